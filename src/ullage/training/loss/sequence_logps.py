"""Log-probabilities of sequences in a packed row, for losses of one's own: of each token, summed and averaged.

The logits of a packed row hold no padding, and neither do these: the model computes logits for the tokens whose labels
count and for no other, where it can be asked for some, and their log-softmax is taken in chunks of tokens, again in the
backward pass. So log-probabilities in float32 over the vocabulary are never held for more than a chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.core.rows import LENGTH_NAMES, on_device, on_host
from ullage.mixers.forwards import ModelForward
from ullage.mixers.wrappers import bare
from ullage.training.batches.forms import form_of

#: Tokens whose log-softmax is taken at once.
_CHUNK = 1024


@dataclass(frozen=True)
class SequenceLogps:
    """Log-probabilities of N sequences in a row of T tokens, in the order of the row, with gradients.

    Attributes:
        per_token: [T], of each token given those before it in its sequence; 0 where its label does not count.
        sums: [N], over each sequence.
        means: [N], over the tokens of each sequence that count; 0 where none does.
        counts: int64 [N], tokens that count.
    """

    per_token: Tensor
    sums: Tensor
    means: Tensor
    counts: Tensor


def sequence_logps(
    model: nn.Module, inputs: RaggedBatch | Mapping[str, Any], labels: Tensor | None = None, *, temperature: float = 1.0
) -> SequenceLogps:
    """The log-probabilities that a causal language model gives to the sequences of a packed row.

    Args:
        model: packed (:func:`ullage.pack_model`; under packing a Trainer's is), within any wrapper.
        inputs: a batch, or its row as ``compute_loss`` gets it: ``input_ids`` [1, T] with ``cu_seq_lens_q``. Fields
            that the model does not name are not handed on.
        labels: [T] or [1, T], aligned with ``input_ids`` and not shifted; -100 counts nowhere, and the first token of
            a sequence is never predicted. By default the ``labels`` of ``inputs``, or else its ``input_ids``.
        temperature: the logits are divided by it.

    Exact: equal to a log-softmax over padded rows. Waits for the device where lengths and labels are not known on the
    host. Raises ``InputError`` for rows that are padded and for a model that is not packed.
    """
    row = _row_of(model, inputs)
    ids, bounds = row["input_ids"], on_host(row["cu_seq_lens_q"])
    given: Tensor = row.get("labels", ids) if labels is None else labels
    labels = given.reshape(-1)
    if labels.numel() != ids.shape[1]:
        raise InputError(
            "labels are not aligned with the row",
            expected=f"{ids.shape[1]} labels",
            found=f"shape {list(labels.shape)}",
        )
    lengths = np.diff(bounds)
    is_counted = on_host(given).reshape(-1) != IGNORED_LABEL
    is_counted[bounds[:-1][lengths > 0]] = False
    counted = np.flatnonzero(is_counted)
    # A token is predicted by the one before it. Of sequences of 3 and 2 tokens, the tokens 1, 2 and 4 are predicted by
    # the logits at 0, 1 and 3; ``of`` is [0, 0, 0, 1, 1].
    of = np.repeat(np.arange(len(lengths)), lengths)
    places, before, item_ids, counts = (
        on_device(each, ids.device)
        for each in (counted, counted - 1, of, np.bincount(of[counted], minlength=len(lengths)))
    )
    logits = _logits(model, row, before)
    targets = labels[places]
    parts = [
        checkpoint(_scores, logits[k : k + _CHUNK], targets[k : k + _CHUNK], temperature, use_reentrant=False)
        for k in range(0, len(counted), _CHUNK)
    ]
    # Without a label that counts, the result still depends on the model, so that a backward pass runs.
    found = torch.cat([*parts, _wide(logits[:0]).sum(1)])
    per_token = found.new_zeros(labels.numel()).index_copy(0, places, found)
    sums = per_token.new_zeros(len(lengths)).index_add(0, item_ids, per_token)
    return SequenceLogps(per_token, sums, sums / counts.clamp(min=1), counts)


def _row_of(model: nn.Module, inputs: RaggedBatch | Mapping[str, Any]) -> dict[str, Any]:
    row = inputs.to_flattened() if isinstance(inputs, RaggedBatch) else dict(inputs)
    if row.get("cu_seq_lens_q") is None:
        raise InputError(
            "log-probabilities by sequence are taken of a packed row",
            expected="cu_seq_lens_q among the inputs",
            found=f"{list(row)}",
            hint="pass a RaggedBatch, or what compute_loss gets under packing_capacity",
        )
    if form_of(model) != "flattened":
        raise InputError(
            "this model does not keep the sequences of a row apart",
            where=type(bare(model)).__name__,
            hint="pack it: ullage.pack_model(model), or train it with packing_capacity",
        )
    return row


def _logits(model: nn.Module, row: Mapping[str, Any], places: Tensor) -> Tensor:
    """The logits at some places of a row, [K, V]."""
    module = bare(model)
    known = {*inspect.signature(module.forward).parameters, *LENGTH_NAMES, "position_ids"} - {"labels"}
    keywords = {name: value for name, value in row.items() if name in known}
    # What runs by lengths cuts its keywords by token and by sequence, and places are neither.
    if "logits_to_keep" in known and not isinstance(vars(module).get("forward"), ModelForward) and len(places):
        logits = model(**keywords, logits_to_keep=places).logits
        if logits.shape[1] == len(places):
            return logits[0]
    logits = model(**keywords).logits[0]
    return logits[places]


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _scores(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """The log-probability of each target, [K]."""
    scaled = _wide(logits) / temperature
    return scaled.gather(1, targets[:, None])[:, 0] - scaled.logsumexp(1)
