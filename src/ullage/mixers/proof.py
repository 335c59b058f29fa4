"""The proof that a packed row gives each sequence what it gets alone, made on the model itself.

A few sequences run one by one, as the model takes them without packing, and once more as one packed row, forward and
backward, with the model at rest (:mod:`ullage.mixers.at_rest`). Three things are compared: every output by token or by
sequence; the loss; and the gradients of the outputs, weighed by numbers that are always the same, and of the loss, with
respect to what the model embeds. Gradients are added up by id, so nothing has to be known of the calls that a way makes
of a row. Then the row runs with other tokens in every second sequence: nothing of the others may change, in outputs or
gradients, by more than the last digits, which finds what is smaller than the differences of other shapes.

How large a difference may be (:func:`limits_of`): products of other shapes are added up in another order, which changes
the last digits of a result, and every layer adds its own. Differences are relative to the largest number compared.

=========  =========  =========  ==============================================================================
precision  outputs    gradients  why
=========  =========  =========  ==============================================================================
float64    1e-8       1e-7       a part of many models (norms, rotary angles, losses) is float32 by itself
float32    2e-5       2e-4       a hundred times the rounding of a shallow model, ten times that of a deep one
TF32       1e-2       5e-2       products have 10 bits
bfloat16   6e-2       2e-1       8 bits; what a layer rounds grows with the depth
float16    2e-2       1e-1       11 bits, and gradients near the smallest number
=========  =========  =========  ==============================================================================

The precision is the lowest of any product of the calls, so autocast counts. Where tokens are routed to experts, a
rounding below float32 may send a token that stands between two of them to the other one, alone and in the row: then the
median token tells, and gradients are left out. One sequence is run twice first: where a
model differs from itself by more than that (random routing), eight times this difference is the limit, and the proof is
*weak*. A balance of experts is left out, and so is a loss that is not known to be a mean over labels or sequences.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ullage.attention.support import usable_tokens
from ullage.core.columns import is_media
from ullage.core.display import quantity
from ullage.core.errors import InputError, first_line, listed
from ullage.core.layout import Layout
from ullage.mixers.at_rest import Leaf, at_rest, embedding_of
from ullage.mixers.axes import Digest, Recorder, specs_of
from ullage.mixers.by_lengths import SOURCES, TARGETS, PackedRow
from ullage.mixers.forwards import Forward, ModelForward
from ullage.mixers.trial import CallOutcome, Trial, TrialRun
from ullage.mixers.ways import own_attention

#: How the problem of a model begins that does not run a sequence, packed or not.
FAILS_ALONE = "alone and unpacked the model fails"
#: A model that differs from itself may differ so many times more from one call to the next.
_BY_CHANCE = 8.0


class Limits(NamedTuple):
    """Largest relative difference of outputs, of gradients, and of the loss."""

    outputs: float
    gradients: float
    loss: float


_LIMITS = {
    torch.float64: Limits(1e-8, 1e-7, 1e-6),
    torch.float32: Limits(2e-5, 2e-4, 2e-5),
    torch.bfloat16: Limits(6e-2, 2e-1, 6e-2),
    torch.float16: Limits(2e-2, 1e-1, 2e-2),
}
_TF32 = Limits(1e-2, 5e-2, 1e-2)


def limits_of(dtype: torch.dtype | None, device: torch.device | str = "cpu") -> Limits:
    """The limits of a precision, which the module's table explains. An unknown one counts as bfloat16."""
    on_cuda = torch.device(device).type == "cuda"
    if dtype == torch.float32 and on_cuda and torch.backends.cuda.matmul.allow_tf32:
        return _TF32
    return _LIMITS.get(dtype or torch.float32, _LIMITS[torch.bfloat16])


