"""Lengths without data: Megatron's mock distributions and samples, and the six workloads of the benchmarks.

A mock configuration is the JSON that Megatron-LM takes as ``--sft-mock-dataset-config-json``: ``mode`` is ``file``
(lengths from a CSV), ``distribution`` (``type`` lognormal, with ``min_seq_len``, ``max_seq_len``, ``mean_seq_len``,
``lognormal_sigma``) or ``verification`` (the same distribution with defaults; ``data_path`` names real tokens, which
lengths do not need). The samples are exp(normal(μ, σ)) with μ = ln(mean) − σ²/2, clipped, cut to integers. They are
drawn from numpy's legacy generator, by default with seed 0, as upstream draws them: the first *n* lengths here are the
first *n* lengths there. One thing differs on purpose: upstream's CSV reader takes the first length of a file without a
header for a header and loses it; here it is kept.

A workload is a function of (n, seed) that gives int64 lengths, at most its capacity, the same on every machine; but
``code`` counts the tokens of the running Python's own standard library and so varies with its version.

Sources: ``MockSFTLowLevelDataset`` in Megatron-LM, ``megatron/training/datasets/sft_dataset.py``; the shapes of the
other workloads are those that chat logs, mixtures of short and long documents, and web text are reported to have.

A mock sample of *L* tokens is 1, 2, ..., L − 1 and an end-of-document token. Its labels are the next tokens, its
positions 0 to L − 1, its loss mask 1 everywhere but at the last token, which has no next one. Source:
``MockSFTDataset`` in the same file. Two things differ on purpose: samples are not padded unless asked, because a packed
layout pads, and the mask goes by position, so that a token that happens to be the padding token counts.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ullage.core.errors import InputError, require_int
from ullage.core.layout import Int64
from ullage.datasets.files import Measured, read_lengths, read_stream, read_text

if TYPE_CHECKING:
    from torch import Tensor

#: Default number of lengths of a mock distribution, upstream's too.
MOCK_SIZE = 1_000_000

_LOGNORMAL = {"min_seq_len": int, "max_seq_len": int, "mean_seq_len": float, "lognormal_sigma": float}
_VERIFICATION_DEFAULTS = {"min_seq_len": 100, "max_seq_len": 4096, "mean_seq_len": 2048, "lognormal_sigma": 1.1}
_MOCK_KEYS = {
    "file": {"path"},
    "distribution": {"type", *_LOGNORMAL},
    "verification": {"data_path", "type", *_LOGNORMAL},
}


def mock_lengths(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None, n: int | None = None, seed: int = 0
) -> Int64:
    """The lengths of Megatron's mock data in tokens, int64 [n].

    Args:
        config: a mapping, the same as a JSON string, or the path of a JSON file; ``None`` is the distribution of the
            benchmarks (mean 4096, sigma 1.1, 1024 to 8192)
        n: number of lengths; ``None`` is all of a file and a million of a distribution; a shorter file begins again
        seed: of a distribution

    Raises ``InputError`` for unknown or missing keys, values of the wrong kind, and files that cannot be read. Source:
    see the module.

    >>> mock_lengths({"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192,
    ...               "mean_seq_len": 4096, "lognormal_sigma": 1.1}, n=4)
    array([8192, 3473, 6564, 8192])
    """
    config = mock_config(config)
    if n is not None:
        require_int(n, "n", least=0)
    if config["mode"] == "file":
        where = os.fspath(config["path"])
        lengths = read_lengths(where).lengths
        if n is not None:
            # A shorter file begins again from its front.
            lengths = np.resize(lengths, n)
        return lengths
    return _lognormal(config, MOCK_SIZE if n is None else int(n), seed)


def mock_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """``config`` as a valid dict with every key. Relative paths start here, or in the JSON file's folder.

    Raises ``InputError`` as :func:`mock_lengths` does.
    """
    if config is None:
        return {"mode": "distribution", "type": "lognormal", **_MEGATRON}
    folder = Path()
    if isinstance(config, (str, os.PathLike)):
        text = os.fspath(config)
        # JSON begins with a brace; anything else is the path of a file.
        if not text.lstrip().startswith("{"):
            folder, text = Path(text).parent, read_text(text)
        try:
            config = json.loads(text)
        except ValueError as error:
            raise InputError("a mock distribution is not JSON", found=str(error)) from error
    if not isinstance(config, Mapping):
        raise InputError("a mock distribution must be a JSON object", found=type(config).__name__)
    config = dict(config)
    _require_mock_keys(config)
    if config["mode"] == "file":
        if not isinstance(config["path"], (str, os.PathLike)):
            raise InputError("a mock distribution's path must be a string", found=config["path"])
        path = Path(config["path"])
        config["path"] = path if path.exists() or path.is_absolute() else folder / path
        return config
    if config["mode"] == "verification":
        config = _VERIFICATION_DEFAULTS | {"type": "lognormal"} | config
    _require_mock_values(config)
    return config


def _require_mock_keys(config: dict[str, Any]) -> None:
    mode = config.get("mode")
    if not isinstance(mode, str) or mode not in _MOCK_KEYS:
        raise InputError("a mock distribution's mode is unknown", expected=" or ".join(_MOCK_KEYS), found=mode)
    allowed = _MOCK_KEYS[mode]
    unknown = sorted(str(key) for key in set(config) - allowed - {"mode", "format"})
    if unknown:
        raise InputError(
            "a mock distribution has unknown keys",
            where=f"mode {mode}",
            expected=", ".join(sorted(allowed)),
            found=", ".join(unknown),
        )
    required = {"verification": {"data_path"}}.get(mode, allowed)
    missing = sorted(required - set(config))
    if missing:
        raise InputError("a mock distribution lacks keys", where=f"mode {mode}", expected=", ".join(missing))


def _require_mock_values(config: dict[str, Any]) -> None:
    if config["type"] != "lognormal":
        raise InputError("a mock distribution's type is unknown", expected="lognormal", found=config["type"])
    for key, kind in _LOGNORMAL.items():
        value = config[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise InputError("a mock distribution's value is not a number", where=key, found=value)
        if kind is int and value != int(value):
            raise InputError("a mock distribution's value is not an integer", where=key, found=value)
        if value < (1 if key == "max_seq_len" else 0) or (key == "mean_seq_len" and value == 0):
            raise InputError("a mock distribution's value is too small", where=key, found=value)
    if config["min_seq_len"] > config["max_seq_len"]:
        raise InputError(
            "a mock distribution is empty",
            expected="min_seq_len <= max_seq_len",
            found=f"{config['min_seq_len']} > {config['max_seq_len']}",
        )


def _lognormal(config: Mapping[str, Any], n: int, seed: int) -> Int64:
    mean, sigma = config["mean_seq_len"], config["lognormal_sigma"]
    generator = np.random.RandomState(seed)  # the stream that upstream draws from
    # The mean of exp(normal(μ, σ)) is exp(μ + σ²/2), so this μ gives ``mean`` before the clipping.
    samples = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, n)
    return np.clip(samples, config["min_seq_len"], config["max_seq_len"]).astype(np.int64)


_MEGATRON = {"min_seq_len": 1024, "max_seq_len": 8192, "mean_seq_len": 4096, "lognormal_sigma": 1.1}


def _megatron(n: int, seed: int = 0) -> Int64:
    """Megatron's mock lognormal: mean 4096 before clipping, sigma 1.1, 1024 to 8192."""
    return mock_lengths(None, n, seed)


