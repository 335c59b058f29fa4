"""A run as it lies in its folder: the rows of its log, its checkpoints, its layouts and the plan of a step.

Read from ``ullage_log.jsonl`` (:mod:`ullage.training.run.log_file`), which ``ullage train`` and the callback ``RunLog``
write; without one, from the ``trainer_state.json`` of the newest checkpoint, which any Trainer of transformers leaves.
Reading needs neither torch nor transformers, so that a run can be followed from another terminal at once. Its figures,
and how those of another run differ, are for terminals, pages and ``--json``.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ullage.core.display import duration, rate
from ullage.core.errors import InputError
from ullage.report.curves import short
from ullage.report.life import Life, life_record, read_life
from ullage.report.page import percent
from ullage.training.run.log_file import LOG, PLAN, Event, read_whole_log, standing

if TYPE_CHECKING:
    from ullage.planning import Plan

STATE, RECORD = "trainer_state.json", "ullage_run.json"

Row = dict[str, Any]


@dataclass(frozen=True)
class LayoutSpan:
    """The steps of a run on one layout: those after ``start``, up to ``stop``. ``began``: seconds since 1970."""

    layout: str
    start: int
    stop: int
    began: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        folder: its output folder.
        rows: of training, by rising ``step``, each with its numbers by their names in the log.
        evaluations: the same of evaluations.
        closing: numbers of the whole run, from its last entries.
        spans: its layouts, in order; of neighbours with the same layout one. Empty without a log of ours.
        starts: steps after which a process began.
        saved: steps of the checkpoints that were written, also of those that are gone.
        checkpoints: folders of those that are there, by rising step.
        plan: of one packed step, with the number of the step.
        max_steps: the step at which the run is to end, where known.
        seconds: from the beginning to the last row, without the time between processes; None without a log of ours.
        has_ended: whether training came to its end, or was stopped.
        settings: those that decide the numbers of a run of ``ullage train``.
        facts: what is known of the run (:func:`ullage.training.run.run_log.describe_run`), of its last process.
        samples: texts that the model wrote, by rising step: (step, prompt, text).
        life: what its processes did, also what was lost; without stretches where there is no log of ours.
    """

    folder: Path
    rows: Sequence[Row]
    evaluations: Sequence[Row] = ()
    closing: Row = field(default_factory=dict)
    spans: Sequence[LayoutSpan] = ()
    starts: Sequence[int] = (0,)
    saved: Sequence[int] = ()
    checkpoints: Sequence[Path] = ()
    plan: tuple[int, Plan] | None = None
    max_steps: int | None = None
    seconds: float | None = None
    has_ended: bool = False
    settings: Row = field(default_factory=dict)
    facts: Row = field(default_factory=dict)
    samples: Sequence[tuple[int, str, str]] = ()
    life: Life = field(default_factory=Life)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((row["step"] for row in (*self.rows, *self.evaluations, self.closing) if row), default=0)

    @property
    def progress(self) -> str:
        """How far the run is, in words."""
        of = f" of {self.max_steps:,}" if self.max_steps is not None and self.max_steps != self.step else ""
        how = "" if not of else ", stopped" if self.has_ended else ", not at its end"
        return f"{self.step:,}{of} step{'' if self.step == 1 and not of else 's'}{how}"

    def values(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each row, of training or evaluation, that has the number."""
        rows = self.evaluations if name.startswith("eval_") else self.rows
        return [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]

    def span_of(self, step: int) -> LayoutSpan | None:
        """The span that ``step`` was trained in."""
        return next((each for each in self.spans if each.start < step <= each.stop), None)


def read_run(folder: str | Path) -> Run:
    """Read the run in an output folder, or that which led to a checkpoint.

    Raises ``InputError`` if there is no run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise InputError("a run is a folder", where=str(folder), expected="the output_dir of a run", found=found)
    whole = read_whole_log(folder)
    events = standing(whole)
    state = _newest_state(folder)
    if not events and state is None:
        if (folder / LOG).is_file():
            raise InputError("the log of the run holds no whole line", where=str(folder / LOG))
        raise InputError(
            "no run has left its log here",
            where=str(folder),
            expected=f"{LOG}, or {STATE} in the folder or in a checkpoint of it",
            hint="give the output_dir of a run; a run of a Trainer of transformers leaves its log with its checkpoints",
        )
    logged = [{"step": each["step"], **each["values"]} for each in events if isinstance(each.get("values"), dict)]
    begins = [each for each in events if each["event"] == "begin"]
    # A run that was begun without a log of ours, and continued with one: its first rows are in its checkpoints alone.
    first = begins[0]["step"] if begins else None
    history = [] if state is None else state.get("log_history", [])
    before = [row for row in history if isinstance(row.get("step"), int) and (first is None or row["step"] <= first)]
    rows, evaluations, closing = _sorted_out([*before, *logged])
    ends = [each for each in events if each["event"] == "end"]
    return Run(
        folder,
        rows,
        evaluations,
        closing,
        _spans(events),
        [each["step"] for each in begins] or [0],
        sorted({each["step"] for each in events if each["event"] == "save"}),
        _checkpoints(folder),
        _plan(folder, events),
        _max_steps(begins, state),
        _seconds(events),
        bool(ends) and events.index(ends[-1]) > events.index(begins[-1]) if begins else bool(closing),
        _settings(folder),
        _facts(begins, state),
        _samples([*before, *events]),
        read_life(whole, _max_steps(begins, state)),
    )


def _newest_state(folder: Path) -> Row | None:
    """The state of the checkpoint with the most steps in the folder, or of the folder itself."""
    states = []
    for path in (folder / STATE, *folder.glob(f"checkpoint-*/{STATE}")):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(state, dict) and isinstance(state.get("log_history"), list):
            states.append(state)
    return max(states, key=lambda state: state.get("global_step") or 0, default=None)


def _sorted_out(history: Sequence[Row]) -> tuple[list[Row], list[Row], Row]:
    """Rows of training, of evaluations, and numbers of the whole run; of two rows of a step the later one counts."""
    training: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    closing: Row = {}
    for whole in history:
        # What is no number cannot be drawn.
        row: Row = {name: value for name, value in whole.items() if isinstance(value, (int, float))}
        if "loss" in row:
            training[row["step"]] = row
        elif any(name.startswith("eval_") for name in row):
            # Several data sets are evaluated at one step.
            evaluations[row["step"]] = {**evaluations.get(row["step"], {}), **row}
        else:
            closing |= row
    return [training[k] for k in sorted(training)], [evaluations[k] for k in sorted(evaluations)], closing


def _spans(events: Sequence[Event]) -> list[LayoutSpan]:
    found: list[LayoutSpan] = []
    begins = [each for each in events if each["event"] == "begin"]
    last = max((each["step"] for each in events), default=0)
    for k, begin in enumerate(begins):
        stop = begins[k + 1]["step"] if k + 1 < len(begins) else last
        layout = str(begin.get("layout", "unknown"))
        if found and found[-1].layout == layout:
            found[-1] = LayoutSpan(layout, found[-1].start, stop, found[-1].began)
        else:
            found.append(LayoutSpan(layout, begin["step"], stop, begin["time"]))
    return found


def _checkpoints(folder: Path) -> list[Path]:
    named = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return [path for _, path in sorted((int(step), path) for step, path in named if step.isdecimal())]


def _plan(folder: Path, events: Sequence[Event]) -> tuple[int, Plan] | None:
    """The plan beside the log, with its step; None where it is missing or cannot be read."""
    steps = [each["step"] for each in events if each["event"] == "plan"]
    if not steps:
        return None
    from ullage.planning import Plan

    try:
        return steps[-1], Plan.from_json((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, InputError):
        return None


def _max_steps(begins: Sequence[Event], state: Row | None) -> int | None:
    asked = begins[-1].get("max_steps") if begins else (state or {}).get("max_steps")
    return asked if isinstance(asked, int) and asked > 0 else None


def _seconds(events: Sequence[Event]) -> float | None:
    """Seconds from each process's beginning to its last entry, in all."""
    total, began, last = 0.0, None, 0.0
    for event in events:
        if event["event"] == "begin":
            total += last - began if began is not None else 0.0
            began = event["time"]
        last = event["time"]
    return None if began is None else total + last - began


def _facts(begins: Sequence[Event], state: Row | None) -> Row:
    """What the last process said of the run; of a run without a log of ours, its batch alone."""
    if not begins:
        batch = (state or {}).get("train_batch_size")
        return {} if not isinstance(batch, int) else {"batch": batch}
    last = begins[-1]
    told = last.get("run")
    names = ("model", "capacity", "capacities", "processes")
    named = {name: last[name] for name in names if last.get(name) is not None}
    return {**named, **(told if isinstance(told, dict) else {}), "began": begins[0]["time"]}


def _samples(history: Sequence[Row]) -> list[tuple[int, str, str]]:
    """Texts that the model wrote, from rows with ``samples``, whoever logged them."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    for row in history:
        step, samples = row.get("step"), row.get("samples")
        if isinstance(step, int) and isinstance(samples, list):
            texts = [each for each in samples if isinstance(each, dict) and isinstance(each.get("text"), str)]
            found[step] = [(step, str(each.get("prompt", "")), each["text"]) for each in texts]
    return [each for step in sorted(found) for each in found[step]]


def _settings(folder: Path) -> Row:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    settings = record.get("settings") if isinstance(record, dict) else None
    return settings if isinstance(settings, dict) else {}


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

    def text_of(self, run: Run) -> str:
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


def _if_any(value: float) -> str:
    return _whole(value) if value else ""


def _time_if_any(value: float) -> str:
    return duration(value) if value else ""


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def what_was_run(run: Run) -> list[tuple[str, str]]:
    """What was run, as pairs of a name and a text: the model, data, command, learning rate, device, versions, date."""
    facts, settings = {**run.settings, **run.facts}, run.settings
    pairs = {
        "model": _model(facts, settings),
        "data": _data(facts, settings),
        "learning rate": _learning_rate(facts),
        "a step": _batch(facts),
        "trained on": _place(run, facts),
        "began": "" if "began" not in facts else date(facts["began"]),
        "versions": ", ".join(f"{name} {version}" for name, version in dict(facts.get("versions") or {}).items()),
        "command": str(facts.get("command", "")),
    }
    return [(name, text) for name, text in pairs.items() if text]


def date(seconds: float) -> str:
    """Seconds since 1970 as people read them."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _model(facts: Row, settings: Row) -> str:
    name, kind = settings.get("model") or facts.get("name"), facts.get("model")
    parts = [str(name) if kind in (None, name) else f"{kind} ({name})" if name and name != kind else str(kind)]
    if parts == ["None"]:
        return ""
    if isinstance(facts.get("parameters"), int):
        parts.append(f"{facts['parameters']:,} parameters")
    if isinstance(facts.get("trained_parameters"), int):
        parts.append(f"{facts['trained_parameters']:,} of them trained")
    return ", ".join(parts)


def _data(facts: Row, settings: Row) -> str:
    named = settings.get("data")
    text = " ".join(map(str, named)) if isinstance(named, list) else str(named or "")
    if "data" in settings and not text:
        text = "the docstrings of the standard library"
    parts = [text, f"{facts['samples']:,} samples" if isinstance(facts.get("samples"), int) else ""]
    return ", ".join(filter(None, parts))


def _learning_rate(facts: Row) -> str:
    given = facts.get("learning_rate")
    if not isinstance(given, (int, float)):
        return ""
    more = [str(facts[name]) for name in ("scheduler", "optimizer") if facts.get(name)]
    return ", ".join([short(given), *more])


def _batch(facts: Row) -> str:
    batch, capacity = facts.get("batch"), facts.get("capacity")
    parts = [f"{batch:,} sequences per process" if isinstance(batch, int) else ""]
    capacities = facts.get("capacities") or {"tokens": capacity}
    held = [f"{limit:,} {name}" for name, limit in capacities.items() if isinstance(limit, int)]
    parts.append(f"microbatches of {' and '.join(held)}" if held else "")
    return ", ".join(filter(None, parts))


def _place(run: Run, facts: Row) -> str:
    layout = run.spans[-1].layout if run.spans else ""
    return ", ".join(str(part) for part in (facts.get("device"), facts.get("dtype"), layout) if part)


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
    RunFigure("restarts", "restarts", lambda run: run.life.restarts, _if_any),
    RunFigure("steps lost and trained again", "steps_lost", lambda run: run.life.steps_lost, _if_any),
    RunFigure("time on lost steps", "seconds_lost", lambda run: run.life.seconds_lost, _time_if_any),
    RunFigure("time down", "seconds_down", lambda run: run.life.seconds_down, _time_if_any),
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
        told = [figure.text_of(run) for run in runs]
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
        "life": life_record(run.life),
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
    if isinstance(value, float):
        return short(value, 9)
    return "none" if value is None else str(value)


def short_names(runs: Sequence[Run]) -> list[str]:
    """A short name of each run's folder; that of its parents before it as far as they are needed to tell runs apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]
