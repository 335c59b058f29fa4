"""Text of unequal lengths as data sets of tokens, and a corpus of texts that every machine has.

The corpus is the docstrings of the running Python's standard library: the source files are parsed with ``ast`` in
the order of their paths, nothing is imported, and each docstring is taken once. Their lengths run from one line to
thousands of bytes.

Tokens lie end to end in one flat array, with a :class:`~ullage.core.layout.Layout` over it. Samples are held out for
evaluation by a hash of their content, so the choice does not depend on order, and equal samples are on one side.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.core.extras import needed_by
from ullage.core.layout import Layout
from ullage.datasets.tables import load_rows, row_place, text_column

#: A text, or a sequence of token ids; with labels of its own, a row of both.
Sample = str | list[int] | dict[str, Any]
S = TypeVar("S")

_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, eq=False)
class TokenDataset(torch.utils.data.Dataset):
    """Map-style dataset of token sequences: ``dataset[i]`` is ``{"input_ids": [length], "labels": [length]}``, int64,
    and ``dataset[16:24]`` a list of them.

    Tokens in = ``num_tokens`` + ``truncated_tokens`` + ``dropped_tokens``.

    Attributes:
        values: the tokens of all sequences end to end
        layout: where each sequence lies in ``values``
        num_truncated: sequences that were cut to the maximum length
        truncated_tokens: the tokens that they lost
        labels: of all tokens end to end, −100 where there is none; ``None`` where they are the tokens themselves
        num_dropped: sequences that were left out because none of their tokens has a label, after the cut
        dropped_tokens: the tokens of these
    """

    values: np.ndarray
    layout: Layout
    num_truncated: int = 0
    truncated_tokens: int = 0
    labels: np.ndarray | None = None
    num_dropped: int = 0
    dropped_tokens: int = 0

    def __len__(self) -> int:
        return self.layout.num_items

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
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
            where=", ".join(filter(None, [where, f"sample {sample}, position {position}"])),
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
    """The nodes that may have a docstring, in the order of their lines; within statements alone, not expressions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        blocks = (getattr(node, name, ()) for name in ("body", "cases", "handlers", "orelse", "finalbody"))
        todo += [inner for block in blocks if isinstance(block, list) for inner in block][::-1]


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