@dataclass(frozen=True)
class TrialDifference:
    """One comparison.

    Attributes:
        kind: "outputs", "loss", "gradients", or "nan".
        name: which output, or which embedding.
        value: largest difference, relative to the largest number compared.
        limit: above which sequences do not get what they get alone.
        sequence: the one that differs most, where that is known.
        leaks: whether it is what other tokens in other sequences change, so that sequences see each other.
    """

    kind: str
    name: str
    value: float
    limit: float
    sequence: int | None = None
    leaks: bool = False

    @property
    def passed(self) -> bool:
        """Whether the difference is within its limit. nan is not."""
        return self.value <= self.limit

    def __str__(self) -> str:
        where = "" if self.sequence is None else f" of sequence {self.sequence}"
        return f"{self.name}{where} by {self.value:.0e} (limit {self.limit:.0e})"


@dataclass
class Proof:
    """What a proof has found.

    Attributes:
        model: class of the model.
        differences: all comparisons.
        module: the first module whose output differs, with its class; None without one.
        weak: whether the model differs from itself, so that only large differences count.
        left_out: what was not compared, and why.
        seconds: that it took.
        tokens: that were run, forward and backward.
        lengths: of the sequences.
    """

    model: str
    differences: list[TrialDifference] = field(default_factory=list)
    module: str | None = None
    weak: bool = False
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every sequence gets what it gets alone."""
        return all(each.passed for each in self.differences)

    def problem(self) -> str | None:
        """What differs and where it begins, in one clause; None if nothing does."""
        failed = [each for each in self.differences if not each.passed]
        if not failed:
            return None
        kinds = " and ".join(dict.fromkeys(each.kind for each in failed))
        where = f", first in {self.module}" if self.module is not None else ""
        return f"{kinds} of packed sequences are not those of each alone: {failed[0]}{where}"


def prove(
    model: nn.Module,
    trial: Trial,
    *,
    call: nn.Module | None = None,
    training: bool = True,
    backward: bool = True,
    parameters: bool = False,
    dtype: torch.dtype | None = None,
    agree: Callable[[bool], bool] = bool,
    in_step: bool = False,
    others: bool = True,
    poison: bool = False,
    bits: bool = False,
) -> Proof:
    """Run the sequences of a trial alone and as a row, and compare. Changes nothing of the model.

    Args:
        model: bare, packed in the way that is to be proved.
        trial: the keywords of the calls.
        call: what is called, where that is not the model itself: what wraps it.
        training: whether in training mode.
        backward: whether gradients are compared too.
        parameters: whether those of all parameters are, beside those of what is embedded.
        dtype: the precision of the model's products; found out if None.
        agree: whether something holds on any rank, asked on all of them, where they make their calls together.
        in_step: whether ranks wait for each other in each call, forward and backward. Then the loss is compared, and
            not differentiated: a sequence without labels has no gradient of it, on one rank and not on another.
        others: whether the row runs with other tokens in every second sequence too.
        poison: whether it runs with nan in what is embedded of them.
        bits: whether other tokens may change no bit of the others, on a CPU; else their last digits.

    Runs three times the row's tokens and those of its shortest sequence, forward and backward; once more where nobody
    knows what the loss is a mean of. Where something differs, the row runs again, and once more all of it. Trials of as
    many sequences make as many calls. Raises what the model raises.
    """
    begun = time.perf_counter()
    call = model if call is None else call
    sizes, proof = list(trial.sizes), Proof(type(model).__name__)
    proof.lengths = sizes
    with at_rest(call, training=training) as precision:
        run = TrialRun(model, trial, call=call, backward=backward)
        run.with_loss = not in_step
        if parameters:
            run.parameters = [each for each in model.parameters() if each.requires_grad]
        shortest = sizes.index(min(sizes))
        again, alone, packed = _run_all(run, shortest)
        missed = _missed(alone, packed)
        if any(each.outputs.keys() != packed.outputs.keys() for each in (again, *alone)):
            # What has no entry for each token or sequence would count in the gradients of one side alone.
            run.only = frozenset(packed.outputs).intersection(*(each.outputs for each in (again, *alone)))
            again, alone, packed = _run_all(run, shortest)
        changed = _with_others(run, alone, packed) if others else None
        spoiled = [*_poisoned(run.forward_only(), alone, packed)] if poison else []
        has_experts = is_routed(model)
        limits = limits_of(dtype or precision.dtype, run.device)
        proof.tokens = (2 + others) * sum(sizes) + sizes[shortest]
        has_ties = limits.outputs > _LIMITS[torch.float32].outputs and has_experts
        limits = _settle(proof, limits, _difference_of_repeats(alone[shortest], again))

        def compared() -> list[TrialDifference]:
            found = [*missed, *_compare(proof, trial, alone, packed, limits, has_ties), *spoiled]
            if changed is not None and not proof.weak and not has_ties:
                found += _reaching(*changed, trial, limits, rounding)
            return found

        # Sums of the same shape are added up in the same order, but for products of experts and for what a GPU does.
        is_exact = not has_experts and run.device.type == "cpu"
        digits = 0.0 if bits else max(16 * torch.finfo(dtype or precision.dtype or torch.float32).eps, 1e-9)
        rounding = digits if is_exact else inf
        proof.differences = compared()
        if agree(not proof.passed):
            # One sequence may have been the same twice by chance.
            repeated = run.packed(alone)
            proof.tokens += sum(sizes)
            if not proof.passed and not proof.weak:
                limits = _settle(proof, limits, _difference_of_repeats(packed, repeated))
                proof.differences = compared()
            # Where only gradients differ, no module's output does.
            if agree(any(not each.passed for each in proof.differences if each.kind != "gradients")):
                proof.module = _first_module(run.forward_only(), limits.outputs / 4)
                proof.tokens += 2 * sum(sizes)
    proof.seconds = time.perf_counter() - begun
    return proof


def _run_all(run: TrialRun, shortest: int) -> tuple[CallOutcome, list[CallOutcome], CallOutcome]:
    """The shortest sequence, every sequence alone, and the row."""
    with own_attention(run.model):
        again = _alone(run, shortest)
        again.of_parameters = []
        alone: list[CallOutcome] = []
        for place in range(len(run.trial.alone)):
            alone.append(_alone(run, place))
            if place:  # one gradient of the weights is held, not one per sequence
                _add_up(alone[0], alone[place])
    return again, alone, run.packed(alone)


def _missed(alone: Sequence[CallOutcome], packed: CallOutcome) -> list[TrialDifference]:
    """Outputs that each sequence alone has one entry of, as of its first token, and the row has not one for each."""
    names = set.intersection(*(set(each.outputs) for each in alone)) - set(packed.outputs)
    by_sequence = sorted(name for name in names if all(each.outputs[name][0].ndim == 2 for each in alone))
    return [
        TrialDifference("outputs", f"{name}, of which a row has not one for each,", inf, 0.0) for name in by_sequence
    ]


def _alone(run: TrialRun, place: int) -> CallOutcome:
    """One sequence in a call of its own. Raises ``InputError`` for whatever the model raises."""
    try:
        return run.alone(place)
    except Exception as error:
        given = run.trial.alone[place]
        others = [name for name in [*inspect.signature(type(run.model).forward).parameters][1:] if name not in given]
        raise InputError(
            f"{FAILS_ALONE} on {quantity(run.trial.sizes[place], 'token')}",
            found=f"{type(error).__name__}: {first_line(error)[:150]}; given {listed([*given])}, no {listed(others)}",
        ) from error


def _add_up(total: CallOutcome, other: CallOutcome) -> None:
    """Move the gradients by parameter of another call to those of the first."""
    pairs = zip(total.of_parameters, other.of_parameters, strict=True)
    # Not in place: torch gives both biases of an Elman cell one tensor.
    total.of_parameters = [b if a is None else a if b is None else a + b for a, b in pairs]
    other.of_parameters = []


def largest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of any number, relative to the largest number expected; nan and infinity count as infinite."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return inf
    scale = _most(expected)
    difference = _most([ours.detach().double() - theirs.detach().double() for ours, theirs in zip(found, expected)])
    return difference / max(scale, 1e-30) if isfinite(difference) and isfinite(scale) else inf


def _most(values: Sequence[Tensor]) -> float:
    """Largest absolute number; nan where one is."""
    each = [value.detach().abs().max().double() for value in values if value.numel()]
    return float(torch.stack(each).max()) if each else 0.0


def _settle(proof: Proof, limits: Limits, repeated: tuple[float, float]) -> Limits:
    """The limits, wider for a model that differs from itself."""
    outputs, gradients = repeated
    if outputs <= limits.outputs and gradients <= limits.gradients:
        return limits
    proof.weak = True
    wide = max(_BY_CHANCE * outputs, limits.outputs)
    return Limits(wide, max(_BY_CHANCE * gradients, limits.gradients), max(wide, limits.loss))


def _difference_of_repeats(first: CallOutcome, again: CallOutcome) -> tuple[float, float]:
    """How much two runs of one call differ, in outputs and in gradients."""
    outputs = max((largest(again.outputs[name], first.outputs[name]) for name in first.outputs), default=0.0)
    gradients = max((value for _, value in _gradients_differ([again], [first])), default=0.0)
    return outputs, gradients


def _compare(
    proof: Proof, trial: Trial, alone: Sequence[CallOutcome], packed: CallOutcome, limits: Limits, has_ties: bool
) -> Iterator[TrialDifference]:
    """All comparisons of a row with its sequences; what cannot be compared is noted.

    ``has_ties``: whether rounding may send single tokens to other experts.
    """
    left: list[str] = []
    if not packed.outputs:
        left.append("outputs: none has an entry for each token or sequence")
    for name, parts in packed.outputs.items():
        expected = [each.outputs[name][0] for each in alone]
        if not isfinite(_most(expected)):
            left.append(f"{name}: not finite for a sequence alone")
            continue
        scale = max(_most(expected), 1e-30)
        if has_ties:
            value, limit = _typical(parts, expected) / scale, limits.outputs / 3  # less than the largest of all
            yield TrialDifference("outputs", name, value, limit)
            continue
        each = [_most([ours.double() - theirs.double()]) / scale for ours, theirs in zip(parts, expected)]
        worst = max(range(len(each)), key=lambda place: each[place] if isfinite(each[place]) else inf)
        value = each[worst] if isfinite(each[worst]) else inf
        yield TrialDifference("outputs", name, value, limits.outputs, worst)
    if has_ties:
        left.append("gradients, and outputs but those of the median token: rounding sends a token to another expert")
    for name, value in () if has_ties else _gradients_differ([packed], alone):
        yield TrialDifference("gradients", f"gradients at {name}", value, limits.gradients)
    yield from _losses_compared(trial, alone, packed, limits, left)
    proof.left_out = list(dict.fromkeys(left))


def is_routed(model: nn.Module) -> bool:
    """Whether tokens are routed to experts."""
    names = (type(module).__name__.lower() for module in model.modules())
    return any("expert" in name or "naivemoe" in name for name in names)  # the latter in older transformers


def _typical(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The difference of the median token, of the largest of its numbers; infinite where it is not finite."""
    each = [
        (ours.double() - theirs.double()).abs().flatten(0, max(ours.ndim - 2, 0)).reshape(-1, ours.shape[-1]).amax(-1)
        for ours, theirs in zip(found, expected)
        if ours.numel()
    ]
    value = float(torch.cat(each).nan_to_num(nan=inf, posinf=inf).median()) if each else 0.0
    return value if isfinite(value) else inf


