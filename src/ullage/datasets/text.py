"""Text of unequal lengths, from files and from a corpus that every machine has, as data sets of tokens.

The corpus is the docstrings of the running Python's standard library: the source files are parsed with ``ast`` in
the order of their paths, nothing is imported, and each docstring is taken once. Their lengths run from one line to
thousands of bytes.

Files are read by ``datasets`` (one column of strings, or of token ids); before that the first bytes are compared
with the ending, because a parser that accepts anything turns a wrong name into a bad model.

Tokens lie end to end in one flat array, with a :class:`~ullage.layout.Layout` over it. Samples are held out for
evaluation by a hash of their content, so the choice does not depend on order, and equal samples are on one side.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import json
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ullage.datasets.files import root_cause
from ullage.errors import InputError
from ullage.layout import Layout

#: A text, or a sequence of token ids.
Sample = str | list[int]

_ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
# Bytes by which a format is recognised.
_HEAD_BYTES = 4096
#: Messages of the readers of ``datasets`` about a valid file without rows: .csv, .parquet.
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0, got 0")


@dataclass(frozen=True, eq=False)
class TokenDataset(torch.utils.data.Dataset):
    """Map-style dataset of token sequences: ``dataset[i]`` is ``{"input_ids": [length], "labels": [length]}``, int64.

    Attributes:
        values: the tokens of all sequences end to end
        layout: where each sequence lies in ``values``
        num_truncated: sequences that were cut to the maximum length
        truncated_tokens: the tokens that they lost; tokens in = ``num_tokens`` + ``truncated_tokens``
    """

    values: np.ndarray
    layout: Layout
    num_truncated: int = 0
    truncated_tokens: int = 0

    def __len__(self) -> int:
        return self.layout.num_items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = int(self.layout.starts[index])
        tokens = torch.from_numpy(self.values[start : start + int(self.layout.lengths[index])].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.layout.num_tokens

    def require_vocabulary(self, vocab_size: int, where: str | None = None) -> None:
        """Raise ``InputError`` for the first id outside ``range(vocab_size)``, with its sample and position."""
        bad = np.flatnonzero((self.values < 0) | (self.values >= vocab_size))
        if not len(bad):
            return
        # The last sequence that starts at or before the bad token.
        sample = int(np.searchsorted(self.layout.starts, bad[0], side="right")) - 1
        position = int(bad[0] - self.layout.starts[sample])
        raise InputError(
            "a token id is outside the vocabulary",
            where=", ".join(filter(None, [where, f"sample {sample}, position {position}"])),
            expected=f"0 to {vocab_size - 1}",
            found=int(self.values[bad[0]]),
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


def split_held_out(samples: Sequence[Sample], fraction: float = 0.05) -> tuple[list[Sample], list[Sample]]:
    """Samples split into ``(for training, held out)``; a hash of each decides, for about ``fraction`` of them.

    Order is kept on both sides. If all samples fall on the side held out, all are for training instead.
    """
    if not 0.0 <= fraction < 1.0:
        raise InputError("the held-out fraction is out of range", expected="0 <= fraction < 1", found=fraction)
    # A digest is a uniform number of 64 bits, so this share of all samples falls below the limit.
    limit = int(fraction * 2**64)
    sides: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in samples:
        content = sample if isinstance(sample, str) else json.dumps(sample)
        digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        sides[int.from_bytes(digest, "big") < limit].append(sample)
    return sides if sides[0] else (sides[1], [])


def load_text(path: str | Path, column: str | None = None) -> list[Sample]:
    """The texts of a .jsonl, .json, .csv, .parquet or .txt file, in its order.

    ``column`` holds the texts, or lists of token ids; by default ``text``, else the only column of either kind. A .txt
    file has one text per line; blank lines are skipped. The whole column is held in memory, and nothing is left in any
    cache. Raises ``InputError`` for a missing file, a file that is not what its ending says, a missing column (the
    message lists the columns), an empty file, and an empty text (the message says which).
    """
    path = Path(path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing there"
        raise InputError("the data file cannot be read", where=str(path), expected="a file", found=found)
    ending = path.suffix.lower()
    if ending not in _ENDINGS:
        raise InputError(
            "the data file has an unknown ending",
            where=str(path),
            expected=f"one of {', '.join(_ENDINGS)}",
            found=ending,
        )
    _require_content(path, ending)
    table = _read_table(path, ending)
    if len(table) == 0:
        raise _empty(path)
    column = _choose_column(table, column, path)
    samples = table[column][:]
    if ending == ".txt":
        samples = [line for line in samples if line.strip()]
        if not samples:
            raise _empty(path)
    for i, sample in enumerate(samples):
        if sample is None or len(sample) == 0:
            raise InputError(
                "a sample is empty",
                where=f"{path}, column {column!r}, sample {i} counted from 0",
                expected="at least one token",
                found="nothing" if sample is None else "length 0",
                hint="remove it from the file",
            )
    return samples


def _empty(path: Path) -> InputError:
    return InputError("the dataset is empty", where=str(path), expected="at least one sample", found="none")


def _require_content(path: Path, ending: str) -> None:
    """Raise ``InputError`` where the first bytes of the file do not fit its ending."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        # A line may be longer than the head, and these formats are told apart by a whole one.
        first_line = next((line for line in file if line.strip()), b"") if ending in (".jsonl", ".csv") else b""
    if not head.strip():
        raise _empty(path)
    expected, found = _promised(ending), _looks_like(head)
    if ending == ".parquet":
        right = found == "Parquet"
    elif found not in ("text", "JSON"):
        right = False
    elif ending == ".jsonl":
        right = isinstance(_parsed(first_line), dict)
    elif ending == ".json":
        right = found == "JSON"
    elif ending == ".csv":
        right = not isinstance(_parsed(first_line), dict | list)
        found = "text" if right else "JSON"
    else:
        right = True
    if not right:
        raise _not_what_it_says(path, ending, expected, found)