def _chat(n: int, seed: int = 0) -> Int64:
    """Conversations: lognormal, median 600, sigma 1.2, 1 to 32,768."""
    samples = np.random.default_rng(seed).lognormal(np.log(600), 1.2, n)
    return np.clip(samples, 1, CAPACITIES["chat"]).astype(np.int64)


def _bimodal(n: int, seed: int = 0) -> Int64:
    """Short and long documents: nine in ten near 512, one near 16k, each normal with an eighth as deviation."""
    generator = np.random.default_rng(seed)
    centre = np.where(generator.random(n) < 0.1, 16384, 512)
    samples = centre * (1 + generator.standard_normal(n) / 8)
    return np.clip(samples, 1, CAPACITIES["bimodal"]).astype(np.int64)


def _uniform(n: int, seed: int = 0) -> Int64:
    """Uniform from 1 to 8192."""
    return np.random.default_rng(seed).integers(1, 8192, n, endpoint=True)


def _pareto(n: int, seed: int = 0) -> Int64:
    """A heavy tail: Pareto from 1024 with exponent 1, cut at 131,072 (128k)."""
    # numpy's pareto begins at 0 (Lomax); plus 1 it is the classical one.
    samples = 1024 * (1 + np.random.default_rng(seed).pareto(1.0, n))
    return np.clip(samples, 1, CAPACITIES["pareto"]).astype(np.int64)