def _loss_difference(trial: Trial, alone: Sequence[CallOutcome], packed: CallOutcome) -> tuple[float, float] | None:
    """Relative difference of the losses, and the size of what was expected; None where they cannot be compared."""
    if packed.loss is None or trial.counts is None or not sum(trial.counts):
        return None
    counted = [(each.loss, count) for each, count in zip(alone, trial.counts) if count and each.loss is not None]
    expected = sum(float(loss) * count for loss, count in counted) / sum(trial.counts)
    value = abs(float(packed.loss) - expected) / max(abs(expected), 1e-30)
    return value if isfinite(value) else inf, abs(expected)


def _losses_compared(
    trial: Trial, alone: Sequence[CallOutcome], packed: CallOutcome, limits: Limits, left: list[str]
) -> Iterator[TrialDifference]:
    left.extend(packed.parts)
    if packed.loss is None:
        return
    difference = _loss_difference(trial, alone, packed)
    if difference is None:
        left.append("the loss: by its source it is not known to be a mean over labels, or over sequences")
        return
    value, size = difference
    # A mean over labels adds up what the outputs differ by; it may itself be near zero.
    limit = max(limits.loss, limits.loss / max(size, 1e-30))
    yield TrialDifference("loss", "the loss", value, limit)


def _gradients_differ(found: Sequence[CallOutcome], expected: Sequence[CallOutcome]) -> Iterator[tuple[str, float]]:
    """The largest difference of gradients: by embedding, those of its ids, and by parameter."""
    ours, theirs = _by_embedding(found), _by_embedding(expected)
    names = [name for name in theirs if name in ours]
    by_id = {name: (_join_items if is_media(name) else _add_by_id)(ours[name], theirs[name]) for name in names}
    yield from _relative(by_id)
    # Those by parameter were added up on the way: the first of several calls has the sum.
    sums = {}
    for place, (given, wanted) in enumerate(zip(found[0].of_parameters, expected[0].of_parameters)):
        like = wanted if given is None else given
        if like is not None:
            both = (torch.zeros_like(like) if each is None else each for each in (given, wanted))
            sums[f"parameter {place}"] = (next(both), next(both))
    yield from _relative(sums)


