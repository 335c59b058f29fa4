"""A run by what a Trainer of transformers leaves of it: its figures, curves, layouts and checkpoints.

Read from ``trainer_state.json`` in the folder of the run or in the newest of its checkpoints, so that the run of any
Trainer can be shown, also while it trains. Ours keeps there, too, on which layout each step was trained
(:mod:`ullage.training.run.layouts`). Reading needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ullage.core.display import duration, prefix_of, quantity, rate
from ullage.core.errors import InputError
from ullage.report.drawing import NUM_COLOURS, Chart, Series, chart, percent, render, short
from ullage.training.run import LAYOUTS

STATE = "trainer_state.json"
#: The page of a run in its folder, and that of a comparison in the folder of the first run.
PAGE, COMPARISON = "report.html", "comparison.html"
#: Figures of which the first that there are stand on top of a page, by their names.
_LARGE = ("last_loss", "eval_loss", "tokens_per_second", "padding_avoided", "mfu", "padding_computed", "imbalance")

Numbers = dict[str, Any]


class LayoutSpan(NamedTuple):
    """Steps on one layout: those after ``start``, up to ``stop``."""

    layout: str
    start: int
    stop: int


@dataclass(frozen=True)
class Run:
    """What a run left in its output folder.

    ``rows`` of training, and of evaluations, by rising ``step``, have numbers by their names in the log; ``closing``
    those of the whole run, once it has ended. ``spans``: its layouts, one for each process that trained; empty for a
    run of another Trainer. ``max_steps``: the step at which the run is to end, where known.
    """

    folder: Path
    rows: Sequence[Numbers]
    evaluations: Sequence[Numbers] = ()
    closing: Numbers = field(default_factory=dict)
    spans: Sequence[LayoutSpan] = ()
    checkpoints: Sequence[Path] = ()
    max_steps: int | None = None

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((row["step"] for row in (*self.rows, *self.evaluations, self.closing) if row), default=0)

    @property
    def progress(self) -> str:
        """How far the run is, and on which layouts, in words."""
        of = f" of {self.max_steps:,}" if self.max_steps is not None and self.max_steps != self.step else ""
        layouts = list(dict.fromkeys(span.layout for span in self.spans))
        where = f", on {', then on '.join(layouts)}" if layouts else ""
        return f"{self.step:,}{of} step{'' if self.step == 1 and not of else 's'}{where}"

    def values(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each row, of training or evaluation, that has the number."""
        rows = self.evaluations if name.startswith("eval_") else self.rows
        return [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]


