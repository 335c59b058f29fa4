"""The loss of a step: what a model's own loss does with labels, smoothed labels, and how losses divide under packing.

A packed step runs as several microbatches, so whatever they return has to be divided such that they add up to one
step. The loss of a model of transformers or of ours is a mean over its own labels. Of any other loss the division is
found by its numbers (:mod:`ullage.training.loss.finding`), which a declaration by ``packing_loss`` on the Trainer has
to agree with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from transformers.trainer_pt_utils import LabelSmoother

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.training.batches.reading import defining_class
from ullage.training.setup.releases import smoothed_loss

if TYPE_CHECKING:
    import transformers

_Value = TypeVar("_Value")

#: "total" is found and not declared: a sum that nothing divides.
Division = Literal["sum", "token_mean", "sequence_mean", "total"]

#: What ``packing_loss`` may be, and what it says of the loss of a microbatch.
DIVISIONS: dict[str, str] = {
    "sum": "divided by num_items_in_batch",
    "token_mean": "a mean over the microbatch's labels",
    "sequence_mean": "a mean over the microbatch's sequences",
}
#: By full name, trainers of others whose source was read: their ``compute_loss`` divides so. Who knows one adds it.
READ_DIVISIONS: dict[str, Division] = {}


def nearest_in(table: Mapping[str, _Value], kind: type, most: int | None = None) -> _Value | None:
    """What a table of others' classes by their full names has of the nearest base of a class; None for no base.

    By name, so that nothing of theirs is imported. ``most``: how many bases to ask, the class itself first.
    """
    names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__[:most])
    return next((table[name] for name in names if name in table), None)


@dataclass
class RaggedLabelSmoother(LabelSmoother):
    """transformers' ``LabelSmoother``, which shifts the labels exactly where the model's own loss does.

    transformers decides by the name of the model's class, and a causal model that is not in its list would be trained
    to predict its own input. ``shifts`` tells, or gives None, and then whoever calls decides. Takes outputs and labels
    that are a ``PackedSequence``, and jagged labels over a row in which sequences lie end to end.
    """

    shifts: Callable[[], bool | None] = field(default=lambda: None)
    #: Labels of the step, where an older Trainer does not hand them on.
    count: Any = None

    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        logits, labels = _aligned(logits, labels)
        own = self.shifts()
        count = self.count if num_items_in_batch is None else num_items_in_batch
        return smoothed_loss(super().__call__, self, logits, labels, shift_labels if own is None else own, count)


def _aligned(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Logits and labels as rows, -100 where there is no label."""
    if isinstance(logits, PackedSequence):
        logits, _ = pad_packed_sequence(logits, batch_first=True)
    if isinstance(labels, PackedSequence):
        labels, _ = pad_packed_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
    elif labels.is_nested:
        rows = labels.unbind()
        # One row as long as all labels together: sequences end to end. Otherwise one padded row per sequence.
        end_to_end = logits.shape[0] == 1 and logits.shape[1] == sum(len(row) for row in rows)
        labels = torch.cat(rows)[None] if end_to_end else torch.nested.to_padded_tensor(labels, float(IGNORED_LABEL))
    return logits, labels


@dataclass(frozen=True)
class OwnLoss:
    """A loss that a Trainer computes itself, in place of the model's.

    Attributes:
        name: for messages.
        function: ``compute_loss`` or ``compute_loss_func``.
        owner: the class that defines ``compute_loss``; None for a function, and for a method set on the instance.
    """

    name: str
    function: Callable[..., Any]
    owner: type | None

    @classmethod
    def of(cls, trainer: transformers.Trainer) -> OwnLoss | None:
        """The function in place of transformers' ``compute_loss`` or of the model's loss; None if nothing is."""
        if "compute_loss" in vars(trainer):
            return cls("compute_loss", trainer.compute_loss, None)
        owner = defining_class(type(trainer), "compute_loss")
        if owner is not None:
            return cls(f"{owner.__name__}.compute_loss", vars(owner)["compute_loss"], owner)
        given = trainer.compute_loss_func
        return None if given is None else cls("compute_loss_func", given, None)

    @property
    def takes_count(self) -> bool:
        """Whether ``num_items_in_batch`` is among its parameters; one that swallows keywords does not say so."""
        try:
            return "num_items_in_batch" in inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # built in: it has no signature
            return False


