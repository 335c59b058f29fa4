"""What is known of TRL's trainers, and their losses that take padded rows, on packed sequences. No import of TRL.

DPO, KTO and reward trainers have one number per sequence. Chosen and rejected of a pair stay together, each pair goes
through once, and a microbatch weighs by its share of the pairs (of the samples, for KTO), because each of these losses
is a mean over them. A loss that looks at the batch as a whole (sorted, or divided by its tokens) is refused: no part of
a batch has it. KTO's KL is of the whole batch too, but it has no gradient, so it is taken once per step, over all
microbatches and ranks, before the first.

GRPO's generation, rewards and advantages stay TRL's: what its ``_prepare_inputs`` gives for a step, prompts padded on
the left and completions on the right, is taken apart into sequences here. Advantages ride along per sequence,
log-probabilities per token, and each microbatch becomes such a dict again, which TRL's loss runs as one packed row. TRL
divides by ``current_gradient_accumulation_steps`` itself: a mean over sequences gets each microbatch's share of the
sequences, a mean over tokens its share of the tokens, and a loss that is divided by the tokens of the whole generation
is left as it is.

Source: TRL 1.16, ``dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``, ``grpo_trainer.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Int64, ranges
from ullage.core.replacing import replaced
from ullage.training.batches.collators import AloneCollator
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.loss.divisions import READ_DIVISIONS, Division, nearest_in, shares
from ullage.training.setup.releases import recomputed
from ullage.training.step.call_metrics import RULES, Difference, Rule
from ullage.training.step.padded_loss import PaddedLoss

if TYPE_CHECKING:
    import transformers

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
        made = WithKL({name: found[name] for name in found.names}, found.layout, found.per_sequence, found.items)
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
            stack.enter_context(disable_gradient_checkpointing(trainer.model, recomputed(trainer.args) or None))
            if trainer.ref_model is not None:
                yield trainer.ref_model
                return
            adapted: Any = trainer.accelerator.unwrap_model(trainer.model)
            stack.enter_context(use_adapter(adapted, "ref" if "ref" in adapted.peft_config else None))
            yield trainer.model

    def weights(self, microbatch: RaggedBatch) -> dict[str, float]:
        return {**super().weights(microbatch), **self._side_weights(microbatch, microbatch["label"].bool())}


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
            # Both are younger than TRL 1.0.
            "an entropy bonus": (
                getattr(trainer, "_entropy_bonus_enabled", False),
                "it is a mean over the tokens of the batch",
            ),
            "the experts' loss": (
                getattr(trainer, "aux_loss_enabled", False) and trainer.loss_type in _BY_COUNT,
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
        return RaggedBatch(values, found.layout, found.per_sequence, found.items)

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


_PAIRED: dict[str, Rule] = {
    f"{name}/{side}": kind
    for side in ("chosen", "rejected")
    for name, kind in {"logits": f"{side}_tokens", "rewards": side, "logps": side}.items()
}


@dataclass(frozen=True)
class _TrainerFacts:
    """What the source of a trainer of TRL's says.

    Attributes:
        division: of its loss.
        rules: of the metrics that its loss appends.
        loss: what packs it, where its loss takes padded rows.
    """

    division: Division
    rules: Mapping[str, Rule]
    loss: type[PaddedLoss] | None = None


#: By full name; a trainer that is not here is packed if it takes packed rows, and its loss has to be declared.
_TRAINERS = {
    "trl.trainer.sft_trainer.SFTTrainer": _TrainerFacts(
        "token_mean", {"entropy": "labels", "mean_token_accuracy": "labels", "aux_loss": "labels"}
    ),
    "trl.trainer.dpo_trainer.DPOTrainer": _TrainerFacts(
        "sequence_mean",
        {
            **_PAIRED,
            "entropy": "labels",
            "mean_token_accuracy": "chosen_tokens",
            "rewards/accuracies": "pairs",
            "rewards/margins": "pairs",
            "aux_loss": "tokens",
        },
        PairLoss,
    ),
    "trl.trainer.grpo_trainer.GRPOTrainer": _TrainerFacts(
        "sequence_mean",
        {
            "policy_loss": "sequences",
            "entropy_coef": "max",
            "aux_loss": "tokens",
            "kl": "labels",
            "entropy": "labels",
            "clip_ratio/low_mean": "labels",
            "clip_ratio/high_mean": "labels",
            "clip_ratio/region_mean": "labels",
            "clip_ratio/low_min": "min",
            "clip_ratio/high_max": "max",
            "cispo_clip_ratio": "labels",
            "vespo/phi_seq_mean": "sequences",
        },
        RolloutLoss,
    ),
    "trl.trainer.kto_trainer.KTOTrainer": _TrainerFacts(
        "sequence_mean",
        {
            **_PAIRED,
            "kl": "sequences",
            "entropy": "labels",
            "rewards/margins": Difference("rewards/chosen", "rewards/rejected"),
            "aux_loss": "tokens",
        },
        UnpairedLoss,
    ),
    "trl.trainer.reward_trainer.RewardTrainer": _TrainerFacts(
        "sequence_mean",
        {"min_reward": "min", "mean_reward": "sequences", "max_reward": "max", "accuracy": "pairs", "margin": "pairs"},
        PairLoss,
    ),
}
for _name, _known in _TRAINERS.items():
    READ_DIVISIONS[_name], RULES[_name] = _known.division, _known.rules


def padded_loss_of(trainer: transformers.Trainer) -> PaddedLoss | None:
    """What packs a trainer whose loss takes padded rows; None for any other trainer."""
    known = nearest_in(_TRAINERS, type(trainer))
    return None if known is None or known.loss is None else known.loss(trainer)


#: Trainers whose data may have images under packing.
_SEEING = ("trl.trainer.sft_trainer.SFTTrainer", "trl.trainer.dpo_trainer.DPOTrainer")


def picture_collator(trainer: transformers.Trainer, padded: PaddedLoss | None) -> AloneCollator | None:
    """The collator of a trainer of TRL's for data with images; None for other trainers, and for data without.

    ``padded``: what packs its loss, if that takes padded rows.
    """
    if not getattr(trainer, "_is_vision_dataset", False) or image_problem(trainer) is not None:
        return None
    made = AloneCollator(trainer.data_collator, trainer.processing_class)
    return made if padded is None else replace(made, per_sample=padded.per_sample, finish=padded.rows)


def image_problem(trainer: transformers.Trainer) -> InputError | None:
    """The error of a trainer of TRL's with a column of images that it packs not; None for any other trainer."""
    seen = nearest_in(dict.fromkeys(_SEEING, True), type(trainer))
    if seen or not getattr(trainer, "_is_vision_dataset", False):
        return None
    return InputError(
        "this trainer's data with images cannot be packed",
        where=type(trainer).__name__,
        expected="text; SFTTrainer and DPOTrainer take images",
        found="a column of images",
        hint="leave packing_capacity out",
    )