def read_run(folder: str | Path) -> Run:
    """Read the run in an output folder, or that which led to a checkpoint.

    Raises ``InputError`` if there is none.
    """
    folder = Path(folder)
    named = [(path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    checkpoints = [path for _, path in sorted((int(step), path) for step, path in named if step.isdecimal())]
    states = [state for place in (folder, *checkpoints) if (state := _state(place / STATE)) is not None]
    if not states:
        expected = f"{STATE} in the folder or in a checkpoint of it"
        torn = [str(place / STATE) for place in (folder, *checkpoints) if (place / STATE).is_file()]
        found = f"a torn {torn[0]}" if torn else None
        hint = "give the output_dir of a run, once it has saved a checkpoint"
        raise InputError("no run has left its state here", where=str(folder), expected=expected, found=found, hint=hint)
    state = max(states, key=lambda each: each.get("global_step") or 0)
    training: dict[int, Numbers] = {}
    evaluations: dict[int, Numbers] = {}
    closing: Numbers = {}
    for whole in state["log_history"]:
        if not isinstance(whole, dict) or not isinstance(whole.get("step"), int):
            continue
        # What is no number cannot be drawn. Of two rows of a step the later one counts.
        row: Numbers = {name: value for name, value in whole.items() if isinstance(value, (int, float))}
        if "loss" in row:
            training[row["step"]] = row
        elif any(name.startswith("eval_") for name in row):  # several data sets are evaluated at one step
            evaluations[row["step"]] = {**evaluations.get(row["step"], {}), **row}
        else:
            closing |= row
    rows, evaluated = ([found[step] for step in sorted(found)] for found in (training, evaluations))
    begins = (state.get("stateful_callbacks") or {}).get(LAYOUTS) or []
    stops = [*(step for step, _ in begins[1:]), state.get("global_step") or 0]
    spans = [LayoutSpan(str(layout), step, stop) for (step, layout), stop in zip(begins, stops)]
    most = state.get("max_steps")
    max_steps = most if isinstance(most, int) and most > 0 else None
    return Run(folder, rows, evaluated, closing, spans, checkpoints, max_steps)


def _state(path: Path) -> Numbers | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and isinstance(state.get("log_history"), list) else None


# Figures.

#: How a figure is compared: by what per cent, by how much, by how many per cent of the whole, or not at all.
Kind = Literal["ratio", "amount", "share", "none"]


class RunFigure(NamedTuple):
    """A figure of runs: its name for people and in ``--json``, how it is read off, written and compared."""

    title: str
    name: str
    value: Callable[[Run], Any]
    text: Callable[[Any], str]
    kind: Kind = "none"

    def text_of(self, run: Run) -> str:
        """The figure as text; empty where the run has none."""
        value = self.value(run)
        return "" if value is None else self.text(value)

    def difference(self, run: Run, first: Run) -> str:
        """By how much ``run`` differs from ``first``, as text; empty where nothing can be said."""
        ours, theirs = self.value(run), self.value(first)
        if self.kind == "none" or ours is None or theirs is None or not math.isfinite(ours - theirs):
            return ""
        if ours == theirs:
            return "equal"
        if self.kind == "ratio":
            return f"{100 * (ours / theirs - 1):+.1f} %" if theirs else ""
        by = ours - theirs
        return f"{round(100 * by, 1) + 0.0:+.1f} points" if self.kind == "share" else "+" * (by > 0) + short(by)


def _of(name: str, take: Callable[[list[float]], float]) -> Callable[[Run], float | None]:
    """What ``take`` makes of the values of a number; None where there are none."""

    def value(run: Run) -> float | None:
        found = [value for _, value in run.values(held_out_loss(run) if name == "eval_loss" else name)]
        return take(found) if found else None

    return value


def _warm_median(values: list[float]) -> float:
    """Without the first, in which compilers and caches are waited for."""
    return statistics.median(values[1:] or values)


def held_out_loss(run: Run) -> str:
    """The name of the loss on held-out data: of several sets, that of the first."""
    names = [name for row in run.evaluations for name in row if name.endswith("_loss")]
    return "eval_loss" if "eval_loss" in names or not names else names[0]


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


_whole = "{:,.0f}".format


#: The table, in order.
FIGURES = (
    RunFigure("steps", "steps", lambda run: run.step, _whole),
    RunFigure("loss at the first log", "first_loss", _of("loss", lambda v: v[0]), _loss),
    RunFigure("loss at the last log", "last_loss", _of("loss", lambda v: v[-1]), _loss, "amount"),
    RunFigure("held-out loss, last", "eval_loss", _of("eval_loss", lambda v: v[-1]), _loss, "amount"),
    RunFigure("held-out loss, best", "best_eval_loss",
              _of("eval_loss", lambda v: min(filter(math.isfinite, v), default=math.nan)), _loss, "amount"),
    RunFigure("real tokens per second, median", "tokens_per_second", _of("tokens_per_second", _warm_median), _whole,
              "ratio"),
    RunFigure("padding computed, mean", "padding_computed", _of("padding_computed", statistics.fmean), percent,
              "share"),
    RunFigure("padding avoided", "padding_avoided", lambda run: run.closing.get("padding_avoided"), percent, "share"),
    RunFigure("capacity unused, mean", "capacity_unused", _of("capacity_unused", statistics.fmean), percent, "share"),
    RunFigure("busiest rank ÷ mean", "imbalance", _of("imbalance", statistics.fmean), lambda v: f"{v:.3f}", "amount"),
    RunFigure("model FLOPs, median", "flops_per_second", _of("flops_per_second", _warm_median), rate, "ratio"),
    RunFigure("MFU, median", "mfu", _of("mfu", _warm_median), percent, "share"),
    RunFigure("waiting for ranks, per step", "wait_seconds", _of("wait_seconds", _warm_median), duration, "ratio"),
    RunFigure("planning, per step", "plan_seconds", _of("plan_seconds", _warm_median), duration, "ratio"),
    RunFigure("exchange and packing, per step", "exchange_seconds", _of("exchange_seconds", _warm_median), duration,
              "ratio"),
    RunFigure("restarts", "restarts", lambda run: len(run.spans) - 1 if len(run.spans) > 1 else None, _whole),
    RunFigure("checkpoints there", "num_checkpoints", lambda run: len(run.checkpoints), _whole),
    RunFigure("sequences dropped", "dropped_sequences", lambda run: run.closing.get("total_dropped_sequences"), _whole),
    RunFigure("sequences truncated", "truncated_sequences",
              lambda run: run.closing.get("total_truncated_sequences"), _whole),
)  # fmt: skip


def run_figures(runs: Sequence[Run]) -> list[list[str]]:
    """The table as text: a row per figure that any run has: its title, then each run's, then, for each run after the
    first, its difference from the first.
    """
    told = [[f.title, *map(f.text_of, runs), *(f.difference(run, runs[0]) for run in runs[1:])] for f in FIGURES]
    return [row for row in told if any(row[1:])]


def run_record(run: Run) -> dict[str, Any]:
    """The run as plain data, for ``--json``; numbers that are not finite are null."""
    values = {figure.name: figure.value(run) for figure in FIGURES}
    figures = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
    places = {"checkpoints": [str(path) for path in run.checkpoints], "layouts": [each._asdict() for each in run.spans]}
    return {"folder": str(run.folder), "max_steps": run.max_steps, **figures, **places}


def short_names(runs: Sequence[Run]) -> list[str]:
    """A short name of each run's folder; that of its parents before it as far as they are needed to tell runs apart."""
    parts = [run.folder.resolve().parts for run in runs]
    named = (["/".join(part[-depth:]) for part in parts] for depth in range(1, max(map(len, parts)) + 1))
    return next((names for names in named if len({*names}) == len(names)), [str(run.folder) for run in runs])


# The page.

#: One picture: its title, what its numbers mean, numbers of the log with their names in the legend, how they are
#: written, and by what they are multiplied.
_Drawn = tuple[str, str, Sequence[tuple[str, str]], Callable[[float], str], float]


class Picture(NamedTuple):
    """A picture of curves under its title; ``note``: what its numbers mean; ``lost``: what it cannot show."""

    title: str
    note: str
    chart: Chart | None
    lost: str


def run_page(runs: Sequence[Run]) -> str:
    """The first of ``runs`` as one HTML page without script or network; the others are drawn over it."""
    names = short_names(runs)
    pictures, large = list(_pictures(runs, names)), list(_large(runs, names))[:4]
    values = {"title": _claim(runs, names), "large": large, "pictures": pictures, "table": run_figures(runs)}
    return render("run.html", runs=runs, names=names, **values)


def _claim(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The title: of one run its losses at both ends, of several how far their losses are apart."""
    losses = [{step: loss for step, loss in run.values("loss") if math.isfinite(loss)} for run in runs]
    if len(runs) == 1:
        ends = " to ".join(short(loss) for loss in (*losses[0].values(),)[:: max(1, len(losses[0]) - 1)])
        return f"{names[0]}: loss {ends} in {quantity(runs[0].step, 'step')}" if len(losses[0]) > 1 else names[0]
    common = sorted(set[int].intersection(*map(set, losses)))
    title = f"{names[0]} beside {', '.join(names[1:])}"
    apart = max((max(at) - min(at) for at in ([of[step] for of in losses] for step in common)), default=0.0)
    said = f"losses at most {short(apart, 2)} apart" if apart else "the same losses"
    return f"{title}: {said} at {quantity(len(common), 'common step')}" if common else title


def _large(runs: Sequence[Run], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Figures of one run, or by how much those of a second one differ, each with what it is."""
    figures = {each.name: each for each in FIGURES}
    for figure in (figures[name] for name in _LARGE if name != "last_loss" or len(runs) > 1):  # it stands in the title
        texts = [figure.text_of(run) for run in runs]
        if len(runs) == 1 and texts[0]:
            yield texts[0], figure.title
        elif len(runs) == 2 and all(texts):
            said = f"{figure.title}: {names[1]} {texts[1]}, {names[0]} {texts[0]}"
            yield figure.difference(runs[1], runs[0]), said


def _pictures(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Picture]:
    for drawn in _all_drawn(runs):
        title, note, _, form, _ = drawn
        series = list(_series(drawn, runs, names))
        # A line stands where a process began.
        made = chart(series, form, [span.start for span in runs[0].spans[1:]])
        lost = "; ".join(filter(None, map(_not_finite, series)))
        # A single step makes no curve, nor does what is the same all the time in six digits: the table has them.
        constant = all(len({short(v, 6) for _, v in each.points if math.isfinite(v)}) < 2 for each in series)
        if made is not None and (made.first == made.last or (title != "Loss" and constant)):
            continue
        if made is not None or lost:
            yield Picture(title, note, made, lost)


def _not_finite(series: Series) -> str:
    """Where values are not finite, in words; empty if all are."""
    steps = [step for step, value in series.points if not math.isfinite(value)]
    logs = quantity(len(series.points), "log")
    return f"{series.label}: not finite in {len(steps):,} of {logs}, first at step {steps[0]:,}" if steps else ""


def _series(drawn: _Drawn, runs: Sequence[Run], names: Sequence[str]) -> Iterator[Series]:
    _, _, numbers, _, scale = drawn
    for r, run in enumerate(runs):
        for k, (name, label) in enumerate(numbers):
            points = [(step, value * scale) for step, value in run.values(name)]
            # One run: a colour for each number. Several: a colour for each run, and its second number broken.
            colour = k if len(runs) == 1 else r
            style = f"k{colour % NUM_COLOURS}" + (" broken" if k and len(runs) > 1 else "")
            told = label if len(runs) == 1 else names[r] if len(numbers) == 1 else f"{names[r]}, {label}"
            yield Series(told, style, points)


def _all_drawn(runs: Sequence[Run]) -> list[_Drawn]:
    losses = [("loss", "training"), (held_out_loss(runs[0]), "held out")]
    shares = [("padding_computed", "padding among what the model was given"),
              ("capacity_unused", "slots of microbatches without a token")]  # fmt: skip
    speed = "Real tokens over all ranks per second, between two logs; evaluating and saving count in their interval."
    work = "The work of the busiest rank over the mean; 1 is the ideal."
    if any(run.values("mfu") for run in runs):
        note = "Per cent of the FLOP/s that the devices could do."
        flops: _Drawn = ("MFU", note, [("mfu", "MFU")], "{:.2f} %".format, 100.0)
    else:
        divisor, prefix = prefix_of(max((v for run in runs for _, v in run.values("flops_per_second")), default=0.0))
        note = f"{prefix}FLOP/s of the model on real tokens, forward and backward, of all devices."
        written = lambda value: rate(value * divisor)  # noqa: E731
        flops = ("Model FLOPs", note, [("flops_per_second", "model FLOPs")], written, 1 / divisor)
    return [
        ("Loss", "", losses, "{:.5g}".format, 1.0),
        ("Speed", speed, [("tokens_per_second", "tokens per second")], _whole, 1.0),
        ("Padding", "Per cent.", shares, "{:.2f} %".format, 100.0),
        ("Imbalance", work, [("imbalance", "imbalance")], "{:.4f}".format, 1.0),
        flops,
        ("Learning rate", "", [("learning_rate", "learning rate")], lambda value: short(value, 4), 1.0),
        ("Gradient norm", "", [("grad_norm", "gradient norm")], lambda value: short(value, 4), 1.0),
    ]
