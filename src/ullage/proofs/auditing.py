"""The audit: whether a packed row gives each sequence what it gets alone, and nothing of its neighbours.

Every check compares two runs of the model itself, so no other implementation is believed. Sequences of 0 to 16 tokens
stand in one row; the reference is each of them on its own, without any packing. A leak shows as a difference where the
tokens of another sequence were changed, and as a nan where they were poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ullage.display import Shown, counted
from ullage.errors import InputError
from ullage.mixers import CompetingSequences, is_packed, pack_model
from ullage.proofs.samples import Sample, Samples

Verdict = Literal["exact", "leak", "differs", "competes", "refused", "not built"]

#: Lengths of the row that is compared; of those with one-token and empty neighbours.
LENGTHS = (7, 3, 12, 1, 9, 3)
NEIGHBOURS = (1, 16, 1, 5, 0, 1)
#: Largest relative difference of numbers that are computed in another order: of outputs, and of gradients.
_LIMITS = {torch.float64: (1e-10, 1e-9), torch.float32: (1e-5, 1e-4)}
_HALF_LIMITS = (3e-2, 1e-1)
#: The same for experts in float64, whose products change shape with the tokens of the others.
_ROUTED_LIMIT = 1e-12


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
        reason: of a refusal, in one line.
        checks: all comparisons.
    """

    model_type: str
    model: str
    verdict: Verdict = "exact"
    way: str = ""
    attention: str = ""
    device: str = "cpu"
    reason: str = ""
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the model is exact."""
        return self.verdict == "exact"

    def value(self, name: str) -> float | None:
        """The difference that a check found; None if it was not made."""
        return next((check.value for check in self.checks if check.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "checks": [{**asdict(check), "passed": check.passed} for check in self.checks]}

    def _facts(self) -> Iterator[str]:
        yield str(self)
        yield counted(len(self.checks), "check")

    def __str__(self) -> str:
        worst = max((check.value for check in self.checks if check.name in ("logits", "gradients")), default=0.0)
        told = self.reason or f"largest difference {worst:.0e}"
        failed = ", ".join(f"{check.name} {check.value:.0e}" for check in self.checks if not check.passed)
        return f"{self.model}: {self.verdict} ({failed or told})"


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

    Runs some thirty forwards of up to 40 tokens and two backwards; leaves weights, gradients, mode and attention of
    the model as they were. Raises ``InputError`` for what is no model; a model that leaks is reported, not raised.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> audit(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=8, n_layer=1, n_head=1))).verdict
    'exact'
    """
    model = _model_of(model)
    config = getattr(model, "config", None)
    report = Audit(getattr(config, "model_type", None) or type(model).__name__, type(model).__name__)
    parameter = next(model.parameters(), None)
    report.device = "cpu" if parameter is None else str(parameter.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    handle, was_packed = None, is_packed(model)
    try:
        if pack:
            try:
                handle = pack_model(model)
            except InputError as error:
                report.verdict = "competes" if isinstance(error, CompetingSequences) else "refused"
                report.reason = str(error)
                return report
            report.way = str(handle.way)
        report.attention = str(getattr(config, "_attn_implementation", None) or "none")
        try:
            _compare(report, Samples(model, collate, seed))
        except Exception as error:  # whatever a model raises on a packed row is what the user has to know
            report.verdict, report.reason = "refused", " ".join(f"{type(error).__name__}: {error}".split())
            return report
    finally:
        for module, mode in modes:
            module.training = mode
        if handle is not None and not was_packed:
            handle.undo()
    if not all(check.passed for check in report.checks):
        report.verdict = "leak" if any(check.leaks and not check.passed for check in report.checks) else "differs"
    return report


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


def _compare(report: Audit, samples: Samples) -> None:
    """Make all checks."""
    limit, gradient_limit = _LIMITS.get(samples.dtype, _HALF_LIMITS)
    least = samples.settle()
    row = samples.draw([max(length, least) for length in LENGTHS])
    alone, packed = samples.alone(row), samples.packed(row)
    add = report.checks.append
    add(Check("logits", _largest(packed.logits, alone.logits), limit))
    add(Check("loss", _relative(packed.loss, alone.loss), limit))
    add(Check("gradients", samples.gradients_differ(packed.loss, alone.loss), gradient_limit))
    # The same sequences in another order.
    turned = row[::-1]
    add(Check("order", _largest(samples.packed(turned).logits[::-1], alone.logits), limit))
    # One-token and empty neighbours.
    short = samples.draw([max(length, least) if length else 0 for length in NEIGHBOURS])
    add(Check("neighbours", _largest(samples.packed(short).logits, samples.alone(short).logits), limit))
    # Other tokens in one sequence: the others must not change in a single bit.
    routed = samples.is_routed
    if routed:
        add(_other_tokens_among_experts(samples, row, limit))
    else:
        add(Check("other tokens", _other_tokens(samples, row), 0.0, leaks=True))
    # A poisoned sequence; experts add up the tokens of all sequences, nan among them, with weight 0.
    if not routed:
        before = samples.packed(row).logits
        worst = 0.0
        for poisoned in range(len(row)):
            with samples.poisoned(row, poisoned) as spoiled:
                after = samples.packed(spoiled).logits
            worst = max(worst, _largest(_without(after, poisoned), _without(before, poisoned)))
        add(Check("poison", worst, 0.0, leaks=True))


def _other_tokens(samples: Samples, row: list[Sample]) -> float:
    before = samples.packed(row).logits
    worst = 0.0
    for changed in range(len(row)):
        after = samples.packed(samples.with_other_tokens(row, changed)).logits
        worst = max(worst, _largest(_without(after, changed), _without(before, changed)))
    return worst


def _other_tokens_among_experts(samples: Samples, row: list[Sample], limit: float) -> Check:
    """In float64: an expert's product has another shape when another sequence's tokens come to it."""
    try:
        with samples.in_double() as judged:
            return Check("other tokens", _other_tokens(judged, row), _ROUTED_LIMIT, leaks=True)
    except RuntimeError:  # the model computes a part in float32, whatever its weights are
        return Check("other tokens", _other_tokens(samples, row), limit, leaks=True)


def _without(rows: Sequence[Tensor], place: int) -> list[Tensor]:
    return [row for at, row in enumerate(rows) if at != place]


def _largest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of any number, relative to the largest number expected; nan and infinity count as infinite."""
    ours, theirs = (torch.cat([row.flatten().double() for row in rows]) for rows in (found, expected))
    if ours.shape != theirs.shape:
        return float("inf")
    largest = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)
    return float(torch.nan_to_num(largest, nan=torch.inf))


def _relative(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0
    return _largest([found.detach()], [expected.detach()])
