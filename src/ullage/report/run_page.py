"""Page of a run: its curves, the plan of a step, its checkpoints and layouts; with other runs over it to compare."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.core.display import duration, prefix_of, quantity, rate, size, write_page
from ullage.report.curves import Chart, Series, chart, short
from ullage.report.life import Life, down, layouts_in_words, life_bars, life_legend, parts_of_down
from ullage.report.page import NUM_COLOURS, render
from ullage.report.plan import memory_drawing
from ullage.report.run import (
    FIGURES,
    Run,
    RunFigure,
    date,
    differing_settings,
    eval_loss_of,
    run_figures,
    short_names,
    what_was_run,
)

#: The page of a run in its folder, and that of a comparison in the folder of the first run.
PAGE, COMPARISON = "report.html", "comparison.html"
#: Rows of the tables of checkpoints and of stretches at the most; the newest are shown.
_MOST_CHECKPOINTS = _MOST_STRETCHES = 40
#: Samples of what the model wrote at the most, and letters of each.
_MOST_SAMPLES, _LONGEST_TEXT = 12, 2000
#: Figures of a single run that stand on top, by their names, as far as it has them.
_TILES = ("last_loss", "eval_loss", "tokens_per_second", "padding_avoided", "padding_computed", "capacity_unused",
          "imbalance", "mfu", "steps", "seconds", "restarts", "steps_lost", "seconds_down")  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A picture of curves under its title; ``note``: what its numbers mean; ``lost``: what it cannot show.

    ``chart`` is None where no value is finite.
    """

    title: str
    note: str
    chart: Chart | None
    lost: str = ""


@dataclass(frozen=True)
class _Drawn:
    """What is drawn in one picture: numbers of the log, each with its name in the legend, in their unit."""

    title: str
    note: str
    names: Sequence[tuple[str, str]]
    form: Callable[[float], str] | None = None
    #: What a value of the log is multiplied by.
    scale: float = 1.0


def run_page(runs: Sequence[Run]) -> str:
    """The first of ``runs`` as one HTML page without script or network; the others are drawn over it.

    Raises ``InputError`` without jinja2.
    """
    run, names = runs[0], short_names(runs)
    return render(
        "run.html",
        run=run,
        names=names,
        told=[(name, what_was_run(each)) for name, each in zip(names, runs, strict=True)],
        samples=_newest(run.samples),
        num_samples=len(run.samples),
        tiles=[(figure.title, figure.text_of(run)) for figure in _tiles() if figure.text_of(run)],
        pictures=list(_pictures(runs, names)),
        table=run_figures(runs),
        settings=differing_settings(runs),
        layouts=layouts_in_words([span.layout for span in run.spans]),
        life=_drawn_life(run.life),
        checkpoints=_checkpoints(run),
        num_rotated=len([step for step in run.saved if step not in {_step(path) for path in run.checkpoints}]),
        plan=None if run.plan is None else run.plan[1],
        planned_step=None if run.plan is None else run.plan[0],
        stats=None if run.plan is None else run.plan[1].statistics(),
        memory=None if run.plan is None else memory_drawing(run.plan[1]),
    )


def write_run_page(runs: Sequence[Run], path: Path) -> None:
    """Write :func:`run_page` to ``path``, whole or not at all. Raises ``InputError`` if it cannot be written."""
    write_page(path, run_page(runs))


def _drawn_life(life: Life) -> dict[str, Any] | None:
    """What the page shows of a life; None where one process did all of it."""
    if not life.restarts:
        return None
    rows = []
    for number, each in list(enumerate(life.stretches))[-_MOST_STRETCHES:]:
        steps = f"{each.start + 1:,} to {each.reached:,}" if each.reached > each.start else "none"
        waited = duration(down(life.stretches, number)) if number else ""
        lost = f"{each.steps_lost:,}" if each.steps_lost else ""
        rows.append((date(each.began), each.layout, steps, waited, lost, life.how_it_ended(number)))
    parts = [f"{duration(seconds)} {told}" for told, seconds in parts_of_down(life)]
    return {
        "bars": life_bars(life),
        "legend": list(life_legend(life)),
        "rows": rows,
        "num_older": len(life.stretches) - len(rows),
        "down": f"{duration(life.seconds_down)} down: {', '.join(parts)}.",
    }


def _tiles() -> Iterator[RunFigure]:
    return (figure for name in _TILES for figure in FIGURES if figure.name == name)