def _code(n: int, seed: int = 0) -> Int64:
    """Source files and docstrings of the running Python's standard library, drawn with replacement."""
    drawn = np.random.default_rng(seed).choice(_library_lengths(), n)
    return np.minimum(drawn, CAPACITIES["code"])


# One subword of a byte-pair vocabulary is about four letters of a word, or one mark; white space costs nothing.
_SUBWORD = re.compile(r"\w{1,4}|[^\w\s]")
# A triple-quoted string that begins a line is a docstring nearly always, and found thirty times faster than by parsing.
_DOCSTRING = re.compile(r"^[ \t]*[rR]?(\"\"\"|''')(.*?)\1", re.DOTALL | re.MULTILINE)


@functools.cache
def _library_lengths() -> Int64:
    """Token counts of each source file, then of each docstring, of the standard library; int64, none zero."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, docstrings = [], []
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        files.append(len(_SUBWORD.findall(text)))
        docstrings += [len(_SUBWORD.findall(found[1])) for found in _DOCSTRING.findall(text)]
    counts = np.array(files + docstrings, np.int64)
    counts = counts[counts > 0]
    # One cached array serves all callers.
    counts.flags.writeable = False
    return counts


#: The lengths of each workload, as ``WORKLOADS[name](n, seed)``: int64 [n], in tokens, none above the capacity.
WORKLOADS: dict[str, Callable[[int, int], Int64]] = {
    "megatron": _megatron,
    "chat": _chat,
    "bimodal": _bimodal,
    "uniform": _uniform,
    "pareto": _pareto,
    "code": _code,
}

#: The capacity with which each workload is planned, in slots per rank and microbatch.
CAPACITIES: dict[str, int] = {
    "megatron": 8192,
    "chat": 32768,
    "bimodal": 32768,
    "uniform": 8192,
    "pareto": 131072,
    "code": 8192,
}


def measured_lengths(
    source: str, n: int | None = None, seed: int = 0, column: str | None = None, tokenizer: str | None = None
) -> tuple[str, Measured, int | None]:
    """A name for people, the lengths of what a command names, and the capacity that belongs to them, if any.

    Args:
        source: a file or a pattern of some, a mock distribution, the name of a workload, ``docstrings``, or ``-``.
        n: how many; by default all of a file, 512 drawn.
        seed: of what is drawn.
        column: of a file, with lengths or text.
        tokenizer: of text.
    """
    drawn = n or 512
    if source in WORKLOADS:
        return source, Measured(WORKLOADS[source](drawn, seed)), CAPACITIES[source]
    if source == "docstrings":
        from ullage.datasets.text import docstring_lengths

        return source, Measured(docstring_lengths(drawn, seed)), 8192
    # Standard input is read once, before it is known whether it holds a distribution or lengths.
    data = sys.stdin.buffer.read() if source == "-" else b""
    is_inline = source.lstrip().startswith("{")
    text = data.decode("utf-8", "replace")
    if source.endswith(".json") and not is_inline:
        text = read_text(source)
    # JSON may be lengths or a distribution: an object with a "mode" is the latter.
    if is_inline or (text.lstrip().startswith("{") and _has_mode(text)):
        config = mock_config(text if data else source)
        made = mock_lengths(config, n if config["mode"] == "file" else drawn, seed)
        return f"mock {config['mode']}", Measured(made), config.get("max_seq_len")
    if source == "-":
        measured = read_stream(data, column, tokenizer)
    elif not Path(source).suffix and not Path(source).exists():
        raise InputError("no such file or workload", where=source, expected=f"a file, or one of {', '.join(WORKLOADS)}")
    else:
        measured = read_lengths(source, column, tokenizer)
    name = "standard input" if source == "-" else Path(source).name
    return name, replace(measured, lengths=measured.lengths[:n]), None


def _has_mode(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and "mode" in value


class MockSamples:
    """Map-style dataset of Megatron-like samples, the same on every machine and at every reading.

    Args:
        config, n, seed: as for :func:`ullage.datasets.mock_lengths`, which gives the ``lengths``
        vocab_size: draw tokens from ``[1, vocab_size)``, by ``seed`` and index alone; ``None`` counts them up as
            upstream
        eod, pad: token ids of the end of a document and of padding
        max_length: tokens to which longer sequences are cut, end-of-document token included
        pad_to_multiple_of: pad each sample to such a length, as upstream does

    A sample has ``tokens``, ``labels``, ``position_ids`` int64 [length], ``loss_mask`` float32 [length], and
    ``original_seq_len``, ``padded_seq_len`` int32. Raises ``InputError`` for a configuration that cannot be used.

    >>> sample = MockSamples({"mode": "distribution", "type": "lognormal", "min_seq_len": 4, "max_seq_len": 4,
    ...                       "mean_seq_len": 4, "lognormal_sigma": 1.0}, n=1)[0]
    >>> sample["tokens"].tolist(), sample["labels"].tolist(), sample["loss_mask"].tolist()
    ([1, 2, 3, 0], [2, 3, 0, 0], [1.0, 1.0, 1.0, 0.0])
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        n: int | None = None,
        seed: int = 0,
        *,
        vocab_size: int | None = None,
        eod: int = 0,
        pad: int = 0,
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
    ) -> None:
        if mock_config(config)["mode"] == "verification":
            raise InputError(
                "mock samples are not read from data",
                where="mode verification",
                hint="use mode distribution, or mock_lengths for the lengths alone",
            )
        at_least = {"vocab_size": (vocab_size, 2), "max_length": (max_length, 1)}
        for name, (value, least) in {**at_least, "pad_to_multiple_of": (pad_to_multiple_of, 1)}.items():
            if value is not None and value < least:
                raise InputError(f"{name} is too small", expected=f">= {least}", found=value)
        # Each sample has its end-of-document token, so none is empty.
        lengths = np.maximum(mock_lengths(config, n, seed), 1)
        self.lengths = lengths if max_length is None else np.minimum(lengths, max_length)
        self._seed, self._vocab_size = seed, vocab_size
        self._eod, self._pad, self._multiple = eod, pad, pad_to_multiple_of

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        import torch  # which the lengths alone do without

        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, none at {index}")
        index %= len(self)
        length = int(self.lengths[index])
        padded = -(-length // self._multiple) * self._multiple
        # One element longer than the sample: tokens are the text without its last element, labels without its first.
        text = torch.full((padded + 1,), self._pad)
        text[: length - 1] = self._words(index, length - 1)
        text[length - 1] = self._eod
        loss_mask = torch.zeros(padded)
        loss_mask[: length - 1] = 1
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(padded),
            "original_seq_len": torch.tensor(length, dtype=torch.int32),
            "padded_seq_len": torch.tensor(padded, dtype=torch.int32),
        }

    def _words(self, index: int, count: int) -> Tensor:
        import torch

        if self._vocab_size is None:
            return torch.arange(1, count + 1)
        # A generator per sample, so that it does not depend on the order of reading.
        return torch.from_numpy(np.random.default_rng([self._seed, index]).integers(1, self._vocab_size, count))
