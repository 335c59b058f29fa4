"""The audit: whether a packed row gives each sequence what it gets alone, and nothing of its neighbours.

Every check compares two runs of the model itself, so no other implementation is believed. Sequences of 0 to 72 tokens
stand in one row; the reference is each of them on its own, without any packing. A leak shows as a difference where the
tokens of another sequence were changed, in outputs and in gradients, and as a nan where they were poisoned. The model
is at rest meanwhile (:mod:`ullage.mixers.at_rest`), and in training mode it goes through the proof that a run makes
before its first step (:mod:`ullage.mixers.proof`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ullage.attention.heads import works_by_sequence
from ullage.core.columns import IGNORED_LABEL, is_media
from ullage.core.display import Shown, quantity
from ullage.core.errors import InputError
from ullage.mixers import CompetingSequences, PackedModel, is_packed, pack_model
from ullage.mixers.at_rest import at_rest, embedded_inputs
from ullage.mixers.items import alone_form
from ullage.mixers.kernels import shares_chunks
from ullage.mixers.packed_model import way_of
from ullage.mixers.proof import is_routed, largest, limits_of, prove
from ullage.mixers.trial import Trial, moved, row_of, trial_of
from ullage.mixers.ways import ways_of
from ullage.mixers.wrappers import bare
from ullage.proofs.pictures import picture_samples, takes_clips, takes_images
from ullage.proofs.placing import given_differ, items_differ, what_is_wrong

Verdict = Literal["exact", "leak", "differs", "competes", "refused", "not built"]


@dataclass(repr=False)
class Audit(Shown):
    """What the audit of one model found.

    Attributes:
        model_type: of its config; the name of its class where it has none.
        model: the name of its class.
        verdict: "exact"; "leak", sequences see each other; "differs", they do not, and yet the numbers are others;
            "competes", by design; "refused"; "not built".
        way: how its sequences are kept apart.
        attention: the implementation that ran.
        device: where it ran.
        reason: of a refusal, or what is wrong with images, in one line.
        images: "images" or "images and clips", if sequences had them; else empty.
        without_images: why sequences had none, of a model that takes them.
        checks: all comparisons.
    """

    model_type: str
    model: str
    verdict: Verdict = "exact"
    way: str = ""
    attention: str = ""
    device: str = "cpu"
    reason: str = ""
    images: str = ""
    without_images: str = ""
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the model is exact."""
        return self.verdict == "exact"

    def value(self, name: str) -> float | None:
        """The difference that a check found; None if it was not made."""
        return next((check.value for check in self.checks if check.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; a difference that is nan or infinite is None, since JSON has neither."""
        checks = [
            {**asdict(check), "value": check.value if math.isfinite(check.value) else None, "passed": check.passed}
            for check in self.checks
        ]
        return {**asdict(self), "checks": checks}

    def _facts(self) -> Iterator[str]:
        yield str(self)
        yield quantity(len(self.checks), "check")

    def __str__(self) -> str:
        worst = max((check.value for check in self.checks if check.name in ("logits", "gradients")), default=0.0)
        summary = self.reason or f"largest difference {worst:.0e}"
        failed = ", ".join(f"{check.name} {check.value:.0e}" for check in self.checks if not check.passed)
        told = f"{failed}: {self.reason}" if failed and self.reason else failed or summary
        return f"{self.model}: {self.verdict} ({told})"


def audit(
    model: Any,
    *,
    collate: Callable[[list[dict[str, Tensor]]], dict[str, Any]] | None = None,
    pack: bool = True,
    seed: int = 0,
) -> Audit:
    """Compare a packed row of a model with its sequences alone: outputs, loss, every gradient, and what leaks.

    Args:
        model: a transformers model, whose weights are used as they are; or a config, or a model type of the installed
            transformers, for a tiny model with random weights.
        collate: a collator of your own, which makes the keywords of a packed row from samples ({"input_ids": [L],
            "labels": [L]}); what ``RaggedBatch.to_flattened`` gives if None.
        pack: whether :func:`ullage.pack_model` packs it first. Without, the model is audited as it is, for example
            plain transformers with ``position_ids``, or a model that somebody else has packed.
        seed: of the tokens.

    A model that takes images gets them: sequences with none, one and several, and clips where it takes those.

    Runs some fifty forwards of up to 118 tokens and some twenty backwards, in evaluation and in training mode without
    dropout; leaves weights, buffers, gradients, mode, attention and random states as they were. Raises ``InputError``
    for anything but a model; a model that leaks is reported, not raised.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> audit(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=1))).verdict
    'exact'
    """
    model = _model_of(model)
    config = getattr(model, "config", None)
    report = Audit(getattr(config, "model_type", None) or type(model).__name__, type(model).__name__)
    parameter = next(model.parameters(), None)
    report.device = "cpu" if parameter is None else str(parameter.device)
    samples = Samples(model, collate, seed)
    handle = None
    try:
        if pack and is_packed(model):
            report.way = str(way_of(bare(model)))
        elif pack:
            try:
                handle = _pack(model, samples)
            except InputError as error:
                report.verdict = "competes" if isinstance(error, CompetingSequences) else "refused"
                report.reason = str(error)
                return report
            report.way = str(handle.way)
        report.attention = str(getattr(config, "_attn_implementation", None) or "none")
        try:
            for check in compare(samples):
                report.checks.append(check)
        except Exception as error:  # whatever a model raises on a packed row is what the user has to know
            report.verdict, report.reason = "refused", " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        if handle is not None:
            handle.undo()
    report.images, report.without_images = samples.images, samples.without_images
    failed = [check for check in report.checks if not check.passed]
    if failed:  # also before it was refused: so much is known
        report.verdict = "leak" if any(check.leaks for check in failed) else "differs"
        if samples.images:
            clauses = (what_is_wrong([check.name for check in failed]), report.reason)
            report.reason = "; ".join(filter(None, clauses))
    return report


def audit_type(kind: str, model_type: str, *, seed: int = 0) -> Audit:
    """The audit of a tiny model of one type; of one that cannot be built, the verdict "not built" and the reason.

    One of kind "image" that was audited on text alone counts as not built.
    """
    from ullage.proofs.tiny import tiny_model

    try:
        model = tiny_model(model_type, kind, seed=seed)
    except InputError as error:
        return Audit(model_type, "", verdict="not built", reason=error.hint or str(error))
    report = audit(model, seed=seed)
    report.model_type = model_type
    if kind == "image" and not report.images:
        report.verdict = "not built"
        report.reason = report.without_images or report.reason or "it takes text alone"
    return report


def _pack(model: nn.Module, samples: Samples) -> PackedModel:
    """Pack a model in the way in which a run would: where what it is made of does not tell, ways are tried."""
    if ways_of(bare(model)).is_certain:
        return pack_model(model)
    try:
        with at_rest(model, training=False):
            samples.settle()
        return pack_model(model, verify=samples.for_trials())
    except CompetingSequences:
        raise
    except Exception:  # no way is accepted: the checks of the one that is taken without a trial tell why
        return pack_model(model)


def _model_of(given: Any) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    from transformers import PreTrainedConfig

    from ullage.proofs.tiny import kind_of, tiny_model

    if isinstance(given, (str, PreTrainedConfig)):
        return tiny_model(given, kind_of(given))
    raise InputError(
        "there is no model to audit",
        expected="a model, a config or a model type of the installed transformers",
        found=repr(given)[:80],
    )


# The comparisons of an audit: a packed row with its sequences alone, and with itself after a neighbour has changed.
#
# In evaluation mode that is a short row, with one-token and empty neighbours, and a long one, for what begins only at a
# later token; in training mode, without dropout, the long one. Whether sequences see each other is told by changing the
# tokens of one: neither the outputs of the others may change, nor the gradients that come from them, and none may reach
# the one that was changed.


#: Lengths of the row that is compared; of those with one-token and empty neighbours; of the long one, where no sequence
#: has one token: statistics over it, which training mode may ask for, would be those of a constant.
LENGTHS = (7, 3, 12, 1, 9, 3)
NEIGHBOURS = (1, 16, 1, 5, 0, 1)
LONG = (41, 5, 72)
#: Images of each sequence of these rows, beside its text, of a model that takes them; and clips of those of the first.
IMAGES = {LENGTHS: (1, 0, 3, 0, 2, 0), NEIGHBOURS: (0, 2, 0, 1, 0, 0), LONG: (2, 0, 1)}
CLIPS = (0, 0, 1, 0, 1, 0)
#: Names of the checks of the first row, by what is compared.
_NAMES = {"outputs": "logits", "loss": "loss", "gradients": "gradients"}
#: Largest differences of experts in float64, whose products change shape with the tokens of the others: of outputs and
#: of gradients.
_ROUTED_LIMITS = (1e-12, 1e-9)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        value: largest difference found, relative to the largest number compared.
        limit: above which the check has failed; 0 asks for equal bits.
        leaks: whether a failure means that sequences see each other, and not only that numbers differ.
    """

    name: str
    value: float
    limit: float
    leaks: bool = False

    @property
    def passed(self) -> bool:
        """Whether the difference is within its limit. nan is not."""
        return self.value <= self.limit


