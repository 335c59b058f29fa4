"""A data set of sequences into a data set of packed rows: what ``trl.pack_dataset`` does, over our packing.

All sequences are packed at once; TRL packs each map batch of 1000 rows by itself. Rows hold the columns end to end and,
as TRL's do, ``seq_lengths``, by which its collator makes ``position_ids``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ullage.datasets.packing import gathered_rows, kept_lengths, require_packing_sizes
from ullage.errors import InputError
from ullage.layout import Int64, starts_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

D = TypeVar("D", "Dataset", "DatasetDict")
# Tokens of the rows that are gathered at once.
_GROUP_TOKENS = 2**22


def pack_dataset(dataset: D, seq_length: int, *, oversize: str = "error") -> D:
    """Pack the sequences of a data set into rows of at most ``seq_length`` tokens.

    Args:
        dataset: a ``datasets.Dataset`` whose columns are lists of one length per row, or a ``DatasetDict`` of such.
        seq_length: tokens of a packed row at most.
        oversize: what becomes of a longer sequence: ``"error"``, ``"truncate"`` (TRL's ``"bfd"``) or ``"drop"``.

    Returns the packed data set, in memory, with the same columns and ``seq_lengths``: for each row the lengths of its
    sequences. Sequences without tokens are left out. Raises ``InputError`` that names the column and the row.

    >>> from datasets import Dataset
    >>> packed = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6]]}), seq_length=4)
    >>> packed["seq_lengths"][:]
    [[3, 1], [2]]
    """
    import datasets

    require_packing_sizes(seq_length, oversize)
    if isinstance(dataset, datasets.DatasetDict):
        parts = {name: pack_dataset(part, seq_length, oversize=oversize) for name, part in dataset.items()}
        return datasets.DatasetDict(parts)
    if not isinstance(dataset, datasets.Dataset):
        raise InputError("this is no data set that can be packed", expected="a datasets.Dataset", found=type(dataset))
    return _packed(dataset, seq_length, oversize)


def _packed(dataset: Dataset, seq_length: int, oversize: str) -> Dataset:
    import datasets
    import pyarrow as pa

    from ullage.planning import pack_lengths

    columns, lengths = _columns(dataset)
    kept = kept_lengths(lengths, seq_length, oversize)
    placed = np.flatnonzero(kept)
    if not len(placed):
        raise InputError("no sequence is left to pack", found=f"{len(lengths)} empty or dropped")
    # Bin k holds ids[cu_ids[k]:cu_ids[k + 1]], counted among the sequences that are placed.
    ids, cu_ids = pack_lengths(kept[placed], seq_length)
    rows = [placed[ids[start:stop]] for start, stop in zip(cu_ids[:-1].tolist(), cu_ids[1:].tolist())]
    features = datasets.Features({**dataset.features, "seq_lengths": datasets.List(datasets.Value("int64"))})
    step = max(1, _GROUP_TOKENS // seq_length)  # offsets within a group fit into int32
    groups = (rows[start : start + step] for start in range(0, len(rows), step))
    table = pa.concat_tables(_tables(groups, columns, starts_of(lengths), kept))
    packed = datasets.Dataset(table.cast(features.arrow_schema))
    return packed.with_format(dataset.format["type"], **dataset.format["format_kwargs"])


def _columns(dataset: Dataset) -> tuple[dict[str, Any], Int64]:
    """The values of each column end to end, and the length of each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Through the data set rather than its table, so that a shuffled or filtered one comes in its own order.
    table: Any = dataset.with_format("arrow")[:]
    columns: dict[str, Any] = {}
    lengths, first = np.empty(0, np.int64), None
    for name in table.column_names:
        # One chunk, so that the values of all rows lie end to end.
        column = table[name].combine_chunks()
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
            found = str(column.type) if not column.null_count else f"{column.null_count} missing values"
            raise InputError("a column cannot be packed", where=name, expected="a list in each row", found=found)
        counts = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False).astype(np.int64)
        if first is None:
            lengths, first = counts, name
        differ = np.flatnonzero(counts != lengths)
        if len(differ):
            row = int(differ[0])
            expected = f"{lengths[row]}, as of {first}"
            raise InputError(
                "lists have other lengths", where=f"{name}, row {row}", expected=expected, found=counts[row]
            )
        columns[name] = column.flatten()
    return columns, lengths


def _tables(groups: Iterator[list[Int64]], columns: dict[str, Any], starts: Int64, kept: Int64) -> Iterator[Any]:
    import pyarrow as pa

    for group in groups:
        index, layout, cuts = gathered_rows(group, starts, kept)
        # Arrow lists are bounds over flat values: rows bounded in tokens, and for seq_lengths in sequences.
        token_cuts, taken = pa.array(layout.cu_seqlens[cuts], pa.int32()), pa.array(index)
        arrays = {name: pa.ListArray.from_arrays(token_cuts, values.take(taken)) for name, values in columns.items()}
        sizes = pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), pa.array(layout.lengths))
        yield pa.table({**arrays, "seq_lengths": sizes})
