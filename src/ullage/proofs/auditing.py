"""The audit: whether a packed row gives each sequence what it gets alone, and nothing of its neighbours.

Every check compares two runs of the model itself, so no other implementation is believed. Sequences of 0 to 72 tokens
stand in one row; the reference is each of them on its own, without any packing. A leak shows as a difference where the
tokens of another sequence were changed, in outputs and in gradients, and as a nan where they were poisoned. The model
is at rest meanwhile (:mod:`ullage.mixers.at_rest`), and in training mode it goes through the proof that a run makes
before its first step (:mod:`ullage.mixers.proof`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from ullage.display import Shown, counted
from ullage.errors import InputError
from ullage.mixers import CompetingSequences, PackedModel, is_packed, pack_model
from ullage.mixers.at_rest import at_rest
from ullage.mixers.placing import way_of
from ullage.mixers.ways import ways_of
from ullage.mixers.wrappers import bare
from ullage.proofs.comparing import Check as Check
from ullage.proofs.comparing import compare
from ullage.proofs.samples import Samples

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

    Runs some fifty forwards of up to 118 tokens and some twenty backwards, in evaluation and in training mode without
    dropout; leaves weights, buffers, gradients, mode, attention and random states as they were. Raises ``InputError``
    for what is no model; a model that leaks is reported, not raised.

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
    if not all(check.passed for check in report.checks):  # also before it was refused: so much is known
        report.verdict = "leak" if any(check.leaks and not check.passed for check in report.checks) else "differs"
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
