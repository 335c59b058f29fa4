"""Table and page of ``ullage quickstart``: a run that changed its layout on the way, beside one that did not.

All figures come from what the runs wrote: the Trainer's log of every step, a checkpoint's files, and the plan of one
step's lengths.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.checkpoint.inventory import Inventory
from ullage.planning import Plan
from ullage.report.checkpoint import draw
from ullage.report.curves import Chart, Series, chart
from ullage.report.page import NUM_COLOURS, render
from ullage.report.plan import memory_drawing

#: Steps after a change of layout that are compared with the uninterrupted run, and digits that must agree.
COMPARED, DIGITS = 3, 5
#: Steps at the start of a process, which wait for compilers and caches and are left out of the speed.
_WARMING = 2

#: Headings of the table.
HEADINGS = (
    "run",
    "layout",
    "steps",
    "tokens/s",
    "padding",
    "unused",
    "imbalance",
    "loss",
    "losses before and after: here, uninterrupted",
)


@dataclass(frozen=True)
class Step:
    """One optimizer step as the Trainer logged it. ``tokens_per_second``: real tokens, over all ranks."""

    number: int
    loss: float
    tokens_per_second: float
    padding_computed: float
    capacity_unused: float | None = None
    imbalance: float | None = None


#: What a step is read from, by the Trainer's names.
_LOGGED = ("loss", "tokens_per_second", "padding_computed", "capacity_unused", "imbalance")


def read_steps(checkpoint: Path) -> list[Step]:
    """The steps that led to a Trainer's checkpoint, in order."""
    history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [Step(row["step"], *(row.get(name) for name in _LOGGED)) for row in history if "loss" in row]


@dataclass(frozen=True)
class Leg:
    """A part of a run on one layout, such as "2 processes, ZeRO 2", with its steps."""

    layout: str
    steps: Sequence[Step]

    @property
    def tokens_per_second(self) -> float:
        """The median, after the first steps."""
        return statistics.median(step.tokens_per_second for step in self.steps[_WARMING:] or self.steps)

    @property
    def padding_computed(self) -> float:
        return statistics.mean(step.padding_computed for step in self.steps)

    @property
    def capacity_unused(self) -> float | None:
        return _mean(step.capacity_unused for step in self.steps)

    @property
    def imbalance(self) -> float | None:
        return _mean(step.imbalance for step in self.steps)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


@dataclass(frozen=True)
class Comparison:
    """One step of the run after a change of layout, and the same step of the uninterrupted run."""

    number: int
    loss: float
    uninterrupted: float

    @property
    def agrees(self) -> bool:
        """Whether both losses are equal to ``DIGITS`` digits."""
        return abs(self.loss - self.uninterrupted) < 10**-DIGITS * max(1.0, abs(self.uninterrupted))


@dataclass(frozen=True)
class Journey:
    """``padded``: the same model without packing. ``whole``: the run without interruption. ``legs``: the other one."""

    padded: Leg
    whole: Leg
    legs: Sequence[Leg]

    def comparisons(self, leg: Leg) -> list[Comparison]:
        """The step before ``leg`` and its first ones, beside the uninterrupted run's; none for the first leg."""
        uninterrupted = {step.number: step.loss for step in self.whole.steps}
        # The step before the change belongs to the comparison: it shows that both runs were alike up to there.
        for before, after in itertools.pairwise(self.legs):
            if after is leg:
                steps = [before.steps[-1], *leg.steps[:COMPARED]]
                return [Comparison(step.number, step.loss, uninterrupted[step.number]) for step in steps]
        return []

    @property
    def agrees(self) -> bool:
        """Whether every change of layout left the losses as they were."""
        return all(comparison.agrees for leg in self.legs for comparison in self.comparisons(leg))

    @property
    def compared(self) -> Sequence[int]:
        """The steps by which padded and packed speeds are compared: those of both runs, but the first ones."""
        both = {step.number for step in self.padded.steps} & {step.number for step in self.whole.steps}
        return sorted(both)[_WARMING:] or sorted(both)

    @property
    def faster(self) -> float:
        """Real tokens per second, packed over padded: medians over the steps :attr:`compared`, which train alike."""
        packed, padded = (
            statistics.median(step.tokens_per_second for step in leg.steps if step.number in self.compared)
            for leg in (self.whole, self.padded)
        )
        return packed / padded

    def rows(self) -> list[tuple[str, ...]]:
        """The table, as text: see :data:`HEADINGS`."""
        return [
            _row("padded", self.padded, None),
            _row("whole", self.whole, None),
            *(_row("stopped" if leg is self.legs[0] else "continued", leg, self.comparisons(leg)) for leg in self.legs),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The table as plain data, for ``--json``."""
        return {"agrees": self.agrees, "rows": [dict(zip(HEADINGS, row, strict=True)) for row in self.rows()]}


def _row(name: str, leg: Leg, comparisons: list[Comparison] | None) -> tuple[str, ...]:
    first, last = leg.steps[0], leg.steps[-1]
    beside = "" if not comparisons else "; ".join(f"{c.loss:.5f}, {c.uninterrupted:.5f}" for c in comparisons)
    unused = "" if leg.capacity_unused is None else f"{leg.capacity_unused:.1%}"
    imbalance = "" if leg.imbalance is None else f"{leg.imbalance:.3f}"
    return (
        name,
        leg.layout,
        f"{first.number} to {last.number}",
        f"{leg.tokens_per_second:,.0f}",
        f"{leg.padding_computed:.1%}",
        unused,
        imbalance,
        f"{last.loss:.3f}",
        beside,
    )


def journey_page(journey: Journey, plan: Plan, inventory: Inventory, commands: Sequence[str]) -> str:
    """The journey as one self-contained HTML page: the curves, a plan of one step, the shards of ``inventory``.

    ``commands``: the commands of the run, in order. Raises ``InputError`` without jinja2.
    """
    return render(
        "journey.html",
        journey=journey,
        headings=HEADINGS[:-1],
        rows=[row[:-1] for row in journey.rows()],
        changes=[
            (before.layout, leg.layout, journey.comparisons(leg)) for before, leg in itertools.pairwise(journey.legs)
        ],
        commands=commands,
        losses=_losses(journey),
        last_step=journey.whole.steps[-1].number,
        faster=journey.faster,
        compared=journey.compared,
        plan=plan,
        stats=plan.statistics(),
        memory=memory_drawing(plan),
        inventory=inventory,
        drawings=[draw(group) for group in inventory.groups],
    )


def _losses(journey: Journey) -> Chart:
    """The losses of the uninterrupted run, and of each leg over it."""

    def points(steps: Sequence[Step]) -> list[tuple[float, float]]:
        return [(step.number, step.loss) for step in steps]

    series = [Series("uninterrupted", "whole", points(journey.whole.steps))]
    before: Sequence[Step] = ()
    for k, leg in enumerate(journey.legs):
        # A curve begins at the last step of the leg before, so that no gap hides a jump where the layout changes.
        series.append(Series(leg.layout, f"k{k % NUM_COLOURS}", points([*before[-1:], *leg.steps])))
        before = leg.steps
    drawn = chart(series, cuts=[one.points[0][0] for one in series[2:]])
    assert drawn is not None  # a run without losses has no journey
    return drawn
