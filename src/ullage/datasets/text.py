"""Text of unequal lengths, from files and from a corpus that every machine has, as data sets of tokens.

The corpus is the docstrings of the running Python's standard library: the source files are parsed with ``ast`` in
the order of their paths, nothing is imported, and each docstring is taken once. Their lengths run from one line to
thousands of bytes.

Files are read by :mod:`ullage.datasets.tables`: one column of strings, or of token ids, which may have labels beside
them.

Tokens lie end to end in one flat array, with a :class:`~ullage.core.layout.Layout` over it. Samples are held out for
evaluation by a hash of their content, so the choice does not depend on order, and equal samples are on one side.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.core.extras import needed_by
from ullage.core.layout import Layout
from ullage.datasets.tables import EmptyDataError, column_kind, no_rows, read_table, text_column

#: A text, or a sequence of token ids; with labels of its own, a row of both.
Sample = str | list[int] | dict[str, Any]
S = TypeVar("S")
#: Columns by which TRL leaves tokens out of the loss, beside token ids.
LOSS_MASKS = ("completion_mask", "assistant_masks")

_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, eq=False)
class TokenDataset(torch.utils.data.Dataset):
    """Map-style dataset of token sequences: ``dataset[i]`` is ``{"input_ids": [length], "labels": [length]}``, int64.

    Tokens in = ``num_tokens`` + ``truncated_tokens`` + ``dropped_tokens``.

    Attributes:
        values: the tokens of all sequences end to end
        layout: where each sequence lies in ``values``
        num_truncated: sequences that were cut to the maximum length
        truncated_tokens: the tokens that they lost
        labels: of all tokens end to end, −100 where there is none; ``None`` where they are the tokens themselves
        num_dropped: sequences that were left out because none of their tokens has a label, after the cut
        dropped_tokens: the tokens of these
        numbers: of the row that each sequence came from, for messages; ``None`` where they are 0, 1, 2 and so on
        num_invalid: samples that were left out because they could not be made tokens
    """

    values: np.ndarray
    layout: Layout
    num_truncated: int = 0
    truncated_tokens: int = 0
    labels: np.ndarray | None = None
    num_dropped: int = 0
    dropped_tokens: int = 0
    numbers: np.ndarray | None = None
    num_invalid: int = 0

    def __len__(self) -> int:
        return self.layout.num_items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = int(self.layout.starts[index])
        own = slice(start, start + int(self.layout.lengths[index]))
        tokens, labels = (
            torch.from_numpy(each[own].astype(np.int64))
            for each in (self.values, self.values if self.labels is None else self.labels)
        )
        return {"input_ids": tokens, "labels": labels}

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.layout.num_tokens

    @property
    def num_labels(self) -> int:
        """Tokens that are trained on; the first of each sequence counts, though nothing predicts it."""
        return self.num_tokens if self.labels is None else int((self.labels != IGNORED_LABEL).sum())

    @property
    def num_predicted(self) -> int:
        """Tokens that a model is trained to predict: those with a label but for the first of each sequence."""
        first = self.layout.starts[self.layout.lengths > 0]
        return self.num_labels - (
            len(first) if self.labels is None else int((self.labels[first] != IGNORED_LABEL).sum())
        )

    def number_of(self, index: int) -> int:
        """The number of the row that a sequence came from."""
        return index if self.numbers is None else int(self.numbers[index])

    def require_vocabulary(self, vocab_size: int, where: str | None = None) -> None:
        """Raise ``InputError`` for the first id outside ``range(vocab_size)``, with its sample and position."""
        outside = (self.values < 0) | (self.values >= vocab_size)
        kind, found = "token id", self.values
        if self.labels is not None and not outside.any():
            kind, found = "label", self.labels
            outside = ((found < 0) | (found >= vocab_size)) & (found != IGNORED_LABEL)
        bad = np.flatnonzero(outside)
        if not len(bad):
            return
        # The last sequence that starts at or before the bad token.
        sample = int(np.searchsorted(self.layout.starts, bad[0], side="right")) - 1
        position = int(bad[0] - self.layout.starts[sample])
        raise InputError(
            f"a {kind} is outside the vocabulary",
            where=", ".join(filter(None, [where, f"sample {self.number_of(sample)}, position {position}"])),
            expected=f"0 to {vocab_size - 1}",
            found=int(found[bad[0]]),
            hint="take the tokenizer that belongs to the model, or a model with a larger vocab_size",
        )


def docstrings() -> list[str]:
    """The docstrings of the running Python's standard library, each once, in the order of files and lines.

    Parses source and imports nothing; takes a few seconds. Raises ``InputError`` if this Python has no sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    # By parts of the path: the same order on every file system.
    kept = sorted((path for path in files if not _NOT_LIBRARY & set(path.parts[:-1])), key=lambda path: path.parts)
    # A dict in the place of a set, because it keeps the order in which texts are found.
    found: dict[str, None] = {}
    for path in kept:
        try:
            tree = ast.parse((root / path).read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # a template, or a file that belongs to another version
        for node in _definitions(tree):
            text = ast.get_docstring(node)
            if text and text.strip():
                found[text] = None
    if not found:
        raise InputError(
            "this Python's standard library has no docstrings to train on",
            where=str(root),
            hint="give a text file with --data",
        )
    return list(found)


def docstring_lengths(n: int | None = None, seed: int = 0, max_length: int = 1024) -> np.ndarray:
    """Lengths of the docstrings in bytes and one for the end, cut to ``max_length`` as in ``ullage train``, int64 [n].

    ``n`` of them are drawn without replacement; ``None`` is all, in their order.
    """
    lengths = np.minimum([len(text.encode()) + 1 for text in docstrings()], max_length).astype(np.int64)
    return lengths if n is None else np.random.default_rng(seed).permutation(lengths)[:n]


def _definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The nodes that may have a docstring, in the order of their lines."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    return iter([tree, *sorted(nodes, key=lambda node: (node.lineno, node.col_offset))])


def split_held_out(samples: Sequence[S], fraction: float = 0.05) -> tuple[list[S], list[S]]:
    """Samples split into ``(for training, held out)``; a hash of each decides, for about ``fraction`` of them.

    Order is kept on both sides. If all samples fall on the side held out, all are for training instead.
    """
    if not 0.0 <= fraction < 1.0:
        raise InputError("the held-out fraction is out of range", expected="0 <= fraction < 1", found=fraction)
    # A digest is a uniform number of 64 bits, so this share of all samples falls below the limit.
    limit = int(fraction * 2**64)
    sides: tuple[list[S], list[S]] = ([], [])
    for sample in samples:
        content = sample if isinstance(sample, str) else json.dumps(sample, default=str)
        digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        sides[int.from_bytes(digest, "big") < limit].append(sample)
    return sides if sides[0] else (sides[1], [])


def load_text(path: str | Path | Sequence[str | Path], column: str | None = None) -> list[Sample]:
    """The texts of a .jsonl, .json, .csv, .tsv, .parquet, .arrow or .txt file, in its order.

    ``path`` may be a folder, a pattern, or several files: see :func:`ullage.datasets.tables.read_table`. ``column``
    holds the texts, or lists of token ids; by default ``input_ids``, else ``text``, else the only column of either
    kind. ``labels`` beside token ids come along. A .txt file has one text per line. Empty texts, of nothing but white
    space, are left out. The whole column is held in memory, and nothing is left in any cache.
    Raises ``InputError`` for a missing file, a file that is not what its ending says, a missing column (the message
    lists the columns), a file without a text, and a row that holds none (the message says which).
    """
    sources = [path] if isinstance(path, str | Path) else list(path)
    return texts_of(read_table(sources, blanks=True), column, ", ".join(map(str, sources))).samples


@dataclass(frozen=True)
class ReadTexts:
    """The texts, or token ids, of a column, without those that are empty.

    Attributes:
        samples: in the order of their rows
        rows: of these, counted from 0
        num_empty: rows that were left out: a text of nothing but white space, no ids
        invalid: rows that were left out because they hold no text, or no ids; none unless that was asked for
    """

    samples: list[Sample]
    rows: list[int]
    num_empty: int
    invalid: list[int]


def texts_of(
    table: Any,
    column: str | None,
    where: str,
    *,
    skip_invalid: bool = False,
    place_of: Callable[[int], str] | None = None,
) -> ReadTexts:
    """The texts, or token ids, of a table's column, as :func:`load_text` chooses and checks them.

    Args:
        table: of ``datasets``.
        column: their column, chosen if ``None``.
        where: the table is from, for messages.
        skip_invalid: leave out rows that hold neither, and say which.
        place_of: how a row is named in a message.
    """
    column = text_column(table, column, where, mixed=True)
    values: list[Any] = table[column][:]
    are_ids = column_kind(table.features[column]) == "ids" or any(isinstance(value, list) for value in values[:1])
    kept: list[int] = []
    invalid: list[int] = []
    for row, value in enumerate(values):
        good = isinstance(value, list if are_ids else str)
        if good and are_ids:
            good = all(type(each) is int for each in value)
        if not good and not skip_invalid:
            raise InputError(
                "a row holds no token ids" if are_ids else "a row holds no text",
                where=f"{where}, {f'row {row} counted from 0' if place_of is None else place_of(row)}, "
                f"column {column!r}",
                expected="a list of integers" if are_ids else "a string",
                found="nothing" if value is None else repr(value)[:60],
                hint="mend it, or leave such rows out with --skip_invalid",
            )
        if not good:
            invalid.append(row)
        elif value if are_ids else value.strip():
            kept.append(row)
    if not kept:
        raise no_rows(where)
    samples = [values[row] for row in kept]
    return ReadTexts(
        _with_labels(table, column, samples, kept, where), kept, len(values) - len(kept) - len(invalid), invalid
    )


def _with_labels(table: Any, column: str, samples: list[Any], kept: Sequence[int], where: str) -> list[Sample]:
    """The samples, and the labels beside token ids."""
    if column_kind(table.features[column]) != "ids" or column == "labels":
        return samples
    if "labels" in table.column_names and column_kind(table.features["labels"]) == "ids":
        every = table["labels"][:]
        own_labels = [every[row] for row in kept]
        return [{"input_ids": ids, "labels": own} for ids, own in zip(samples, own_labels, strict=True)]
    masks = [name for name in LOSS_MASKS if name in table.column_names]
    if masks:
        raise InputError(
            "token ids have a mask of the loss, and no labels",
            where=where,
            expected="a column 'labels', with -100 where a token does not count",
            found=f"column {masks[0]!r}",
            hint="write the labels, or leave the mask out to train on every token",
        )
    return samples


def byte_tokenizer() -> Any:
    """transformers' byte tokenizer, without a download: ids 3 to 258 are bytes, 0 pads, 1 ends a text, 2 is unknown.

    ``</s>`` or ``<pad>`` within a text are bytes like any others.
    """
    with needed_by("ullage.datasets.byte_tokenizer"):
        from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0, split_special_tokens=True)