def byte_tokenizer() -> Any:
    """Tokenizer of bytes, without a download: ids 3 to 258 are bytes, 0 pads, 1 ends a text, 2 is unknown, as ByT5's.

    It is one of the ``tokenizers`` library, so that it saves and loads as any other. ``</s>`` or ``<pad>`` within a
    text are bytes like any others. A call adds no end, so that a prompt goes on; :func:`tokenize` does.
    """
    with needed_by("ullage.datasets.byte_tokenizer"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

    marks = ("<pad>", "</s>", "<unk>")
    letters = bytes_to_unicode()  # the letter that stands for a byte in a vocabulary
    words = [*marks, *(letters[byte] for byte in range(256))]
    own = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    named = dict(zip(("pad_token", "eos_token", "unk_token"), marks, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=own, split_special_tokens=True, **named)


def tokenize(samples: Sequence[Sample], tokenizer: Any, max_length: int | None = None) -> TokenDataset:
    """Data set of the tokens of ``samples``, each ended by the tokenizer's end token and cut to ``max_length`` tokens.

    Samples of token ids get no end token; a mapping has ``input_ids``, and ``labels`` of its own. A sample in which no
    token has a label is left out and counted. Raises ``InputError`` if there are no samples or none is left, for a
    sample without tokens, and for labels that are not as many as its tokens (the message says which).
    """
    if isinstance(samples, str | Mapping):
        what = "one text is" if isinstance(samples, str) else "a dict of columns is"
        raise InputError(f"{what} no list of samples", expected="a list, or one column", found=repr(samples)[:40])
    if max_length is not None and max_length < 1:
        raise InputError("the maximum length is out of range", expected="at least 1 token", found=max_length)
    parts: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    lengths: list[int] = []
    dropped, count, differ, longest = 0, 0, False, 0
    for count, sample in enumerate(samples, 1):
        ids, own = _tokens(sample, tokenizer)
        _require_sequence(ids, own, count - 1)
        longest = max(longest, len(ids))
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
    if not parts:
        raise InputError(
            "no sequence has a token to train on" if count else "the dataset is empty",
            expected="a label that counts" if count else "at least one sample",
            found=f"none in {count:,}" if count else "none",
            hint=f"a max_length above {max_length} may reach them" if 0 < (max_length or 0) < longest else None,
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
        count - len(parts),
        dropped,
    )


def _tokens(sample: Sample, tokenizer: Any) -> tuple[Sequence[int], Sequence[int] | None]:
    if isinstance(sample, Mapping):
        return sample["input_ids"], sample.get("labels")
    if not isinstance(sample, str):
        return sample, None
    ids = tokenizer(sample, verbose=False)["input_ids"] if sample else []
    end = getattr(tokenizer, "eos_token_id", None)
    return ([*ids, end] if ids and end is not None and ids[-1] != end else ids), None


def _require_sequence(ids: Sequence[int], labels: Sequence[int] | None, index: int) -> None:
    where = f"sample {index}"
    if not hasattr(ids, "__len__"):
        expected = "a string, or a list of integers"
        raise InputError("a sample is neither text nor token ids", where=where, expected=expected, found=repr(ids)[:60])
    if len(ids) == 0:
        raise InputError("a sample is empty", where=where, expected="at least one token", found="length 0")
    if labels is not None and (found := len(labels) if hasattr(labels, "__len__") else repr(labels)) != len(ids):
        raise InputError("labels and tokens disagree", where=where, expected=f"{len(ids)} labels", found=found)


def usable(
    values: Sequence[Any], labels: Sequence[Any] | None, masks: Sequence[Any] | None, place: Callable[[int], str]
) -> list[Any]:
    """The texts, or ids with their labels, without empty ones. Raises ``InputError`` for other values and padding."""
    ids = any(isinstance(value, list) for value in values[:1])
    kind, expected = (list, "a list of integers") if ids else (str, "a string")
    for row, value in enumerate(values):
        if not isinstance(value, kind) or (ids and not all(type(each) is int for each in value)):
            found = "nothing" if value is None else repr(value)[:60]
            raise InputError("a row cannot be used", where=place(row), expected=expected, found=found)
        if ids and masks and 0 in (masks[row] or ()):
            hint, found = "tokenize without padding, or cut it off", f"attention_mask {masks[row][:20]}"
            raise InputError("a row holds padding", where=place(row), found=found, hint=hint)
    kept = [row for row, value in enumerate(values) if (value if ids else value.strip())]
    if labels is None or not ids:
        return [values[row] for row in kept]
    return [{"input_ids": values[row], "labels": labels[row]} for row in kept]


def read_samples(
    sources: Sequence[str], column: str | None = None, config: str | None = None, split: str | None = None
) -> tuple[list[Sample], Any]:
    """The texts, or token ids with their labels, of a table without empty ones, and the table.

    Arguments as for :func:`ullage.datasets.tables.load_rows`; ``column`` holds them. Raises ``InputError`` for a row
    that holds none, and where none is left.
    """
    table, where = load_rows(sources, config, split), ", ".join(sources)
    column = text_column(table, where, column)
    labels = table["labels"][:] if "labels" in table.column_names and column != "labels" else None
    masks = table["attention_mask"][:] if "attention_mask" in table.column_names else None
    place = lambda row: f"{where}, {row_place(sources, row)}, column {column!r}"  # noqa: E731
    found = usable(table[column][:], labels, masks, place)
    if not found:
        raise InputError("the dataset is empty", where=where, expected="a sample", found=f"{len(table):,} empty rows")
    return found, table


def tokenize_stream(
    rows: Any, column: str | None, tokenizer: Any, max_length: int | None, vocab_size: int, seed: int
) -> Any:
    """Sequences of a ``datasets.IterableDataset``, made as its rows are read, and shuffled among a thousand.

    Args:
        rows: of the stream.
        column: of texts or token ids; ``None`` as for :func:`ullage.datasets.tables.text_column`.
        tokenizer: of the texts.
        max_length: longer sequences are cut to it, in tokens.
        vocab_size: ids are below it.
        seed: of the order.
    """
    chosen = text_column(rows, "the stream", column)

    def sequences(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        place = lambda row: f"row {numbers[row]} of the stream"  # noqa: E731
        samples = usable(batch[chosen], batch.get("labels"), batch.get("attention_mask"), place)
        found: list[dict[str, torch.Tensor]] = []
        if samples:
            made = tokenize(samples, tokenizer, max_length)
            made.require_vocabulary(vocab_size, "the stream")
            found = [made[k] for k in range(len(made))]
        return {name: [each[name].tolist() for each in found] for name in ("input_ids", "labels")}

    made = rows.map(sequences, batched=True, batch_size=100, with_indices=True, remove_columns=rows.column_names)
    return made.shuffle(seed=seed, buffer_size=1000)
