"""What ``ullage plan`` prints: the figures of one step, or a row per capacity, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ullage.core.display import counted
from ullage.core.errors import UllageError
from ullage.datasets.files import Measured
from ullage.planning import Plan
from ullage.report.figures import (
    Padded,
    PlannedStep,
    StepTotals,
    bound_ullage,
    described,
    figures,
    ideal_microbatches,
    lost_sequences,
    reference_name,
    step_time,
)


@dataclass(frozen=True)
class PlanShown:
    """The name of what was planned, its lengths, and whether a machine reads what is printed."""

    name: str
    measured: Measured
    as_json: bool

    def step(self, step: PlannedStep) -> None:
        """The figures of one step."""
        if self.as_json:
            typer.echo(json.dumps(self._source() | _record(step), indent=2))
            return
        plan, reference, padded = step.plan, step.reference, step.padded
        console = self._begun(plan.ranks, f"{plan.capacity:,}", plan.sync)
        if lost := lost_sequences(plan.statistics()):
            console.print(lost, markup=False, soft_wrap=True)
        columns = [plan.strategy, *([] if reference is None else [reference_name(reference)])]
        table = _table(["", *columns, *([] if padded is None else ["padded"]), "lower bound", "ideal"])
        cells_of_padded = _cells(padded) if padded is not None else {}
        for figure in figures(plan, reference):
            cells = [figure.plan, *([figure.reference] if reference is not None else [])]
            cells += [cells_of_padded.get(figure.name, "–")] if padded is not None else []
            table.add_row(figure.name, *cells, figure.bound, figure.ideal)
        console.print(_unbroken(table), crop=False)
        console.print(_compared(step), soft_wrap=True)

    def sweep(self, rows: Iterable[tuple[int, StepTotals | UllageError]], settings: dict[str, Any]) -> None:
        """A row for each capacity: all steps in sum, or why that capacity cannot hold them."""
        found = list(rows)
        if self.as_json:
            told = {"ranks": settings["ranks"], "sync": settings["sync"]}
            listed = [
                {"capacity": capacity, "error": str(row)} if isinstance(row, UllageError) else dataclasses.asdict(row)
                for capacity, row in found
            ]
            typer.echo(json.dumps(self._source() | told | {"capacities": listed}, indent=2))
            return
        sums = [row for _, row in found if not isinstance(row, UllageError)]
        several = max(row.num_steps for row in sums) > 1
        capacities = f"{found[0][0]:,}" if len(found) == 1 else "each capacity's"
        console = self._begun(settings["ranks"], capacities, settings["sync"])
        if several:
            console.print(
                f"{sums[0].num_steps:,} steps in sum; times are in ideal steps, of the worst one too", soft_wrap=True
            )
        worst = ["worst"] if several else []
        table = _table(["capacity", "microbatches", "bound", "ullage", "time", *worst, "next_fit", "padded"])
        for capacity, row in found:
            if isinstance(row, UllageError):
                table.add_row(f"{capacity:,}", "–")
                continue
            cells = [f"{row.num_microbatches:,}", f"{row.lower_bound:,}", f"{100 * row.ullage:.2f} %", _time(row.time)]
            cells += [_time(row.worst_time)] if several else []
            table.add_row(f"{capacity:,}", *cells, _time(row.next_fit_time), _time(row.padded_time))
        console.print(_unbroken(table), crop=False)
        for capacity, row in found:
            if isinstance(row, UllageError):
                console.print(f"{capacity:,}: {row}", markup=False, soft_wrap=True)
        best = min(sums, key=lambda row: (row.time, row.capacity))
        console.print(f"Shortest at capacity {best.capacity:,}: {best.time:.3f} of the ideal time.")

    def _source(self) -> dict[str, Any]:
        facts = {"name": self.name, "column": self.measured.column, "unit": self.measured.unit}
        return {"source": facts | described(self.measured.lengths)}

    def _begun(self, ranks: int, slots: str, sync: str) -> Console:
        """The console, with the lines about the lengths and the ranks printed."""
        console = Console(highlight=False)
        facts, measured = described(self.measured.lengths), self.measured
        origin = self.name if measured.column is None else f"{self.name}, column {measured.column}"
        held = f"{counted(int(facts['sequences']), 'sequence')}, {facts['tokens']:,} {measured.unit}"
        between = f"{facts['shortest']:,} to {facts['longest']:,} long, median {facts['median']:,.0f}"
        meets = "every microbatch" if sync == "microbatch" else "once a step"
        console.print(f"{origin}: {held}, {between}", markup=False, soft_wrap=True)
        together = f"; they meet {meets}" if ranks > 1 else ""
        console.print(f"{counted(ranks, 'rank')} of {slots} slots a microbatch{together}", soft_wrap=True)
        return console


def _table(titles: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place or title else "left")
    return table


def _unbroken(table: Table) -> Table:
    """The table, whose names may be broken between words where there is no room, and no number."""
    for place, column in enumerate(table.columns):
        heading, cells = str(column.header), list(map(str, column.cells))
        numbers = cells if place or heading else " ".join(cells).split()
        # A heading such as "next_fit, degree 8" is broken into its words.
        column.min_width = max(map(len, [*heading.split(), *numbers]), default=0)
    return table


def _time(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _cells(padded: Padded) -> dict[str, str]:
    """The figures of padded batches by the names of the table's lines."""
    return {
        "microbatches per rank": f"{padded.num_microbatches:,}",
        "ullage": f"{100 * padded.ullage:.2f} %",
        "rank imbalance": f"{padded.rank_imbalance:.3f}",
        "critical path": f"{padded.critical_path:.3f}",
    }


def _compared(step: PlannedStep) -> str:
    """The time of the step beside next_fit's and that of padded batches, in one sentence; empty without any."""
    time, parts = step_time(step.plan), []
    if step.reference is not None:
        parts.append(f"{100 * time / step_time(step.reference):.1f} % of next_fit's time")
    if step.padded is not None and step.padded_time:
        padding = f"{100 * step.padded.padding_computed:.1f} % padding"
        parts.append(f"{100 * time / step.padded_time:.1f} % of padded batches' ({padding})")
    return f"The step takes {' and '.join(parts)}." if parts else ""


def _record(step: PlannedStep) -> dict[str, Any]:
    """The figures of one step as plain data."""

    def numbers(one: Plan) -> dict[str, Any]:
        return {"strategy": one.strategy, "step_time": step_time(one), **dataclasses.asdict(one.statistics())}

    plan, stats = step.plan, step.plan.statistics()
    ideal = {
        "num_microbatches": ideal_microbatches(plan, stats),
        "ullage": 0.0,
        "rank_imbalance": 1.0,
        "critical_path": 1.0,
    }
    bound = {
        "num_microbatches": stats.lower_bound,
        "ullage": bound_ullage(plan, stats),
        "rank_imbalance": stats.rank_imbalance_bound,
        "critical_path": stats.critical_path_bound,
    }
    padded = None if step.padded is None else {"step_time": step.padded_time, **dataclasses.asdict(step.padded)}
    return {
        "ranks": plan.ranks,
        "capacity": plan.capacity,
        "pad_to_multiple_of": plan.pad_to_multiple_of,
        "sync": plan.sync,
        "plan": numbers(plan),
        "next_fit": None if step.reference is None else numbers(step.reference),
        "padded": padded,
        "lower_bound": bound,
        "ideal": ideal,
    }