def tokenize(
    samples: Sequence[Sample],
    tokenizer: Any,
    max_length: int | None = None,
    *,
    numbers: Sequence[int] | None = None,
) -> TokenDataset:
    """Data set of the tokens of ``samples``, each ended by the tokenizer's end token and cut to ``max_length`` tokens.

    Samples of token ids get no end token; a mapping has ``input_ids``, and ``labels`` of its own. ``numbers`` are those
    of the rows where the samples came from, for messages. Raises ``InputError`` if there are no samples, and for a
    sample without tokens (the message says which).
    """
    return token_dataset((_tokens(sample, tokenizer) for sample in samples), max_length, numbers)


def _tokens(sample: Sample, tokenizer: Any) -> tuple[Sequence[int], Sequence[int] | None]:
    if isinstance(sample, Mapping):
        return sample["input_ids"], sample.get("labels")
    if not isinstance(sample, str):
        return sample, None
    ids = tokenizer(sample, verbose=False)["input_ids"] if sample else []
    end = getattr(tokenizer, "eos_token_id", None)
    return ([*ids, end] if ids and end is not None and ids[-1] != end else ids), None


def token_dataset(
    sequences: Iterable[tuple[Sequence[int], Sequence[int] | None] | None],
    max_length: int | None = None,
    numbers: Sequence[int] | None = None,
) -> TokenDataset:
    """Data set of sequences, each of token ids and of labels, where these are others; cut to ``max_length`` tokens.

    A sequence in which no token has a label is left out and counted, and so is ``None``, a sample that is none.
    ``numbers`` are those of the rows, for messages.
    Raises ``InputError`` if there are no sequences or none is left, for one without tokens, and for labels that are not
    as many as its tokens.
    """
    if max_length is not None and max_length < 1:
        raise InputError("the maximum length is out of range", expected="at least 1 token", found=max_length)
    parts: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    lengths: list[int] = []
    places: list[int] = []
    dropped, count, differ, invalid = 0, 0, False, 0
    for count, sequence in enumerate(sequences, 1):
        if sequence is None:
            invalid += 1
            continue
        ids, own = sequence
        number = count - 1 if numbers is None else numbers[count - 1]
        _require_sequence(ids, own, number)
        # Held as int32, half of what int64 takes; a sample is widened when it is read.
        part = np.asarray(ids[:max_length], np.int32)
        label = part if own is None else np.asarray(own[:max_length], np.int32)
        if own is not None and (label == IGNORED_LABEL).all():
            dropped += len(ids)
            continue
        differ = differ or own is not None
        parts.append(part)
        labels.append(label)
        lengths.append(len(ids))
        places.append(number)
    if not parts:
        raise EmptyDataError(
            "no sequence has a token to train on" if count else "the dataset is empty",
            expected="a label that counts" if count else "at least one sample",
            found=f"none in {count:,}" if count else "none",
            hint=f"a max_length above {max_length} may reach them" if count and max_length is not None else None,
        )
    # ``whole`` are the lengths before the cut, by which the lost tokens are counted.
    whole = np.asarray(lengths, np.int64)
    kept = np.minimum(whole, max_length) if max_length is not None else whole
    cut = whole - kept
    return TokenDataset(
        np.concatenate(parts),
        Layout(kept),
        int((cut > 0).sum()),
        int(cut.sum()),
        np.concatenate(labels) if differ else None,
        count - invalid - len(parts),
        dropped,
        np.asarray(places, np.int64) if places != list(range(len(places))) else None,
        invalid,
    )


def _require_sequence(ids: Sequence[int], labels: Sequence[int] | None, index: int) -> None:
    if len(ids) == 0:
        raise InputError("a sample is empty", where=f"sample {index}", expected="at least one token", found="length 0")
    if labels is not None and len(labels) != len(ids):
        raise InputError(
            "labels and tokens disagree",
            where=f"sample {index}",
            expected=f"{len(ids)} labels",
            found=len(labels),
        )