def _promised(ending: str) -> str:
    return {
        ".parquet": "Parquet",
        ".jsonl": "one JSON object per line",
        ".json": "a JSON list of objects",
        ".csv": "comma-separated UTF-8 text",
        ".txt": "UTF-8 text",
    }[ending]


def _not_what_it_says(path: Path, ending: str, expected: str, found: str) -> InputError:
    return InputError(
        f"the file is not what its ending {ending} says",
        where=str(path),
        expected=expected,
        found=found,
        hint="rename the file, or write it again",
    )


def _looks_like(head: bytes) -> str:
    for magic, name in ((b"PAR1", "Parquet"), (b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "a zip archive")):
        if head.startswith(magic):
            return name
    try:
        # final=False: the head may end inside a character
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError:
        return "bytes that are not UTF-8"
    if "\0" in text:
        return "binary data"
    return "JSON" if text.lstrip()[:1] in ("{", "[") else "text"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return None


def _read_table(path: Path, ending: str) -> Any:
    """The file as an in-memory ``datasets.Dataset``; its cache is a temporary folder."""
    import datasets

    reader, options = {
        ".jsonl": (datasets.Dataset.from_json, {}),
        ".json": (datasets.Dataset.from_json, {}),
        # texts such as "NA" and "null" are texts
        ".csv": (datasets.Dataset.from_csv, {"keep_default_na": False}),
        ".parquet": (datasets.Dataset.from_parquet, {}),
        ".txt": (datasets.Dataset.from_text, {}),
    }[ending]
    if ending == ".json" and path.stat().st_size < _HEAD_BYTES and _parsed(path.read_bytes()) == []:
        raise _empty(path)
    bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error raised below holds what it would log
    try:
        with tempfile.TemporaryDirectory(prefix="ullage-") as cache:
            return reader(str(path), cache_dir=cache, keep_in_memory=True, **options)
    except Exception as error:  # the readers raise whatever pandas, pyarrow and json raise
        cause = root_cause(error)
        if any(sign in str(cause) for sign in _NO_ROWS):
            raise _empty(path) from error
        found = _bad_line(path) if ending == ".jsonl" else None
        raise _not_what_it_says(path, ending, _promised(ending), found or f"{type(cause).__name__}: {cause}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _bad_line(path: Path) -> str | None:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and not isinstance(_parsed(line), dict):
                return f"line {number}, which is not a JSON object"
    return None


def _choose_column(table: Any, column: str | None, path: Path) -> str:
    names = list(table.column_names)
    kinds = {name: _kind(feature) for name, feature in table.features.items()}
    if column is None:
        usable = [name for name in names if kinds[name] in ("string", "ids")]
        column = "text" if "text" in names else usable[0] if len(usable) == 1 else None
        if column is None:
            raise InputError(
                "it is not clear which column holds the text",
                where=str(path),
                expected="a column 'text', or one column of strings only",
                found=f"columns {', '.join(map(repr, names))}",
                hint="name it with --text_column",
            )
    elif column not in names:
        raise InputError(
            f"there is no column {column!r}",
            where=str(path),
            expected=f"one of {', '.join(map(repr, names))}",
            found=repr(column),
            hint="name one of them with --text_column",
        )
    if kinds[column] not in ("string", "ids"):
        raise InputError(
            f"the column {column!r} holds no text",
            where=str(path),
            expected="strings, or lists of token ids",
            found=kinds[column],
        )
    return column


def _kind(feature: Any) -> str:
    """``string``, ``ids`` for lists of integers, or the feature as ``datasets`` writes it."""
    dtype = getattr(feature, "dtype", None)
    if dtype in ("string", "large_string"):
        return "string"
    inner = str(getattr(getattr(feature, "feature", None), "dtype", ""))
    if inner.startswith(("int", "uint")):
        return "ids"
    return str(dtype if dtype not in (None, "list", "dict") else feature)


def byte_tokenizer() -> Any:
    """transformers' byte tokenizer, without a download: ids 3 to 258 are bytes, 0 pads, 1 ends a text, 2 is unknown.

    ``</s>`` or ``<pad>`` within a text are bytes like any others.
    """
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0, split_special_tokens=True)


