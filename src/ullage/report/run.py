"""A run as it lies in its folder: the rows of its log, its checkpoints, its layouts and the plan of a step.

Read from ``ullage_log.jsonl`` (:mod:`ullage.training.log_file`), which ``ullage train`` and the callback ``RunLog``
write; without one, from the ``trainer_state.json`` of the newest checkpoint, which any Trainer of transformers leaves.
Reading needs neither torch nor transformers, so that a run can be followed from another terminal at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import InputError
from ullage.training.log_file import LOG, PLAN, Event, read_log

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
        written: time of the last entry, seconds since 1970.
        has_ended: whether training came to its end, or was stopped.
        settings: those that decide the numbers of a run of ``ullage train``.
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
    written: float | None = None
    has_ended: bool = False
    settings: Row = field(default_factory=dict)

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


def read_run(folder: str | Path, *, with_plan: bool = True) -> Run:
    """Read the run in an output folder, or that which led to a checkpoint.

    ``with_plan``: whether the plan of a step is read too. Raises ``InputError`` if there is no run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise InputError("a run is a folder", where=str(folder), expected="the output_dir of a run", found=found)
    events = read_log(folder)
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
        _plan(folder, events) if with_plan else None,
        _max_steps(begins, state),
        _seconds(events),
        events[-1]["time"] if events else None,
        bool(ends) and events.index(ends[-1]) > events.index(begins[-1]) if begins else bool(closing),
        _settings(folder),
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


def _settings(folder: Path) -> Row:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    settings = record.get("settings") if isinstance(record, dict) else None
    return settings if isinstance(settings, dict) else {}