def _newest(samples: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """The last samples, the newest step first, each cut to a length that a page bears."""
    steps = sorted({step for step, _, _ in samples}, reverse=True)
    ordered = [each for step in steps for each in samples if each[0] == step]
    cut = lambda text: text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ..."  # noqa: E731
    return [(step, cut(prompt), cut(text)) for step, prompt, text in ordered[:_MOST_SAMPLES]]


def _pictures(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Picture]:
    for drawn in _all_drawn(runs):
        series = list(_series(drawn, runs, names))
        # A line stands where the layout of the first run changes.
        made = chart(series, drawn.form, [span.start for span in runs[0].spans[1:]])
        lost = _not_finite(series)
        # What is the same all the time is said by the table.
        if drawn.title != "Loss" and made is not None and _is_constant(series):
            made = None
        # A single step makes no curve: its figures stand in the table.
        if made is not None and made.first < made.last:
            yield Picture(drawn.title, drawn.note, made, lost)
        elif made is None and lost:
            yield Picture(drawn.title, "", None, lost)


def _is_constant(series: Sequence[Series]) -> bool:
    """Whether all values of each curve are the same, within the digits that anybody reads."""
    for each in series:
        values = [value for _, value in each.points if math.isfinite(value)]
        if values and max(values) - min(values) > 1e-6 * max(map(abs, values)):
            return False
    return True


def _not_finite(series: Sequence[Series]) -> str:
    """Where values are not finite, in words; empty if all are."""
    told, several = [], len([each for each in series if each.points]) > 1
    for each in series:
        steps = [step for step, value in each.points if not math.isfinite(value)]
        if steps:
            name = f"{each.label}: " * several
            logs = quantity(len(each.points), "log")
            told.append(f"{name}not finite in {len(steps):,} of {logs}, first at step {steps[0]:,}")
    said = "; ".join(told)
    # The name of a run keeps its letters.
    return f"{said if several else said.capitalize()}." if said else ""


def _series(drawn: _Drawn, runs: Sequence[Run], names: Sequence[str]) -> Iterator[Series]:
    for r, run in enumerate(runs):
        for k, (name, label) in enumerate(drawn.names):
            points = [(step, value * drawn.scale) for step, value in run.values(name)]
            # One run: a colour for each number. Several: a colour for each run, and its second number broken.
            colour = k if len(runs) == 1 else r
            style = f"k{colour % NUM_COLOURS}" + (" broken" if k and len(runs) > 1 else "")
            told = label if len(runs) == 1 else names[r] if len(drawn.names) == 1 else f"{names[r]}, {label}"
            yield Series(told, style, points)


def _all_drawn(runs: Sequence[Run]) -> Iterator[_Drawn]:
    held_out = eval_loss_of(runs[0])
    yield _Drawn("Loss", "", [("loss", "training"), (held_out, "held out")], lambda value: f"{value:.5g}")
    note = "Real tokens over all ranks per second, between two logs; evaluating and saving count in their interval."
    yield _Drawn("Speed", note, [("tokens_per_second", "tokens per second")], lambda value: f"{value:,.0f}")
    note = (
        "Per cent. Computed: padding among the elements that the model was given. Unused: slots of the plan's"
        " microbatches that held no token; nothing is computed for them."
    )
    shares = [("padding_computed", "padding computed"), ("capacity_unused", "capacity unused")]
    yield _Drawn("Padding", note, shares, lambda value: f"{value:.2f} %", 100.0)
    note = "The work of the busiest rank over the mean; 1 is the ideal."
    yield _Drawn("Imbalance", note, [("imbalance", "imbalance")], lambda value: f"{value:.4f}")
    if any(run.values("mfu") for run in runs):
        note = "Per cent of the FLOP/s that the devices could do."
        yield _Drawn("MFU", note, [("mfu", "MFU")], lambda value: f"{value:.2f} %", 100.0)
    else:
        largest = max((value for run in runs for _, value in run.values("flops_per_second")), default=0.0)
        divisor, prefix = prefix_of(largest)
        note = f"{prefix}FLOP/s of the model on real tokens, forward and backward, of all devices."
        form = lambda value: rate(value * divisor)  # noqa: E731
        yield _Drawn("Model FLOPs", note, [("flops_per_second", "model FLOPs")], form, 1 / divisor)
    note = "Milliseconds per step, as means over ranks; waiting: for the last rank and the device, before a step."
    seconds = [("wait_seconds", "waiting"), ("plan_seconds", "planning"), ("exchange_seconds", "exchange and packing")]
    if len(runs) == 1:
        yield _Drawn("Beside the model's work", note, seconds, lambda value: f"{value:.3g} ms", 1e3)
    yield _Drawn("Learning rate", "", [("learning_rate", "learning rate")], lambda value: short(value, 4))
    yield _Drawn("Gradient norm", "", [("grad_norm", "gradient norm")], lambda value: short(value, 4))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _checkpoints(run: Run) -> list[tuple[str, str, str, str]]:
    """Step, layout, bytes and whether it is whole, of each checkpoint that is there."""
    from ullage.training.saving.damage import is_damaged

    rows = []
    for path in run.checkpoints[-_MOST_CHECKPOINTS:]:
        span = run.span_of(_step(path))
        layout = "" if span is None else span.layout
        rows.append((f"{_step(path):,}", layout, size(_num_bytes(path)), "damaged" if is_damaged(path) else "whole"))
    return rows


def _num_bytes(folder: Path) -> int:
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sum(path.stat().st_size for path in files if path.is_file())