def compare(samples: Samples) -> Iterator[Check]:
    """All checks of a model, in evaluation mode and in training mode. Raises what the model raises."""
    with at_rest(samples.model, training=False):
        samples.settle()
    short, neighbours, long = (
        samples.draw(_fitting(samples, lengths), IMAGES[lengths]) for lengths in (LENGTHS, NEIGHBOURS, LONG)
    )
    if samples.images:
        yield from _placed(samples, short)
    yield from _proved(samples, short, _NAMES, parameters=True)
    # The same sequences in another order; one-token and empty neighbours; what begins only at a later token.
    yield from _proved(samples, short[::-1], {"outputs": "order"}, backward=False)
    yield from _proved(samples, neighbours, {"outputs": "neighbours"}, backward=False)
    yield from _proved(samples, long, {"outputs": "long", "loss": "long: loss"}, backward=False)
    with at_rest(samples.model, training=False):
        yield from _others(samples, long, "", backward=False)
        if samples.images:
            yield from _others(samples, long, "", backward=False, images=True)
        # A poisoned sequence; experts add up the tokens of all sequences, nan among them, with weight 0, and so do
        # kernels whose sequences share chunks.
        if not samples.is_routed and not samples.shares_chunks:
            yield Check("poison", _poison(samples, long), 0.0, leaks=True)
    for difference in prove(bare(samples.model), samples.trial(long), training=True).differences:
        yield Check(f"training: {difference.name}", difference.value, difference.limit)
    with at_rest(samples.model, training=True):
        yield from _others(samples, long, "training: ", backward=True)


