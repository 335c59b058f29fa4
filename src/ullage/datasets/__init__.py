"""Where sequences come from: mock lengths, text files, and text that every machine has.

Names load when they are touched: lengths need only numpy, text needs torch and the ``hf`` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.datasets.text import TokenDataset, byte_tokenizer, docstrings, load_text, split_held_out, tokenize

_HOME = {
    "TokenDataset": "text",
    "byte_tokenizer": "text",
    "docstrings": "text",
    "load_text": "text",
    "split_held_out": "text",
    "tokenize": "text",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ullage.datasets.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ullage.datasets' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


__all__ = ["TokenDataset", "byte_tokenizer", "docstrings", "load_text", "split_held_out", "tokenize"]
