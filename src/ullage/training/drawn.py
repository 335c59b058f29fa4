"""Batches of others' collators, as the sequences that they hold.

===================================================  ==========================================================
batch                                                its sequences are told by
===================================================  ==========================================================
one row [1, T] with ``cu_seq_lens_q``                those bounds: transformers' ``DataCollatorWithFlattening``
                                                     with ``return_flash_attn_kwargs``, TRL's padding-free collator
padded rows [N, C, L] with ``attention_mask``        the mask, C choices of one question per row:
                                                     ``DataCollatorForMultipleChoice``
padded rows [N, L] with ``attention_mask``           the mask, one sequence per row: ``DataCollatorWithPadding``,
                                                     ``DataCollatorForLanguageModeling``, ``DataCollatorForSeq2Seq``
rows with ``position_ids`` or ``seq_idx``, no mask   positions that begin anew: ``DataCollatorWithFlattening``
===================================================  ==========================================================

Labels of all of them are aligned with their tokens and not shifted, as ours are. Bounds, masks and positions that only
count on are used up: a batch of ours says the same by its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Layout
from ullage.rows import beginnings, read_row
from ullage.schema import IGNORED_LABEL, is_target
from ullage.training.choices import joined

_BOUNDS = "cu_seq_lens_q"
#: What says where sequences lie, and nothing else.
_PLACES = ("attention_mask", "position_ids", "seq_idx", "seq_lengths", _BOUNDS, "cu_seq_lens_k")
_NUMBERS = ("max_length_q", "max_length_k")


def as_ragged(batch: Any, main_input: str = "input_ids", *, pairs: bool = False) -> RaggedBatch:
    """The sequences of a batch; a :class:`RaggedBatch` is returned as it is.

    Args:
        batch: what a collator gave: a :class:`RaggedBatch`, or a dict of tensors or arrays on the host.
        main_input: the field of the tokens, [1, T, ...] or [N, L, ...].
        pairs: padded ``labels`` and ``decoder_`` fields are targets of an encoder-decoder, of lengths of their own.

    Raises ``InputError`` for a batch that does not tell its sequences, or tells them in two ways that disagree.

    >>> row = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": torch.tensor([[0, 1, 2, 0]])}
    >>> as_ragged(row).layout.lengths.tolist()
    [3, 1]
    """
    if isinstance(batch, RaggedBatch):
        return batch
    fields = _tensors(batch)
    main = fields.get(main_input)
    if main is None or main.is_nested or main.ndim < 2:
        raise _unknown(batch)
    shape = tuple(main.shape[:2])
    counted = next((name for name in ("position_ids", "seq_idx") if _fits(fields.get(name), shape)), None)
    if _BOUNDS in fields or ("attention_mask" not in fields and counted is not None):
        return _flat(fields, shape, counted)
    if "attention_mask" not in fields:
        raise _unknown(batch)
    return _padded(fields, shape, pairs)


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The fields of a batch that are tensors; none of one without names."""
    if not isinstance(batch, Mapping):
        return {}
    arrays = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()
    }
    return {name: value for name, value in arrays.items() if isinstance(value, Tensor) and name not in _NUMBERS}


def _unknown(batch: Any) -> InputError:
    fields = f" of {', '.join(batch)}" if isinstance(batch, Mapping) else ""
    return InputError(
        "packing needs batches that know their sequences",
        expected="a collator that gives a RaggedBatch, or tensors with attention_mask, cu_seq_lens_q or position_ids",
        found=f"{type(batch).__name__}{fields}",
        hint="leave data_collator out, or use RaggedCollator(labels_from='input_ids') for texts without labels",
    )


