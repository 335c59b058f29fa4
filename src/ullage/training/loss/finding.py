"""What a loss is a sum or a mean of, found by its own numbers.

A packed step runs as microbatches, so a loss can be packed only where the losses of microbatches make up that of the
step. Of a loss whose source nobody has read this is told by a few sequences: each by itself, and all in one padded
batch, as the loss is computed without packing. The rules that give the second number out of the first ones are left;
then one must give that of the packed row too.

===============  ===============================================================================
rule             the loss of sequences together
===============  ===============================================================================
"sum"            Σ loss, where each is divided by the same ``num_items_in_batch``
"total"          Σ loss
"token_mean"     Σ labels · loss / Σ labels; with the first label of each sequence, or without
"sequence_mean"  Σ loss / sequences
===============  ===============================================================================

Sequences have unequal numbers of labels, first labels among them, and values drawn from those of the step, so that
another weight per class or token shows. Where padding changes what the model makes of a sequence, sequences of one
length take the place of the padded batch; where a loss takes packed rows only, rows of one sequence that of each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.attention.heads import is_loss_known, loss_shifts
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.mixers.at_rest import at_rest
from ullage.mixers.packed_model import forward_of, runs_whole
from ullage.mixers.proof import limits_of
from ullage.mixers.trial import outputs_by_name, without_balance
from ullage.mixers.ways import own_attention
from ullage.training.batches import counting, forms, targets
from ullage.training.batches.reading import BatchReader, FoundLoss
from ullage.training.loss.divisions import READ_DIVISIONS, OwnLoss, declared_division, nearest_in
from ullage.training.setup.arguments import weight_field

if TYPE_CHECKING:
    import transformers

#: What is more than this many times as far off as the nearest rule is not meant, where a limit is wide.
_FARTHER, _NEAR = 4.0, 1e-3
#: The limit where weights are in half precision, and that of a loss which differs from one call to the next.
_HALF, _MOST = 0.02, 0.05
#: Classes that a step may lack and labels are drawn from all the same.
_MOST_CLASSES = 64
#: Weights at whose gradient a loss is looked at, the last of the model, and directions in it.
_WEIGHTS, _TURNS = 4, (0.7, 1.3, 2.9, 3.7, 5.1, 6.7)
#: In this order a loss is tried: as it is without packing; without padding, which some models see; as a packed row.
_FORMS = ("padded", "one length", "one length, all labels", "row")

_Numbers = np.ndarray[Any, np.dtype[np.float64]]


def is_unknown(trainer: transformers.Trainer, model: nn.Module) -> bool:
    """Whether the loss of a trainer is not known by its source: one of its own, or of a model of another author."""
    own = OwnLoss.of(trainer)
    if own is None:
        return getattr(trainer, "packing_loss", None) is not None or not is_loss_known(model)
    return own.owner is None or nearest_in(READ_DIVISIONS, own.owner, most=1) is None


class LossTrial:
    """Losses of a few sequences, by which the rule of a loss is found.

    Args:
        trainer: whose loss it is.
        reader: of its batches, which is told the rule.
        samples: batches of one sequence, on the host.
        values: what labels are drawn from; None where they stay what they are.
        call: the model as the loss is to call it, without an engine's hooks.
        gather: gives what every rank has for a value. All ranks take the same branches.
        counted: whether the step has labels to count.
        hides: whether some tokens are to have no label.
        backward: whether gradients are looked at too; not where ranks gather weights in each call.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        reader: BatchReader,
        samples: Sequence[RaggedBatch],
        values: Tensor | None,
        *,
        call: Any,
        gather: Callable[[Any], list[Any]],
        counted: bool,
        hides: bool = False,
        backward: bool = True,
    ) -> None:
        self._trainer, self._reader, self._call, self._gather, self._counted = trainer, reader, call, gather, counted
        self._hides, self._backward = hides, backward
        self._declared = declared_division(trainer, OwnLoss.of(trainer))
        # The longest first, as models that take lengths want them.
        natural = sorted(samples, key=lambda each: -each.numel())
        natural = [each for each in natural if each.numel() > 1] or natural  # a mean over one shifted label is nan
        drawn = natural if values is None else [self._with_drawn(*each, values) for each in enumerate(natural)]
        self._drawings = (drawn, natural)
        self._samples, self._form, self._limits = drawn, "padded", limits_of(None)
        self._alone: dict[Any, list[_Numbers]] = {}
        self._numbers, self._outputs, self._limit = "", [], 0.0
        self._farness: dict[FoundLoss, float] = {}
        #: The rules that are left, the first to be preferred; whether none was that of the last row.
        self.rules: list[FoundLoss] = []
        self.is_unfit = False

    def find(self) -> None:
        """Find the rules that give the loss of all sequences together. Collective.

        Raises ``InputError`` on every rank where there is none, with the numbers.
        """
        error: Exception | None = None
        for samples, form in ((samples, form) for samples in self._drawings for form in _FORMS):
            self._samples, self._form, self._alone, fitting = samples, form, {}, None
            try:
                fitting = self._fitting()
            except Exception as raised:  # whatever a loss raises, it does not take this form
                error = error or raised
                self._numbers = f"{type(error).__name__}: {error}"
            # Placeholders tell nothing.
            every = self._gather((self._samples[0].numel() > 1, fitting, self._numbers))
            told = [(each, numbers) for tells, each, numbers in every if tells]
            if all(each is not None for each, _ in told):
                self.rules = [rule for rule in self._candidates() if all(rule in each for each, _ in told)]
                if self.rules:
                    # What padding changes a little may still tell a mean over labels from one over sequences.
                    self.rules.sort(key=lambda rule: self._farness.get(rule, 0.0))
                    return
                self._numbers = next((numbers for each, numbers in told if not each), self._numbers)
                raise self.refusal()
        raise self.refusal() from error

    def problem_of_row(self, gather: Callable[[Any], list[Any]]) -> str | None:
        """Why no rule gives the loss of the packed row; None if one does, which the reader is told. Collective."""
        whole, told, passed = self._together(), "", []
        if self._form == "row" and runs_whole(self._reader.model):  # what was joined by a rule proves none
            self.is_unfit = True
            return f"its loss is not known from sequences in rows of a batch: {self._numbers}"
        self._form = "row" if self._form == "row" else "padded"
        for rule in self.rules:
            wanted = self._expected(rule)
            found = self._loss(targets.split_targets(whole), rule)
            told = told or f"{found[0]:.6g} for {wanted[0]:.6g}, by {rule}"
            passed += [rule] * (_distance(found, wanted) <= max(self._limit, min(self._limits.loss, _HALF)))
        every = gather((self._samples[0].numel() > 1, passed))
        agreed = [rule for rule in self.rules if all(rule in each for tells, each in every if tells)]
        if not agreed and self._form == "padded" and OwnLoss.of(self._trainer) is not None:
            agreed = [replace(self.rules[0], apart=True)]
        self._tell(agreed[0] if agreed else None)
        self.is_unfit, self._numbers = not agreed, told
        return None if agreed else f"the loss of a packed row is not that of its sequences: {told}"

    # Rules.

    def _candidates(self) -> list[FoundLoss]:
        """The rules that are asked about, the first to be preferred where two give the same numbers."""
        own, name, first = OwnLoss.of(self._trainer), self._reader.label_name, self._samples[0]
        words = ["token_mean", "total", "sequence_mean"] if self._counted else ["total", "sequence_mean"]
        if self._counted and (self._declared == "sum" or (own is not None and own.takes_count)):
            words.insert(0, "sum")
        shifts = [loss_shifts(self._reader.model)]
        by_token = name is not None and name in first and name not in first.per_sequence
        if name is not None and by_token and not targets.is_joined(first):
            # Only where first labels are there can a loss show whether it counts them.
            there = any(bool((each[name][:1] != IGNORED_LABEL).any()) for each in self._samples)
            shifts = [False, True] if there else [shifts[0] is not False]
        return [FoundLoss(word, each) for word in words for each in shifts]

    def _fitting(self) -> list[FoundLoss] | None:
        """The rules that fit in this form; None where it tells nothing, since padding changes what the model makes."""
        uncut, error = self._samples, None
        if self._form.startswith("one length"):
            self._samples = self._of_one_length(all_labels=self._form != "one length")
        self._outputs.clear()
        wanted: dict[FoundLoss, _Numbers] = {}
        found: dict[bool, _Numbers] = {}
        try:
            for counted in (True, False):
                rules = [rule for rule in self._candidates() if (rule.division == "sum") == counted]
                try:
                    expected = {rule: self._expected(rule) for rule in rules}
                    if rules and self._form != "row":
                        found[counted] = self._loss(self._inputs(self._together()), rules[0])
                    wanted |= expected
                except Exception as raised:  # a function may need the count
                    error = raised
            if not wanted:
                raise error or InputError("no rule to try")
            if self._form == "row":
                return [
                    rule for rule in self._candidates() if rule in wanted and self._declared in (None, rule.division)
                ]
            alone, whole = self._outputs[: len(self._samples)], self._outputs[-1:]
            rules = [rule for rule in self._candidates() if rule in wanted]
            repeated = self._loss(self._inputs(self._samples[0]), rules[-1])
        finally:
            self._samples = uncut
            self._outputs.clear()
        # A model that differs from itself may differ so from one call to the next.
        self._limit = max(
            min(self._limits.loss, _HALF), min(8 * _distance(repeated, self._alone[self._key(rules[-1])][0]), _MOST)
        )
        by_rule = dict.fromkeys(f"{wanted[rule][0]:.6g} by {rule}" for rule in rules)
        self._numbers = f"{found[rules[-1].division == 'sum'][0]:.6g} together, {', '.join(by_rule)}"
        distance = {rule: _distance(found[rule.division == "sum"], wanted[rule]) for rule in rules}
        if self._form == "padded" and _differ(alone, whole[0], self._limits.outputs):
            self._farness = distance
            return None
        if self._declared is None and len(found) == 2 and _distance(found[True], found[False]) <= self._limit:
            rules = [rule for rule in rules if rule.division != "sum"]  # the count changes nothing
        near = max(_FARTHER * min(distance.values()), _NEAR)
        fitting = [rule for rule in rules if distance[rule] <= min(self._limit, near)]
        return [rule for rule in fitting if self._declared in (None, rule.division)]

    def _expected(self, rule: FoundLoss) -> _Numbers:
        """The loss of all sequences together, by a rule."""
        key = self._key(rule)
        if key not in self._alone:
            self._alone[key] = [self._loss(self._inputs(each), rule) for each in self._samples]
        alone = self._alone[key]
        if rule.division in ("sum", "total"):
            return np.sum(alone, 0)
        counts = [1 if rule.division == "sequence_mean" else self._count(each, rule.shifts) for each in self._samples]
        # A mean over no labels is nan, and counts nothing.
        parts = [count * loss for count, loss in zip(counts, alone) if count]
        return np.sum(parts, 0) / sum(counts) if parts else np.full_like(alone[0], np.nan)

    def _key(self, rule: FoundLoss) -> Any:
        return self._form, rule.division == "sum", rule.shifts if self._form == "row" else None

    def _count(self, sample: RaggedBatch, shifts: bool | None) -> int:
        assert self._reader.label_name is not None
        split = targets.split_targets(sample)
        elements = counting.label_elements(split, self._reader.label_name, shifts=shifts)
        return 0 if elements is None else int(counting.count_labels(elements))

    def _tell(self, rule: FoundLoss | None) -> None:
        self._reader.found_loss, forward = rule, forward_of(self._reader.model)
        if forward is not None:
            forward.division = None if rule is None else rule.division

    # Calls.

    def _loss(self, inputs: Any, rule: FoundLoss) -> _Numbers:
        """The loss as the trainer computes it, and without the balance of experts. Leaves the trainer as it was."""
        is_row, trainer, model = isinstance(inputs, RaggedBatch), self._trainer, self._reader.model
        self._tell(rule if is_row else None)
        count = torch.tensor(1000.0, device=trainer.args.device) if rule.division == "sum" else None
        outputs: list[Any] = []
        handle = model.register_forward_hook(lambda module, given, output: outputs.append(output))
        try:
            with (
                at_rest(self._call, training=True) as precision,
                nullcontext() if is_row else own_attention(model),
                _attributes_kept(trainer),
                # Weights in float32 tell rules apart that autocast's rounding makes one.
                torch.autocast(trainer.args.device.type, enabled=False),
                replaced(torch, "set_autocast_enabled", lambda *_: None),
                torch.set_grad_enabled(self._backward),
            ):
                # Outputs are asked for so that the head is not run in chunks.
                loss: Any = trainer.compute_loss(
                    self._call, trainer._prepare_inputs(inputs), return_outputs=True, num_items_in_batch=count
                )
                loss = (loss[0] if isinstance(loss, tuple) else loss).float().mean()
                slope = self._slope(loss)
        finally:
            handle.remove()
        self._limits = limits_of(precision.dtype, trainer.args.device)
        made = outputs[0] if outputs else None
        if self._form == "padded" and not is_row:
            self._outputs.append({name: value.detach() for name, value in outputs_by_name(made).items()})
        loss = loss.detach()
        return np.array([float(loss), float(without_balance(model, loss, made)[0].detach()), *slope])

    def _slope(self, loss: Tensor) -> list[float]:
        """The gradient at the last weights, along a few directions: it tells rules apart where losses are alike."""
        weights = [each for each in self._reader.model.parameters() if each.requires_grad and each.numel()][-_WEIGHTS:]
        if not loss.requires_grad or not weights:
            return []
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        parts = [torch.zeros_like(at) if each is None else each for at, each in zip(weights, found)]
        flat = torch.cat([each.detach().flatten().float() for each in parts])
        places = torch.arange(1, len(flat) + 1, dtype=torch.float32, device=flat.device)
        return [float((flat * torch.cos(places * turn)).sum()) for turn in _TURNS]

    def _inputs(self, batch: RaggedBatch) -> Any:
        """A batch in the form that is tried: as a packed row, or as the model takes it without packing."""
        batch = targets.split_targets(batch)
        if self._form == "row":
            return batch
        batch = batch.select(name for name in batch.names if name != weight_field(self._trainer.args))
        form, pad_token_id = forms.padded_form(self._reader.model), self._reader.pad_token_id
        return forms.keywords_of(batch, form, shifts=None, pad_token_id=pad_token_id)

    def _together(self) -> RaggedBatch:
        return _as_batch([sample for each in self._samples for sample in each.samples()], self._samples[0])

    def _with_drawn(self, place: int, sample: RaggedBatch, values: Tensor) -> RaggedBatch:
        """A sequence with other labels: by token as many as before, one of them at its first token."""
        name, (fields,) = self._reader.label_name, sample.samples()
        if name is None or name not in fields:
            return sample
        labels, random = fields[name], torch.Generator().manual_seed(place)
        drawn = values[torch.randint(len(values), tuple(labels.shape), generator=random)].to(labels.dtype)
        if name in sample.per_sequence:
            drawn = values[place % len(values)].to(labels.dtype).expand(labels.shape)
        is_label = labels != IGNORED_LABEL
        if name not in sample.per_sequence and not targets.is_joined(sample) and not is_label[0].any():
            is_label[0], is_label[len(labels) // 2 :][-1:] = True, len(labels) < 3
        if name not in sample.per_sequence and self._hides:
            is_label[2::3] = False
        return _as_batch([{**fields, name: torch.where(is_label, drawn, IGNORED_LABEL)}], sample)

    def _of_one_length(self, *, all_labels: bool) -> list[RaggedBatch]:
        """The longer sequences cut to one length, with unequal numbers of labels unless ``all_labels`` are kept."""
        first, name = self._samples[0], self._reader.label_name
        size = self._samples[min(2, len(self._samples) - 1)].numel()
        if size < 2 or targets.is_joined(first) or any(each.items for each in self._samples):
            raise InputError("sequences with images or targets are not cut")
        made = []
        for place, sample in enumerate(self._samples[:3]):
            (fields,) = sample.samples()
            fields = {key: value if key in first.per_sequence else value[:size] for key, value in fields.items()}
            if name in fields and name not in first.per_sequence and not all_labels:
                fields[name] = fields[name].clone()
                fields[name][size - place * size // 4 :] = IGNORED_LABEL
            made.append(_as_batch([fields], first))
        return made

    def refusal(self) -> InputError:
        """The error of a loss that no rule fits, with the numbers."""
        own, declared = OwnLoss.of(self._trainer), self._declared
        kinds = "a sum, or a mean over labels, over shifted labels or over sequences"
        return InputError(
            "this loss cannot be packed: that of a few sequences together is not made up of that of each alone",
            where=type(self._reader.model).__name__ if own is None else own.name,
            expected=kinds if declared is None else f"{declared!r}, as packing_loss says",
            found=self._numbers,
            hint="compute a loss in the Trainer that is one of these (compute_loss, compute_loss_func), or leave "
            "packing_capacity out; a packing_loss of the Trainer's class is believed under packing_verify=False",
        )


def drawable(microbatches: Sequence[RaggedBatch], name: str | None, num_classes: int) -> Tensor | None:
    """The labels of a step, each once, and all classes where these are few; None where they are no integers."""
    parts = [each[name].flatten() for each in microbatches if each.numel() and name is not None and name in each]
    if not parts or any(part.is_floating_point() or part.dtype == torch.bool for part in parts):
        return None
    values = torch.cat(parts).unique()
    values = values[values != IGNORED_LABEL]
    if len(values) and int(values.min()) >= 0 and int(values.max()) < num_classes <= _MOST_CLASSES:
        values = torch.arange(num_classes)
    return values if len(values) else None


def _as_batch(samples: list[dict[str, Any]], like: RaggedBatch) -> RaggedBatch:
    return RaggedBatch.from_samples(samples, per_sequence=like.per_sequence, per_item=like.per_item)


def _distance(found: _Numbers, wanted: _Numbers) -> float:
    """Relative difference of losses, and a tenth of that of slopes; infinite where a number is nan.

    Of a loss with a balance of experts that of the loss without it, if that is smaller.
    """
    scale = np.maximum(np.maximum(abs(found), abs(wanted)), 1e-30)
    apart = np.nan_to_num(abs(found - wanted) / scale, nan=np.inf)
    if found[0] != found[1] or not len(found[2:]):
        return float(apart[:2].min())
    slopes = np.linalg.norm(found[2:] - wanted[2:]) / max(np.linalg.norm(found[2:]), np.linalg.norm(wanted[2:]), 1e-30)
    return max(float(apart[0]), float(slopes) / 10)


def _differ(alone: Sequence[Mapping[str, Tensor]], together: Mapping[str, Tensor], limit: float) -> bool:
    """Whether an output by token or by sequence of a padded batch is not that of each sequence alone."""
    for name, value in together.items():
        parts = [outputs[name][0] for outputs in alone if name in outputs and outputs[name].shape[0] == 1]
        if len(parts) != len(value) or any(part.ndim != value.ndim - 1 for part in parts):
            continue
        by_token = value.ndim > 2 and all(part.shape[1:] == value.shape[2:] for part in parts)
        rows = [row[: len(part)] if by_token else row for row, part in zip(value, parts)]
        if any(row.shape != part.shape for row, part in zip(rows, parts)):
            continue
        scale = max(float(part.abs().max()) for part in parts)
        if any(float((row - part).abs().max()) > limit * scale for row, part in zip(rows, parts)):
            return True
    return False


@contextmanager
def _attributes_kept(owner: Any) -> Iterator[None]:
    """Within it an object has copies of its lists and dicts, such as the metrics that a loss appends to."""
    before = dict(vars(owner))
    vars(owner).update({name: _copied(value) for name, value in before.items()})
    try:
        yield
    finally:
        for name in vars(owner).keys() - before.keys():
            del vars(owner)[name]
        vars(owner).update(before)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        copy = value.copy()
        copy.update({key: _copied(part) for key, part in value.items()})
        return copy
    return value.copy() if isinstance(value, list) else value
