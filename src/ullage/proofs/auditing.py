"""The audit: whether a packed row gives each sequence what it gets alone, and nothing of its neighbours.

Every check compares two runs of the model itself, so no other implementation is believed. Sequences of 0 to 72 tokens
stand in one row; the reference is each of them on its own, without any packing. A leak shows as a difference where the
tokens of other sequences were changed, in outputs and in gradients, and as a nan where they were poisoned. The model
is at rest meanwhile (:mod:`ullage.mixers.at_rest`), and in training mode it goes through the proof that a run makes
before its first step (:mod:`ullage.mixers.proof`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from ullage.core.display import Shown, quantity
from ullage.core.errors import InputError
from ullage.mixers import CompetingSequences, PackedModel, is_packed, pack_model
from ullage.mixers.at_rest import at_rest
from ullage.mixers.packed_model import way_of
from ullage.mixers.proof import prove
from ullage.mixers.wrappers import bare
from ullage.proofs.samples import Sample, Samples

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
        reason: of a refusal, or the first module in which a difference appears, in one line.
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
    pictures: Any = None,
) -> Audit:
    """Compare a packed row of a model with its sequences alone: outputs, loss, every gradient, and what leaks.

    Args:
        model: a transformers model, whose weights are used as they are; a folder, a name of the hub, or a new one by
            its type and sizes, such as "llama-64x2"; or a config, for a model with random weights.
        collate: a collator of your own, which makes the keywords of a packed row from samples ({"input_ids": [L],
            "labels": [L]}); what ``RaggedBatch.to_flattened`` gives if None.
        pack: whether :func:`ullage.pack_model` packs it first. Without, the model is audited as it is, for example
            plain transformers with ``position_ids``, or a model that somebody else has packed.
        seed: of the tokens.
        pictures: makes sequences with images for a model that takes them, as ``maintenance/pictures.py`` does for types
            of transformers; without, such a model is audited on text alone.

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
    samples = Samples(model, collate, seed, pictures)
    handle = None
    try:
        if pack and is_packed(model):
            report.way = str(way_of(bare(model)))
        elif pack:
            try:
                handle = pack_as_a_run(samples)
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
    if report.verdict == "exact" and "logits" not in {check.name for check in report.checks}:
        report.verdict, report.reason = "refused", "none of its outputs has an entry for each token or sequence"
    failed = [check for check in report.checks if not check.passed]
    if failed:  # also before it was refused: so much is known
        report.verdict = "leak" if any(check.leaks for check in failed) else "differs"
        where = f"first in {samples.where}" if samples.where else ""
        report.reason = "; ".join(filter(None, (where, report.reason)))
    return report


def pack_as_a_run(samples: Samples) -> PackedModel:
    """Pack the model of ``samples`` as a run would: ways are tried, and the first that is proved is taken."""
    model = samples.model
    try:
        with at_rest(model, training=False):
            samples.settle()
        return pack_model(model, verify=samples.for_trials())
    except CompetingSequences:
        raise
    except Exception:  # no way is accepted: the checks of the finest one tell why
        return pack_model(model, verify=False)


def _model_of(given: Any) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    from transformers import PreTrainedConfig

    from ullage.proofs.given import named_model, new_model

    if isinstance(given, str):
        return named_model(given)
    if isinstance(given, PreTrainedConfig):
        return new_model(given)
    expected = "a model, a config, or the name of one"
    raise InputError("there is no model to audit", expected=expected, found=repr(given)[:80])


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
#: What of a row other tokens in every second sequence may change, by the kind of difference.
_OTHERS = {"outputs": "tokens", "gradients": "gradients"}


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
        samples.draw(_fitting(samples, lengths), IMAGES[lengths], CLIPS if lengths == LENGTHS else ())
        for lengths in (LENGTHS, NEIGHBOURS, LONG)
    )
    yield from _proved(samples, short, _NAMES, parameters=True)
    # The same sequences in another order; one-token and empty neighbours; what begins only at a later token.
    yield from _proved(samples, short[::-1], {"outputs": "order"}, backward=False)
    yield from _proved(samples, neighbours, {"outputs": "neighbours"}, backward=False)
    # Nan in a sequence; experts add up the tokens of all sequences, nan among them, with weight 0, and so do kernels
    # whose sequences share chunks, and the blocks of flex attention on a GPU.
    poison = not samples.is_routed and not samples.shares_chunks and samples.device.type == "cpu"
    names = {"outputs": "long", "loss": "long: loss", "nan": "poison"}
    yield from _proved(samples, long, names, backward=False, poison=poison)
    # Others in the longest sequence, where those before were in the shortest.
    bits = not samples.shares_chunks
    proof = prove(bare(samples.model), samples.trial([*long[1:], *long[:1]]), training=True, bits=bits)
    samples.where = samples.where or proof.module or ""
    for difference in proof.differences:
        name = f"other {_OTHERS[difference.kind]}" if difference.leaks else difference.name
        yield Check(f"training: {name}", difference.value, difference.limit, leaks=difference.leaks)


def _proved(samples: Samples, row: list[Sample], names: Mapping[str, str], **options: Any) -> Iterator[Check]:
    """One check for each kind of difference that ``names`` names, in evaluation mode: the largest beside its limit.

    And one for what other tokens in every second sequence change.
    """
    model, options = samples.model, options | {"bits": not samples.shares_chunks}
    proof = prove(bare(model), samples.trial(row), call=model, training=False, **options)
    samples.where = samples.where or proof.module or ""
    for kind, name in names.items():
        for leaks, told in ((False, name), (True, f"{name}: other {_OTHERS[kind]}" if kind in _OTHERS else name)):
            of_kind = [each for each in proof.differences if each.kind == kind and each.leaks is leaks]
            if of_kind:
                worst = max(of_kind, key=lambda each: each.value / (each.limit or 1.0))
                yield Check(told, worst.value, worst.limit, leaks)


def _fitting(samples: Samples, lengths: Sequence[int]) -> list[int]:
    """Lengths as the model takes them; none stays none."""
    return [min(max(length, samples.least), samples.most) if length else 0 for length in lengths]
