"""Figures of a run, and how those of another differ, for terminals, pages and ``--json``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ullage.report.page import percent
from ullage.report.run import Run
from ullage.units import duration, rate

#: How a figure is compared: by what per cent, by how much, by how many per cent of the whole, or not at all.
Kind = Literal["ratio", "amount", "share", "none"]


@dataclass(frozen=True)
class RunFigure:
    """A figure of runs: its name for people and in ``--json``, how it is read off, written and compared."""

    title: str
    name: str
    value: Callable[[Run], Any]
    text: Callable[[Any], str]
    kind: Kind = "none"

    def told(self, run: Run) -> str:
        """The figure as text; empty where the run has none."""
        value = self.value(run)
        return "" if value is None else self.text(value)

    def difference(self, run: Run, first: Run) -> str:
        """By how much ``run`` differs from ``first``, as text; empty where nothing can be said."""
        ours, theirs = self.value(run), self.value(first)
        if self.kind == "none" or ours is None or theirs is None or not math.isfinite(ours - theirs):
            return ""
        if self.kind == "ratio":
            return f"{100 * (ours / theirs - 1):+.1f} %" if theirs else ""
        if self.kind == "share":
            return f"{100 * (ours - theirs):+.1f} points"
        return f"{ours - theirs:+.3g}"


def _first(name: str) -> Callable[[Run], float | None]:
    return lambda run: next((value for _, value in run.values(name)), None)


def _last(name: str) -> Callable[[Run], float | None]:
    return lambda run: next((value for _, value in reversed(run.values(name))), None)


def _closing(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.closing.get(name)


def _mean(name: str) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found = [value for _, value in run.values(name)]
        return statistics.fmean(found) if found else None

    return value


def _median(name: str) -> Callable[[Run], float | None]:
    """The median, without the first row of each process, in which compilers and caches are waited for."""

    def value(run: Run) -> float | None:
        found = run.values(name)
        cold = {next((step for step, _ in found if step > start), None) for start in run.starts}
        warm = [value for step, value in found if step not in cold] or [value for _, value in found]
        return statistics.median(warm) if warm else None

    return value


def _best_eval(run: Run) -> float | None:
    found = [value for _, value in run.values(eval_loss_of(run)) if math.isfinite(value)]
    return min(found, default=None)


def eval_loss_of(run: Run) -> str:
    """The name of the loss on held-out data: of several sets, that of the first."""
    names = [name for row in run.evaluations for name in row if name.endswith("_loss")]
    return "eval_loss" if "eval_loss" in names or not names else names[0]


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.3f}"


#: The table, in order.
FIGURES = (
    RunFigure("steps", "steps", lambda run: run.step, _whole),
    RunFigure("loss at the first log", "first_loss", _first("loss"), _loss),
    RunFigure("loss at the last log", "last_loss", _last("loss"), _loss, "amount"),
    RunFigure("held-out loss, last", "eval_loss", lambda run: _last(eval_loss_of(run))(run), _loss, "amount"),
    RunFigure("held-out loss, best", "best_eval_loss", _best_eval, _loss, "amount"),
    RunFigure("real tokens per second, median", "tokens_per_second", _median("tokens_per_second"), _whole, "ratio"),
    RunFigure("padding computed, mean", "padding_computed", _mean("padding_computed"), percent, "share"),
    RunFigure("padding avoided", "padding_avoided", _closing("padding_avoided"), percent, "share"),
    RunFigure("capacity unused, mean", "capacity_unused", _mean("capacity_unused"), percent, "share"),
    RunFigure("imbalance, mean", "imbalance", _mean("imbalance"), _ratio, "amount"),
    RunFigure("model FLOPs, median", "flops_per_second", _median("flops_per_second"), rate, "ratio"),
    RunFigure("MFU, median", "mfu", _median("mfu"), percent, "share"),
    RunFigure("waiting for ranks, per step", "wait_seconds", _median("wait_seconds"), duration, "ratio"),
    RunFigure("planning, per step", "plan_seconds", _median("plan_seconds"), duration, "ratio"),
    RunFigure("exchange and packing, per step", "exchange_seconds", _median("exchange_seconds"), duration, "ratio"),
    RunFigure("time", "seconds", lambda run: run.seconds, duration, "ratio"),
    RunFigure("checkpoints there", "num_checkpoints", lambda run: len(run.checkpoints), _whole),
    RunFigure("sequences dropped", "dropped_sequences", _closing("total_dropped_sequences"), _whole),
    RunFigure("sequences truncated", "truncated_sequences", _closing("total_truncated_sequences"), _whole),
)


def run_figures(runs: Sequence[Run]) -> list[list[str]]:
    """The table as text: a row per figure that any run has: its title, then each run's, then, for each run after the
    first, its difference from the first.
    """
    rows = []
    for figure in FIGURES:
        told = [figure.told(run) for run in runs]
        if any(told):
            rows.append([figure.title, *told, *(figure.difference(run, runs[0]) for run in runs[1:])])
    return rows


def run_record(run: Run) -> dict[str, Any]:
    """The run as plain data, for ``--json``; numbers that are not finite are null."""
    figures = {figure.name: _plain(figure.value(run)) for figure in FIGURES}
    return {
        "folder": str(run.folder),
        "has_ended": run.has_ended,
        "max_steps": run.max_steps,
        **figures,
        "checkpoints": [str(path) for path in run.checkpoints],
        "layouts": [{"layout": span.layout, "after_step": span.start, "to_step": span.stop} for span in run.spans],
        "planned_step": None if run.plan is None else run.plan[0],
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings in which runs of ``ullage train`` differ, with the value of each run."""
    if len(runs) < 2 or not all(run.settings for run in runs):
        return []
    names = dict.fromkeys(name for run in runs for name in run.settings)
    told = {name: [_setting(run.settings.get(name)) for run in runs] for name in names}
    return [(name, values) for name, values in told.items() if len(set(values)) > 1]


def _setting(value: Any) -> str:
    return "none" if value is None else str(value)


def names_of(runs: Sequence[Run]) -> list[str]:
    """A short name of each run's folder; that of its parents before it as far as they are needed to tell runs apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]
