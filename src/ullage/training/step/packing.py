"""Packed, balanced training: each optimizer step is a global batch, planned over the ranks and run as microbatches.

Every rank plans a step by itself, the same plan, so that each gets microbatches of at most ``capacity`` tokens and as
much work as the others. Where lengths are stored, that is done as samples are read (``batches.steps``), and a rank
reads its own. Else the ranks gather the lengths of what each has collated, plan it, and exchange the sequences.
Sampling, workers, resuming and epochs stay transformers' own: one batch in, one batch out. The microbatches then run
inside one ``training_step``; gradients meet once, after the last. The loss is normalised by the labels that count in
the whole step over all ranks, or by the weights of its sequences, so it does not depend on how they were packed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout
from ullage.core.rows import alike, on_host
from ullage.exchange import exchange, gather_lengths, materialize
from ullage.exchange.lengths import gather_or_fail
from ullage.mixers.by_lengths import require_one_loss
from ullage.mixers.wrappers import refuse_learned_prompt
from ullage.planning import MultimodalCost, Plan, TransformerCost, plan
from ullage.planning.cost import Cost
from ullage.planning.placement import TOKENS
from ullage.ranks import Topology, tried
from ullage.ranks.world import gather
from ullage.training.batches import targets
from ullage.training.batches.amounts import NAMES, amounts_of, stacked, unstacked
from ullage.training.batches.packed_batch import PackedBatch, stand_in
from ullage.training.batches.reading import BatchReader
from ullage.training.loss.divisions import Division, OwnLoss, division_of, shares
from ullage.training.loss.sequence_weights import SequenceWeigher
from ullage.training.setup.arguments import PackingOptions
from ullage.training.setup.sharding import Sharding, sharding_of
from ullage.training.step.call_metrics import CallMetrics, Taken
from ullage.training.step.metering import StepTimes, TokenMeter, cost_of, num_parameters
from ullage.training.step.packable import items_of_step, meet_in_towers, require_equal_calls, truncation_problem
from ullage.training.step.padded_loss import PaddedLoss
from ullage.training.step.reduction import GradientReduction, Run, run_weighed
from ullage.training.step.verifying import PackingProof

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class Planning:
    """How steps are planned: what a worker of a data loader can know of it.

    Attributes:
        options: of packing.
        cost: of the model.
        ranks: that draw different batches.
        meets_every_microbatch: whether ranks wait for each other in each microbatch.
    """

    options: PackingOptions
    cost: Cost
    ranks: int
    meets_every_microbatch: bool

    def plan_fitting(self, lengths: Int64) -> Plan | None:
        """The plan of sequences that all fit, and of which each rank has some; None for any others."""
        if lengths.min() < 1 or lengths.max() > self.options.capacity or len(lengths) < self.ranks:
            return None
        made = self.plan(lengths, {}, self.options.capacities, "error")
        return made if all(len(made.all_members(rank)) for rank in range(self.ranks)) else None

    def plan(
        self,
        lengths: Int64,
        amounts: dict[str, Int64],
        capacities: Mapping[str, int],
        oversize: str,
        together: Any = None,
    ) -> Plan:
        """The plan, the same on every rank. If it drops every sequence, it has one empty microbatch per rank."""
        ranks = self.ranks
        limits: dict[str, Any] = {"ranks": ranks, "capacities": capacities, "oversize": oversize, "amounts": amounts}
        # Where ranks wait for each other in each microbatch, the plan has to balance each; otherwise they wait once, at
        # the reduction of gradients.
        made = plan(
            lengths,
            cost=self.cost,
            strategy=self.options.strategy,
            sync="microbatch" if self.meets_every_microbatch else "step",
            keep_together=together,
            **limits,
        )
        if made.num_microbatches:
            return made
        # Nothing is left to train on. One empty microbatch on every rank keeps their collectives in step.
        return plan(lengths, strategy="preassigned", assignment=[[[]] * ranks], **limits)


@dataclass(frozen=True)
class StepPlanner:
    """Plans steps and exchanges them.

    Attributes:
        topology: all ranks along dp.
        planning: of the steps.
        config: of the model, which tells what images take.
        times: what planning and exchanging took is added to them.
    """

    topology: Topology
    planning: Planning
    config: Any = None
    times: StepTimes = field(default_factory=StepTimes)

    def pack(self, batches: list[RaggedBatch], padded: PaddedLoss | None) -> PackedBatch:
        """Plan and exchange the batches of all ranks; returns this rank's part. Collective.

        ``batches``: of this rank. ``padded``: which of its sequences stay together, and go together.
        """
        options, plan = self.planning.options, self.planning.plan

        def planned(lengths: Int64, amounts: dict[str, Int64]) -> Plan:
            if padded is None:
                return plan(lengths, amounts, options.capacities, options.oversize)
            asked = padded.planned_lengths(lengths, options.capacity, options.oversize)
            made = plan(asked, amounts, options.capacities, options.oversize, padded.groups(len(lengths)))
            return replace(made, original_lengths=lengths)

        return self._exchange(batches, planned)

    def pack_beside(self, batches: list[RaggedBatch]) -> PackedBatch:
        """The same for what runs without gradients: a sequence over the capacity gets a microbatch of its length."""

        def planned(lengths: Int64, amounts: dict[str, Int64]) -> Plan:
            taken = {**amounts, TOKENS: lengths}
            largest = {
                name: max(limit, int(taken[name].max(initial=1)) if name in taken else 1)
                for name, limit in self.planning.options.capacities.items()
            }
            return self.planning.plan(lengths, amounts, largest, "error")

        return self._exchange(batches, planned)

    def _exchange(
        self, batches: list[RaggedBatch], make_plan: Callable[[Int64, dict[str, Int64]], Plan]
    ) -> PackedBatch:
        # The empty array first, so that a rank without batches concatenates to no lengths.
        lengths = np.concatenate([np.zeros(0, np.int64), *(batch.layout.lengths for batch in batches)])
        times = self.times
        with times.measure("exchange"):
            gathered = gather_lengths(lengths, self.topology)
            amounts = self._gather_amounts(batches)
        with times.measure("plan"):
            schedule = make_plan(gathered.lengths, amounts)
        with times.measure("exchange"):
            microbatches = tuple(exchange(schedule, batches, self.topology, gathered))
        return PackedBatch(microbatches, schedule)

    def _gather_amounts(self, batches: list[RaggedBatch]) -> dict[str, Int64]:
        """What all sequences of all ranks take besides tokens. Collective, for models that take images only."""
        if getattr(self.config, "vision_config", None) is None:
            return {}
        mine = tried(lambda: stacked([amounts_of(batch, self.config) for batch in batches]))
        return unstacked(gather_or_fail(*mine, self.topology).lengths)


class Packer:
    """Packing of a trainer's steps. Off unless the arguments say ``packing_capacity=...``: ``options`` is then None.

    ``metrics``: of the calls of the loss. ``reduction``: of the gradients of a step.

    Args:
        trainer: whose arguments, model and accelerator count.
        reader: of its batches.
        meter: the times of steps are added to it.
        padded_loss_of: gives what packs a trainer whose loss takes padded rows; None for any other trainer.
        data_problem: gives the error of a trainer whose data cannot be packed, as the trainer itself knows; else None.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        reader: BatchReader,
        meter: TokenMeter,
        padded_loss_of: Callable[[transformers.Trainer], PaddedLoss | None],
        data_problem: Callable[[transformers.Trainer], InputError | None],
    ) -> None:
        self._trainer, self._reader, self._meter = trainer, reader, meter
        self._padded_loss_of, self._data_problem = padded_loss_of, data_problem
        self.metrics = CallMetrics(trainer)
        #: For packing_capacity='auto', once it is found.
        self.found_capacity: int | None = None
        self._divided: Division | None = None
        #: Gives the model that was packed last, if it was to be.
        self._met: Callable[[], nn.Module | None] = lambda: None
        #: Fraction of the step, over all ranks, that the running microbatch makes up.
        self.share_of_step = 1.0
        self.weigher = SequenceWeigher(trainer, reader)
        self.proof = PackingProof(trainer, reader, self)
        self.reduction = GradientReduction(trainer)

    @functools.cached_property
    def options(self) -> PackingOptions | None:
        """The arguments of packing, None without it."""
        return PackingOptions.of(self._trainer.args, self.found_capacity)

    @property
    def padded_loss(self) -> PaddedLoss | None:
        """What packs the batches of a trainer whose loss takes padded rows; None for others, and without packing."""
        return self._padded_loss if self.options is not None else None

    @property
    def packs_drawn(self) -> bool:
        """Whether the batches that are drawn are planned and exchanged, and not what a trainer makes of them."""
        return self.options is not None and not (self.padded_loss is not None and self.padded_loss.makes_batches)

    @property
    def truncates(self) -> bool:
        """Whether a plan may cut a sequence over the capacity: a sample is one sequence of tokens."""
        return self.padded_loss is None and truncation_problem(self._reader.model) is None

    @functools.cached_property
    def _padded_loss(self) -> PaddedLoss | None:
        return self._padded_loss_of(self._trainer)

    def forget_options(self) -> None:
        """Read the arguments again: they were changed."""
        vars(self).pop("options", None)

    def begin_run(self) -> None:
        """A run begins, perhaps of a search, which sets arguments and makes models anew: pack what was not packed."""
        self.forget_options()
        if self._reader.model is not self._met():
            self._divided = None
            for name in ("_cost_of_model", "_num_parameters"):
                vars(self).pop(name, None)
            self._reader.forget_model()
            self._pack_model()
        self.proof.begin_run()

    def _pack_model(self) -> None:
        """Make the trainer's model keep packed sequences apart; who shards one by hand has packed it."""
        self._met = weakref.ref(self._reader.model)
        if self.options is not None and self._sharding is None:
            self.proof.pack(self._reader.model)

    def require_packable(self) -> None:
        """Raise ``InputError`` for what cannot be packed, and make the model keep packed sequences apart."""
        options, args = self.options, self._trainer.args
        if options is None:
            if self.meets_every_microbatch:  # it may have been packed by hand
                require_equal_calls(self._reader.model)
            return
        if self._reader.evaluates_itself and self.padded_loss is None:
            trainer = self._reader.overridden("compute_loss") or type(self._trainer)
            raise InputError(
                "this trainer cannot be packed yet: its batches are not sequences with labels",
                where=trainer.__name__,
                expected=f"a field {self._reader.label_name!r} to train on",
                found=f"columns {self._trainer._signature_columns}",
                hint="leave packing_capacity out: it trains and evaluates as without the mixin",
            )
        if args.n_gpu > 1:
            raise InputError(
                "packing runs one process per GPU: nn.DataParallel would cut a packed row anywhere",
                expected="one GPU",
                found=f"{args.n_gpu} in one process",
                hint="start the script with torchrun --nproc_per_node",
            )
        refuse_learned_prompt(self._reader.model)
        if args.gradient_accumulation_steps > 1:
            raise InputError(
                "packing takes no gradient_accumulation_steps: each optimizer step is one global batch, "
                "and its plan says how many microbatches it has",
                expected=1,
                found=args.gradient_accumulation_steps,
                hint="multiply per_device_train_batch_size by it instead",
            )
        if options.oversize == "truncate" and (problem := truncation_problem(self._reader.model)) is not None:
            raise problem
        if (problem := self._data_problem(self._trainer)) is not None:
            raise problem
        self._pack_model()
        self.weigher.require_weighable()
        if self.padded_loss is not None:
            self.padded_loss.require_packable()
        if self.meets_every_microbatch and self._sharding is None:
            require_equal_calls(self._reader.model)
        if args.average_tokens_across_devices is False:
            raise InputError(
                "packing normalises the loss over all ranks", expected="average_tokens_across_devices=True", found=False
            )

    def require_losses(self, batch: RaggedBatch) -> None:
        """Raise ``InputError`` for labels by sequence beside those by token, unless the trainer computes the loss."""
        labels = self._reader.label_name
        if OwnLoss.of(self._trainer) is None and labels in batch and labels not in batch.per_sequence:
            require_one_loss(self._reader.model, batch.per_sequence)

    # Planning and exchange.

    @functools.cached_property
    def _topology(self) -> Topology:
        """All ranks along dp unless the model says otherwise, on gloo where their group takes device tensors only."""
        if self._trainer.args.world_size == 1:
            return Topology.single()
        sharding = self._sharding
        topology = Topology.from_groups(dp=dist.group.WORLD) if sharding is None else sharding.topology
        return topology if self._trainer.args.device.type == "cpu" else topology.on_gloo()

    @functools.cached_property
    def _cost_of_model(self) -> Cost:
        return cost_of(self._reader.model)

    @property
    def _config(self) -> Any:
        return getattr(self._reader.model, "config", None)

    @functools.cached_property
    def _num_parameters(self) -> int:
        return num_parameters(self._reader.model)

    @property
    def meets_every_microbatch(self) -> bool:
        """Whether sharded parameters are gathered in every forward, so that ranks wait for each other in each."""
        is_sharded = self._sharding is not None and self._trainer.args.world_size > 1
        return self.reduction.zero_stage == 3 or self._trainer.is_fsdp_enabled or is_sharded

    @property
    def _sharding(self) -> Sharding | None:
        return sharding_of(self._trainer.model)

    @property
    def averaged_over(self) -> int:
        """The ranks whose gradients are averaged, by which a loss is multiplied beforehand."""
        sharding = self._sharding
        return self._trainer.accelerator.num_processes if sharding is None else sharding.averaged_over

    def flops(self, batch: PackedBatch) -> int:
        """Model FLOPs of this rank's part of a step, forward and backward.

        Of real tokens, with the causal half of attention; without a formula for the model, six times parameters times
        tokens.
        """
        tokens, cost = batch.numel(), self._cost_of_model
        lengths = np.concatenate([microbatch.layout.lengths for microbatch in batch.microbatches])
        if isinstance(cost, TransformerCost):
            return int(cost.training_flops(tokens, int((lengths**2).sum())))
        if isinstance(cost, MultimodalCost):
            amounts = unstacked(stacked([amounts_of(each, self._config) for each in batch.microbatches]))
            patches, squares = (int(amounts[name].sum()) for name in NAMES[:2])
            return int(cost.training_flops(tokens, int((lengths**2).sum()), patches, squares))
        # Two FLOPs per parameter and token forward, four backward.
        return 6 * tokens * self._num_parameters

    @property
    def _planning(self) -> Planning:
        assert self.options is not None
        ranks, meets = self._topology.dp.size, self.meets_every_microbatch
        return Planning(self.options, self._cost_of_model, ranks, meets)

    @property
    def plan_of(self) -> Callable[[Int64], Plan | None] | None:
        """What plans a step before it is read, where its lengths in tokens are all that counts; else None."""
        if self.options is None or not self.packs_drawn or self.padded_loss is not None or self.options.limits:
            return None
        if self._reader.takes_pairs or getattr(self._config, "vision_config", None) is not None:
            return None
        return self._planning.plan_fitting

    def pack(self, batches: Sequence[RaggedBatch], made: Plan | None = None) -> PackedBatch:
        """This rank's part of the step that the batches of all ranks make up.

        ``batches``: those that this rank has drawn, none if its data have ended; they are planned and exchanged, which
        is collective. Those that were read by a plan, ``made``, are its microbatches.
        """
        self._meter.times.steps += 1
        padded, planner = self.padded_loss, StepPlanner(self._topology, self._planning, self._config, self._meter.times)
        if made is None:
            step = planner.pack([targets.join_targets(batch) for batch in batches], padded)
        else:
            step = PackedBatch(tuple(batches), made)
        step = replace(step, shifts=self._reader.shifts)
        self._meter.add_packed(step.microbatches, step.plan, self.flops(step))
        return step if padded is None else padded.complete(step, batches, planner.pack_beside)

    # One step.

    def train_step(self, run: Run, model: nn.Module, inputs: PackedBatch, count: Any) -> Tensor:
        """Train on all microbatches of a step; gradients meet once. Returns the loss of the step.

        ``run``: transformers' ``training_step``, for one microbatch. ``count``: labels of the step over all ranks.
        """
        several, idle = self._trainer.args.world_size > 1, list[nn.Parameter]()
        items = items_of_step(self._reader.model, inputs.microbatches, several=several)
        shifts = self._reader.shifts
        self.proof.before_step(model, inputs, items, count)
        if self._reader.shifts != shifts and count is not None:
            count = self._counted_again(inputs, count)
        if self._reader.found_loss is not None and self._reader.found_loss.apart:
            inputs = self._apart(inputs)
        if several:
            idle = meet_in_towers(self._reader.model, items, is_sharded=self.meets_every_microbatch)
        division = self._division(count)
        parts = self._shares(inputs, division, count)
        around = contextlib.nullcontext() if self.padded_loss is None else self.padded_loss.step(model, inputs)
        calls: list[Taken] = []
        is_sum = division == "sum" and not self.weigher.is_on

        def run_microbatch(k: int) -> Tensor:
            microbatch, share = inputs.microbatches[k], parts[k]
            runs = self._runnable(inputs, microbatch, share, division)
            batch = self._inputs_of(runs)
            self.share_of_step = share if runs is microbatch else 0.0
            self.weigher.begin(batch, inputs.weight)
            # A stand-in counts in no metric, whatever it has in it.
            weigh = (self.padded_loss or self._reader).weights
            weights = weigh(microbatch) if runs is microbatch and self.metrics.are_kept else {}
            # A sum over the step's labels adds up by itself, and has the ranks in it; so do weights of labels.
            factor = self.averaged_over * (1.0 if self.weigher.is_on else share)
            given, factor = (count, 1.0) if is_sum else (None, factor)
            with self.metrics.collect(calls, "train", weights):
                return run_weighed(self._trainer, run, model, batch, factor if runs is microbatch else 0.0, given)

        try:
            with around:
                loss = self.reduction.run(model, len(inputs.microbatches), run_microbatch)
                for parameter in idle:
                    parameter.grad = None
                self.metrics.merge(calls, "train", inputs.num_tokens)
        finally:
            self.share_of_step = 1.0
            self.weigher.end()
        return loss

    def _apart(self, batch: PackedBatch) -> PackedBatch:
        """The step with microbatches of sequences of one length each, as many on every rank. Collective."""
        parts: list[RaggedBatch] = []
        for each in batch.microbatches:
            samples, sizes = each.samples() if len(each) else [], each.layout.lengths
            alone = targets.is_joined(each) or bool(each.items)
            for group in np.arange(len(each))[:, None] if alone else alike([sizes], sizes > 0):
                chosen = [samples[place] for place in group]
                parts.append(RaggedBatch.from_samples(chosen, per_sequence=each.per_sequence, per_item=each.per_item))
        first = batch.microbatches[0]
        left = {name: first[name][:0] for name in first.names if name not in first.items}
        nothing = RaggedBatch(left, Layout([]), first.per_sequence)
        most = max(1, *gather(len(parts), self._trainer.args.world_size > 1))
        return replace(batch, microbatches=(*parts, *[nothing] * (most - len(parts))))

    def _counted_again(self, batch: PackedBatch, count: Any) -> Any:
        """The labels of a step over all ranks, once it is known whether the first of a sequence counts."""
        counts = gather(sum(map(self._reader.num_labels, batch.microbatches)), self._trainer.args.world_size > 1)
        return torch.full_like(torch.as_tensor(count), max(sum(counts), 1))

    def _division(self, num_items_in_batch: Any) -> Division:
        """The division of a microbatch's loss. The same on every rank."""
        if self._reader.found_loss is not None:
            return self._reader.found_loss.division
        if self._divided is None:
            self.weigher.require_weighable()  # the model may be another than the trainer was made with
            self._divided = division_of(self._trainer, counted=num_items_in_batch is not None)
        return self._divided

    def _shares(self, batch: PackedBatch, division: Division, num_items_in_batch: Any) -> list[float]:
        """Fraction of the step over all ranks that each microbatch makes up, in tokens, labels or sequences."""
        if self.padded_loss is not None:
            return self.padded_loss.shares(batch)
        # A mean over 30 of the step's 120 labels counts a quarter.
        if division == "sum" or self.weigher.is_on:
            return shares([microbatch.numel() for microbatch in batch.microbatches], batch.num_tokens)
        if division == "token_mean":
            count = int(on_host(torch.as_tensor(num_items_in_batch)))
            return shares(map(self._reader.num_labels, batch.microbatches), count)
        if division == "total":
            return [float(len(each) > 0) for each in batch.microbatches]
        return shares(map(len, batch.microbatches), len(batch.plan.order))

    def _inputs_of(self, microbatch: RaggedBatch) -> Any:
        """A microbatch as the trainer takes its batches."""
        return targets.split_targets(microbatch) if self.padded_loss is None else self.padded_loss.to_padded(microbatch)

    def _runnable(self, batch: PackedBatch, microbatch: RaggedBatch, share: float, division: Division) -> RaggedBatch:
        """The microbatch, or a stand-in for one with nothing to count: every rank runs equally many microbatches."""
        if self.padded_loss is not None:
            return microbatch if len(microbatch) else self.padded_loss.stand_in(batch.microbatches, microbatch)
        if share:
            return microbatch
        return stand_in(
            batch.microbatches, microbatch, counts=self._reader.num_labels if division == "token_mean" else len
        )

    # Evaluation.

    def within_capacity(self, batch: RaggedBatch) -> list[RaggedBatch]:
        """An evaluation batch as microbatches that fit the capacity, in order."""
        options = self.options
        # Sharded models run equally often on every rank.
        if (
            options is None
            or self.meets_every_microbatch
            or (not options.limits and int(targets.num_tokens_each(batch).sum()) <= options.capacity)
        ):
            return [batch]
        whole = targets.join_targets(batch)
        # An evaluated sequence is never cut or dropped: one over the capacity gets a microbatch of its length.
        amounts = amounts_of(whole, self._config)
        taken = {**amounts, TOKENS: whole.layout.lengths}
        capacities = {name: max(limit, int(taken[name].max())) for name, limit in options.capacities.items()}
        schedule = plan(whole.layout.lengths, ranks=1, capacities=capacities, amounts=amounts, strategy="next_fit")
        return [targets.split_targets(microbatch) for microbatch in materialize(schedule, whole, 0)]
