"""Losses of one number per sequence: TRL's DPO, KTO and reward trainers under packing.

Chosen and rejected of a pair stay together, each pair goes through once, and a microbatch weighs by its share of the
pairs (of the samples, for KTO), because each of these losses is a mean over them. A loss that looks at the batch as a
whole (sorted, or divided by its tokens) is refused: no part of a batch has it. KTO's KL is of the whole batch too, but
it has no gradient, so it is taken once per step, over all microbatches and ranks, before the first.

Source: TRL 1.16, ``dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.step.padded_loss import PaddedLoss

#: Losses of DPO that a part of the batch does not have, and why.
_OF_THE_BATCH = {
    "aot": "it sorts the pairs of a batch",
    "aot_unpaired": "it sorts the pairs of a batch",
    "sft": "it is a mean over the chosen tokens of a batch",
}


class PairLoss(PaddedLoss):
    """DPO and reward models: chosen and rejected of each sample."""

    per_sample = 2

    def require_packable(self) -> None:
        super().require_packable()
        for kind in getattr(self._trainer, "loss_types", ()):
            if kind in _OF_THE_BATCH:
                raise InputError(
                    f"loss_type={kind!r} cannot be packed: {_OF_THE_BATCH[kind]}, and a microbatch is a part of it",
                    where=type(self._trainer).__name__,
                    expected="a mean over pairs",
                    hint="leave packing_capacity out, or take another loss_type",
                )

    def weights(self, microbatch: RaggedBatch) -> dict[str, float]:
        is_chosen = torch.arange(len(microbatch)) % 2 == 0
        return {**super().weights(microbatch), **self._side_weights(microbatch, is_chosen)}


#: Beginning of the names of the fields of KTO's mismatched completions.
_KL = "KL_"


class WithKL(RaggedBatch):
    """The sequences of a batch of KTO's, and beside them the mismatched completions that its KL is taken over."""

    __slots__ = ("beside",)

    beside: RaggedBatch


class UnpairedLoss(PaddedLoss):
    """KTO: samples that are desirable or not, and a KL over the whole batch."""

    @property
    def _takes_kl(self) -> bool:
        return bool(self._trainer.calculate_KL)

    def to_ragged(self, batch: Any) -> RaggedBatch:
        """The sequences of a collated batch; the completions of its KL beside them."""
        if isinstance(batch, RaggedBatch) or not self._takes_kl:
            return super().to_ragged(batch)
        own = {name: value for name, value in batch.items() if _KL not in name}
        found = super().to_ragged(own)
        made = WithKL({name: found[name] for name in found.names}, found.layout, found.per_sequence)
        made.beside = super().to_ragged({name.replace(_KL, ""): batch[name] for name in batch if _KL in name})
        return made

    def to_padded(self, microbatch: RaggedBatch) -> dict[str, Any]:
        """The rows of a microbatch, with a KL of the reference model that :meth:`step` has taken off already."""
        rows = super().to_padded(microbatch)
        if self._takes_kl and self._trainer.precompute_ref_logps:
            rows["ref_KL_logps"] = torch.zeros(len(microbatch))
        return rows

    def complete(
        self, step: PackedBatch, drawn: Sequence[RaggedBatch], pack: Callable[..., PackedBatch]
    ) -> PackedBatch:
        if not self._takes_kl:
            return step
        return replace(step, beside=pack([each.beside for each in drawn if isinstance(each, WithKL)]))

    @contextmanager
    def step(self, model: nn.Module, step: PackedBatch) -> Iterator[None]:
        """Take the KL of the step, and give it to the loss of every microbatch. Collective; waits for the device."""
        if step.beside is None:
            yield
            return
        value = self._kl_of(model, step.beside)

        def of_step(asked: nn.Module, batch: Any) -> Tensor:
            # The loss subtracts what it gets for the reference model, which it asks for without gradients.
            return value if torch.is_grad_enabled() else torch.zeros_like(value)

        with replaced(self._trainer, "_compute_kl_logps", of_step):
            yield

    @torch.no_grad()
    def _kl_of(self, model: nn.Module, beside: PackedBatch) -> Tensor:
        """The mean over all ranks of the log-ratios of the mismatched completions, [1]."""
        trainer = self._trainer
        total = torch.zeros(2, dtype=torch.float64)
        model.train()
        with trainer.compute_loss_context_manager(), self.packed_rows():
            for microbatch in beside.microbatches:
                # Ranks run equally many, for wrappers that meet in each call.
                runs = microbatch if len(microbatch) else self.stand_in(beside.microbatches, microbatch)
                ratios = self._log_ratios(model, runs)
                if runs is microbatch:
                    total += torch.tensor([float(ratios.double().sum()), len(ratios)], dtype=torch.float64)
        if trainer.args.world_size > 1:
            total = trainer.accelerator.reduce(total.to(trainer.args.device), "sum").cpu()
        return (total[:1] / total[1:].clamp(min=1)).to(trainer.args.device, torch.float32)

    def _log_ratios(self, model: nn.Module, microbatch: RaggedBatch) -> Tensor:
        """Policy against reference, [N]: TRL's own log-probabilities of each."""
        trainer = self._trainer
        rows = super().to_padded(microbatch)
        batch = trainer._prepare_input({f"{_KL}{name}": value for name, value in rows.items()})
        compute = type(trainer)._compute_kl_logps
        policy = compute(trainer, model, batch)
        if trainer.precompute_ref_logps:
            return policy - batch[f"{_KL}ref_logps"]
        with self._reference_in_place() as reference:
            return policy - compute(trainer, reference, batch)

    @contextmanager
    def _reference_in_place(self) -> Iterator[nn.Module]:
        """The reference model, or the trainer's with its adapters as they were before training."""
        from trl.models.utils import disable_gradient_checkpointing
        from trl.trainer.utils import use_adapter

        trainer = self._trainer
        with contextlib.ExitStack() as stack:
            kwargs = trainer.args.gradient_checkpointing_kwargs
            stack.enter_context(disable_gradient_checkpointing(trainer.model, kwargs))
            if trainer.ref_model is not None:
                yield trainer.ref_model
                return
            adapted: Any = trainer.accelerator.unwrap_model(trainer.model)
            stack.enter_context(use_adapter(adapted, "ref" if "ref" in adapted.peft_config else None))
            yield trainer.model

    def weights(self, microbatch: RaggedBatch) -> dict[str, float]:
        return {**super().weights(microbatch), **self._side_weights(microbatch, microbatch["label"].bool())}