def tokenize(samples: Sequence[Sample], tokenizer: Any, max_length: int | None = None) -> TokenDataset:
    """Data set of the tokens of ``samples``, each ended by the tokenizer's end token and cut to ``max_length`` tokens.

    Samples of token ids get no end token. Raises ``InputError`` if there are no samples, and for a sample without
    tokens (the message says which).
    """
    if max_length is not None and max_length < 1:
        raise InputError("the maximum length is out of range", expected="at least 1 token", found=max_length)
    if not len(samples):
        raise InputError("the dataset is empty", expected="at least one sample", found="none")
    end = getattr(tokenizer, "eos_token_id", None)
    parts: list[np.ndarray] = []
    lengths = np.empty(len(samples), np.int64)
    for i, sample in enumerate(samples):
        if isinstance(sample, str):
            ids = tokenizer(sample, verbose=False)["input_ids"] if sample else []
            if ids and end is not None and ids[-1] != end:
                ids = [*ids, end]
        else:
            ids = sample
        if len(ids) == 0:
            raise InputError("a sample is empty", where=f"sample {i}", expected="at least one token", found="length 0")
        lengths[i] = len(ids)
        # Held as int32, half of what int64 takes; a sample is widened when it is read.
        parts.append(np.asarray(ids[:max_length], np.int32))
    # ``lengths`` are those before the cut, by which the lost tokens are counted.
    kept = np.minimum(lengths, max_length) if max_length is not None else lengths
    cut = lengths - kept
    return TokenDataset(np.concatenate(parts), Layout(kept), int((cut > 0).sum()), int(cut.sum()))
