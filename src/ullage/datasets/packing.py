"""Packing of a file of sequences into a file of rows, in two passes and little memory.

The first pass streams the input through ``datasets``, makes tokens of it, and writes them end to end into a flat file;
only the lengths stay in memory. Then all sequences are packed at once, since packing window by window leaves more
padding. The second pass gathers each row's sequences from the flat file and writes Parquet, group by group. Everything
is written in a folder beside the target, and moved to its place when it is complete.

A packed row has the columns that padding-free trainers read: ``input_ids``, ``labels``, ``position_ids`` that begin
again with each sequence (by which transformers tells sequences apart), and ``seq_lengths`` (by which TRL does). The
first label of each sequence is −100, so that a loss that shifts never crosses a boundary, as in transformers' own
flattening. Rows are shuffled, because packing puts the long sequences first.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ullage.datasets.arrow import is_list, is_text, list_lengths, require_values
from ullage.datasets.column_lengths import TEXT_NAMES
from ullage.datasets.measuring import load_tokenizer
from ullage.datasets.pack_report import PackReport
from ullage.errors import InputError, first_line, require_int, require_one_of, root_cause
from ullage.extras import needed_by
from ullage.layout import Int64, Layout, starts_of

#: Readers of ``datasets`` by ending.
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
#: That of ``ullage.schema``, which loads torch: packing token ids does without.
IGNORED_LABEL = -100

_BATCH = 1000  # rows of the source read at once
_GROUP_TOKENS = 2**22  # tokens of the rows gathered and written at once: 16 MiB per column of int32
_OVERSIZE = ("error", "truncate", "drop")


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
        source: .jsonl, .json, .parquet, .csv or .txt
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
            with _Spool.open(Path(folder)) as spool:
                _fill(spool, source, column, tokenizer, progress)
            return _write(spool, Path(folder), target, capacity, oversize, seed, progress)
    except OSError as error:
        raise InputError("a file cannot be written", where=str(target), found=error.strerror or str(error)) from error


def require_packing_sizes(capacity: int, oversize: str) -> None:
    """Raise ``InputError`` for a capacity below 1 or an unknown treatment of longer sequences."""
    require_int(capacity, "capacity", least=1)
    require_one_of(oversize, _OVERSIZE, "oversize")


class _Spool:
    """Flat files of tokens and, if there are any, labels; their lengths in memory."""

    def __init__(self, tokens: IO[bytes], labels: IO[bytes]) -> None:
        self.tokens, self.labels = tokens, labels
        self.has_labels = False
        self._lengths: list[Int64] = []

    @classmethod
    def open(cls, folder: Path) -> _Spool:
        return cls((folder / "tokens").open("wb"), (folder / "labels").open("wb"))

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.tokens.close()
        self.labels.close()

    def add(self, tokens: npt.NDArray[np.int32], lengths: Int64, labels: npt.NDArray[np.int32] | None) -> None:
        tokens.tofile(self.tokens)
        self._lengths.append(lengths)
        if labels is not None:
            self.has_labels = True
            labels.tofile(self.labels)

    def lengths(self) -> Int64:
        return np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int64)


def _fill(spool: _Spool, source: Path, column: str | None, tokenizer: str | None, progress: bool | None) -> None:
    from tqdm import tqdm

    name, batches = _batches(source, column)
    encode = None
    row = 0
    with tqdm(desc="read", unit=" rows", unit_scale=True, disable=_quiet(progress)) as bar:
        for table in batches:
            array = table[name].combine_chunks()  # one chunk: its values lie end to end
            where = f"{source}, column {name}"
            require_values(array, where, row)
            if is_text(array.type):
                encode = encode or load_tokenizer(tokenizer)  # once, and for text alone
                ids = encode(array.to_pylist())
                lengths = np.array([len(one) for one in ids], np.int64)
                spool.add(np.array([token for one in ids for token in one], np.int32), lengths, None)
            else:
                tokens, lengths = _flat(array, where, 0)
                labels = None
                if "labels" in table.column_names and name != "labels":
                    labels = _labels(table["labels"].combine_chunks(), lengths, source, row)
                spool.add(tokens, lengths, labels)
            row += len(array)
            bar.update(len(array))
    if not row:
        raise InputError("a file holds no sequences", where=str(source))


def _quiet(progress: bool | None) -> bool | None:
    """tqdm's ``disable``, in which ``None`` means unless on a terminal."""
    return None if progress is None else not progress