def _fits(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tuple(tensor.shape) == shape


def _flat(fields: dict[str, Tensor], shape: tuple[int, ...], counted: str | None) -> RaggedBatch:
    """Sequences that lie end to end, bounded by ``cu_seq_lens_q`` or where the field ``counted`` begins anew."""
    size = shape[0] * shape[1]
    # Indices repeat within a sequence.
    begins = None if counted is None else beginnings(fields[counted].numpy(), int(counted == "position_ids"))
    if _BOUNDS in fields:
        positions = fields["position_ids"].reshape(1, size) if counted == "position_ids" else None
        layout = read_row(fields[_BOUNDS], size, positions)
        # Each element of padding is at 0, as if a sequence began there.
        filled = layout.slots > 0
        expected = np.sort(np.append(layout.starts[filled], np.flatnonzero(layout.padding_mask())))
        if begins is not None and not np.array_equal(begins, expected):
            raise InputError(
                f"{counted} and cu_seq_lens_q disagree about where sequences begin",
                expected=expected.tolist()[:8],
                found=begins.tolist()[:8],
                hint="leave positions of your own out",
            )
    else:
        assert begins is not None
        layout = Layout(np.diff(np.append(begins, size)))
    if "attention_mask" in fields and not bool(fields["attention_mask"].all()):
        raise InputError("a row with cu_seq_lens_q has padding too", where="attention_mask", hint="leave padding out")
    values, whole = {}, []
    for name, tensor in fields.items():
        if name in _PLACES:
            continue
        if tuple(tensor.shape[:2]) == shape:
            values[name] = tensor.flatten(0, 1)
        else:  # one entry per sequence, or RaggedBatch says what is wrong with it
            values[name] = tensor
            whole.append(name)
    return RaggedBatch(values, layout, whole)


def _padded(fields: dict[str, Tensor], shape: tuple[int, ...], pairs: bool) -> RaggedBatch:
    """Sequences of padded rows, one per row, told by the mask."""
    mask = fields["attention_mask"]
    if mask.ndim == 3 and mask.shape[:2] == shape:
        return _questions(fields, shape)
    positions = fields.get("position_ids")
    if positions is not None:
        _require_running(positions, mask)
    values = {name: tensor for name, tensor in fields.items() if name not in _PLACES}
    targets = {name: values.pop(name) for name in list(values) if pairs and is_target(name) and values[name].ndim > 1}
    whole = [name for name, tensor in values.items() if tuple(tensor.shape[:2]) != shape]
    batch = RaggedBatch.from_padded(values, mask, whole)
    if not targets:
        return batch
    nested = _nested(targets)
    fields = {name: batch[name] for name in batch.names} | nested
    return RaggedBatch(fields, batch.layout, (*batch.per_sequence, *nested))


def _questions(fields: dict[str, Tensor], shape: tuple[int, ...]) -> RaggedBatch:
    """Questions of padded rows [N, C, L], each with C choices."""
    full = fields["attention_mask"].shape
    rows = {name: tensor.flatten(0, 1) for name, tensor in fields.items() if tuple(tensor.shape[:3]) == tuple(full)}
    batch = _padded(rows, (shape[0] * shape[1], full[2]), pairs=False)
    rest = {name: tensor for name, tensor in fields.items() if name not in rows}
    return joined(batch, rest, shape[1])


def _require_running(positions: Tensor, mask: Tensor) -> None:
    """Raise ``InputError`` for positions that begin anew within a row."""
    both = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if positions.shape != mask.shape or bool((both & (positions.diff(dim=1) != 1)).any()):
        raise InputError(
            "position_ids do not count on within a row of attention_mask",
            expected="one sequence per row",
            found=f"position_ids {list(positions.shape)}",
            hint="give rows of several sequences with position_ids and without attention_mask",
        )


def _nested(targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padded targets [N, L] as nested fields, cut behind the last label that counts, or as the decoder's mask says."""
    mask = targets.pop("decoder_attention_mask", None)
    counts = targets["labels"] != IGNORED_LABEL if mask is None else mask != 0
    # What lies behind the last label has no loss, and a decoder looks back only. At least one token each.
    last = torch.arange(1, counts.shape[1] + 1) * counts
    lengths = last.amax(1).clamp(min=1)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    kept = torch.arange(counts.shape[1]) < lengths[:, None]
    return {name: torch.nested.nested_tensor_from_jagged(tensor[kept], offsets) for name, tensor in targets.items()}
