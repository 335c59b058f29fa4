"""Packing of a data set of sequences into rows of at most so many tokens.

A data set becomes what ``trl.pack_dataset`` makes of it, over our packing: all sequences are packed at once, TRL packs
each map batch of 1000 rows by itself. Rows hold the columns end to end and, as TRL's do, ``seq_lengths``, by which its
collator makes ``position_ids`` and ours takes the sequences apart again.

Source: trl 1.16 ``data_utils.py``, ``pack_dataset``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ullage.core.errors import MOST_TOKENS, InputError, listed, require_int, require_one_of
from ullage.core.extras import needed_by
from ullage.core.layout import Int64, Layout, ranges, starts_of
from ullage.datasets.stored import list_lengths

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

D = TypeVar("D", "Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
#: That of ``ullage.core.columns``, which loads torch: packing token ids does without.
IGNORED_LABEL = -100
#: Tokens of the rows that are gathered at once: 16 MiB per column of int32.
_GROUP_TOKENS = 2**22
_OVERSIZE = ("error", "truncate", "drop")
#: TRL's strategies, and what each does with a longer sequence.
_STRATEGIES = {"bfd": "truncate", "bfd_split": "split", "wrapped": "wrap"}


def pack_dataset(
    dataset: D,
    seq_length: int,
    strategy: str | None = None,
    map_kwargs: Mapping[str, Any] | None = None,
    *,
    oversize: str = "error",
) -> D:
    """Pack the sequences of a data set into rows of at most ``seq_length`` tokens.

    Args:
        dataset: a ``datasets.Dataset`` whose columns are lists of one length per row, or a dict of such. A stream is
            packed as it is read, each map batch by itself.
        seq_length: tokens of a packed row at most.
        strategy: as TRL's: ``"bfd"`` truncates longer sequences, ``"bfd_split"`` makes several of them, ``"wrapped"``
            fills every row and cuts sequences anywhere. ``None`` does with them what ``oversize`` says.
        map_kwargs: keywords of the data set's ``map``, through which a stream is packed, and with them any data set:
            then in batches of ``batch_size`` rows, all at once without it.
        oversize: treatment of a longer sequence: ``"error"``, ``"truncate"`` or ``"drop"``.

    Returns the packed data set, in memory unless it went through ``map``, with the same columns and format, and, unless
    wrapped, ``seq_lengths``: for each row the lengths of its sequences. Sequences without tokens are left out. Raises
    ``InputError`` that names the column and the row.

    >>> from datasets import Dataset
    >>> packed = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6]]}), seq_length=4)
    >>> packed["seq_lengths"][:]
    [[3, 1], [2]]
    """
    with needed_by("ullage.datasets.pack_dataset"):
        import datasets

    require_packing_sizes(seq_length, oversize)
    longer = oversize
    if strategy is not None:
        longer = _STRATEGIES[require_one_of(strategy, tuple(_STRATEGIES), "strategy")]
        if oversize != "error":
            raise InputError(
                "the strategy says what becomes of longer sequences",
                expected="strategy or oversize",
                found=f"strategy={strategy!r}, oversize={oversize!r}",
            )
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        parts: Any = dict(dataset)
        for name, part in parts.items():
            parts[name] = pack_dataset(part, seq_length, strategy, map_kwargs, oversize=oversize)
        return type(dataset)(parts)
    pack = functools.partial(_pack_table, seq_length=seq_length, longer=longer)
    if isinstance(dataset, datasets.IterableDataset):
        formatting = dataset._formatting
        mapped = dataset.with_format("arrow").map(pack, batched=True, **(map_kwargs or {}))
        return mapped.with_format(None if formatting is None else formatting.format_type)
    if not isinstance(dataset, datasets.Dataset):
        raise InputError("this is no data set that can be packed", expected="a datasets.Dataset", found=type(dataset))
    # Through the data set rather than its table, so that a shuffled or filtered one comes in its own order.
    view = dataset.with_format("arrow")
    if map_kwargs:
        packed = view.map(pack, batched=True, **{"batch_size": None, **map_kwargs})
    else:
        features = dict(dataset.features)
        if longer != "wrap":
            features["seq_lengths"] = datasets.List(datasets.Value("int64"))
        packed = datasets.Dataset(pack(view[:]).cast(datasets.Features(features).arrow_schema))
    if not len(packed):
        raise InputError("no sequence is left to pack", found=f"{len(dataset)} empty or dropped")
    chosen = dataset.format
    columns = chosen["columns"] + [name for name in packed.column_names if name not in dataset.column_names]
    kept = {"output_all_columns": chosen["output_all_columns"], **chosen["format_kwargs"]}
    return packed.with_format(chosen["type"], columns=columns, **kept)


def _pack_table(table: Any, seq_length: int, longer: str) -> Any:
    """An Arrow table of sequences as one of packed rows. ``longer``: truncate, drop, split, wrap or error."""
    import pyarrow as pa

    columns, lengths = _columns(table)
    if longer == "wrap":
        cuts = np.append(np.arange(0, lengths.sum(), seq_length), lengths.sum())
        bounds = pa.array(cuts, pa.int32())
        return pa.table({name: pa.ListArray.from_arrays(bounds, values) for name, values in columns.items()})
    starts = starts_of(lengths)
    if longer == "split":
        starts, lengths = _fragments(starts, lengths, seq_length)
    kept = kept_lengths(lengths, seq_length, "error" if longer == "split" else longer)
    placed = np.flatnonzero(kept)
    # Within a row the longest sequence comes first, as in TRL's.
    rows = [row[np.argsort(-kept[row], kind="stable")] for row in _bins(kept, seq_length)]
    packed = pa.concat_tables(
        _gathered(group, columns, starts, kept)[0] for group in _groups(rows or [placed], seq_length)
    )
    return packed if len(placed) else packed.slice(0, 0)


def _bins(kept: Int64, capacity: int) -> list[Int64]:
    """The ids of the sequences of each row; those of which nothing is kept are in none."""
    from ullage.planning import pack_lengths

    placed = np.flatnonzero(kept)
    # Bin k holds ids[cu_ids[k]:cu_ids[k + 1]], counted among the sequences that are placed.
    ids, cu_ids = pack_lengths(kept[placed], capacity)
    return [placed[ids[start:stop]] for start, stop in zip(cu_ids[:-1].tolist(), cu_ids[1:].tolist())]


def _groups(rows: list[Int64], capacity: int) -> Iterator[list[Int64]]:
    step = max(1, _GROUP_TOKENS // capacity)  # offsets within a group fit into int32
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _gathered(group: list[Int64], columns: dict[str, Any], starts: Int64, kept: Int64) -> tuple[Any, Layout]:
    """An Arrow table of packed rows, and the layout of their sequences.

    ``group``: for each row the ids of its sequences; ``columns``: the values of all sequences end to end; ``starts``,
    ``kept``: the first of each sequence there, and how many of it are kept.
    """
    import pyarrow as pa

    ids = np.concatenate(group)
    layout, cuts = Layout(kept[ids]), np.cumsum([0, *map(len, group)])
    # Arrow lists are bounds over flat values: rows bounded in tokens, and for seq_lengths in sequences.
    taken, bounds = pa.array(ranges(starts[ids], kept[ids])), pa.array(layout.cu_seqlens[cuts], pa.int32())
    arrays = {name: pa.ListArray.from_arrays(bounds, values.take(taken)) for name, values in columns.items()}
    sizes = pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), pa.array(layout.lengths))
    return pa.table({**arrays, "seq_lengths": sizes}), layout


def _fragments(starts: Int64, lengths: Int64, most: int) -> tuple[Int64, Int64]:
    """Starts and lengths of the sequences after those longer than ``most`` were cut into pieces of that length."""
    counts = -(-lengths // most)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(first)) - first) * most
    return np.repeat(starts, counts) + offsets, np.minimum(np.repeat(lengths, counts) - offsets, most)


def _columns(table: Any) -> tuple[dict[str, Any], Int64]:
    """The values of each column end to end, and the length of each row."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    lengths, first = np.empty(0, np.int64), None
    for name in table.column_names:
        # One chunk, so that the values of all rows lie end to end.
        column = table[name].combine_chunks()
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
            found = str(column.type) if not column.null_count else f"{column.null_count} missing values"
            raise InputError("a column cannot be packed", where=name, expected="a list in each row", found=found)
        counts = list_lengths(column)
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


def require_packing_sizes(capacity: int, oversize: str) -> None:
    """Raise ``InputError`` for a capacity below 1 or an unknown treatment of longer sequences."""
    require_int(capacity, "capacity", least=1, most=MOST_TOKENS)
    require_one_of(oversize, _OVERSIZE, "oversize")


def kept_lengths(lengths: Int64, capacity: int, oversize: str) -> Int64:
    """Tokens kept of each sequence, int64 [n]. Raises ``InputError`` for a longer one under ``"error"``."""
    large = np.flatnonzero(lengths > capacity)
    if len(large) and oversize == "error":
        i = int(large[0])
        raise InputError(
            "a sequence is longer than the capacity",
            where=f"sequence {listed(large.tolist(), 1)}",
            expected=f"at most {capacity} tokens",
            found=int(lengths[i]),
            hint="raise the capacity, or say that such sequences are to be truncated or dropped",
        )
    kept = lengths.copy()
    kept[large] = capacity if oversize == "truncate" else 0  # nothing kept: dropped
    return kept