def _batches(source: Path, column: str | None) -> tuple[str, Iterator[Any]]:
    """The column to pack, and the file as Arrow tables. Raises ``InputError`` for a file that is broken in any way."""
    with needed_by("packing a file"):
        import datasets
    if source.suffix.lower() not in READERS:
        found = source.suffix or "none"
        raise InputError("a file's ending is unknown", where=str(source), expected=", ".join(READERS), found=found)
    if not source.is_file():
        raise InputError("a file cannot be read", where=str(source), found="no such file")
    if not source.stat().st_size:
        raise InputError("a file holds no sequences", where=str(source), hint="it is empty")
    reader, literally = READERS[source.suffix.lower()], glob.escape(str(source.resolve()))
    try:
        stream = datasets.load_dataset(reader, data_files=literally, split="train", streaming=True)
        tables = iter(stream.with_format("arrow").iter(batch_size=_BATCH))
        first: Any = next(tables, None)
    except Exception as error:  # each reader raises its own library's
        raise _unreadable(source, error) from error
    if first is None:
        raise InputError("a file holds no sequences", where=str(source))
    return _column(first.schema, column, str(source)), _guarded(first, tables, source)


def _guarded(first: Any, tables: Iterator[Any], source: Path) -> Iterator[Any]:
    yield first
    while True:
        try:
            table = next(tables, None)
        except Exception as error:
            raise _unreadable(source, error) from error
        if table is None:
            return
        yield table


def _unreadable(source: Path, error: Exception) -> InputError:
    found = first_line(root_cause(error))
    return InputError("a file is not what its ending says, or is broken", where=str(source), found=found)


def _column(schema: Any, column: str | None, where: str) -> str:
    """The column to pack. Raises ``InputError`` that lists the columns."""
    import pyarrow as pa

    def usable(name: str) -> bool:
        kind = schema.field(name).type
        if not is_list(kind):
            return is_text(kind)
        # Lists that are all empty have values of no type.
        return pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)

    texts = [name for name in schema.names if is_text(schema.field(name).type)]
    named = [name for name in texts if name.lower() in TEXT_NAMES]
    if column is None:
        found = ["input_ids"] if "input_ids" in schema.names else texts if len(texts) == 1 else named
        if len(found) == 1:
            column = found[0]
    if column is None or column not in schema.names:
        raise InputError(
            "no single column holds token ids or text" if column is None else "a column is missing",
            where=where,
            expected=column or "input_ids or text",
            found=", ".join(schema.names),
            hint="name one of them with --column" if column is None else None,
        )
    if not usable(column):
        found = str(schema.field(column).type)
        raise InputError("a column holds neither token ids nor text", where=f"{where}, column {column}", found=found)
    return column


def _flat(array: Any, where: str, least: int) -> tuple[npt.NDArray[np.int32], Int64]:
    """The values of an Arrow list array end to end, and the length of each list."""
    values = array.flatten()
    if values.null_count:
        raise InputError("a token is missing", where=where)
    lengths = list_lengths(array)
    tokens = values.to_numpy(zero_copy_only=False)  # of any integer type; the flat file holds int32
    outside = np.flatnonzero((tokens < least) | (tokens >= 2**31)) if len(tokens) else []
    if len(outside):
        found = int(tokens[outside[0]])
        raise InputError("a token is out of range", where=where, expected=f"{least} to {2**31 - 1}", found=found)
    return tokens.astype(np.int32), lengths


def _labels(array: Any, lengths: Int64, source: Path, row: int) -> npt.NDArray[np.int32]:
    import pyarrow as pa

    where = f"{source}, column labels"
    kind = getattr(array.type, "value_type", pa.string())
    if array.null_count or not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise InputError("labels must be a list of integers in each row", where=where, found=str(array.type))
    labels, counts = _flat(array, where, -(2**31))
    differ = np.flatnonzero(counts != lengths)
    if len(differ):
        i = int(differ[0])
        raise InputError(
            "labels and tokens disagree",
            where=f"{source}, row {row + i}",
            expected=f"{lengths[i]} labels",
            found=int(counts[i]),
        )
    return labels