def _proved(samples: Samples, row: list[Sample], names: Mapping[str, str], **options: Any) -> Iterator[Check]:
    """One check for each kind of difference that ``names`` names, in evaluation mode: the largest beside its limit."""
    model = samples.model
    compared = prove(bare(model), samples.trial(row), call=model, training=False, **options).differences
    for kind, name in names.items():
        of_kind = [each for each in compared if each.kind == kind]
        if of_kind:
            worst = max(of_kind, key=lambda each: each.value / each.limit)
            yield Check(name, worst.value, worst.limit)


def _placed(samples: Samples, row: list[Sample]) -> Iterator[Check]:
    """What becomes of images before the text sees them: their features, their places and the positions."""
    model, trial = bare(samples.model), samples.trial(row)
    limit = limits_of(samples.dtype).outputs
    with at_rest(samples.model, training=False):
        way: Any = way_of(model)
        if getattr(way, "items", "row") == "row":
            features = items_differ(model, trial.alone, trial.packed)
            if features is not None:
                yield Check("items", features, limit, leaks=True)
        given = given_differ(model, trial.alone, trial.packed, trial.sizes)
    for name, value, most in (("inputs_embeds", "places", limit), ("position_ids", "positions", 0.0)):
        if name in given:
            yield Check(value, given[name], most)


def _fitting(samples: Samples, lengths: Sequence[int]) -> list[int]:
    """Lengths as the model takes them; none stays none."""
    return [min(max(length, samples.least), samples.most) if length else 0 for length in lengths]


