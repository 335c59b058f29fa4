"""Metrics that a trainer of TRL's appends in each call of its loss, made one value per metric and step.

TRL's trainers append to ``_metrics[mode][name]`` in every call, gather over ranks in every call, and average what was
appended when they log. A packed step calls the loss once per microbatch: microbatches hold unequally many tokens, ranks
unequally many sequences, and what an empty microbatch runs counts for nothing. So during such a call

- ``accelerator.gather``, ``gather_for_metrics`` and ``reduce`` give this rank's values: no collective per microbatch;
- what is appended is taken off the trainer's lists, and kept with the weights of the microbatch;
- after the step the ranks meet once, and each metric gets one value, merged by its rule (:data:`RULES`).

``num_tokens`` grows by the real tokens of the step over all ranks, whatever was added in the calls. A metric that had
nothing to count in the whole step gets no value. Nothing here imports TRL.

Source: TRL 1.16, ``compute_loss`` and ``_compute_loss`` of its trainers.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.core.replacing import replaced
from ullage.ranks import Axis
from ullage.ranks.wire import dumps, gather_records
from ullage.training.loss.divisions import nearest_in

#: Rules that are not a kind of weight.
_EXTREMES = {"min": min, "max": max}
#: The count of tokens that trainers keep over the whole run, and set in each call.
_TOTAL = "num_tokens"
#: The seconds of a step, which a call appends where it takes itself for the last of an accumulation.
_SECONDS = "step_time"


@dataclass(frozen=True)
class Difference:
    """Rule of a metric that is the difference of two others, taken after those are merged."""

    minuend: str
    subtrahend: str


#: "min", "max", "sum", or the kind of weight of a mean: "tokens", "labels", "sequences", or one of a trainer's own.
Rule = str | Difference

#: A metric that no table names, as any that a subclass adds: a mean weighed by real tokens.
DEFAULT_RULE: Rule = "tokens"

#: By a trainer's full name: the rule of each metric that its loss appends. Who knows a trainer adds it. Kinds beside
#: those of every microbatch, for pairs: "pairs", "chosen" and "rejected" (sequences of either side), "chosen_tokens",
#: "rejected_tokens" and "labels" (completion tokens that have a token before them).
RULES: dict[str, Mapping[str, Rule]] = {}


def rules_of(kind: type) -> Mapping[str, Rule]:
    """The rules of the nearest class of the trainer that has any; empty for a trainer that no table names."""
    return nearest_in(RULES, kind) or {}


@dataclass(frozen=True)
class Taken:
    """What one call appended.

    Attributes:
        weights: of the microbatch, by kind; empty for one that counts nowhere, such as a placeholder.
        values: by the metric's name, in the order in which they were appended.
    """

    weights: Mapping[str, float]
    values: Mapping[str, Sequence[float]]


class CallMetrics:
    """The metrics of a trainer that keeps ``_metrics`` as TRL's do; does nothing for any other.

    ``trainer``: whose lists and accelerator count. Nothing of it is read before it is asked for.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def are_kept(self) -> bool:
        """Whether the trainer has lists of metrics."""
        kept = getattr(self._trainer, "_metrics", None)
        return isinstance(kept, dict) and isinstance(kept.get("train"), dict) and "eval" in kept

    @contextlib.contextmanager
    def collect(self, into: list[Taken], mode: str, weights: Mapping[str, float]) -> Iterator[None]:
        """A call of the loss, without collectives of its own; what it appends goes to ``into``.

        ``mode``: "train" or "eval". ``weights``: of the microbatch, by kind; empty if it counts nowhere.
        """
        if not self.are_kept:
            yield
            return
        trainer = self._trainer
        lists, tokens = trainer._metrics[mode], getattr(trainer, "_total_train_tokens", None)
        # A mapping of its own: some trainers replace a list, and some read back what they have just appended.
        trainer._metrics[mode] = appended = defaultdict(list)
        try:
            with contextlib.ExitStack() as alone:
                for name in ("gather", "gather_for_metrics", "reduce"):
                    alone.enter_context(replaced(trainer.accelerator, name, _own_values))
                yield
        finally:
            trainer._metrics[mode] = lists
            if tokens is not None:
                trainer._total_train_tokens = tokens
        found = {name: [*map(float, values)] for name, values in appended.items() if name != _SECONDS}
        into.append(Taken(weights, found))

    def merge(self, calls: Iterable[Taken], mode: str, num_tokens: int = 0) -> None:
        """Append one value per metric to the trainer's lists; ``num_tokens``: real tokens over all ranks.

        Collective on several ranks: one gather.
        """
        if not self.are_kept:
            return
        trainer, rules = self._trainer, rules_of(type(self._trainer))
        ranks = gather_records(dumps(_merge_calls(calls, rules)), Axis.world())
        merged = _values(rules, [json.loads(record) for record in ranks])
        if merged.pop(_TOTAL, None) is not None and hasattr(trainer, "_total_train_tokens"):
            trainer._total_train_tokens += num_tokens
            trainer._metrics[mode][_TOTAL] = [trainer._total_train_tokens]
        for name, value in merged.items():
            trainer._metrics[mode].setdefault(name, []).append(value)


def _merge_calls(calls: Iterable[Taken], rules: Mapping[str, Rule]) -> dict[str, tuple[float, float]]:
    """(value, weight) of each metric over some calls; without those that are a difference of others."""
    parts: dict[str, list[tuple[float, float]]] = {}
    for call in calls:
        for name, values in call.values.items():
            rule = rules.get(name, DEFAULT_RULE)
            if isinstance(rule, Difference):
                continue
            weight = float(name == _TOTAL)  # that it is kept, which holds for every call
            if call.weights and name != _TOTAL:
                weight = 1.0 if rule in ("min", "max", "sum") else float(call.weights[rule])
            parts.setdefault(name, []).extend((value, weight) for value in values)
    return {name: _merge(rules.get(name, DEFAULT_RULE), found) for name, found in parts.items()}


def _values(rules: Mapping[str, Rule], ranks: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The value of each metric over all ranks; without those that nothing counted in."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    merged = {
        name: _merge(rules.get(name, DEFAULT_RULE), [rank[name] for rank in ranks if name in rank]) for name in names
    }
    values = {name: value for name, (value, weight) in merged.items() if weight > 0}
    for name, rule in rules.items():
        if isinstance(rule, Difference) and rule.minuend in values and rule.subtrahend in values:
            values[name] = values[rule.minuend] - values[rule.subtrahend]
    return values


def _merge(rule: Rule, parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """One (value, weight) of several. The weight of what is not a number is zero, and so is that of nothing."""
    # Means of 1.0 over one label and of 6.0 over four are one of 5.0 over five.
    counted = [(value, weight) for value, weight in parts if weight > 0 and not math.isnan(value)]
    whole = math.fsum(weight for _, weight in counted)
    if not counted:
        return 0.0, 0.0
    if rule == "sum":
        return math.fsum(value for value, _ in counted), whole
    if rule in _EXTREMES:
        return _EXTREMES[str(rule)](value for value, _ in counted), whole
    return math.fsum(value * weight for value, weight in counted) / whole, whole


def _own_values(values: Any, *args: Any, **kwargs: Any) -> Any:
    """``values`` as :meth:`accelerate.Accelerator.gather` gives those of one process."""
    return values
