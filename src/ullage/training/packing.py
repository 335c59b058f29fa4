"""Packed, balanced training: each optimizer step is a global batch, planned over the ranks and run as microbatches.

Where the Trainer draws a batch, the ranks gather the lengths of all their sequences, plan them (every rank by itself,
the same plan), and exchange them, so that each rank gets microbatches of at most ``capacity`` tokens and as much work
as the others. Sampling, workers, resuming and epochs stay transformers' own: one batch in, one batch out. The
microbatches then run inside one ``training_step``; gradients meet once, after the last. The loss is normalised by the
labels that count in the whole step over all ranks, so it does not depend on how the sequences were packed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

import ullage.attention as packed_attention
from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.exchange import exchange, gather_lengths, materialize
from ullage.layout import Layout
from ullage.planning import Plan, plan
from ullage.planning.cost import Cost
from ullage.ranks import Topology
from ullage.training import forms
from ullage.training.arguments import PackingOptions
from ullage.training.collators import RaggedCollator
from ullage.training.costing import cost_of, model_flops, num_parameters
from ullage.training.counting import count_labels
from ullage.training.losses import Division, division_of
from ullage.training.reading import ReadingMixin

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class PackedBatch:
    """This rank's part of a global batch: as many microbatches as the plan has, some of them empty."""

    microbatches: tuple[RaggedBatch, ...]
    plan: Plan

    @property
    def num_tokens(self) -> int:
        """Real tokens of the global batch."""
        return int(self.plan.lengths.sum())

    def numel(self) -> int:
        """Real tokens of this rank's microbatches."""
        return sum(microbatch.numel() for microbatch in self.microbatches)


