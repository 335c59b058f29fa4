"""Samples of a Megatron data iterator, read as sequences of real tokens.

Two forms are in use. A *pre-packed* sample holds several sequences end to end and ``cu_seqlens`` that bound them (with
``cu_seqlens_padded`` too, the first gives the lengths and the second the positions). A sample of *one sequence* says
with ``original_seq_len`` how many of its ``padded_seq_len`` elements are real. Padding is removed here: the plan's
layout adds its own, and statistics count real tokens. Further fields are kept, one entry per token or per sequence.

Source: ``_unpack_batch`` in Megatron-LM, ``megatron/core/datasets/data_schedule_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ullage.core.columns import sample_value
from ullage.core.errors import InputError

#: Required fields of a sample, one entry per token, and their dtypes.
FIELDS = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
_LENGTHS = ("original_seq_len", "padded_seq_len", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def pull(data_iterator: Any, count: int) -> list[Any]:
    """The next ``count`` items, or as many as there are left."""
    items = []
    for _ in range(count):
        try:
            items.append(next(data_iterator))
        except StopIteration:
            break
    return items


def read_rows(items: Iterable[Any]) -> list[list[dict[str, Tensor]]]:
    """Sequences of the items of an iterator, which are samples or lists of samples, row by row; nothing is written to.

    A pre-packed sample is a row, and so are the samples of one sequence each that come as one item. Raises
    ``InputError`` with sample and key for a key that is missing, contradicts another or is not numeric.
    """
    samples: list[Any] = []
    # For each sample, whether it begins a row.
    begins: list[bool] = []
    for item in items:
        if isinstance(item, Mapping):
            given = [item]
        elif isinstance(item, Sequence) and not isinstance(item, str):
            given = list(item)
        else:
            raise InputError("a data iterator yields samples or lists of samples", found=type(item).__name__)
        packed = [isinstance(sample, Mapping) and "cu_seqlens" in sample for sample in given]
        begins += [k == 0 or packed[k] or packed[k - 1] for k in range(len(given))]
        samples += given
    rows: list[list[dict[str, Tensor]]] = []
    for i, sample in enumerate(samples):
        if begins[i]:
            rows.append([])
        rows[-1] += _sequences(samples, i, sample)
    return rows


def _sequences(samples: Sequence[Any], i: int, sample: Any) -> list[dict[str, Tensor]]:
    if not isinstance(sample, Mapping):
        raise InputError(
            "a sample is not a mapping of keys to values", where=f"sample {i}", found=type(sample).__name__
        )
    missing = [name for name in FIELDS if sample.get(name) is None]
    one, several = "original_seq_len" in sample or "padded_seq_len" in sample, "cu_seqlens" in sample
    if missing or not (one or several):
        raise InputError(
            "a sample lacks a key",
            where=f"sample {i}, key {missing[0]!r}" if missing else f"sample {i}",
            expected=f"{', '.join(FIELDS)}, and original_seq_len or cu_seqlens",
            found=", ".join(map(str, sample)),
        )
    if one and several:
        raise InputError(
            "a sample says twice where its sequences end",
            where=f"sample {i}",
            expected="cu_seqlens if it is pre-packed, original_seq_len and padded_seq_len if it is one sequence",
            found=", ".join(name for name in _LENGTHS if name in sample),
        )
    # The tokens decide how many elements the sample has; every other field is read against that.
    size = _flat(sample_value(samples, i, "tokens"), None).shape[0]
    values = {name: _flat(sample_value(samples, i, name), size) for name in sample if name not in _LENGTHS}
    for name, dtype in FIELDS.items():
        if values[name].ndim != 1 or len(values[name]) != size:
            raise InputError(
                "the fields of a sample disagree in length",
                where=f"sample {i}, key {name!r}",
                expected=f"[{size}] as tokens",
                found=f"shape {list(values[name].shape)}",
            )
        values[name] = values[name].to(dtype)
    cuts = _cuts(samples, i, size) if several else [(0, _length(samples, i, size))]
    return [_part(values, f"sample {i}", size, cuts, k) for k in range(len(cuts))]


def _flat(value: Tensor, size: int | None) -> Tensor:
    """``value`` without the leading dimension of 1 that a collate function adds."""
    has_row = value.ndim >= 2 and value.shape[0] == 1 and (size is None or value.shape[1] == size)
    return value.squeeze(0) if has_row else value


def _length(samples: Sequence[Any], i: int, size: int) -> int:
    name = "original_seq_len" if "original_seq_len" in samples[i] else "padded_seq_len"
    value = sample_value(samples, i, name)
    if value.numel() != 1 or not 1 <= int(value) <= size:
        raise InputError(
            f"a sample's {name} does not fit its tokens",
            where=f"sample {i}",
            expected=f"1 to {size}",
            found=value.tolist(),
        )
    return int(value)


def _cuts(samples: Sequence[Any], i: int, size: int) -> list[tuple[int, int]]:
    """Start and length of each sequence of a pre-packed sample; slots without tokens are left out."""
    ends = sample_value(samples, i, "cu_seqlens").reshape(-1).tolist()
    padded = samples[i].get("cu_seqlens_padded")
    places = ends if padded is None else sample_value(samples, i, "cu_seqlens_padded").reshape(-1).tolist()
    # ``cu_seqlens`` gives each sequence's tokens, ``cu_seqlens_padded`` the slots in which they lie.
    lengths = [b - a for a, b in pairwise(ends)]
    slots = [b - a for a, b in pairwise(places)]
    sound = ends[:1] == places[:1] == [0] and len(ends) == len(places) and places[-1] <= size
    if not sound or any(not 0 <= length <= slot for length, slot in zip(lengths, slots)):
        raise InputError(
            "a sample's cu_seqlens do not bound its sequences",
            where=f"sample {i}",
            expected=f"numbers that rise from 0 to at most {size}",
            found=ends if places is ends else f"{ends} in slots {places}",
        )
    return [(place, length) for place, length in zip(places, lengths) if length]


def _part(values: dict[str, Tensor], where: str, size: int, cuts: list[tuple[int, int]], k: int) -> dict[str, Tensor]:
    start, length = cuts[k]
    part = {}
    for name, value in values.items():
        # By shape: one entry per token, one for the whole sample, or one per sequence.
        if value.ndim and value.shape[0] == size:
            part[name] = value[start : start + length]
        elif value.numel() == 1:
            part[name] = value.reshape(())
        elif value.ndim and value.shape[0] == len(cuts):
            part[name] = value[k]
        else:
            raise InputError(
                "a field has neither one entry per token nor one per sequence",
                where=f"{where}, key {name!r}",
                expected=f"{size} or {len(cuts)}",
                found=f"shape {list(value.shape)}",
            )
    return part