# Other tokens in one sequence: the others must not change in a single bit.


def _others(samples: Samples, row: list[Sample], name: str, *, backward: bool, images: bool = False) -> Iterator[Check]:
    """Other tokens in one sequence, or other images, where it has any; both for gradients."""
    limits = (0.0, 0.0)
    if samples.shares_chunks:
        limits = limits_of(samples.dtype)[:2]
        largest_of_kind = _others_differ(samples, row, backward=backward, images=images)
    elif not samples.is_routed:
        largest_of_kind = _others_differ(samples, row, backward=backward, images=images)
    else:
        # In float64: an expert's product has another shape when another sequence's tokens come to it.
        try:
            with samples.in_double() as judged:
                largest_of_kind = _others_differ(judged, row, backward=backward, images=images)
                limits = _ROUTED_LIMITS
        except RuntimeError:  # the model computes a part in float32, whatever its weights are
            limits = limits_of(samples.dtype)[:2]
            largest_of_kind = _others_differ(samples, row, backward=backward, images=images)
    names = ("other images" if images else "other tokens", "other gradients")
    for what, value, limit in zip(names, largest_of_kind, limits):
        yield Check(f"{name}{what}", value, limit, leaks=True)


def _others_differ(samples: Samples, row: list[Sample], *, backward: bool, images: bool) -> list[float]:
    """Largest difference that other tokens in some sequences make to the others: of outputs, of gradients."""
    with torch.set_grad_enabled(backward):
        before = _PackedCall(samples, row)
        worst = [0.0, 0.0]
        for changed in range(len(row)):
            kept = [place for place in range(len(row)) if place != changed]
            if images and not row[changed].items:
                continue
            other = row if images else samples.with_other_tokens(row, changed)
            after = _PackedCall(samples, samples.with_other_images(other, changed) if images or backward else other)
            outputs = largest(*([run.logits[place] for place in kept] for run in (after, before)))
            worst[0] = max(worst[0], outputs)
            if backward:
                worst[1] = max(worst[1], _gradients_of_others(before, after, kept))
    return worst if backward else worst[:1]


