"""Batches of one optimizer step: drawn on every rank, counted together, and packed where packing is on.

The ranks meet once before each step, in one small reduction: how many labels count, whether a rank has a problem, how
many batches each has drawn, and whether one is asked to stop. A problem on one rank is raised on all of them. Ranks
whose data end first are met here too: packed, the others draw more batches in their place, as
:class:`~ullage.exchange.PackedIterator` does; not packed, the epoch ends on all ranks together.

What a plan drops or truncates is not trained on: then, and only then, the labels are counted again after the exchange,
in a second reduction.

The place of a run in its epochs: transformers finds it again by the number of steps in an epoch, one batch of each rank
per step. Two runs are elsewhere. Under packing, ranks that still have data give more batches than steps; and an epoch
of iterable data ends when the data do, while transformers takes all steps of the run for one epoch. Both are kept with
the trainer's state, only then.

Source: transformers 5.23 ``trainer.py``, ``_init_training_state`` and ``_run_epoch``, which calls
``get_batch_samples`` equally often on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.core.errors import CheckpointError, DistributedError, TrainingError
from ullage.core.layout import Int64
from ullage.core.rows import on_device
from ullage.exchange.source import deal
from ullage.planning import Plan
from ullage.ranks import Axis, agree
from ullage.ranks.lost import LostRanks
from ullage.training.batches import counting
from ullage.training.batches.packed_batch import SharedPart
from ullage.training.batches.reading import BatchReader
from ullage.training.batches.steps import RecordedBatches, divided, index_read_again
from ullage.training.saving.background import BackgroundSave
from ullage.training.setup.arguments import empty_step_of
from ullage.training.setup.sharding import data_ranks, sharding_of
from ullage.training.step.metering import TokenMeter
from ullage.training.step.packing import Packer
from ullage.training.step.sharing import StepSharing
from ullage.training.step.stopping import StopFlag

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class StepCounts:
    """Counts of a step that the ranks tell each other before it, one row of integers from each.

    Attributes:
        labels: [ranks], label elements that count.
        batches: [ranks], batches drawn, on the host; of a step that the ranks share, samples.
        complete: whether every batch of every rank has labels.
        weight: sum of the weights of the sequences of all ranks, where sequences are weighed; else 0.
        failed: whether a rank has a problem.
        stop: the signal that a rank was asked to stop by, 0 without.
    """

    labels: Int64
    batches: Int64
    steps: Int64
    complete: bool
    weight: float
    failed: bool = False
    stop: int = 0

    @classmethod
    def sum(cls, meetings: Sequence[StepCounts]) -> StepCounts:
        """The counts of a step that was drawn in several rounds."""
        return cls(
            np.sum([met.labels for met in meetings], 0),
            np.sum([met.batches for met in meetings], 0),
            meetings[-1].steps,
            all(met.complete for met in meetings),
            math.fsum(met.weight for met in meetings),
        )

    @staticmethod
    def row(
        labels: int,
        complete: bool,
        problem: BaseException | None,
        batches: int,
        stop: int,
        weight: float,
        step: int = 0,
    ) -> list[int]:
        """What a rank tells the others before a step: seven integers, of which one holds the bits of a float64."""
        # 120 labels in 2 batches, all with labels, without a problem, a stop or weights: [120, 1, 0, 2, 0, 0, 0].
        bits = int(np.float64(weight).view(np.int64))
        return [labels, int(complete), int(problem is not None), batches, stop, bits, step]

    @classmethod
    def of(cls, ranks: Tensor, sharing: Sequence[Sequence[int]] | None = None) -> StepCounts:
        """The counts that the rows [ranks, 7] of all ranks tell. Waits for their device.

        ``sharing``: the ranks that draw the same batches, each group one rank of the result; None if all draw others.
        Raises ``DistributedError`` on every rank if those of a group have drawn others.
        """
        told = ranks.cpu().numpy()
        _, complete, failed, _, stops, _, _ = told.T
        if sharing is not None:
            drawn = told[np.array(sharing)]
            if not failed.any() and (drawn != drawn[:, :1])[..., [0, 3]].any():
                raise DistributedError(
                    "ranks that share their batches have drawn different ones",
                    expected="as many batches and labels on the ranks of tp and cp",
                    found=f"(labels, batches) by place in dp: {drawn[..., [0, 3]].tolist()}",
                    hint="a data set that draws random numbers has to draw the same on these ranks",
                )
            told = told[[group[0] for group in sharing]]
        batches, weights = told[:, 3], told[:, 5]
        return cls(
            labels=told[:, 0],
            batches=batches,
            steps=told[:, 6],
            complete=bool(complete.all()),
            # fsum rounds once, so the order of the ranks does not matter.
            weight=math.fsum(np.ascontiguousarray(weights).view(np.float64).tolist()),
            failed=bool(failed.any()),
            stop=int(stops.max()),
        )


_logger = logging.getLogger(__name__)

#: The place in the trainer's state, under ``stateful_callbacks``: ``steps`` drawn in the epoch, batches ``given`` by
#: each rank, the number of ``workers`` that read a stream, and of the ``epoch`` if transformers computes another.
_DRAWN = "ullage_batches_drawn"
#: Beside it, the number of ranks, and a checksum of the order of what was drawn in the epoch: of the steps that ranks
#: share, which is the same on any number, or by the first rank.
_ORDER = "ullage_step_order"
_OTHER_ORDER = (
    "%s has drawn another order of samples than the one that the checkpoint is in the middle of: in this epoch some "
    "are trained on twice and some never. Unless data or batches were changed on purpose: a sampler with a generator "
    "draws each epoch by seed and number under packing_global_batch_size=..., one of your own may do so in its "
    "set_epoch(epoch), and save_strategy='epoch' saves where no order is begun."
)


@dataclass
class Epoch:
    """Progress through the running epoch.

    Attributes:
        given: [ranks], batches drawn so far.
        live: [ranks], whether a rank's data have not ended.
        number: of the epoch, from 0.
        steps: drawn so far.
        steps_before: of the run before this epoch, as transformers counts them.
        recorded: skipped batches of this rank whose indices were recorded before those of the first one drawn.
        ahead: batches of this rank that are still to be skipped, because a step before the checkpoint took them.
        order: a checksum of the indices of this rank's batches; -1 where some are not known.
        order_before: that of the skipped ones when they were trained on; -1 where it is not known.
        ended: whether no rank draws any further step.
    """

    given: Int64
    live: np.ndarray
    number: int = 0
    steps: int = 0
    steps_before: int = 0
    recorded: int = 0
    ahead: int = 0
    order: int = 0
    order_before: int = -1
    ended: bool = False

    @classmethod
    def of(cls, ranks: int, number: int = 0, steps_before: int = 0) -> Epoch:
        return cls(np.zeros(ranks, np.int64), np.ones(ranks, bool), number, steps_before=steps_before)


class StepSource:
    """The batches of a trainer's steps, and the counts of each that the ranks exchange.

    Args:
        trainer: whose arguments, state and accelerator count.
        reader: of its batches.
        packer: of its steps.
        meter: counts what goes through the model.
        stop: the request to stop, which the ranks agree on before every step.
        background: the save that may be under way, whose failure ends training before the next step.
        sharing: of steps over the ranks, where a global batch is asked for.
        lost_ranks: told when a step begins, and when all ranks are in it.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        reader: BatchReader,
        packer: Packer,
        meter: TokenMeter,
        stop: StopFlag,
        background: BackgroundSave,
        sharing: StepSharing,
        lost_ranks: LostRanks,
    ) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self._meter, self._stop, self._background = meter, stop, background
        self._sharing, self._lost_ranks = sharing, lost_ranks
        self._epoch: Epoch | None = None
        self._indices: RecordedBatches | None = None
        self._loader: Any = None
        self._is_empty = False
        self._has_warned_of_unused = False

    def begin_run(self) -> None:
        """Forget what an earlier run has warned of, and its dataloader."""
        self._has_warned_of_unused, self._indices = False, None

    def read_from(self, loader: Any, dataset: Any, most: int | None) -> Any:
        """The training dataloader over ``dataset``, whose indices are recorded from now on.

        ``most``: samples of a microbatch at most without packing, where the ranks share steps; None where they do not.
        """
        if most is not None:
            self._sharing.share(loader, most)
        elif divided(dataset):  # accelerate would divide it once more, and most of it would never be read
            vars(getattr(loader, "base_dataloader", loader))["dataset"] = dataset
        self._indices, self._loader = RecordedBatches.put_in(loader), loader
        return loader

    # The place in the epoch.

    @contextlib.contextmanager
    def epoch(self, **progress: Any) -> Iterator[dict[str, Any] | None]:
        """An epoch of the trainer. ``progress``: the keywords of transformers' ``_run_epoch``.

        Gives the keywords to run it with; None for an epoch that was trained before the checkpoint.
        """
        place = self._place(progress)
        if place is None:
            yield None
            return
        self._epoch = self._begin(**place)
        try:
            yield place
        finally:
            self._epoch, self._is_empty = None, False

    @property
    def _kept(self) -> dict[str, Any]:
        """What checkpoints keep of callbacks, by name."""
        kept: Any = self._trainer.state.stateful_callbacks
        return kept

    def _place(self, progress: dict[str, Any]) -> dict[str, Any] | None:
        """The keywords of the epoch, with the place that a checkpoint tells; None where it was trained before that."""
        if not self._resumes(progress):
            return progress
        self._require_same_steps(progress["num_update_steps_per_epoch"])
        kept = self._kept.get(_DRAWN)
        self._require_same_readers(kept)
        number = progress.get("epoch", 0)
        if not isinstance(kept, dict) or number > kept.get("epoch", -1):
            return progress
        if number < kept["epoch"]:
            return None
        steps = kept["steps"] * self._trainer.args.gradient_accumulation_steps
        return {**progress, "epochs_trained": number, "steps_trained_in_current_epoch": steps}

    def _resumes(self, progress: dict[str, Any]) -> bool:
        return progress.get("resume_from_checkpoint") is not None and not self._trainer.args.ignore_data_skip

    def _require_same_steps(self, steps_per_epoch: int) -> None:
        """Look at whether the run goes on with steps of as many sequences as before.

        Of a sharded model others raise ``CheckpointError``; where the ranks share a global batch, a warning is logged.
        """
        trainer, state = self._trainer, self._trainer.state
        is_sharded = sharding_of(trainer.model) is not None
        if not (is_sharded or self._sharing.is_on) or not state.epoch:
            return
        before = state.global_step / state.epoch
        if abs(before - steps_per_epoch) < 0.5:
            return
        error = CheckpointError(
            "the run would go on with steps of another size",
            where=f"step {state.global_step}",
            expected=f"{before:.0f} steps in an epoch; here {steps_per_epoch}",
            found=f"{trainer.get_total_train_batch_size(trainer.args)} sequences a step",
            hint="set packing_global_batch_size, or per_device_train_batch_size × dp, to that of the run",
        )
        if is_sharded:
            raise error
        if trainer.is_world_process_zero():
            _logger.warning("%s", error)

    def _require_same_readers(self, kept: Any) -> None:
        """Raise ``CheckpointError`` where a stream goes on with readers that order its samples in another way."""
        if not self._is_stream or not isinstance(kept, dict):
            return
        number = data_ranks(self._trainer.model, self._trainer.args)[1]
        where = f"step {self._trainer.state.global_step}"
        if len(kept["given"]) != number and self._sharing.size is None:
            raise CheckpointError(
                "a stream that was divided among the ranks goes on on as many ranks",
                where=where,
                expected=f"{len(kept['given'])} ranks",
                found=number,
                hint="begin runs over streams with packing_global_batch_size=..., sequences a step: the index of a "
                "sample then says in which step it is, on any ranks; ignore_data_skip=True begins the data anew",
            )
        if kept.get("workers", self._workers) != self._workers:
            raise CheckpointError(
                "dataloader workers, of which each reads a part of the stream, are not as many as before",
                where=where,
                expected=f"dataloader_num_workers={kept['workers']}",
                found=self._trainer.args.dataloader_num_workers,
            )

    @property
    def _workers(self) -> int:
        """Processes of this rank that read."""
        return max(self._trainer.args.dataloader_num_workers, 1)

    @property
    def _is_stream(self) -> bool:
        return isinstance(self._trainer.train_dataset, torch.utils.data.IterableDataset)

    def _begin(
        self,
        epoch: int = 0,
        epochs_trained: int = 0,
        steps_trained_in_current_epoch: int = 0,
        num_update_steps_per_epoch: int = 0,
        train_dataloader: Any = None,
        **others: Any,
    ) -> Epoch:
        """The beginning of an epoch: at its first batch, or behind those that were trained on before a checkpoint."""
        if self._indices is None:  # of a trainer that makes its own
            self._indices, self._loader = RecordedBatches.put_in(train_dataloader), train_dataloader
        rank, number = data_ranks(self._trainer.model, self._trainer.args)
        begun = Epoch.of(number, epoch, epoch * num_update_steps_per_epoch)
        drawn, (ranks, order) = self._kept.pop(_DRAWN, None), self._kept.pop(_ORDER, (0, -1))
        if self._sharing.is_on:  # every rank draws one part a step, whatever it drew before
            drawn = None
        self._sharing.begin_epoch(0)
        if not self._resumes(others) or epoch != epochs_trained or not steps_trained_in_current_epoch:
            return begun
        # transformers skips one batch per trained step (accelerate's skip_first_batches). SkipBatchSampler still draws
        # them from the recorded sampler, so their indices wait in front of those of the first real batch.
        begun.recorded = steps_trained_in_current_epoch
        is_comparable = (ranks == number or self._sharing.is_on) and self._trainer.args.process_index == 0
        begun.order_before = order if is_comparable else -1
        self._sharing.begin_epoch(begun.recorded)
        begun.steps = begun.recorded // self._trainer.args.gradient_accumulation_steps
        begun.given[:] = begun.steps
        # Under packing a rank may have drawn more batches than steps (its peers ended first) or fewer (its own data
        # ended): of 4 steps that were given [3, 5] batches, rank 0 has ended, and rank 1 skips one more.
        if drawn is not None and drawn["steps"] == begun.steps and len(drawn["given"]) == len(begun.given):
            begun.given = np.array(drawn["given"], np.int64)
            begun.live = begun.given >= begun.steps
            begun.ahead = max(0, int(begun.given[rank]) - begun.steps)
        return begun

    def _keep_place(self, epoch: Epoch) -> None:
        """Count a step that was drawn, and keep for a checkpoint what transformers would not find again."""
        state = self._trainer.state
        epoch.steps += 1
        self._kept[_ORDER] = [len(epoch.given), epoch.order]
        elsewhere = epoch.steps_before + epoch.steps != state.global_step + 1
        # What is resumed skips one batch a step; this says which ranks are further, or have ended, and how many read
        # a stream.
        if elsewhere or len(set(epoch.given.tolist())) > 1 or self._is_stream:
            kept: dict[str, Any] = {"steps": epoch.steps, "given": epoch.given.tolist()}
            kept |= {"workers": self._workers} if self._is_stream else {}
            self._kept[_DRAWN] = kept | ({"epoch": epoch.number} if elsewhere else {})

    # Drawing.

    def draw_step(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """This rank's batches of a step, one packed batch under packing, and the labels that count over all ranks.

        Collective: one reduction, which waits for the device. Raises on every rank if one has a problem.
        """
        epoch = self._epoch or Epoch.of(data_ranks(self._trainer.model, self._trainer.args)[1])
        self._is_empty = False
        if epoch.ended:
            return [], None
        self._lost_ranks.begin_step()
        if self._sharing.is_on:
            return self._shared_step(epoch, epoch_iterator, device)
        if self._packer.packs_drawn:
            return self._packed_step(epoch, epoch_iterator, device)
        # Every branch below is taken from gathered numbers, so all ranks enter the same collectives.
        parts, problem = self._draw(epoch, epoch_iterator, num_batches)
        batches = [batch for part in parts for batch in part.batches]
        met = self._count_together(batches, device, problem)
        fewest = int(met.batches.min())
        epoch.ended = fewest < num_batches
        # An unequal step: keep what every rank has, and count labels again, because the first count has those of
        # batches that are now left out.
        if fewest < met.batches.max():
            self._tell_of_unused(met.batches)
            batches = batches[:fewest]
            met = self._count_together(batches, device)
        if not fewest:
            return [], None
        self._keep_place(epoch)
        for batch in batches:
            self._count_batch(batch)
        return batches, self._num_items(met.labels, met.complete)

    def _draw(self, epoch: Epoch, iterator: Iterator[Any], number: int) -> tuple[list[SharedPart], Exception | None]:
        """Up to ``number`` parts of steps, each a batch where ranks have batches of their own, and what is wrong."""
        parts: list[SharedPart] = []
        try:
            # Read and drop the batches that earlier steps took; their indices are dropped with the next ones.
            for _ in itertools.islice(iterator, epoch.ahead):
                epoch.recorded += 1
            epoch.ahead = 0
            for drawn in itertools.islice(iterator, number):
                part, indices = drawn, self._next_indices(epoch)
                if not isinstance(part, SharedPart):
                    part = SharedPart([drawn], [len(indices or [0])], indices=indices)
                if part.plan is None:
                    part = replace(part, batches=[self._as_packed(batch) for batch in part.batches])
                parts.append(part)
                for batch, first, size in zip(part.batches, np.cumsum([0, *part.sizes]), part.sizes):
                    if size:
                        self._check(batch, None if part.indices is None else part.indices[first : first + size])
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            return parts, error
        return parts, None

    def _next_indices(self, epoch: Epoch) -> list[int] | None:
        """The indices of the samples of the batch drawn now; None where they are not known."""
        # The indices of skipped batches come first; the last ones popped are those of this batch.
        if self._indices is None:
            epoch.order = -1
            return None
        indices: list[int] | None = None
        for left in range(epoch.recorded, -1, -1):
            if left == 0 and -1 not in (epoch.order, epoch.order_before) and epoch.order != epoch.order_before:
                _logger.warning(_OTHER_ORDER, self._indices.drawn_by)
            indices = self._indices.next_batch()
            is_known = indices is not None and epoch.order != -1
            epoch.order = zlib.crc32(str(indices).encode(), epoch.order) if is_known else -1
        epoch.recorded, epoch.order_before = 0, -1
        return indices

    def _as_packed(self, drawn: Any) -> Any:
        """A drawn batch in the form that packing takes; as it is without packing, or if its rollouts are packed."""
        packer = self._packer
        if packer.options is None or not packer.packs_drawn:
            return drawn
        return self._reader.as_ragged(drawn) if packer.padded_loss is None else packer.padded_loss.to_ragged(drawn)

    def _check(self, batch: Any, indices: Sequence[int] | None = None) -> None:
        """Raise ``InputError`` for a batch that cannot be trained on. ``indices``: of its samples, where known."""
        options, padded = (self._packer.options, self._packer.padded_loss) if self._packer.packs_drawn else (None, None)
        per_sample = 1 if padded is None else padded.per_sample
        try:
            self._reader.require_ids(batch)
            self._packer.weigher.require_weights(batch)
            if options is not None and padded is None:
                self._packer.require_losses(batch)
            if options is not None and options.oversize == "error":
                counting.require_capacity(batch, options.capacity, per_sample, truncates=self._packer.truncates)
                counting.require_limits(batch, options.limits, getattr(self._reader.model, "config", None))
        except counting.SampleError as error:
            sample = error.sample // per_sample
            ragged = None if padded is None else padded.to_ragged
            index = index_read_again(self._loader, indices, batch, sample, self._reader.main_input, ragged, per_sample)
            rank = f"rank {self._trainer.args.process_index}, " if self._trainer.args.world_size > 1 else ""
            place = f"{rank}sample {sample} of the batch" if index is None else f"train_dataset[{index}]"
            raise error.at(place) from None

    def _tell_of_unused(self, drawn: Int64) -> None:
        """Warn once per run that an epoch ends before some ranks have used up their data. ``drawn``: by each rank."""
        if self._has_warned_of_unused or not self._trainer.is_world_process_zero():
            return
        self._has_warned_of_unused = True
        _logger.warning(
            "the data of rank %s ended first, and the epoch with them on all ranks: what the others have left is not "
            "used. Give every rank as many batches, or pack them (packing_capacity=...), where the others fill the "
            "step.",
            ", ".join(map(str, np.flatnonzero(drawn == drawn.min()))),
        )

    def _packed_step(
        self, epoch: Epoch, iterator: Iterator[Any], device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The step's one packed batch, made of as many batches as there are ranks, or of all that are left."""
        rank, number = data_ranks(self._trainer.model, self._trainer.args)
        wanted = number
        drawn: list[RaggedBatch] = []
        meetings: list[StepCounts] = []
        # One collective per round. The first asks each live rank for its part of the batches; a rank that gives fewer
        # has ended, and the next round asks the others for what is missing: of four ranks, the last of which has
        # ended, [2, 1, 1, 0] batches. given, live and wanted change by gathered numbers only, so every rank leaves
        # the loop after the same round.
        while wanted and epoch.live.any():
            quota = deal(epoch.given, epoch.live, wanted)
            parts, problem = self._draw(epoch, iterator, int(quota[rank]))
            batches = [batch for part in parts for batch in part.batches]
            met = self._count_together(batches, device, problem)
            epoch.live &= met.batches == quota
            epoch.given = epoch.given + met.batches
            wanted -= int(met.batches.sum())
            drawn += batches
            meetings.append(met)
        if wanted == number:
            epoch.ended = True
            return [], None
        self._keep_place(epoch)
        return self._pack(drawn, meetings, device)

    def _shared_step(
        self, epoch: Epoch, iterator: Iterator[Any], device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """This rank's part of a step that the ranks share; one packed batch under packing."""
        parts, problem = self._draw(epoch, iterator, 1)
        batches, count = self.take_part(parts[0] if parts else SharedPart([], []), device, problem)
        epoch.ended = not batches
        if batches:
            epoch.given += 1
            self._keep_place(epoch)
        return batches, count

    def take_part(
        self, part: SharedPart, device: torch.device, problem: Exception | None = None
    ) -> tuple[list[Any], Tensor | None]:
        """What is trained on of a drawn part, and the labels that count; nothing behind the last step. Collective.

        ``problem``: what is wrong with this rank's part.
        """
        batches = [batch for batch, size in zip(part.batches, part.sizes) if size]  # a plan may leave some empty
        met = self._count_together(batches, device, problem, sum(part.sizes), part.told)
        if not met.batches.any():
            return [], None
        is_planned = self._sharing.require_same_step(met.steps.tolist(), met.batches.tolist())
        if self._packer.packs_drawn:
            self._meter.times.plan += part.plan_seconds
            return self._pack(part.batches if is_planned else batches, [met], device, part.plan if is_planned else None)
        for batch in part.batches:
            self._count_batch(batch)
        part = replace(part, number=self._sharing.number(met.batches), num_samples=int(met.batches.sum()))
        return [part], self._num_items(met.labels, met.complete)

    def _pack(
        self, drawn: Sequence[RaggedBatch], met: Sequence[StepCounts], device: torch.device, plan: Plan | None = None
    ) -> tuple[list[Any], Tensor | None]:
        """The packed batch of what was drawn in several rounds, or by a plan, and the labels that count."""
        packed = self._packer.pack(drawn, plan)
        # Labels were counted as drawn. Where the plan leaves sequences out, count those that the exchange brought: the
        # ranks hold other sequences now, and the sum over ranks is what the divisor needs. Empty microbatches have no
        # labels to look for.
        counts = StepCounts.sum(met)
        if counts.complete and not packed.is_whole:
            counts = self._count_together([batch for batch in packed.microbatches if len(batch)], device)
        return [replace(packed, weight=counts.weight)], self._num_items(counts.labels, counts.complete)

    # Counting together.

    def _count_batch(self, batch: Any) -> None:
        reader, main_input = self._reader, self._reader.main_input
        if (told := counting.marked_rows(batch, main_input)) is not None:
            self._meter.add(*told, told[1])
            return
        self._meter.add(
            reader.num_tokens(batch) if reader.knows_padding(batch) else math.nan,
            counting.num_elements(batch, main_input, reader.form if isinstance(batch, RaggedBatch) else None),
            counting.num_padded_tokens(batch, main_input),
        )

    def num_items(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """The divisor of the loss of these batches (:meth:`draw_step`). Collective."""
        problem = None
        try:
            for batch in batch_samples:
                self._check(batch)
        except Exception as error:
            problem = error
        met = self._count_together(batch_samples, device, problem)
        return self._num_items(met.labels, met.complete) if met.batches.any() else None

    def _count_together(
        self,
        batches: list[Any],
        device: torch.device,
        problem: Exception | None = None,
        number: int | None = None,
        step: int = 0,
    ) -> StepCounts:
        """One reduction of seven integers; waits for the device. Raises on every rank if one has a problem.

        ``number``: what is told in the place of the number of batches; ``step``: which step it is, and how it was read.
        """
        counts: list[int] = []
        weight, weigher = 0.0, self._packer.weigher
        if problem is None:
            try:
                if weigher.is_on:
                    weighed = [weigher.weigh(batch) for batch in batches]
                    counts, weight = [each.num_labels for each in weighed], math.fsum(each.total for each in weighed)
                else:
                    found = [self._reader.label_elements(batch) for batch in batches]
                    counts = [int(counting.count_labels(elements)) for elements in found if elements is not None]
            except Exception as error:
                problem = error
        # Everything the ranks must know before a step travels in this one gather.
        complete = len(counts) == len(batches)
        told = problem or self._background.failure
        number = len(batches) if number is None else number
        mine = StepCounts.row(sum(counts), complete, told, number, int(self._stop.requested), weight, step)
        sharding = sharding_of(self._trainer.model)
        met = StepCounts.of(self._gather(mine, device), None if sharding is None else sharding.ranks_of_batch)
        self._stop.agreed = met.stop
        if met.failed:  # only then do the ranks meet again, to hear of the error
            self._background.settle()  # that of a save comes first: it is older
            agree(problem, Axis.world(), "reading its batches")
        return met

    def _gather(self, numbers: list[int], device: torch.device) -> Tensor:
        """Integers of every rank, [ranks, n]; on the device where there are several."""
        if self._trainer.args.world_size == 1:
            return torch.tensor([numbers])
        mine = torch.tensor([numbers], device=device)
        # gather concatenates along the first dimension, which is 1 here, so it becomes the ranks.
        # The first meeting of a step: whoever is ready early waits here for the last.
        with self._meter.times.measure("wait"):
            ranks = self._trainer.accelerator.gather(mine)
        assert isinstance(ranks, Tensor)
        self._lost_ranks.met()
        return ranks

    def _num_items(self, labels: Int64, complete: bool) -> Tensor | None:
        """The divisor of this rank's loss: labels of the step over all ranks, or its own if it averages so.

        ``labels`` [ranks]: that count. ``None`` where not all batches have labels. Where none counts, 1: a sum over
        nothing is then zero, not 0/0.
        """
        if not complete:
            return None
        total = labels.sum()
        if total == 0:
            self._meet_an_empty_step()
        args = self._trainer.args
        if not args.average_tokens_across_devices:
            # Trainer averages the losses of nn.DataParallel's replicas, each of which is divided by this number; with
            # the average over devices it multiplies them by the replicas instead.
            total = labels[args.process_index if args.world_size > 1 else 0] // max(args.n_gpu, 1)
        total = on_device(np.array(max(int(total), 1)), self._trainer.args.device)
        # DataParallel gives each replica a part of every tensor, so each needs the number.
        return total if args.n_gpu <= 1 else total.unsqueeze(0).expand(args.n_gpu, -1)

    # Steps in which no label counts.

    def _meet_an_empty_step(self) -> None:
        """Count the step, and warn once, or raise ``TrainingError`` if the arguments say so. Alike on every rank."""
        where = f"step {self._trainer.state.global_step + 1}, field {self._reader.label_name!r}"
        if empty_step_of(self._trainer.args) == "error":
            raise TrainingError(
                "no label counts in this step",
                where=where,
                expected="at least one label that is not -100",
                hint="leave out samples without labels, take a larger batch, or set empty_step='warn'",
            )
        self._is_empty = True
        self._meter.left_out.empty_steps += 1
        if self._meter.left_out.empty_steps == 1 and self._trainer.is_world_process_zero():
            _logger.warning(
                "no label counts in this step (%s): its loss is 0.0 and its gradients are zero. It is said once; "
                "the closing summary counts such steps, empty_step='error' ends the run at the first.",
                where,
            )

    def without_nan(self, model: nn.Module, loss: Tensor) -> Tensor:
        """The loss of a step after backward; 0/0 in a step in which no label counts becomes zero, in gradients too.

        Other steps pass unchanged, and so do a finite loss and finite gradients of a step without labels.
        """
        if not self._is_empty:
            return loss
        # 0/0 in the loss can make nan of gradients too. A parameter whose gradient is finite keeps it: it may come from
        # what the loss has beside the labels.
        for parameter in model.parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                parameter.grad.zero_()
        return loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
