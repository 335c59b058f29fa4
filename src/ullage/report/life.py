"""Life of a run: the stretches that its processes trained, what was lost between them and trained again, and the time.

All of it is read off the log (:mod:`ullage.training.run.log_file`): a process that was killed left no last word, so its
stretch ends with its last line, which is at most five seconds and one step old when it is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ullage.core.display import duration, quantity
from ullage.report.page import NUM_COLOURS, Box, Row
from ullage.training.run.log_file import Event

#: Layouts that a sentence names, and the part of a bar, in per cent, below which a box is left out.
_MOST_NAMED, _LEAST_WIDTH = 4, 0.05


@dataclass(frozen=True)
class ProcessSpan:
    """What one process of a run did; times in seconds since 1970, None where the log has none.

    Attributes:
        layout: how the run was spread, in words.
        start: the step that it went on from.
        reached: the last step that it told of.
        kept: the last of its steps that stands; the later ones were trained again.
        began: when training began.
        stopped: its last sign.
        kept_until: when the last step that stands was done.
        first_step: when its first step was done.
        started: when the process was started.
        has_ended: whether it said that training had ended.
    """

    layout: str
    start: int
    reached: int
    kept: int
    began: float
    stopped: float
    kept_until: float
    first_step: float | None = None
    started: float | None = None
    has_ended: bool = False

    @property
    def steps_lost(self) -> int:
        """Steps that were trained again."""
        return self.reached - self.kept

    @property
    def resumed(self) -> float:
        """When its first step was done, or its last sign where none was."""
        return self.stopped if self.first_step is None else self.first_step


@dataclass(frozen=True)
class Life:
    """The stretches of a run, in order; ``max_steps``: where it is to end, where known."""

    stretches: Sequence[ProcessSpan] = field(default_factory=tuple)
    max_steps: int | None = None

    @property
    def restarts(self) -> int:
        """Processes that went on with what another had begun."""
        return max(0, len(self.stretches) - 1)

    @property
    def steps_lost(self) -> int:
        """Steps that were trained again."""
        return sum(each.steps_lost for each in self.stretches)

    @property
    def seconds_lost(self) -> float:
        """Seconds that the lost steps had taken."""
        return sum(each.stopped - each.kept_until for each in self.stretches)

    @property
    def seconds_down(self) -> float:
        """Seconds from each last sign to the next step that was done."""
        return sum(down(self.stretches, k) for k in range(1, len(self.stretches)))

    def how_it_ended(self, number: int) -> str:
        """How a stretch ended, in a word or two: one that another followed without a last line was lost."""
        each = self.stretches[number]
        if number + 1 < len(self.stretches):
            return "stopped" if each.has_ended else "lost"
        if not each.has_ended:
            return "no end in the log"
        return "stopped" if self.max_steps is not None and each.reached < self.max_steps else "done"


def read_life(events: Sequence[Event], max_steps: int | None) -> Life:
    """The life that all events of a log tell, those that are superseded too."""
    groups: list[list[Event]] = []
    for event in events:
        if event["event"] == "begin":
            groups.append([])
        if groups:
            groups[-1].append(event)
    found: list[ProcessSpan] = []
    least = None  # the step that a later process went on from
    for group in reversed(groups):
        found.append(_stretch(group, least))
        least = group[0]["step"] if least is None else min(least, group[0]["step"])
    found.reverse()
    # A process that found the run done adds nothing to its life.
    while len(found) > 1 and found[-2].has_ended and found[-1].has_ended and found[-1].reached == found[-1].start:
        found.pop()
    return Life(found, max_steps)


def _stretch(group: Sequence[Event], least: int | None) -> ProcessSpan:
    begin = group[0]
    start, reached = begin["step"], max(each["step"] for each in group)
    kept = reached if least is None else max(start, min(reached, least))
    began, stopped = begin["time"], max(each["time"] for each in group)
    # Its own steps: an evaluation before the first of them is none.
    steps = [each for each in group if each["step"] > start]
    # The first step of a stretch belongs to the time down before it.
    until = max((each["time"] for each in steps if each["step"] <= kept), default=steps[0]["time"] if steps else began)
    started = begin.get("started")
    return ProcessSpan(
        str(begin.get("layout", "unknown")),
        start,
        reached,
        kept,
        began,
        stopped,
        stopped if kept == reached else until,
        steps[0]["time"] if steps else None,
        started if isinstance(started, (int, float)) else None,
        any(each["event"] == "end" for each in group),
    )


def down(stretches: Sequence[ProcessSpan], number: int) -> float:
    """Seconds without a step before a stretch; 0 where the clocks of two machines disagree."""
    return max(0.0, stretches[number].resumed - stretches[number - 1].stopped)


def parts_of_down(life: Life) -> list[tuple[str, float]]:
    """The seconds down of all restarts by what they went into, as far as the log tells them apart."""
    noticing = loading = stepping = 0.0
    for before, each in zip(life.stretches, life.stretches[1:]):
        started = each.began if each.started is None else each.started
        started = min(max(started, before.stopped), each.began)
        noticing += max(0.0, started - before.stopped)
        loading += each.began - started
        stepping += max(0.0, each.resumed - each.began)
    told = "until a process was started", "until it trained (imports, data, the checkpoint)", "in first steps"
    return list(zip(told, (noticing, loading, stepping), strict=True))


def layouts_in_words(layouts: Sequence[str]) -> str:
    """The layouts of a run, in order; where they changed often, each once.

    >>> layouts_in_words(["2 processes", "1 process"]), layouts_in_words(["2 processes", "1 process"] * 3)
    ('2 processes, then on 1 process', '2 processes or 1 process (5 changes)')
    """
    if len(layouts) <= _MOST_NAMED:
        return ", then on ".join(layouts)
    named = list(dict.fromkeys(layouts))
    more = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return f"{' or '.join([*named[:_MOST_NAMED], *more])} ({len(layouts) - 1} changes)"


def life_bars(life: Life) -> list[Row]:
    """Two bars: the time of the run, and its steps; a colour for each layout, paler for what was trained again."""
    stretches = life.stretches
    colours = _colours(life)
    first, last = stretches[0].began, max(each.stopped for each in stretches)
    time, steps = _Bar(first, last), _Bar(0, max(life.max_steps or 0, *(each.reached for each in stretches)))
    for number, each in enumerate(stretches):
        name = f"{each.layout}: steps {each.start + 1:,} to"
        begins = each.resumed if number else each.began
        time.add(begins, each.kept_until, colours[each.layout], f"{name} {each.kept:,}")
        lost = f"{each.layout}: {quantity(each.steps_lost, 'step')} lost"
        time.add(max(begins, each.kept_until), each.stopped, f"{colours[each.layout]} d2", lost)
        steps.add(each.start, each.kept, colours[each.layout], f"{name} {each.kept:,}")
    return [Row("time", tuple(time.boxes), duration(last - first)), Row("steps", tuple(steps.boxes), f"{steps.last:,}")]


class _Bar:
    """The boxes of a bar from ``first`` to ``last``."""

    def __init__(self, first: float, last: float) -> None:
        self.first, self.last = first, last
        self.boxes: list[Box] = []

    def add(self, start: float, stop: float, style: str, title: str) -> None:
        scale = 100 / (self.last - self.first or 1)
        if (stop - start) * scale >= _LEAST_WIDTH:
            self.boxes.append(
                Box(round((start - self.first) * scale, 3), round((stop - start) * scale, 3), style, title)
            )


def life_legend(life: Life) -> Iterator[tuple[str, str]]:
    """Classes of colour and what they stand for."""
    for layout, colour in _colours(life).items():
        yield colour, layout
    if life.steps_lost:
        yield "c0 d2", "lost, and trained again"


def _colours(life: Life) -> dict[str, str]:
    names = dict.fromkeys(each.layout for each in life.stretches)
    return {name: f"c{k % NUM_COLOURS}" for k, name in enumerate(names)}


def life_record(life: Life) -> list[dict[str, Any]]:
    """The stretches as plain data, for ``--json``."""
    return [
        {
            "layout": each.layout,
            "after_step": each.start,
            "reached_step": each.reached,
            "kept_step": each.kept,
            "steps_lost": each.steps_lost,
            "seconds_down_before": down(life.stretches, number) if number else 0.0,
            "ended": life.how_it_ended(number),
        }
        for number, each in enumerate(life.stretches)
    ]