class _PackedCall:
    """One packed call, and the gradients that come from some of its sequences."""

    def __init__(self, samples: Samples, row: list[Sample]) -> None:
        torch.manual_seed(samples.seed)  # what is drawn in spite of all is drawn alike
        self.samples = samples
        self.parameters = [each for each in samples.model.parameters() if each.requires_grad]
        with embedded_inputs(samples.model) as leaves:
            outcome: RowOutputs = samples.packed(row)
        self.logits, self.loss, self.leaves = outcome.logits, outcome.loss, leaves

    @functools.cached_property
    def of_loss(self) -> list[Tensor]:
        """The gradients of the model's own loss, for what was embedded."""
        return self._of(self.loss, only_leaves=True)[1] if self.loss is not None else []

    def gradients(self, places: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Of the outputs of some sequences, weighed at random: for all parameters, and for what was embedded."""
        random = torch.Generator().manual_seed(0)
        weights = [torch.randn(each.shape, generator=random, dtype=torch.float64).to(each) for each in self.logits]
        return self._of(torch.stack([(self.logits[place] * weights[place]).sum() for place in places]).sum())

    def _of(self, value: Tensor, *, only_leaves: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        parameters = [] if only_leaves else self.parameters
        wanted = [*parameters, *(leaf.value for leaf in self.leaves)]
        if not wanted or not value.requires_grad:
            return [], []
        gradients = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=True)
        dense = [torch.zeros_like(each) if grad is None else grad for each, grad in zip(wanted, gradients)]
        return dense[: len(parameters)], dense[len(parameters) :]


def _gradients_of_others(before: _PackedCall, after: _PackedCall, kept: Sequence[int]) -> float:
    """Largest difference of what comes back from the sequences that are kept; and what reaches those that changed."""
    (parameters, embedded), (parameters_after, embedded_after) = before.gradients(kept), after.gradients(kept)
    # Gradients that are rounding noise beside the largest of all count by a thousandth of that.
    most = max((float(each.abs().max()) for each in parameters if each.numel()), default=0.0)
    worst = 0.0
    for ours, theirs in zip(parameters_after, parameters):
        own = float(theirs.abs().max()) if theirs.numel() else 0.0
        worst = max(worst, largest([ours], [theirs]) * own / max(own, 1e-3 * most, 1e-30))
        if not own and ours.any():
            worst = max(worst, float(ours.abs().max()) / max(most, 1e-30))
    places = _places(before, after)
    size = max((float(embedded[at].abs().max()) for at, _, _ in places), default=0.0)
    for found, found_after in ((embedded, embedded_after), (before.of_loss, after.of_loss)):
        for at, same, changed in places if found else ():
            worst = max(worst, largest([found_after[at][same]], [found[at][same]]))
            if found is embedded and size and changed.any():
                worst = max(worst, float(found_after[at][changed].abs().max()) / size)
    return worst


def _places(first: _PackedCall, second: _PackedCall) -> list[tuple[int, Tensor, Tensor]]:
    """The calls of embeddings, by their place; which of their entries belong to other sequences, and which changed.

    Where an embedding is called once, that is the packed row: other tokens stand in the changed sequence. Where it is
    called more often, all of a row belongs to one sequence; but for an encoder-decoder, which may call it for both of
    its rows, and whose targets all begin with one token.
    """
    before, after = first.leaves, second.leaves
    fixed = torch.tensor(sorted(first.samples.special))
    calls = Counter(leaf.name for leaf in before)
    places = []
    for at, (ours, theirs) in enumerate(zip(before, after)):
        if ours.ids is None or theirs.ids is None or ours.ids.shape != theirs.ids.shape or ours.ids.ndim < 2:
            continue
        changed, same = ours.ids != theirs.ids, torch.ones_like(ours.ids, dtype=torch.bool)
        if first.samples.is_encoder_decoder:
            same = ~changed & ~torch.isin(ours.ids, fixed.to(ours.ids))
        elif changed.any() and calls[ours.name] == 1 and len(changed) == 1:
            here = changed[0].flatten(1).any(1).nonzero() if changed.ndim > 2 else changed[0].nonzero()
            same[:, int(here.min()) : int(here.max()) + 1] = False
        else:
            same[changed.flatten(1).any(1)] = False
        places.append((at, same, changed))
    changing = {before[at].name for at, _, changed in places if changed.any()}
    return [each for each in places if before[each[0]].name in changing]


@torch.no_grad()
def _poison(samples: Samples, row: list[Sample]) -> float:
    before, worst = samples.packed(row).logits, 0.0
    for changed in range(len(row)):
        kept = [place for place in range(len(row)) if place != changed]
        with samples.poisoned(row, changed) as spoiled:
            after = samples.packed(spoiled).logits
        worst = max(worst, largest([after[place] for place in kept], [before[place] for place in kept]))
    return worst


# The sequences of an audit, alone and in a packed row, and what the model makes of them.


#: Tokens of the target of a source, so that the lengths of both differ: a source of 7 has a target of 5.
_TARGETS = (5, 4, 2, 6, 3, 4)
#: Lengths of the longest sequence, of which the first is taken that a model takes.
_LONGEST = (72, 40, 24, 16)
#: Names in configs of how many tokens a sequence may have, and parts of the paths of tables of positions.
_MOST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "max_target_positions")
_POSITIONS = re.compile(r"pos|wpe")
_EXPERTS_BY = "_experts_implementation"


@dataclass(frozen=True)
class Sample:
    """One sequence: tokens [L], and labels [L], or of an encoder-decoder [target tokens]."""

    input_ids: Tensor
    labels: Tensor
    #: The kinds of its tokens, by token, and the fields of its images.
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def items(self) -> dict[str, Tensor]:
        """The fields of its images and clips."""
        return {name: value for name, value in self.others.items() if is_media(name)}


@dataclass(frozen=True)
class RowOutputs:
    """What a model made of a row: for each sequence its logits, and the loss of all; None without labels."""

    logits: list[Tensor]
    loss: Tensor | None


class Samples:
    """Sequences for one model, and its outputs for them.

    Args:
        model: in the state in which it is audited.
        collate: makes the keywords of a packed row from samples; None for ``RaggedBatch.to_flattened``.
        seed: of the tokens.
    """

    def __init__(self, model: nn.Module, collate: Callable[..., Any] | None, seed: int) -> None:
        self.model, self.collate, self.seed = model, collate, seed
        config: Any = getattr(model, "config", None)
        self.config = config
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.by_sequence = works_by_sequence(model)
        #: Whether the model computes a loss of text alone; some take labels with images only.
        self.has_loss = True
        #: Tokens of the shortest and of the longest sequence that the model takes, as :meth:`settle` finds.
        self.least, self.most = 1, 16
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        table: Any = _embedding(model)
        self.vocabulary = int(getattr(text, "vocab_size", None) or table.weight.shape[0])
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.special = {
            value
            for part in (config, text)
            for name, value in vars(part).items()
            if name.endswith(("token_id", "token_index")) and isinstance(value, int)
        }
        #: What sequences have beside text, and why a model that takes images gets none; as :meth:`settle` finds.
        self.images, self.without_images = "", ""
        #: Tokens to draw from, in order.
        self.usable = torch.tensor([token for token in range(self.vocabulary) if token not in self.special][:1000])

    @functools.cached_property
    def shares_chunks(self) -> bool:
        """Whether kernels of its mixers compute sequences that meet in a chunk together."""
        return shares_chunks(self.model)

    @property
    def is_routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return is_routed(self.model)

    def draw(self, lengths: Sequence[int], images: Sequence[int] = ()) -> list[Sample]:
        """Sequences of these lengths. Labels are the tokens, but for each sequence's first, which nothing predicts.

        ``images``: how many each has beside, if the model takes any.
        """
        if self.images and any(images):
            return self._draw_pictures(lengths, images)
        random, usable = torch.Generator().manual_seed(self.seed), self.usable
        samples = []
        for place, length in enumerate(lengths):
            tokens = usable[torch.randint(len(usable), (length,), generator=random)]
            if self.is_encoder_decoder:
                size = max(_TARGETS[place % len(_TARGETS)], length // 3 if length > 16 else 0) if length else 0
                labels = usable[torch.randint(len(usable), (size,), generator=random)]
            elif self.by_sequence:
                labels = torch.randint(int(self.config.num_labels), (), generator=random)
            else:
                labels = tokens.clone()
                labels[:1] = IGNORED_LABEL
            samples.append(Sample(tokens.to(self.device), labels.to(self.device)))
        return samples

    def _draw_pictures(self, lengths: Sequence[int], images: Sequence[int]) -> list[Sample]:
        """Sequences with text of these lengths before, between and behind their images."""
        model: Any = bare(self.model)
        clips = [each * takes_clips(model) for each in CLIPS[: len(lengths)]] if sum(lengths) < sum(LONG) else None
        texts = []
        for place, (length, count) in enumerate(zip(lengths, images)):
            parts = 1 + count + (clips[place] if clips else 0)
            texts += [max(length // parts + (part < length % parts), min(length, 1)) for part in range(parts)]
        drawn = picture_samples(model, seed=self.seed, images=images, videos=clips, texts=texts)
        samples = []
        for fields in drawn:
            held = {name: value.to(self.device) for name, value in fields.items()}
            held |= {name: value.to(self.dtype) for name, value in held.items() if value.is_floating_point()}
            samples.append(Sample(held.pop("input_ids"), held.pop("labels"), held))
        return samples

    def with_other_images(self, row: Sequence[Sample], place: int) -> list[Sample]:
        """The row with other pixels in all images of one sequence; what is empty stays so."""
        random, sample = torch.Generator().manual_seed(self.seed + 2), row[place]
        others = dict(sample.others)
        for name, value in sample.items.items():
            if value.is_floating_point() and name.startswith("pixel_"):
                drawn = torch.randn(value.shape, generator=random).to(value)
                others[name] = torch.where(value == 0, value, drawn)
        return [*row[:place], replace(sample, others=others), *row[place + 1 :]]

    def with_other_tokens(self, row: Sequence[Sample], place: int) -> list[Sample]:
        """The row with another token everywhere in one sequence, of the same length."""
        random, sample = torch.Generator().manual_seed(self.seed + 1), row[place]
        labels = self._other(sample.labels, random) if self.is_encoder_decoder else sample.labels
        sample = replace(sample, input_ids=self._other(sample.input_ids, random), labels=labels)
        return [*row[:place], sample, *row[place + 1 :]]

    def _other(self, tokens: Tensor, random: torch.Generator) -> Tensor:
        usable = self.usable.to(self.device)
        at = torch.searchsorted(usable, tokens)
        other = usable[(at + torch.randint(1, len(usable), (len(tokens),), generator=random).to(at)) % len(usable)]
        # Tokens of images stay, of which there are as many as features.
        return torch.where(torch.isin(tokens, usable), other, tokens)

    # Runs.

    def _run_alone(self, row: Sequence[Sample]) -> list[Tensor]:
        """The logits of each sequence in a call of its own."""
        return [
            _logits(self.model(**alone_form(bare(self.model), fields), **self._without_cache()))
            for fields in self.fields(row)
        ]

    @torch.no_grad()
    def settle(self) -> None:
        """Find out how short and how long a sequence may be, in tokens, and whether there is a loss of text alone."""
        failure: Exception | None = None
        self._settle_images()
        for self.least in (1, 2, 4, 8, 16):
            for self.has_loss in (True, False):
                try:
                    self._run_alone(self.draw([self.least, max(self.least, 7)], (0, 1)))
                except Exception as error:  # whatever it is: another length is tried
                    failure = failure or error
                    continue
                self.most = self._longest()
                return
        assert failure is not None
        raise failure

    def _settle_images(self) -> None:
        """Find out whether images can be made for the model, and text with them is run."""
        model: Any = bare(self.model)
        if self.is_encoder_decoder or self.collate is not None or not takes_images(model):
            return
        self.images = "images and clips" if takes_clips(model) else "images"
        try:
            row = self.draw([7], [1])
            if all(map(torch.equal, self._run_alone(row), self._run_alone(self.with_other_images(row, 0)))):
                self.images, self.without_images = "", "another image changes nothing"
        except Exception as error:  # whatever the model raises: it is audited on text alone
            self.images, self.without_images = "", " ".join(f"{type(error).__name__}: {error}".split())

    def _longest(self) -> int:
        """The longest of some lengths that the model takes: as it tells, for on a GPU a trial would end the process."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        limits = [value for name in _MOST if type(value := getattr(text, name, None)) is int and value > 0]
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
                limits.append(module.num_embeddings)
        # A table may begin behind the index of padding.
        lengths = [length for length in _LONGEST if length + 2 <= min(limits, default=length + 2)] or [16]
        for length in lengths if self.device.type == "cpu" else ():
            try:
                self._run_alone(self.draw([length]))
                return length
            except Exception:  # the next, shorter one
                continue
        return lengths[0] if self.device.type != "cpu" else 16

    def trial(self, row: Sequence[Sample]) -> Trial:
        """The calls of a proof: each sequence that has tokens by itself, and the row."""
        if self.by_sequence:
            row = [sample for sample in row if len(sample.input_ids)]
        trial = trial_of(self.model, self.fields(row))
        return replace(trial, is_strict=True, **({} if self.collate is None else {"packed": self._row(row)}))

    def for_trials(self) -> list[dict[str, Tensor]]:
        """Three sequences, as ``pack_model(model, verify=...)`` takes them."""
        return self.fields(self.draw([min(max(length, self.least), self.most) for length in (24, 3, 9)]))

    def fields(self, row: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """Samples as ``RaggedBatch.from_samples`` takes them, with the labels where the model computes a loss."""
        name = "labels" if self.has_loss else "decoder_input_ids" if self.is_encoder_decoder else None
        labels = [{} if name is None else {name: each.labels} for each in row]
        return [{"input_ids": each.input_ids} | label | dict(each.others) for each, label in zip(row, labels)]

    def packed(self, row: Sequence[Sample]) -> RowOutputs:
        """All sequences in one row."""
        outputs = self.model(**self._row(row), **self._without_cache())
        logits, loss = _logits(outputs), _loss(outputs)
        if self.by_sequence:
            return RowOutputs([*logits], loss)
        sizes = [len(sample.labels if self.is_encoder_decoder else sample.input_ids) for sample in row]
        flat = logits[0] if logits.ndim == 3 else logits
        if len(flat) != sum(sizes):
            raise InputError(
                "the model's outputs do not lie end to end",
                expected=f"[1, {sum(sizes)}, ...]",
                found=list(logits.shape),
            )
        return RowOutputs([*flat.split(sizes)], loss)

    @contextmanager
    def poisoned(self, row: Sequence[Sample], place: int) -> Iterator[list[Sample]]:
        """The row with one sequence whose embeddings are nan: its tokens are one id, which no other sequence has."""
        used = {int(token) for sample in row for token in (*sample.input_ids, *sample.labels.flatten())}
        poison = next(token for token in range(self.vocabulary) if token not in used | self.special)
        sample = row[place]
        # Images are nan where they are not empty; their tokens stay.
        images = {
            name: torch.where(value == 0, value, torch.nan)
            for name, value in sample.items.items()
            if name.startswith("pixel_values")
        }
        is_text = torch.isin(sample.input_ids, self.usable.to(self.device))
        ids = torch.where(is_text, poison, sample.input_ids) if images else torch.full_like(sample.input_ids, poison)
        sample = replace(sample, input_ids=ids, others={**sample.others, **images})

        def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
            tokens = inputs[0] if inputs else None
            if (
                isinstance(tokens, Tensor)
                and isinstance(output, Tensor)
                and output.shape[: tokens.ndim] == tokens.shape
            ):
                return output.masked_fill((tokens == poison)[..., None], torch.nan)
            return output

        hook = _embedding(self.model).register_forward_hook(spoil)
        try:
            yield [*row[:place], sample, *row[place + 1 :]]
        finally:
            hook.remove()

    @contextmanager
    def in_double(self) -> Iterator[Samples]:
        """The same in float64, experts by plain products: the grouped ones take no float64."""
        configs: dict[int, Any] = {
            id(part.config): part.config for part in self.model.modules() if hasattr(part, "config")
        }
        experts = [(each, each._experts_implementation) for each in configs.values() if hasattr(each, _EXPERTS_BY)]
        for config, _ in experts:
            config._experts_implementation = "eager"
        before = {name: value.dtype for name, value in self.model.state_dict().items()}
        weights = copy.deepcopy(self.model.state_dict())
        self.model.double()
        try:
            yield self._again(self.seed)
        finally:
            for config, implementation in experts:
                config._experts_implementation = implementation
            self.model.to(self.dtype)
            self.model.load_state_dict({name: value.to(before[name]) for name, value in weights.items()})

    def _again(self, seed: int) -> Samples:
        again = Samples(self.model, self.collate, seed)
        again.has_loss, again.least, again.most = self.has_loss, self.least, self.most
        again.images = self.images
        return again

    # Keywords.

    def _row(self, row: Sequence[Sample]) -> dict[str, Any]:
        if self.collate is not None:
            return dict(self.collate([{"input_ids": each.input_ids, "labels": each.labels} for each in row]))
        keywords = moved(row_of(self.model, self.fields(row)), self.device)
        # In double precision, as the weights are.
        return {
            name: value.to(self.dtype) if is_media(name) and value.is_floating_point() else value
            for name, value in keywords.items()
        }

    def _without_cache(self) -> dict[str, Any]:
        return {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}


def _embedding(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_input_embeddings", None)
    table = None
    if get is not None:
        try:
            table = get()
        except NotImplementedError:
            table = None
    if table is None:
        table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if table is None:
        raise InputError("the model has no embedding of tokens", where=type(model).__name__)
    return table


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]
        if isinstance(outputs.get("start_logits"), Tensor):  # question answering
            return torch.stack([outputs["start_logits"], outputs["end_logits"]], -1)
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return next(part for part in parts if isinstance(part, Tensor) and part.ndim >= 2)


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, dict) else None
