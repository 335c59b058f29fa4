"""Packing of a data set of sequences, or of a file of them, into rows of at most so many tokens.

A data set becomes what ``trl.pack_dataset`` makes of it, over our packing: all sequences are packed at once, TRL packs
each map batch of 1000 rows by itself. Rows hold the columns end to end and, as TRL's do, ``seq_lengths``, by which its
collator makes ``position_ids`` and ours takes the sequences apart again.

A file is read into Arrow on the disk, beside the target, so that only lengths and the rows of one group are in memory;
everything is written there and moved to its place when it is complete. Its rows have the columns that padding-free
trainers read: ``input_ids``, ``labels``, ``position_ids`` that begin again with each sequence (by which transformers
tells sequences apart), and ``seq_lengths``. The first label of each sequence is −100, so that a loss that shifts never
crosses a boundary, as in transformers' own flattening. Rows are shuffled, because packing puts long sequences first.

Source: trl 1.16 ``data_utils.py``, ``pack_dataset``.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ullage.core.display import Shown, quantity
from ullage.core.errors import MOST_TOKENS, InputError, listed, require_int, require_one_of
from ullage.core.extras import needed_by
from ullage.core.layout import Int64, Layout, ranges, starts_of
from ullage.datasets.files import load_tokenizer
from ullage.datasets.stored import is_list, list_lengths, require_token_ids, require_values
from ullage.datasets.tables import column_kind, quiet, read_file, text_column

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


@dataclass(frozen=True, repr=False)
class PackReport(Shown):
    """Counts of a packing.

    ``tokens_in = num_tokens + truncated_tokens + dropped_tokens``, and ``capacity_tokens = num_tokens +
    padding_tokens``. ``num_sequences`` are in the rows, ``num_empty`` had no tokens and were left out, ``lower_bound``
    is the least possible number of rows, and ``ullage`` the share of the capacity that is padding.
    """

    num_rows: int
    lower_bound: int
    num_sequences: int
    num_empty: int
    num_truncated: int
    num_dropped: int
    tokens_in: int
    num_tokens: int
    truncated_tokens: int
    dropped_tokens: int
    capacity_tokens: int
    padding_tokens: int
    ullage: float

    def _facts(self) -> Iterator[str]:
        yield quantity(self.num_rows, "row")
        yield quantity(self.num_sequences, "sequence")
        yield quantity(self.num_tokens, "token")
        yield f"ullage {100 * self.ullage:.1f} %"


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


def pack_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    capacity: int,
    *,
    column: str | None = None,
    tokenizer: str | None = None,
    oversize: str = "error",
    seed: int = 0,
    progress: bool | None = False,
) -> PackReport:
    """Pack the sequences of a file into rows of at most ``capacity`` tokens.

    Args:
        source: .jsonl, .json, .parquet, .arrow, .csv, .tsv or .txt
        target: .parquet; an existing file is replaced
        capacity: tokens per row
        column: of token ids or text; by default ``input_ids``, else the text. A column ``labels`` beside token ids is
            carried along
        tokenizer: for text, a name or folder for ``AutoTokenizer``; by default ByT5's bytes
        oversize: treatment of a sequence longer than a row: ``"error"``, ``"truncate"`` or ``"drop"``
        seed: of the order of rows
        progress: show bars on standard error; ``None`` only on a terminal

    Raises ``InputError`` for a file that cannot be read, packed or written; ``target`` is then as it was.
    """
    source, target = Path(source), Path(target)
    require_packing_sizes(capacity, oversize)
    if target.suffix.lower() != ".parquet":
        raise InputError("packed rows are written as Parquet", where=str(target), expected="a name ending in .parquet")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            shown = sys.stderr.isatty() if progress is None else progress
            sequences = _sequences(source, column, tokenizer, folder, shown)
            lengths = _checked_lengths(sequences, source)
            return _write(sequences, lengths, Path(folder), target, capacity, oversize, seed, shown)
    except OSError as error:
        raise InputError("a file cannot be written", where=str(target), found=error.strerror or str(error)) from error


def require_packing_sizes(capacity: int, oversize: str) -> None:
    """Raise ``InputError`` for a capacity below 1 or an unknown treatment of longer sequences."""
    require_int(capacity, "capacity", least=1, most=MOST_TOKENS)
    require_one_of(oversize, _OVERSIZE, "oversize")


def _sequences(source: Path, column: str | None, tokenizer: str | None, folder: str, shown: bool) -> Any:
    """The token ids of a file, and its labels if there are any, as a data set in files of ``folder``."""
    with needed_by("packing a file"):
        import datasets

    table = read_file(source, cache=folder, bars=shown)
    column = text_column(table, column, str(source), "--column")
    require_values(table.data.column(column), f"{source}, column {column}")
    if column_kind(table.features[column]) == "ids":
        labels = ["labels"] if "labels" in table.column_names and column != "labels" else []
        chosen = table.select_columns([column, *labels])
        return chosen if column == "input_ids" else chosen.rename_column(column, "input_ids")
    encode = load_tokenizer(tokenizer)
    with quiet(bars=shown):
        return table.map(
            # A text of nothing but white space has no tokens, not even an end.
            lambda batch: {
                "input_ids": [ids if text.strip() else [] for text, ids in zip(batch[column], encode(batch[column]))]
            },
            batched=True,
            remove_columns=table.column_names,
            features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}),
            cache_file_name=f"{folder}/tokens.arrow",
            new_fingerprint="tokens",  # by default it is a digest of the tokenizer
        )


def _checked_lengths(sequences: Any, source: Path) -> Int64:
    """Tokens of each sequence, int64 [n]. Raises ``InputError`` for tokens and labels that rows cannot hold."""
    import pyarrow.compute as pc

    lengths = list_lengths(sequences.data.column("input_ids"))
    for name, least in (("input_ids", 0), ("labels", -(2**31))):
        if name not in sequences.column_names:
            continue
        array, where = sequences.data.column(name), f"{source}, column {name}"
        require_values(array, where)
        if not is_list(array.type):
            raise InputError(f"{name} must be a list of integers in each row", where=where, found=str(array.type))
        require_token_ids(array, where)
        bounds = pc.call_function("min_max", [pc.call_function("list_flatten", [array])]).as_py()
        if any(value is not None and not least <= value < 2**31 for value in bounds.values()):
            found = bounds["max"] if bounds["max"] >= 2**31 else bounds["min"]
            raise InputError("a token is out of range", where=where, expected=f"{least} to {2**31 - 1}", found=found)
        differ = np.flatnonzero(list_lengths(array) != lengths)
        if len(differ):
            row = int(differ[0])
            raise InputError(
                "labels and tokens disagree",
                where=f"{source}, row {row}",
                expected=f"{lengths[row]} labels",
                found=int(list_lengths(array)[row]),
            )
    return lengths


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


def _write(
    sequences: Any,
    lengths: Int64,
    folder: Path,
    target: Path,
    capacity: int,
    oversize: str,
    seed: int,
    shown: bool,
) -> PackReport:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tqdm import tqdm

    kept = kept_lengths(lengths, capacity, oversize)
    if not kept.any():
        raise InputError("no sequence is left to pack", where=str(target), found=f"{len(lengths)} empty or dropped")
    bins = _bins(kept, capacity)
    rows = [bins[k] for k in np.random.default_rng(seed).permutation(len(bins)).tolist()]
    names = ("input_ids", "labels", "position_ids", "seq_lengths")
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    view, partial = sequences.with_format("arrow"), folder / "rows.parquet"
    with (
        tqdm(desc="write", total=len(rows), unit=" rows", unit_scale=True, disable=not shown) as bar,
        pq.ParquetWriter(partial, schema) as writer,
    ):
        for group in _groups(rows, capacity):
            writer.write_table(_trainable(view, group, kept).select(names).cast(schema))
            bar.update(len(group))
    # Renamed within one file system: the target is the old file or the whole new one.
    partial.replace(target)
    return _report(lengths, kept, capacity, len(rows))


def _trainable(view: Any, group: list[Int64], kept: Int64) -> Any:
    """The packed rows of a group, with labels and positions."""
    import pyarrow as pa

    ids = np.concatenate(group)
    # The sequences of the group alone, in its order.
    columns, lengths = _columns(view[ids])
    places = np.split(np.arange(len(ids)), np.cumsum(list(map(len, group)))[:-1])
    table, layout = _gathered(places, columns, starts_of(lengths), kept[ids])
    bounds = table["input_ids"].combine_chunks().offsets
    labels = table["labels" if "labels" in columns else "input_ids"].combine_chunks().flatten().to_numpy().copy()
    labels[layout.starts] = IGNORED_LABEL  # a shifted loss would predict it from the sequence before
    for name, values in (("labels", labels), ("position_ids", layout.positions())):
        made = pa.ListArray.from_arrays(bounds, pa.array(values))
        table = table.drop_columns([name]) if name in table.column_names else table
        table = table.append_column(name, made)
    return table


def _report(lengths: Int64, kept: Int64, capacity: int, num_rows: int) -> PackReport:
    from ullage.planning.bounds import bin_bound

    dropped = (kept == 0) & (lengths > 0)
    tokens_in, num_tokens, dropped_tokens = int(lengths.sum()), int(kept.sum()), int(lengths[dropped].sum())
    return PackReport(
        num_rows=num_rows,
        lower_bound=bin_bound(kept[kept > 0], capacity),
        num_sequences=int(np.count_nonzero(kept)),
        num_empty=int(np.count_nonzero(lengths == 0)),
        num_truncated=int(np.count_nonzero((kept < lengths) & ~dropped)),
        num_dropped=int(np.count_nonzero(dropped)),
        tokens_in=tokens_in,
        num_tokens=num_tokens,
        truncated_tokens=tokens_in - num_tokens - dropped_tokens,
        dropped_tokens=dropped_tokens,
        capacity_tokens=num_rows * capacity,
        padding_tokens=num_rows * capacity - num_tokens,
        ullage=1 - num_tokens / (num_rows * capacity),
    )