def declared_division(trainer: transformers.Trainer, own: OwnLoss | None) -> Division | None:
    """The value of ``packing_loss`` that holds for this loss, or what is known of a Trainer's source; None if neither.

    A declaration holds for the ``compute_loss`` of its class and of the classes under it. Whoever overrides the method
    once more has to declare the division of its own loss. Raises ``InputError`` for an unknown word.
    """
    word = getattr(trainer, "packing_loss", None)
    if word is not None and word not in DIVISIONS:
        raise InputError(
            "packing_loss is not a known division",
            where=type(trainer).__name__,
            expected=" or ".join(map(repr, DIVISIONS)),
            found=word,
        )
    owner = None if own is None else own.owner
    if word is not None and owner is not None and "packing_loss" not in vars(trainer):
        # Earlier in the order is nearer to the trainer's class. A declaration behind the owner was made for another
        # loss.
        order = type(trainer).__mro__
        declaring = next(each for each in order if "packing_loss" in vars(each))
        if order.index(declaring) > order.index(owner):
            word = None
    if word is None and owner is not None:
        return nearest_in(READ_DIVISIONS, owner, most=1)
    return word


def require_counted(trainer: transformers.Trainer, division: Division | None, counted: bool) -> None:
    """Raise ``InputError`` for a declared division by labels where there are none."""
    if division in ("sum", "token_mean") and not counted:
        raise InputError(
            f"packing_loss={division!r} needs labels to count",
            where=type(trainer).__name__,
            expected=f"a field {trainer.label_names or 'labels'}",
            found="none in the batch",
            hint="a loss without labels is divided by sequences: packing_loss = 'sequence_mean'",
        )


def division_of(trainer: transformers.Trainer, *, counted: bool, packed: bool = True) -> Division:
    """The division of a microbatch's loss, as it is declared or known without running it.

    Raises ``InputError`` where it is neither, of a ``packed`` step. Without packing a loss that takes the count is
    believed to divide by it, unless the trainer says otherwise, and any other to be a mean.

    Args:
        trainer: whose loss it is.
        counted: whether the step has labels to count.
        packed: whether microbatches are packed rows.
    """
    own = OwnLoss.of(trainer)
    division = declared_division(trainer, own) if packed or own is not None else None
    if not packed:
        is_sum = own is not None and own.takes_count and trainer.loss_is_scaled_for_ga is not False
        return division or ("sequence_mean" if not counted else "sum" if is_sum else "token_mean")
    require_counted(trainer, division, counted)
    if division is not None:
        return division
    if own is None and counted:
        return "token_mean"
    # What transformers asks of such a function.
    if own is not None and own.name == "compute_loss_func" and own.takes_count and counted:
        return "sum"
    meanings = ", ".join(f"{word!r} ({meaning})" for word, meaning in DIVISIONS.items())
    if own is None:
        hint = "give samples labels, or RaggedCollator(labels_from='input_ids'); else set packing_loss on the Trainer"
        raise InputError("the batches have no labels to count", expected=trainer.label_names, found="none", hint=hint)
    raise InputError(
        "packing must know how a loss of one's own is divided",
        where=own.name,
        expected="packing_loss on the Trainer's class",
        found="none",
        hint=f"set packing_loss to {meanings}; docs/losses.md shows each",
    )


def shares(parts: Iterable[float], whole: float) -> list[float]:
    """Fraction of a step over all ranks that each microbatch makes up: its part of what the step's mean is over.

    Over all ranks and microbatches the fractions add up to one, or are all zero where nothing counts.

    >>> shares([3, 0, 1], 8)
    [0.375, 0.0, 0.125]
    """
    return [part / whole if whole else 0.0 for part in parts]


def part_of_step(mean: Tensor, count: Tensor, whole: Tensor, ranks: int) -> Tensor:
    """A mean over ``count`` labels as its part of a mean over ``whole``. Does not wait for the device.

    ``ranks``: those whose gradients are averaged, which divides by them.
    """
    # A mean of 2.0 over 3 of a step's 12 labels is 0.5 of the step's mean. On two ranks it is given as 1.0, because
    # averaging their gradients halves it. A mean over no labels is nan, which a weight of zero would keep.
    return torch.where(count > 0, mean, torch.zeros_like(mean)) * (count / whole * ranks).to(mean.dtype)
