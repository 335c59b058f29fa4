"""Where lengths, samples and text come from: mock distributions, the benchmarks' workloads, files, the docstrings.

Names load when they are touched: lengths need only numpy, samples torch, text torch and the ``hf`` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.datasets.lengths import CAPACITIES, WORKLOADS, mock_lengths
    from ullage.datasets.samples import MockSamples
    from ullage.datasets.text import TokenDataset, byte_tokenizer, docstrings, load_text, split_held_out, tokenize

_HOME = {
    "CAPACITIES": "lengths",
    "MockSamples": "samples",
    "TokenDataset": "text",
    "WORKLOADS": "lengths",
    "byte_tokenizer": "text",
    "docstrings": "text",
    "load_text": "text",
    "mock_lengths": "lengths",
    "split_held_out": "text",
    "tokenize": "text",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ullage.datasets' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ullage.datasets.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


__all__ = [
    "CAPACITIES",
    "WORKLOADS",
    "MockSamples",
    "TokenDataset",
    "byte_tokenizer",
    "docstrings",
    "load_text",
    "mock_lengths",
    "split_held_out",
    "tokenize",
]
