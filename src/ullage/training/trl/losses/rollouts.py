"""Rollouts of TRL's GRPO under packing: planned, exchanged, and trained on by TRL's own loss.

Generation, rewards and advantages stay TRL's: what its ``_prepare_inputs`` gives for a step, prompts padded on the
left and completions on the right, is taken apart into sequences here. Advantages ride along per sequence,
log-probabilities per token, and each microbatch becomes such a dict again, which TRL's loss runs as one packed row.

TRL divides by ``current_gradient_accumulation_steps`` itself: a mean over sequences gets each microbatch's share of
the sequences, a mean over tokens its share of the tokens, and a loss that is divided by the tokens of the whole
generation is left as it is.

Source: TRL 1.16, ``grpo_trainer.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Int64, ranges
from ullage.core.replacing import replaced
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.loss.divisions import shares
from ullage.training.step.padded_loss import PaddedLoss

#: Losses of GRPO by what they are a mean over, in a part of the step.
_BY_SEQUENCE = ("grpo", "sapo", "dr_grpo", "luspo")
_BY_TOKEN = ("bnpo",)
#: Divided by the tokens of the generation over all ranks: parts of it add up.
_BY_COUNT = ("dapo", "cispo", "vespo")
#: Fields that stand for something other than zero where there is no token.
_FILLS = {"importance_sampling_ratio": 1.0}


class RolloutLoss(PaddedLoss):
    """GRPO: prompts with their completions. Batches are made in the step, not by the collator."""

    makes_batches = True
    divides_itself = True

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        #: What a step has once, such as the tokens of its generation.
        self._shared: dict[str, Any] = {}

    def require_packable(self) -> None:
        super().require_packable()
        trainer = self._trainer
        known = (*_BY_SEQUENCE, *_BY_TOKEN, *_BY_COUNT)
        refused = {
            f"loss_type={trainer.loss_type!r}": (trainer.loss_type not in known, "how it is divided is not known"),
            "top_entropy_quantile": (trainer.top_entropy_quantile < 1.0, "it is a quantile over the batch"),
            "an entropy bonus": (trainer._entropy_bonus_enabled, "it is a mean over the tokens of the batch"),
            "the experts' loss": (
                trainer.aux_loss_enabled and trainer.loss_type in _BY_COUNT,
                f"loss_type={trainer.loss_type!r} would count it once per microbatch",
            ),
        }
        for name, (is_asked, reason) in refused.items():
            if is_asked:
                raise InputError(
                    f"{name} cannot be packed: {reason}",
                    where=type(trainer).__name__,
                    hint="leave it or packing_capacity out",
                )

    # From TRL's dict to sequences, and back.

    def make_batch(self, model: nn.Module, drawn: Any) -> RaggedBatch:
        """The rollouts of this rank's next step, as TRL makes them of its prompts. Collective; host values."""
        model.train()  # TRL makes rollouts of training only then
        with self.packed_rows():
            return self.to_ragged(self._trainer._prepare_inputs(drawn))

    def to_ragged(self, batch: Any) -> RaggedBatch:
        """The rollouts of a dict of TRL's. Raises ``InputError`` for one with images."""
        if isinstance(batch, RaggedBatch):
            return batch
        prompts, completions = batch["prompt_mask"].cpu(), batch["completion_mask"].cpu()
        before = torch.zeros_like(prompts)
        fields = {
            "input_ids": torch.cat([batch["prompt_ids"].cpu(), batch["completion_ids"].cpu()], 1),
            "completion_mask": torch.cat([before, completions], 1),
        }
        whole, self._shared = [], {}
        for name, value in batch.items():
            if name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
                continue
            if not isinstance(value, Tensor) or value.ndim == 0:
                self._shared[name] = value
            elif value.shape == completions.shape:
                value = value.cpu()
                fields[name] = torch.cat([value.new_zeros(before.shape), value], 1)
            elif len(value) == len(prompts) and value.numel() == len(prompts):
                fields[name] = value.cpu()
                whole.append(name)
            else:
                raise InputError(
                    "packing takes rollouts of text",
                    where=f"field {name!r}",
                    expected=f"one entry per completion token {list(completions.shape)}, or one per rollout",
                    found=f"shape {list(value.shape)}",
                    hint="leave packing_capacity out",
                )
        return RaggedBatch.from_padded(fields, torch.cat([prompts, completions], 1), whole)

    def to_padded(self, microbatch: RaggedBatch) -> dict[str, Any]:
        """The rollouts of a microbatch as TRL's loss takes them."""
        lengths, completions = microbatch.layout.lengths, _completions(microbatch)
        prompts = lengths - completions
        # TRL's slices of the last tokens need one.
        widths = int(prompts.max()), max(int(completions.max()), 1)
        rows, starts = np.arange(len(microbatch)), microbatch.layout.starts
        ends = _Places(
            ranges(starts, prompts), ranges(rows * widths[0] + widths[0] - prompts, prompts), len(rows), widths[0]
        )
        tails = _Places(
            ranges(starts + prompts, completions), ranges(rows * widths[1], completions), len(rows), widths[1]
        )
        ids, mask = microbatch["input_ids"], torch.ones(len(microbatch["input_ids"]), dtype=torch.long)
        made: dict[str, Any] = {
            "prompt_ids": ends.lay(ids, self._pad_token_id),
            "prompt_mask": ends.lay(mask),
            "completion_ids": tails.lay(ids, self._pad_token_id),
            "completion_mask": tails.lay(mask),
        }
        for name in microbatch.names:
            if name in microbatch.per_sequence:
                made[name] = microbatch[name]
            elif name not in ("input_ids", "completion_mask"):
                made[name] = tails.lay(microbatch[name], _FILLS.get(name, 0))
        return {**made, **self._shared}

    def stand_in(self, microbatches: Sequence[RaggedBatch], empty: RaggedBatch) -> RaggedBatch:
        """The shortest rollout of this rank, or zeros, of which no token counts."""
        found = super().stand_in(microbatches, empty)
        values: Mapping[str, Tensor] = {name: found[name] for name in found.names}
        mask = values["completion_mask"]
        if not bool(mask.any()):
            mask = mask.index_fill(0, torch.tensor([len(mask) - 1]), 1)
        values = {**values, "completion_mask": mask, "tool_mask": torch.zeros_like(mask)}
        return RaggedBatch(values, found.layout, found.per_sequence)

    # A step.

    def shares(self, step: PackedBatch) -> list[float]:
        ranks = self._trainer.args.world_size
        if self._trainer.loss_type in _BY_COUNT:
            return shares([1] * len(step.microbatches), ranks)
        if self._trainer.loss_type not in _BY_TOKEN:
            return super().shares(step)
        parts = torch.tensor([float(_num_counted(each)) for each in step.microbatches], dtype=torch.float64)
        whole = parts.sum().to(self._trainer.args.device)
        if ranks > 1:
            whole = self._trainer.accelerator.reduce(whole, "sum")
        return shares(parts.tolist(), float(whole))

    @contextmanager
    def step(self, model: nn.Module, step: PackedBatch) -> Iterator[None]:
        """Around the microbatches: TRL counts one step, and takes their rows as they are."""
        trainer, begun = self._trainer, time.perf_counter()
        number = trainer._step
        try:
            with replaced(trainer, "_prepare_inputs", trainer._prepare_input):
                yield
        finally:
            # TRL has added one per call.
            trainer._step, trainer._current_train_step_time = number + 1, 0.0
        trainer._metrics["train"]["step_time"].append(time.perf_counter() - begun)

    def weights(self, microbatch: RaggedBatch) -> dict[str, float]:
        return {**super().weights(microbatch), "labels": float(_num_counted(microbatch))}


class _Places:
    """Tokens of a flat row, ``taken``, and where they go in padded rows [``number``, ``width``], laid end to end."""

    def __init__(self, taken: Int64, places: Int64, number: int, width: int) -> None:
        self._taken, self._places = torch.from_numpy(taken), torch.from_numpy(places)
        self._shape = number, width

    def lay(self, values: Tensor, fill: float = 0) -> Tensor:
        number, width = self._shape
        rows = values.new_full((number * width, *values.shape[1:]), fill)
        return rows.index_copy(0, self._places, values[self._taken]).unflatten(0, self._shape)


def _completions(batch: RaggedBatch) -> Int64:
    """Tokens of each completion."""
    mask, layout = batch["completion_mask"].numpy() != 0, batch.layout
    return np.add.reduceat(np.append(mask, False).astype(np.int64), layout.starts)


def _num_counted(batch: RaggedBatch) -> int:
    """Completion tokens that the loss counts."""
    mask = batch["completion_mask"] != 0
    return int((mask & (batch["tool_mask"] != 0) if "tool_mask" in batch else mask).sum())
