"""Padded rows outside, one packed row inside: models that are called with padding and compute none.

TRL's losses call the model with padded rows and read per-token results [N, L - 1]: log-probabilities, entropies and the
like, one number per token, never logits. Within :func:`packed_rows` such a call runs as one packed row [1, T] of the
real tokens alone, and what it gives per token is laid out in [N, L - 1] again: the entry at position p of a row is that
of the token at p + 1, and zero where one of the two is padding. What the model gives per sequence stays as it is.

Calls of other kinds stay what they were: without a mask, with a cache (generation), or for logits of every token, which
would have to be padded.

Source: TRL 1.16 ``trainer/utils.py``, ``add_fused_lm_head``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ullage.attention.heads import works_by_sequence
from ullage.batch import RaggedBatch
from ullage.mixers.wrappers import bare

#: Keyword by which TRL asks for per-token log-probabilities in the place of logits.
_FUSED = "fused_lm_head"


@contextlib.contextmanager
def packed_rows(*models: nn.Module | None) -> Iterator[None]:
    """Make models run padded rows as one packed row each call; none of them is changed afterwards.

    ``models``: packable ones (:func:`ullage.training.packable.make_packable`), within any wrapper; None is left out.
    """
    with contextlib.ExitStack() as stack:
        for model in {id(each): each for each in (bare(one) for one in models if one is not None)}.values():
            stack.enter_context(_put_in(model))
        yield


@contextlib.contextmanager
def _put_in(model: nn.Module) -> Iterator[None]:
    # In the place of the instance's own forward, outside whatever TRL, accelerate and pack_model have put there:
    # PEFT calls ``forward`` itself, so that a hook of the module would not be met.
    before: Callable[..., Any] | None = vars(model).get("forward")
    vars(model)["forward"] = _RowsForward(model, model.forward)
    try:
        yield
    finally:
        vars(model).pop("forward")
        if before is not None:
            vars(model)["forward"] = before


class _RowsForward:
    """The forward of a model within :func:`packed_rows`. ``own``: the forward in whose place it stands."""

    def __init__(self, model: nn.Module, own: Callable[..., Any]) -> None:
        self._own, self._by_sequence = own, works_by_sequence(model)
        self._names = list(inspect.signature(own).parameters)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        named = {**dict(zip(self._names, arguments)), **keywords}
        if not self._is_of_rows(named):
            return self._own(*arguments, **keywords)
        mask = named.pop("attention_mask")
        fields, others = self._parted(named, mask)
        batch = RaggedBatch.from_padded(fields, mask)
        if "labels" in batch:
            # Shifted within each sequence, so that the head scores the row as it is, and gives an entry for each token.
            batch = batch.with_shift_labels().select([*(name for name in fields if name != "labels"), "shift_labels"])
        outputs = self._own(**batch.to_flattened(), **others)
        return outputs if self._by_sequence else _laid_out(outputs, mask)

    def _is_of_rows(self, keywords: dict[str, Any]) -> bool:
        """Whether a call has padded rows, and asks for nothing that would have to be padded."""
        ids, mask = keywords.get("input_ids"), keywords.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != ids.shape:
            return False
        if keywords.get("past_key_values") is not None or keywords.get("cu_seq_lens_q") is not None:
            return False
        return bool(keywords.get(_FUSED)) or (self._by_sequence and keywords.get("labels") is None)

    def _parted(self, keywords: dict[str, Any], mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The fields with one entry per token of the rows, and the other keywords.

        A tensor of another size that ``forward`` does not name is left out: TRL's reward trainer hands margins on.
        """
        fields, others = {}, {}
        for name, value in keywords.items():
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == mask.shape:
                fields[name] = value
            elif not isinstance(value, Tensor) or value.ndim == 0 or name in self._names:
                others[name] = value
        return fields, others


def _laid_out(outputs: Any, mask: Tensor) -> Any:
    """Outputs of a packed row as those of padded rows: [1, T] becomes [N, L - 1], zero where there is nothing.

    ``mask`` [N, L]: 1 on the tokens. The entry of a row's last position predicts nothing, and is left out.
    """
    places = mask.flatten().nonzero()[:, 0]

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or tuple(value.shape) != (1, len(places)):
            return value
        there = places.to(value.device)
        return value.new_zeros(mask.numel()).index_copy(0, there, value[0]).view(mask.shape)[:, :-1]

    return type(outputs)(**{name: rows(value) for name, value in outputs.items()})
