"""The proof that a run's own model keeps the sequences of its own data apart, before the first step.

A few sequences of the first batch run alone and as one packed row through the model that is about to be trained
(:mod:`ullage.mixers.proof`). Where they differ, the next coarser way of the model is tried; where none is accepted,
every rank raises. All ranks try the same ways and make equally many calls: one without data runs a placeholder. The
proof is repeated before a step that has what none before it had: images, clips, and either in several sizes.

Of sequences with images, three stand in the trial: one, another of another size, and the first one again. The pixels of
the second are mirrored and halved. So a mean, a maximum or a count over the row is not that of any sequence alone, also
where a step has one image only, and whatever sorts the row moves them, from the smallest on or from the largest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ullage.core.batch import RaggedBatch
from ullage.core.columns import is_media
from ullage.core.display import quantity
from ullage.core.errors import InputError
from ullage.mixers import call_equally_often, is_packed
from ullage.mixers.items import PIXELS
from ullage.mixers.packed_model import SequencesMeet, first_accepted, forward_of, way_of
from ullage.mixers.proof import Proof, prove
from ullage.mixers.trial import Trial, trial_of
from ullage.mixers.ways import Way
from ullage.ranks.world import gather, rank_here
from ullage.training.batches import targets
from ullage.training.batches.amounts import items_in
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.batches.reading import BatchReader
from ullage.training.loss.divisions import OwnLoss, declared_division, require_counted
from ullage.training.loss.finding import LossTrial, drawable, is_unknown
from ullage.training.setup.sharding import sharding_of
from ullage.training.step.packable import StepItems, items_of_step, make_packable

if TYPE_CHECKING:
    import transformers

_logger = logging.getLogger(__name__)

#: Of a step in which some tokens have no label, beside the first of each sequence.
_UNLABELLED = "tokens without labels"
#: What a model makes its outputs of, beside the rows of images.
_SEEN = ("input_ids", "token_type_ids", "mm_token_type_ids")

#: Sequences of a trial: the same number on every rank.
_SEQUENCES = 4
#: Most tokens of a row, and most numbers of its logits, which no chunks make smaller here.
_MOST_TOKENS, _MOST_LOGITS = 8192, 1 << 27


class PackingProof:
    """The proof of a trainer's packing, once per run.

    ``trainer``: whose model and arguments count. ``reader``: of its batches. ``packer``: of its steps. Nothing is
    proved without packing, and under ``packing_verify=False``.

    Attributes:
        candidates: the ways of the model, as they were before it was packed; None where nobody knows.
        last: the last proof of this rank, None before.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Any) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self.candidates: tuple[Way, ...] | None = None
        self.last: Proof | None = None
        #: What the batches that were proved had: in training, and in an evaluation without one.
        self._seen: frozenset[str] = frozenset()
        self._evaluated: frozenset[str] = frozenset()

    def pack(self, model: nn.Module) -> None:
        """Make a bare model keep packed sequences apart, in a way that the first step proves."""
        self.candidates = make_packable(model, is_sharded=self._packer.meets_every_microbatch)

    def begin_run(self) -> None:
        """Prove the next batch: a run begins, or another model."""
        self._seen = self._evaluated = frozenset()

    @property
    def _capacity(self) -> int | None:
        """Tokens of a row; None where nothing is to be proved."""
        options = self._packer.options
        # Whoever shards a model by hand looks at its parts; rows of a trial are whole on every rank.
        return None if options is None or sharding_of(self._trainer.model) is not None else options.capacity

    @property
    def _verifies(self) -> bool:
        return self._packer.options is not None and self._packer.options.verify

    def _loss_trial(
        self,
        model: nn.Module,
        microbatches: Sequence[RaggedBatch],
        chosen: Sequence[RaggedBatch],
        counted: bool,
        meeting: _Meeting,
        features: frozenset[str] = frozenset(),
    ) -> LossTrial | None:
        """The trial of a loss that its source does not tell; None where it is known, or declared and believed."""
        trainer, packer = self._trainer, self._packer
        if packer.padded_loss is not None or packer.weigher.is_on or not is_unknown(trainer, self._reader.model):
            return None
        declared = declared_division(trainer, OwnLoss.of(trainer))
        if not self._verifies and declared is not None:
            return None
        require_counted(trainer, declared, counted)
        classes = getattr(getattr(self._reader.model, "config", None), "num_labels", None) or 0
        values = drawable(microbatches, self._reader.label_name, classes)
        options = {"call": within_engine(model), "gather": meeting.all, "counted": counted}
        options |= {"hides": _UNLABELLED in features, "backward": not packer.meets_every_microbatch}
        return LossTrial(trainer, self._reader, chosen, values, **options)

    def _find_here(self, model: nn.Module, microbatches: Sequence[RaggedBatch], capacity: int) -> None:
        """Find what the loss is on this rank alone, for an evaluation before any step; unknown if no rule fits."""
        self._evaluated |= {"loss"}
        meeting, counted = _Meeting(False), self._reader.label_name in microbatches[0]
        with self._trainer.compute_loss_context_manager(), suppress(InputError):
            loss = self._loss_trial(model, microbatches, self._choose(microbatches, capacity), counted, meeting)
            if loss is not None:
                loss.find()
                loss.problem_of_row(meeting.all)

    def _features_of_labels(self, batch: PackedBatch, count: Any) -> frozenset[str]:
        """Whether a step has tokens without labels, where that may be news of a loss that no source tells."""
        found = self._reader.found_loss
        if count is None or (found is None and self._seen):
            return frozenset()
        # At the first step it is not known yet whether first labels count.
        first = 0 if found is not None and found.shifts is False else len(batch.plan.order)
        return frozenset({_UNLABELLED} if int(count.flatten()[0]) < batch.num_tokens - first else ())

    def before_step(self, model: nn.Module, batch: PackedBatch, items: StepItems = (), count: Any = None) -> None:
        """Prove the packing before the first step, or one with something new, and find what the loss is. Collective.

        ``model``: as the training loop calls it. ``items`` and ``count``, the labels that count: of the step, the same
        on every rank. Raises ``SequencesMeet`` on every rank if no way is accepted, and ``InputError`` for a loss that
        cannot be packed.
        """
        capacity, is_sharded = self._capacity, self._packer.meets_every_microbatch
        if capacity is None:
            return
        self._apart_until_proved(False)
        features = self._features(items) | self._features_of_labels(batch, count)
        if features <= self._seen:
            return
        known = bool(self._seen)
        several, bare_model = self._trainer.args.world_size > 1, self._reader.model
        self._reader.form  # noqa: B018  read once, whatever the ways that are tried look like
        chosen = self._choose_with_items(batch.microbatches, capacity, features, several)
        with self._trainer.compute_loss_context_manager():
            meeting = _Meeting(several)
            loss = self._loss_trial(model, batch.microbatches, chosen, count is not None, meeting, features)
            if loss is not None:
                loss.find()
        self._seen |= features
        if loss is None and not self._verifies:
            return

        def problem() -> str | None:
            meeting = _Meeting(several)
            try:
                mine = None
                if is_sharded and not call_equally_often(bare_model):
                    mine = "its layers run once per length of a row, and its parameters are sharded"
                elif self._verifies:
                    mine = self._prove(model, chosen, meeting.any).problem()
                if loss is not None and not meeting.any(mine is not None):
                    mine = loss.problem_of_row(meeting.all)
            except _Elsewhere as error:
                return str(error)
            except Exception as error:  # whatever a model raises on a packed row, it cannot be packed in this way
                mine = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            return meeting.end(mine)

        current = way_of(bare_model)
        ways: Sequence[Way] = (current,) if self.candidates is None or not self._verifies else self.candidates
        if not is_packed(bare_model):  # it takes the lengths by itself, as it is
            ways = (current, *(way for way in ways if way.kind != "native"))
        if known and current in ways:  # a finer one was refused
            ways = ways[ways.index(current) :]
        try:
            with self._trainer.compute_loss_context_manager():
                way = first_accepted(bare_model, ways, problem, current=current)
        except SequencesMeet as error:
            raise (error if loss is None or not loss.is_unfit else loss.refusal()) from None
        self._tell(way)

    def _features(self, items: StepItems) -> frozenset[str]:
        """What a step shows of the model, by which it is proved again; the same on every rank."""
        there = {pair for rank in items for microbatch in rank for pair in microbatch}
        names = [name for name, _ in there]
        return frozenset({"tokens", *names, *(f"{name} of several sizes" for name in names if names.count(name) > 1)})

    def before_evaluation(self, model: nn.Module, batch: RaggedBatch) -> None:
        """Prove the packing of a model that is evaluated and was not trained, forward only.

        Not collective, and as many calls on every rank, unless its parameters are sharded and it takes images. Raises
        ``SequencesMeet`` on a rank where something differs.
        """
        capacity, is_sharded = self._capacity, self._packer.meets_every_microbatch
        if capacity is None or self._reader.form != "flattened":
            return
        several, in_train = is_sharded and self._trainer.args.world_size > 1, self._trainer.is_in_train
        microbatches = [targets.join_targets(batch)]
        if not is_sharded and len(batch) and self._reader.found_loss is None and "loss" not in self._evaluated:
            self._find_here(model, microbatches, capacity)
        if not self._verifies:
            return
        features = self._features(items_of_step(self._reader.model, microbatches, several=several))
        # A run proves its first step, forward and backward, and may take another way then.
        is_new = not features <= self._seen | self._evaluated | ({"tokens"} if in_train else set())
        is_apart = is_new and in_train and not is_sharded
        self._apart_until_proved(is_apart)
        if is_apart or not is_new or not (several or len(batch)):
            return
        with self._trainer.compute_loss_context_manager():
            chosen = self._choose_with_items(microbatches, capacity, features, several)
            proof = self._prove(model, chosen, None, training=False)
        self._evaluated |= features
        problem = proof.problem()
        if problem is not None:
            raise SequencesMeet(
                "packed, the sequences of this model do not get what they get alone",
                where=type(self._reader.model).__name__,
                found=problem,
                hint="leave packing_capacity out; packing_verify=False evaluates it packed all the same",
            )
        self._tell(way_of(self._reader.model))

    def _apart_until_proved(self, apart: bool) -> None:
        """Have a model that is not proved yet take images by sequence, or in the way that it is packed in."""
        forward = forward_of(self._reader.model)
        if forward is not None and self.candidates is not None:
            forward.runs_items_apart = apart

    def _prove(
        self,
        model: nn.Module,
        chosen: Sequence[RaggedBatch],
        agree: Callable[[bool], bool] | None,
        *,
        training: bool = True,
    ) -> Proof:
        trial = self._trial(chosen)
        forget_trace(model)
        # Not through DDP or the engine: their hooks on outputs and gradients belong to steps.
        called = within_engine(model)
        proof = prove(
            self._reader.model,
            trial,
            call=called,
            training=training,
            backward=training,
            dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._trainer.accelerator.mixed_precision),
            agree=bool if agree is None else agree,
            in_step=self._packer.meets_every_microbatch,
        )
        forget_trace(model)
        self.last = proof
        return proof

    def _tell(self, way: Way) -> None:
        proof = self.last
        if proof is None or rank_here(self._trainer.args.world_size > 1):
            return
        name = type(self._reader.model).__name__
        if self._reader.found_loss is not None:
            _logger.info("by its numbers the loss of %s is %s", name, self._reader.found_loss)
        _logger.info(
            "packing proved on %s of %s tokens: %s, %s; %d tokens in %.2f s",
            quantity(len(proof.lengths), "sequence"),
            ", ".join(map(str, proof.lengths)),
            name,
            way,
            proof.tokens,
            proof.seconds,
        )
        for part in proof.left_out:
            if self._reader.found_loss is not None and part.startswith("the loss"):
                continue
            _logger.info("the proof of packing leaves out %s", part)
        if proof.weak:
            _logger.warning(
                "the proof of packing is weak: %s gives other numbers each time it runs a sequence, so sequences that "
                "see each other a little would not be noticed",
                name,
            )

    # The trial.

    def _most(self, capacity: int) -> int:
        """Tokens that a row of a trial may have."""
        vocabulary = int(getattr(getattr(self._reader.model, "config", None), "vocab_size", None) or 1)
        return max(min(capacity, _MOST_TOKENS, _MOST_LOGITS // vocabulary), 16)

    def _choose(self, microbatches: Sequence[RaggedBatch], capacity: int) -> list[RaggedBatch]:
        """A few sequences of different lengths, one batch each, that make up a row of at most the capacity."""
        there, most = [each for each in microbatches if each.numel()], self._most(capacity)
        if not there:
            return [targets.placeholder(microbatches[0], [1])] * _SEQUENCES
        places = [(batch, place) for batch in there for place in range(len(batch))]
        lengths = np.concatenate([each.layout.lengths for each in there])
        order = [int(each) for each in np.argsort(lengths, kind="stable") if lengths[each]]
        # The longest that leaves room for others, the shortest, and one between, of three lengths if there are.
        fitting = [each for each in order if lengths[each] <= most * 0.6] or order[:1]
        long, short = fitting[-1], fitting[0]
        can_cut = not there[0].per_sequence and not any(batch.items for batch in there)
        if len(set(lengths[fitting])) < 3 and can_cut and lengths[long] > 3:
            # Of too few lengths: cut to others.
            size = int(lengths[long])
            sizes = (size // 4 + 1, size, size // 2 + 1, size // 2 + 1)
            return [
                _one_sequence(*places[fitting[-1 - at % len(fitting)]], most=min(each, most))
                for at, each in enumerate(sizes)
            ]
        others = [each for each in fitting if lengths[each] not in (lengths[long], lengths[short])]
        middle = others[len(others) // 2] if others else fitting[len(fitting) // 2]
        taken = [short, long, middle]
        chosen = [_one_sequence(*places[each], most=most) for each in taken]
        # And one more of a length that is there: by lengths, these two share a call.
        alike = [each for each in fitting if each not in taken and lengths[each] in lengths[taken]]
        longer = [each for each in order if each != middle and lengths[each] > lengths[middle]]
        if not alike and longer and can_cut:
            return [*chosen, _one_sequence(*places[longer[0]], most=int(lengths[middle]))]
        return [*chosen, _one_sequence(*places[alike[-1] if alike else middle], most=most)]

    def _choose_with_items(
        self, microbatches: Sequence[RaggedBatch], capacity: int, features: frozenset[str], several: bool
    ) -> list[RaggedBatch]:
        """The shortest and a long sequence, and three with items of each kind, of those of all ranks. Collective.

        They are the same on every rank: ranks gather the parameters of a tower in each call of it. Without items in the
        step, a few of this rank.
        """
        kinds = [name for name in PIXELS.values() if name in features]
        if not kinds:
            return self._choose(microbatches, capacity)
        config, rank = getattr(self._reader.model, "config", None), rank_here(several)
        known: tuple[list[Any], list[Any]] = [], []
        for number, batch in enumerate(microbatches):
            keys = [(int(length), rank, number, place) for place, length in enumerate(batch.layout.lengths)]
            known[0].extend(key for key in keys if key[0])
            known[1].extend((keys[place], name, size) for place, name, size in items_in(batch, config))
        gathered = gather(known, several)
        there, items = (sorted(each for rank in gathered for each in rank[which]) for which in range(2))
        fitting = [key for key in there if key[0] <= self._most(capacity) * 0.6] or there[:1]
        wanted = [there[0], fitting[-1]]
        for kind in kinds:
            having = [(key, size) for key, name, size in items if name == kind]
            first, size = having[0]
            # Another sequence, of another size, if there are such.
            other, _ = min(having, key=lambda each: (each[0] == first, each[1] == size))
            wanted += [first, other, first]
        held = {key: _one_sequence(microbatches[key[2]], key[3], most=capacity) for key in {*wanted} if key[1] == rank}
        found = {key: batch for each in gather(held, several) for key, batch in each.items()}
        return [_mirrored(found[key]) if at % 3 == 0 and at else found[key] for at, key in enumerate(wanted)]

    def _trial(self, chosen: Sequence[RaggedBatch]) -> Trial:
        """The keywords of the calls, of the fields that the model takes."""
        each = [targets.split_targets(batch) for batch in chosen]
        samples = [dict(sample) for batch in each for sample in batch.samples()]
        if self._packer.padded_loss is not None:
            # Its loss is made of rows; what the model makes of tokens and images is what packing could change.
            samples = [{name: sample[name] for name in sample if name in _SEEN or is_media(name)} for sample in samples]
        taken = set(self._reader.forward_parameters)
        samples = [{name: value for name, value in sample.items() if name in taken} for sample in samples]
        whole = [name for name in each[0].per_sequence if name in samples[0]]
        return trial_of(self._reader.model, samples, device=self._trainer.args.device, per_sequence=whole)


class _Elsewhere(Exception):
    """Another rank has a problem that ends this rank's proof too."""


class _Meeting:
    """Questions that all ranks answer in one proof, and its end, which one with an error comes to early."""

    def __init__(self, several: bool) -> None:
        self._several = several

    def any(self, mine: bool) -> bool:
        """Whether it holds on any rank. Collective. Raises where another rank has ended with an error."""
        return any(self.all(mine))

    def all(self, mine: Any) -> list[Any]:
        """What every rank has. Collective. Raises where another rank has ended with an error."""
        answers = gather((False, mine), self._several)
        problem = _first([what if ended else None for ended, what in answers])
        if problem is not None:
            raise _Elsewhere(problem)
        return [what for _, what in answers]

    def end(self, mine: str | None) -> str | None:
        """The first problem of any rank. Collective."""
        answers = gather((True, mine), self._several)
        return mine if not self._several else _first([what if ended else None for ended, what in answers])


def _first(problems: Sequence[Any]) -> str | None:
    return next((f"rank {rank}: {what}" for rank, what in enumerate(problems) if what is not None), None)


def within_engine(model: nn.Module) -> Any:
    """The module that DDP or DeepSpeed's engine calls, without their hooks on outputs and gradients."""
    is_engine = isinstance(model, nn.parallel.DistributedDataParallel) or type(model).__name__ == "DeepSpeedEngine"
    return model.module if is_engine else model


def _one_sequence(batch: RaggedBatch, place: int, *, most: int) -> RaggedBatch:
    """One sequence of a batch, cut to what a row may have where it can be cut."""
    sample = batch.samples()[place]
    length = int(batch.layout.lengths[place])
    if length > most and not batch.per_sequence and not batch.items:
        sample = {name: value[:most] for name, value in sample.items()}
    return RaggedBatch.from_samples([sample], per_sequence=batch.per_sequence, per_item=batch.per_item)


def _mirrored(batch: RaggedBatch) -> RaggedBatch:
    """A sequence with the pixels of its images mirrored and halved: others in the same form, none brighter."""
    (sample,) = batch.samples()
    pixels = {name: sample[name] for name in PIXELS.values() if name in sample}
    changed = {name: value.flip(-1).mul(0.5).to(value.dtype) for name, value in pixels.items()}
    return RaggedBatch.from_samples([sample | changed], per_sequence=batch.per_sequence, per_item=batch.per_item)


def forget_trace(model: Any) -> None:
    """Let ZeRO 3 record the order of modules anew: that of calls before a step is not that of the step.

    DeepSpeed 0.19.8 gathers and lets go of parameters by the first order that it sees, and a step of a model with
    adapters then met parameters that had been let go ("size of tensor a (0)").
    """
    coordinate = getattr(
        getattr(getattr(model, "optimizer", None), "parameter_offload", None), "get_param_coordinator", None
    )
    if coordinate is None:
        return
    coordinator = coordinate()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    coordinator.reset_step()