def _relative(sums: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[tuple[str, float]]:
    """By name, the largest difference of what was found and what was expected, relative to the largest expected."""
    most = max((_most([wanted]) for _, wanted in sums.values()), default=0.0)
    for name, (given, wanted) in sums.items():
        if not isfinite(_most([wanted])):
            continue
        # A gradient of 1e-7 beside others of 1 is rounding noise: it is compared with a thousandth of the largest.
        scale = max(_most([wanted]), 1e-3 * most, 1e-30)
        value = _most([given - wanted]) / scale if given.shape == wanted.shape else inf
        yield name, value if isfinite(value) else inf


def _by_embedding(outcomes: Sequence[CallOutcome]) -> dict[str, list[tuple[Tensor | None, Tensor]]]:
    by_name: dict[str, list[tuple[Tensor | None, Tensor]]] = {}
    for outcome in outcomes:
        for leaf, gradient in zip(outcome.leaves, outcome.gradients):
            if gradient is not None:
                by_name.setdefault(leaf.name, []).append((leaf.ids, gradient))
    return by_name


def _add_by_id(
    ours: Sequence[tuple[Tensor | None, Tensor]], theirs: Sequence[tuple[Tensor | None, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Gradients [ids, d] of both sides, added up by id; those of numbers lie end to end."""
    if any(ids is None for ids, _ in (*ours, *theirs)):
        first, second = (torch.cat([gradient.double() for _, gradient in side], 1) for side in (ours, theirs))
        return first, second
    # A row looks up the ids [5, 7, 5] at once, alone the sequences look up [5, 7] and [5]. By id both sides have one
    # gradient for 5 and one for 7.
    ids = torch.cat([each.flatten() for each, _ in (*ours, *theirs) if each is not None])
    known, place = ids.unique(return_inverse=True)
    number = sum(each.numel() for each, _ in ours if each is not None)
    sums = []
    for side, places in ((ours, place[:number]), (theirs, place[number:])):
        rows = torch.cat([gradient.reshape(-1, gradient.shape[-1]) for _, gradient in side]).double()
        sums.append(rows.new_zeros(len(known), rows.shape[1]).index_add(0, places, rows))
    return sums[0], sums[1]


def _join_items(
    ours: Sequence[tuple[Tensor | None, Tensor]], theirs: Sequence[tuple[Tensor | None, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Gradients of images [images, ...] of both sides, end to end; smaller ones with zeros behind, as in the row."""
    whole = torch.cat([gradient.double() for _, gradient in ours])
    parts = [gradient.double() for _, gradient in theirs]
    # A model may take the images of one sequence as a row of a batch.
    parts = [part[0] if part.ndim > whole.ndim else part for part in parts]
    wanted = whole.new_zeros(sum(map(len, parts)), *whole.shape[1:])
    for part, rows in zip(parts, wanted.split([*map(len, parts)])):
        rows[(slice(None), *map(slice, part.shape[1:]))] = part
    return whole, wanted


# Other tokens in every second sequence: nothing of the others may change, which finds what is smaller than the
# roundings of other shapes.


def _with_others(run: TrialRun, alone: Sequence[CallOutcome], packed: CallOutcome) -> tuple[CallOutcome, CallOutcome]:
    """The row, and the row with other tokens, both with the gradients of the loss where the run has a loss."""
    before = packed
    if run.trial.counts is None and packed.loss is not None and run.with_loss:
        run.has_any_loss = True  # whatever it is a mean of, it is the same mean
        before = run.packed(alone)
    after = run.packed(alone, run.with_other_tokens())
    run.has_any_loss = False
    return before, after


def _reaching(
    before: CallOutcome, after: CallOutcome, trial: Trial, limits: Limits, limit: float
) -> Iterator[TrialDifference]:
    """What other tokens in every second sequence change of the others: of their outputs, and of their gradients."""
    for name in before.outputs.keys() & after.outputs.keys():
        both = (outcome.outputs[name][::2] for outcome in (after, before))
        value = largest(*both) if isfinite(_most(before.outputs[name])) else 0.0
        told, most = f"{name}, as tokens of others change,", min(limit, limits.outputs)
        yield TrialDifference("outputs", told, value, most, leaks=True)
    # Of what tokens look up; a table of distances serves the other sequences too.
    tokens = _changed_tables(before.leaves, after.leaves)
    most = max((_most([each]) for each in before.gradients if each is not None), default=0.0)
    worst: dict[str, float] = dict.fromkeys(tokens, 0.0)
    for ours, other, first, second in zip(before.leaves, after.leaves, before.gradients, after.gradients):
        same = _rows_kept(ours.ids, other.ids, trial) if ours.name in tokens else None
        if first is None or second is None or same is None or not isfinite(_most([first])):
            continue
        scale = max(_most([first]), 1e-3 * most, 1e-30)
        value = _most([second[same].double() - first[same].double()]) / scale
        worst[ours.name] = max(worst[ours.name], value if isfinite(value) else inf)
    for name, value in worst.items():
        told = f"gradients at {name}, as tokens of others change,"
        yield TrialDifference("gradients", told, value, min(limit, limits.gradients), leaks=True)


def _poisoned(run: TrialRun, alone: Sequence[CallOutcome], before: CallOutcome) -> Iterator[TrialDifference]:
    """What nan in every second sequence changes of the others, by a token that none of them has."""
    fields = [run.trial.packed.get(name) for name in ("input_ids", "decoder_input_ids", "labels")]
    rows = [each.values() if each.is_nested else each for each in fields if isinstance(each, Tensor)]
    used = {token for row in rows for token in row.flatten().tolist()}
    token = next((each for each in usable_tokens(run.model).tolist() if each not in used), None)
    if token is None:  # each token of a tiny vocabulary is there
        return

    def spoil(module: nn.Module, given: Any, output: Any) -> Any:
        ids = given[0] if given else None
        is_told = isinstance(ids, Tensor) and isinstance(output, Tensor) and output.shape[: ids.ndim] == ids.shape
        return output.masked_fill((ids == token)[..., None], torch.nan) if is_told else output

    with embedding_of(run.model).register_forward_hook(spoil):
        after = run.packed(alone, run.with_other_tokens(token))
    for name in before.outputs.keys() & after.outputs.keys():
        both = (outcome.outputs[name][::2] for outcome in (after, before))
        yield TrialDifference("nan", f"{name}, with nan in others,", largest(*both), 0.0, leaks=True)


def _changed_tables(before: Sequence[Leaf], after: Sequence[Leaf]) -> set[str]:
    """The embeddings in which other ids are looked up; none where they are called otherwise."""
    pairs = [(ours.name, ours.ids, other.ids) for ours, other in zip(before, after)]
    known = [(name, first, second) for name, first, second in pairs if first is not None and second is not None]
    if len(before) != len(after) or any(first.shape != second.shape for _, first, second in known):
        return set()
    return {name for name, first, second in known if not torch.equal(first, second)}


def _rows_kept(before: Tensor | None, after: Tensor | None, trial: Trial) -> Tensor | None:
    """Which ids [n, L] of an embedding's call are of the sequences that stay; None where nobody knows."""
    if before is None or after is None or before.ndim != 2:
        return None
    for sizes in (trial.sizes, trial.target_sizes):
        if sizes is not None and sorted(before.shape) == [1, sum(sizes)]:
            number = torch.tensor([place % 2 for place, size in enumerate(sizes) for _ in range(size)])
            return (number == 0).view(before.shape).to(before.device)
    return torch.full_like(before, torch.equal(before, after), dtype=torch.bool)  # a call of some of the sequences


# The first module of a model in which a packed row differs from its sequences alone.


def _first_module(run: TrialRun, limit: float) -> str | None:
    """The path and class of the innermost module whose output differs and whose input does not; None without one.

    What lies within modules that run by lengths gets sequences, not the row, and is not looked at. ``limit``: of the
    relative difference.
    """
    model, trial, device = run.model, run.trial, run.device
    forwards = {path: vars(each).get("forward") for path, each in model.named_modules()}
    whole = forwards[""]
    if isinstance(whole, ModelForward) and whole.runs_whole:
        return whole.way.cause or None
    without = [path for path, each in forwards.items() if path and isinstance(each, Forward)]
    targets = trial.target_sizes
    ends = [int(np.argmin(trial.sizes)), int(np.argmax(trial.sizes))]
    sizes = [{SOURCES: trial.sizes[k]} | ({} if targets is None else {TARGETS: targets[k]}) for k in ends]
    with own_attention(model):
        specs = specs_of(model, [functools.partial(run.alone, k) for k in ends], [(1, each) for each in sizes])
        expected: list[Mapping[Any, Digest]] = []
        outcomes: list[CallOutcome] = []
        for k, size in enumerate(trial.sizes):
            one = PackedRow(Layout([size]), None if targets is None else Layout([targets[k]]), device)
            recorder = Recorder(model, specs, one)
            with recorder.watching():
                outcomes.append(run.alone(k))
            expected += recorder.of_sequence
    row = PackedRow(Layout(trial.sizes), None if targets is None else Layout(targets), device)
    recorder = Recorder(model, specs, row, without)
    with recorder.watching():
        run.packed(outcomes)
    for path, number in recorder.ended:
        differs = {True: False, False: False}
        for found, known in zip(recorder.of_sequence, expected):
            for key, digest in found.items():
                if key[:2] == (path, number) and key in known and not digest.is_exact:
                    differs[key[2]] |= not digest.equals(known[key], limit)
        if differs[False] and not differs[True]:
            kind = type(model.get_submodule(path)).__name__
            return f"{path or 'the forward of the model itself'} ({kind})"
    return None