class PackingMixin(ReadingMixin):
    """The part of :class:`RaggedTrainerMixin` that packs. Off unless the arguments say ``packing_capacity=...``.

    ``packing_loss``, on the class of a Trainer that computes a loss of its own, says how that loss is divided: "sum",
    "token_mean" or "sequence_mean" (:mod:`ullage.training.losses`).
    """

    packing_loss: str | None = None
    _declared: Division | None = None
    _share_of_step: float = 1.0

    @functools.cached_property
    def _packing(self) -> PackingOptions | None:
        return PackingOptions.of(self.args)

    def _prepare_packing(self, collator_given: bool) -> None:
        """Refuses what cannot be packed, before anything is trained; puts the packed attention in place."""
        options = self._packing
        if options is None:
            return
        if self._evaluates_itself:
            trainer = next(each for each in (self._theirs("compute_loss"), type(self)) if each is not None)
            raise InputError(
                "this trainer cannot be packed yet: its batches are not sequences with labels",
                where=trainer.__name__,
                expected=f"a field {self._label_name!r} to train on",
                found=f"columns {self._signature_columns}",
                hint="leave packing_capacity out: it trains and evaluates as without the mixin",
            )
        if forms.has_learned_prompt(self._bare_model):
            raise InputError(
                "a learned prompt cannot be packed: it would have to stand before each sequence of a row",
                where=type(self._bare_model).__name__,
                expected="an adapter in the layers of the model, such as LoRA",
                found="prompt learning",
                hint="leave packing_capacity out, or take another kind of adapter",
            )
        if self.args.gradient_accumulation_steps > 1:
            raise InputError(
                "packing takes no gradient_accumulation_steps: each optimizer step is one global batch, "
                "and its plan says how many microbatches it has",
                expected=1,
                found=self.args.gradient_accumulation_steps,
                hint="multiply per_device_train_batch_size by it instead",
            )
        self._pack_attention(self._bare_model)
        if not collator_given:
            self.data_collator = RaggedCollator(labels_from="input_ids")
        if self.args.average_tokens_across_devices is False:
            raise InputError(
                "packing normalises the loss over all ranks", expected="average_tokens_across_devices=True", found=False
            )

    @staticmethod
    def _pack_attention(model: nn.Module) -> None:
        """Puts an attention that keeps packed sequences apart into a model that needs one, or raises."""
        if isinstance(model, PreTrainedModel) and "cu_seq_lens_q" not in inspect.signature(model.forward).parameters:
            if not packed_attention.supports_packing(model):
                with contextlib.suppress(KeyError, ValueError):  # no hook to put it in: the check says so
                    model.set_attn_implementation("ullage")
            packed_attention.require_packing(model)
        elif getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InputError(
                "packing takes models whose sequences have one length",
                where=type(model).__name__,
                found="sources and targets",
                hint="leave packing out: a Seq2SeqCollator pads neither",
            )
        if forms.form_of(model) != "flattened":
            packed_attention.require_packing(model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model that packs as the first one did; what was known of the one before it is forgotten."""
        model = super().call_model_init(trial)
        for name in ("_form", "_cost", "_num_parameters", "_declared"):
            self.__dict__.pop(name, None)
        if self._packing is not None:
            self._pack_attention(forms.bare(model))
        return model

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.__dict__.pop("_packing", None)  # a trial may set any argument

    # Planning and exchange.

    @functools.cached_property
    def _topology(self) -> Topology:
        """All ranks along dp, on a gloo group where the main group takes device tensors only."""
        if self.args.world_size == 1:
            return Topology.single()
        topology = Topology.from_groups(dp=dist.group.WORLD)
        return topology if self.args.device.type == "cpu" else topology.on_gloo()

    @functools.cached_property
    def _cost(self) -> Cost:
        return cost_of(self._bare_model)

    @functools.cached_property
    def _num_parameters(self) -> int:
        return num_parameters(self._bare_model)

    @property
    def _zero_stage(self) -> int:
        plugin = self.accelerator.state.deepspeed_plugin
        return 0 if plugin is None else int(plugin.zero_stage)

    def _plan(self, lengths: Any) -> Plan:
        """The step's plan. One from which everything is dropped has a microbatch too, an empty one, on every rank."""
        options = self._packing
        assert options is not None
        ranks = self.args.world_size
        limits: dict[str, Any] = {"ranks": ranks, "capacity": options.capacity, "oversize": options.oversize}
        meets_every_microbatch = self._zero_stage == 3 or self.is_fsdp_enabled
        made = plan(
            lengths,
            cost=self._cost,
            strategy=options.strategy,
            sync="microbatch" if meets_every_microbatch else "step",
            **limits,
        )
        if made.num_microbatches:
            return made
        return plan(lengths, strategy="preassigned", assignment=[[[]] * ranks], **limits)

    def _model_flops(self, batch: PackedBatch) -> int:
        return model_flops(self._cost, self._num_parameters, batch.microbatches)

    def _pack(self, batches: list[RaggedBatch]) -> PackedBatch:
        """This rank's share of the global batch that the batches of all ranks make together. Collective.

        A rank whose data have ended brings none.
        """
        lengths = np.concatenate([np.zeros(0, np.int64), *(batch.layout.lengths for batch in batches)])
        gathered = gather_lengths(lengths, self._topology)
        schedule = self._plan(gathered.lengths)
        microbatches = exchange(schedule, batches, self._topology, gathered)
        return PackedBatch(tuple(microbatches), schedule)

    # One step.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """All microbatches of a step; gradients meet once. Returns the step's loss as transformers expects it."""
        if not isinstance(inputs, PackedBatch):
            return super().training_step(model, inputs, num_items_in_batch)
        division = self._division(inputs, num_items_in_batch)
        shares = self._shares(inputs, division, num_items_in_batch)
        last, ranks = len(inputs.microbatches) - 1, self.accelerator.num_processes
        losses = []
        with self._weighed(division), self._gradients_meet_once(model) as coalesced:
            for k, (microbatch, share) in enumerate(zip(inputs.microbatches, shares, strict=True)):
                self.accelerator.gradient_state._set_sync_gradients(k == last and not coalesced)
                # How many such microbatches a step has: divided by that, and averaged over ranks, its share is left.
                self._share_of_step = share
                self.current_gradient_accumulation_steps = 1 / (share * ranks) if share else math.inf
                batch = self._runnable(inputs, microbatch, division)
                count = num_items_in_batch if division == "sum" else None
                with self._deferred(model, k < last):
                    losses.append(super().training_step(model, batch, count))  # pyright: ignore
        self.accelerator.gradient_state._set_sync_gradients(True)
        return torch.stack(losses).sum()

    def _division(self, batch: PackedBatch, num_items_in_batch: Any) -> Division:
        """How the loss of a microbatch is divided; warns once where nobody declared it. The same on every rank."""
        if self._declared is None:
            first, name = batch.microbatches[0], self._label_name
            by_token = name is not None and name in first and name not in first.per_sequence
            self._declared, warning = division_of(
                self,
                divides_by_count=self._divides_by_count,
                labels=name if by_token else None,
                counted=num_items_in_batch is not None,
            )
            if warning is not None and self.is_world_process_zero():
                logger.warning(warning)
        return self._declared

    def _shares(self, batch: PackedBatch, division: Division, num_items_in_batch: Any) -> list[float]:
        """What part of the step over all ranks each microbatch is: of its real tokens, its labels, or its sequences."""
        if division == "sum":
            parts, whole = [microbatch.numel() for microbatch in batch.microbatches], batch.num_tokens
        elif division == "token_mean":
            parts, whole = [self._num_labels(microbatch) for microbatch in batch.microbatches], int(num_items_in_batch)
        else:
            parts, whole = [len(microbatch) for microbatch in batch.microbatches], len(batch.plan.order)
        return [part / whole if whole else 0.0 for part in parts]

    def _num_labels(self, batch: RaggedBatch) -> int:
        elements = self._label_elements(batch)
        return 0 if elements is None else int(count_labels(elements))

    @contextlib.contextmanager
    def _weighed(self, division: Division) -> Iterator[None]:
        """Makes transformers multiply a mean by its microbatch's share, and leave a sum as it is."""
        before = vars(self).get("loss_is_scaled_for_ga")
        self.loss_is_scaled_for_ga = division == "sum"
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps, self._share_of_step = 1, 1.0
            del self.loss_is_scaled_for_ga
            if before is not None:
                self.loss_is_scaled_for_ga = before

    def _runnable(self, batch: PackedBatch, microbatch: RaggedBatch, division: Division) -> RaggedBatch:
        """The microbatch, or what stands in for one that counts for nothing, because every rank runs equally many.

        A sum over no labels is zero. A mean over nothing is not a number, and would stay so at weight zero; so the
        shortest sequence of this rank that counts is run in its place.
        """
        if division == "sum":
            return microbatch if len(microbatch) else microbatch.placeholder()
        if self._share_of_step > 0:
            return microbatch
        by_label = division == "token_mean"
        samples = [sample for other in batch.microbatches if len(other) for sample in other.samples()]
        batches = [RaggedBatch.from_samples([s], per_sequence=microbatch.per_sequence) for s in samples]
        counting = [each for each in batches if not by_label or self._num_labels(each) > 0]
        if counting:
            return min(counting, key=lambda each: each.numel())
        values = {name: microbatch[name] for name in microbatch.names}
        sizes = {name: 1 if name in microbatch.per_sequence else 2 for name in values}
        values = {name: tensor.new_zeros((sizes[name], *tensor.shape[1:])) for name, tensor in values.items()}
        return RaggedBatch(values, Layout([2]), microbatch.per_sequence)

    def _deferred(self, model: nn.Module, more_to_come: bool) -> Any:
        """No reduction of gradients before the last microbatch, where DDP would make one."""
        if more_to_come and isinstance(model, nn.parallel.DistributedDataParallel):
            return self.accelerator.no_sync(model)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _gradients_meet_once(self, model: nn.Module) -> Iterator[bool]:
        """Under ZeRO, one reduction and one step for all microbatches where the engine can; tells whether it does.

        Source: DeepSpeed's ``engine.coalesce_grad_reduction`` (stages 1 to 3, since 0.19).
        """
        wrapper = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        engine = getattr(wrapper, "engine", None)
        optimizer = getattr(engine, "optimizer", None)
        options = self._packing
        able = hasattr(engine, "coalesce_grad_reduction") and hasattr(optimizer, "_coalesce_grad_reduction")
        if (
            engine is None
            or options is None
            or not (able and options.coalesce_gradients and self._zero_stage in (1, 2, 3))
        ):
            yield False
            return
        with engine.coalesce_grad_reduction():
            yield True
        engine.set_gradient_accumulation_boundary(is_boundary=True)
        engine.step()

    @property
    def _adds_auxiliary(self) -> bool:
        """Whether the loss of a packed microbatch is the model's own, and holds a mean over tokens beside the labels'.

        Where smoothed labels or a function take its place, transformers leaves that mean out; a trainer under the
        mixin with a loss of its own weighs it by itself.
        """
        own = self.label_smoother is None and self.compute_loss_func is None and not self._theirs("compute_loss")
        return self._packing is not None and own and self._auxiliary_factor is not None

    @property
    def _auxiliary_factor(self) -> float | None:
        return getattr(getattr(self._bare_model, "config", None), "router_aux_loss_coef", None)

    def _weigh_auxiliary(self, loss: Tensor, outputs: Any) -> Tensor:
        """A mean over the microbatch that a model adds to its loss (experts' balance) counts by its real tokens."""
        auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        factor = self._auxiliary_factor
        if auxiliary is None or factor is None:
            return loss
        ranks = self.accelerator.num_processes
        return loss - (1 - self._share_of_step) * factor * ranks * auxiliary.to(loss.device)

    # Evaluation.

    def _within_capacity(self, batch: RaggedBatch) -> list[RaggedBatch]:
        """An evaluation batch as microbatches that fit the capacity, in order."""
        options = self._packing
        alike = self._zero_stage == 3 or self.is_fsdp_enabled  # sharded models run equally often on every rank
        if options is None or alike or batch.layout.size <= options.capacity:
            return [batch]
        capacity = max(options.capacity, batch.max_seqlen)
        schedule = plan(batch.layout.lengths, ranks=1, capacity=capacity, strategy="next_fit")
        return materialize(schedule, batch, 0)