def kept_lengths(lengths: Int64, capacity: int, oversize: str) -> Int64:
    """Tokens kept of each sequence, int64 [n]. Raises ``InputError`` for a longer one under ``"error"``."""
    large = np.flatnonzero(lengths > capacity)
    if len(large) and oversize == "error":
        i = int(large[0])
        raise InputError(
            "a sequence is longer than the capacity",
            where=f"sequence {i}" + (f" and {len(large) - 1} more" if len(large) > 1 else ""),
            expected=f"at most {capacity} tokens",
            found=int(lengths[i]),
            hint="raise the capacity, or say that such sequences are to be truncated or dropped",
        )
    kept = lengths.copy()
    kept[large] = capacity if oversize == "truncate" else 0  # nothing kept: dropped
    return kept


def _write(
    spool: _Spool, folder: Path, target: Path, capacity: int, oversize: str, seed: int, progress: bool | None
) -> PackReport:
    import pyarrow.parquet as pq
    from tqdm import tqdm

    from ullage.planning import pack_lengths

    lengths = spool.lengths()
    kept = kept_lengths(lengths, capacity, oversize)
    placed = np.flatnonzero(kept)
    if not len(placed):
        raise InputError("no sequence is left to pack", where=str(target), found=f"{len(lengths)} empty or dropped")
    # All sequences into bins at once; bin k holds ids[cu_ids[k]:cu_ids[k + 1]]. The bins, shuffled, are the rows.
    ids, cu_ids = pack_lengths(kept[placed], capacity)
    order = np.random.default_rng(seed).permutation(len(cu_ids) - 1)
    partial = folder / "rows.parquet"
    rows = _PackedRows(folder, lengths, kept, spool.has_labels)
    # Rows in groups of about as many tokens as are held in memory at once.
    with (
        tqdm(desc="write", total=len(order), unit=" rows", unit_scale=True, disable=_quiet(progress)) as bar,
        pq.ParquetWriter(partial, _schema()) as writer,
    ):
        step = max(1, _GROUP_TOKENS // capacity)
        for start in range(0, len(order), step):
            group = [placed[ids[cu_ids[k] : cu_ids[k + 1]]] for k in order[start : start + step].tolist()]
            writer.write_table(rows.table(group))
            bar.update(len(group))
    # Renamed within one file system: the target is the old file or the whole new one.
    partial.replace(target)
    return _report(lengths, kept, capacity, len(order))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "position_ids", "seq_lengths")])


def gathered_rows(group: list[Int64], starts: Int64, kept: Int64) -> tuple[Int64, Layout, Int64]:
    """Positions of the tokens of packed rows in the source.

    ``group``: for each row the ids of its sequences; ``starts``, ``kept``: the first token of each sequence in the flat
    source, and the tokens kept of it. Returns the index of each token in the source, the layout of all sequences of the
    group, and the bounds of the rows in it: rows + 1 numbers of sequences.
    """
    ids = np.concatenate(group)
    layout = Layout(kept[ids])
    index = np.repeat(starts[ids], layout.lengths) + layout.positions()
    return index, layout, np.cumsum([0, *map(len, group)])


class _PackedRows:
    """Packed rows, gathered from the flat files."""

    def __init__(self, folder: Path, lengths: Int64, kept: Int64, has_labels: bool) -> None:
        self.tokens = np.memmap(folder / "tokens", np.int32, "r")
        self.labels = np.memmap(folder / "labels", np.int32, "r") if has_labels else self.tokens
        self.starts, self.kept = starts_of(lengths), kept

    def table(self, group: list[Int64]) -> Any:
        """An Arrow table with a row for each array of sequence ids."""
        import pyarrow as pa

        index, layout, cuts = gathered_rows(group, self.starts, self.kept)
        labels = self.labels[index]  # a copy, never the file's own memory
        labels[layout.starts] = IGNORED_LABEL  # a shifted loss would predict it from the sequence before
        token_cuts = layout.cu_seqlens[cuts]
        columns = [
            pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
            for offsets, values in (
                (token_cuts, self.tokens[index]),
                (token_cuts, labels),
                (token_cuts, layout.positions()),
                (cuts, layout.lengths),
            )
        ]
        return pa.Table.from_arrays(columns, schema=_schema())


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
