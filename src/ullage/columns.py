"""Columns of a batch: the values that samples hold in one field, read as tensors, and laid out or stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.errors import InputError
from ullage.layout import Layout

#: The label that no loss counts.
IGNORED_LABEL = -100
LABEL_NAMES = ("labels", "shift_labels")


def fill_value(name: str, dtype: torch.dtype) -> int:
    """What padding holds in a field: -100 in labels whose dtype has such a number, 0 elsewhere."""
    return IGNORED_LABEL if name in LABEL_NAMES and dtype.is_signed else 0


def holding_ignored(labels: Tensor) -> Tensor:
    """Labels in a dtype that has -100: as they are, or int64 where theirs is bool or unsigned (156 in uint8)."""
    return labels if labels.dtype.is_signed else labels.long()


def sample_value(samples: Sequence[Mapping[str, Any]], i: int, name: str) -> Tensor:
    """The value of a field of sample ``i`` as a tensor that shares its memory where it can.

    Raises ``InputError`` that names sample and field for one that is missing or no number.
    """
    try:
        value = samples[i][name]
    except KeyError:
        raise InputError(
            "a sample lacks a field", where=f"sample {i}", expected=list(samples[0]), found=list(samples[i])
        ) from None
    if isinstance(value, Tensor):
        return value
    problem = InputError(
        "a value is neither a number nor an array of numbers",
        where=f"sample {i}, field {name!r}",
        found=f"{type(value).__name__} {str(value)[:40]!r}",
        hint="drop the field, or turn it into numbers",
    )
    try:
        array = np.asarray(value)
    except ValueError:
        raise problem from None
    if array.dtype.kind not in "biuf" and array.size:
        raise problem
    if not isinstance(value, (np.ndarray, np.generic)):
        if array.dtype.kind in "iu" or array.size == 0:
            array = array.astype(np.int64)
        elif array.dtype.kind == "f":
            array = array.astype(np.float32)
    return torch.from_numpy(np.array(array)) if array.ndim == 0 else torch.from_numpy(np.ascontiguousarray(array))


def common_lengths(columns: Mapping[str, list[Tensor]]) -> list[int]:
    """The length of each sample, which all token-aligned fields share."""
    names = list(columns)
    reference = names[0]
    lengths = []
    for i, first in enumerate(columns[reference]):
        for name in names:
            value = columns[name][i]
            if value.ndim == 0 or first.ndim == 0 or value.shape[0] != first.shape[0]:
                raise InputError(
                    "the fields of a sample disagree in length",
                    where=f"sample {i}, field {name!r}",
                    expected=f"{_length(first)} as in {reference!r}",
                    found=_length(value),
                    hint="name fields with one entry a sequence in per_sequence",
                )
        if first.shape[0] == 0:
            raise InputError(
                "a sequence is empty", where=f"sample {i}", expected="at least one token", found=0, hint="drop it"
            )
        lengths.append(first.shape[0])
    return lengths


def _length(value: Tensor) -> str:
    return "a number" if value.ndim == 0 else str(value.shape[0])


def stack(column: list[Tensor], name: str) -> Tensor:
    """One value a sequence, [N, ...]. Raises ``InputError`` for values of different shapes."""
    shapes = [tuple(tensor.shape) for tensor in column]
    odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise InputError(
            "a per-sequence field must have one shape",
            where=f"sample {odd}, field {name!r}",
            expected=list(shapes[0]),
            found=list(shapes[odd]),
        )
    return torch.stack(column)


def lay_out(column: list[Tensor], name: str, layout: Layout) -> Tensor:
    """Token-aligned values end to end, [layout.size, ...], padding filled. Raises ``InputError``."""
    shapes = [tuple(tensor.shape[1:]) for tensor in column]
    odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise InputError(
            "a token's value must have one shape",
            where=f"sample {odd}, field {name!r}",
            expected=["L", *shapes[0]],
            found=["L", *shapes[odd]],
        )
    tokens = torch.cat(column)
    if layout.num_tokens == layout.size:
        return tokens
    empty = tokens.new_full((layout.size, *tokens.shape[1:]), fill_value(name, tokens.dtype))
    return empty.index_copy(0, torch.from_numpy(layout.token_index()), tokens)
