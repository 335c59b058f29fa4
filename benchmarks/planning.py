"""Planning: how far each planner is from the ideal and from the lower bounds, and how long it takes.

Every planner gets the same lengths: six workloads, several seeds, two sizes. *critical path* is the sum over
microbatches of the dearest rank, *rank imbalance* the dearest rank over the step, both over the mean rank; *over bound*
divides the critical path by the least that any plan of those sequences can have, so a workload whose giants set a floor
does not hide what the planner does. All ratios are geometric means. Time is one thread's CPU time of a whole call, the
best of several, and compiled code is loaded before; TRL's includes the moving of its tokens.

Of slime and prime-rl the own code is measured where a checkout is given, with this table's cost; prime-rl's swaps take
minutes for thousands of microbatches, so it is left out of the second size. torchtitan's packing is grain's, by its
documented rule. transformers' sampler is told how many batches the plan has, and its padding is not counted. Bins above
the capacity are *problems*.

A table of its own holds the plan against transformers' ``train_sampling_strategy="batch_rebalance"``, which balances
padded batches over ranks, by that sampler's own cost.

    python benchmarks/planning.py                 # a few minutes; writes benchmarks/results/planning-DATE.json
    python benchmarks/planning.py --checkout slime=PATH --checkout prime-rl=PATH
    python benchmarks/planning.py --seeds 1 --no-large
    python benchmarks/planning.py --peers-only    # every planner and no other table, each call timed once
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import numba
import numpy as np
import peers
import typer
from rich.console import Console
from rich.table import Table

import ullage
from ullage.datasets.lengths import CAPACITIES, WORKLOADS
from ullage.planning.bounds import bin_bound
from ullage.planning.solver.compiled import compile_all

SIZES = ((512, 8), (4096, 32))
UNTUNED = ((600, 3), (1000, 7), (2048, 16), (8192, 64))
LARGE = ((65_536, 32), (1_000_000, 32))


@dataclass
class Row:
    """One plan of one workload by one planner."""

    planner: str
    workload: str
    n: int
    ranks: int
    seed: int
    critical_path: float
    critical_path_bound: float
    rank_imbalance: float
    rank_imbalance_bound: float
    microbatches: int
    lower_bound: int
    problems: int
    milliseconds: float


def _trl(lengths: np.ndarray, ranks: int, capacity: int) -> ullage.Plan:
    """TRL's best-fit-decreasing rows, dealt to the ranks in their order."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    tokens = datasets.Dataset.from_dict({"id": [np.full(n, i, np.int32) for i, n in enumerate(lengths)]})
    packed = trl.pack_dataset(tokens, capacity, "bfd")
    bins = [list(dict.fromkeys(row)) for row in packed.with_format("numpy")["id"]]
    bins += [[]] * (-len(bins) % ranks)
    return ullage.plan(lengths, ranks=ranks, capacity=capacity, strategy="preassigned", assignment=bins)


def _ours(**options: object) -> Callable[..., ullage.Plan]:
    return lambda lengths, ranks, capacity: ullage.plan(lengths, ranks=ranks, capacity=capacity, **options)  # type: ignore[arg-type]


PLANNERS: dict[str, Callable[..., ullage.Plan | peers.Rows]] = {
    "ullage": _ours(),
    "ullage, sync=step": _ours(sync="step"),
    "ullage, context parallel auto": _ours(context_parallel="auto"),
    "next fit (arrival order)": _ours(strategy="next_fit"),
    "TRL bfd": _trl,
    **peers.ALWAYS,
}
#: Planners that are measured once, and those that are left out of the second size.
_ONCE, _SMALL_ONLY = {"TRL bfd", peers.REBALANCE, peers.PRIME_RL}, {peers.PRIME_RL}


def measure(planner: str, workload: str, n: int, ranks: int, seed: int, repeats: int) -> Row:
    """Plans once for the figures and ``repeats`` times for the time."""
    lengths, capacity = WORKLOADS[workload](n, seed), CAPACITIES[workload]
    best, made = math.inf, []
    for _ in range(repeats):
        begin = time.thread_time()
        made = PLANNERS[planner](lengths, ranks, capacity)
        best = min(best, time.thread_time() - begin)
    plan = made if isinstance(made, ullage.Plan) else peers.as_plan(lengths, ranks, capacity, made)
    found = plan.statistics()
    return Row(
        planner, workload, n, ranks, seed, found.critical_path, found.critical_path_bound, found.rank_imbalance,
        found.rank_imbalance_bound, found.num_microbatches, found.lower_bound, len(plan.problems()), best * 1000,
    )  # fmt: skip


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(float(np.mean([math.log(value) for value in values])))


def show(console: Console, title: str, rows: list[Row], by: Callable[[Row], str]) -> None:
    """One line for each value of ``by``."""
    table = Table(title=title)
    for column in ("", "critical path", "over bound", "rank imbalance", "microbatches ÷ bound", "problems", "ms"):
        table.add_column(column, justify="left" if not column else "right")
    for name in dict.fromkeys(map(by, rows)):
        mine = [row for row in rows if by(row) == name]
        table.add_row(
            name,
            f"{mean(row.critical_path for row in mine):.4f}",
            f"{mean(row.critical_path / row.critical_path_bound for row in mine):.4f}",
            f"{mean(row.rank_imbalance for row in mine):.4f}",
            f"{mean(row.microbatches / row.lower_bound for row in mine):.4f}",
            str(sum(row.problems for row in mine)),
            f"{np.median([row.milliseconds for row in mine]):.2f}",
        )
    console.print(table)


def rebalanced(workload: str, n: int, ranks: int, seed: int) -> dict[str, float | str]:
    """transformers' ``BatchRebalanceSampler`` and ``plan`` on one step, judged by the sampler's own cost.

    The sampler knows no capacity: it gets as many microbatches as the plan has, and its largest batch is then larger
    than the capacity. So the plan is made twice: within the capacity, and with as much room as that batch takes.
    *padded* is what the sampler's batches cost, rows as long as each batch's longest; *packed* what they would cost
    unpadded.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    lengths, capacity = WORKLOADS[workload](n, seed), CAPACITIES[workload]
    # cost(bs, max_len) = bs·max_len + coefficient·bs·max_len², in integers
    cost = ullage.TransformerCost(linear=round(1 / BatchRebalanceSampler.QUADRATIC_COST_COEF), quadratic=1)
    plan = ullage.plan(lengths, ranks=ranks, capacity=capacity, cost=cost)
    found, count = plan.statistics(), plan.num_microbatches
    sampler = BatchRebalanceSampler(lengths.tolist(), effective_batch_size=n, dp_size=ranks, grad_accum=count)
    begin = time.thread_time()
    groups = sampler._assign(list(range(n)), lengths.tolist())  # of all ranks; each rank's iterator computes it again
    spent = (time.thread_time() - begin) * 1000
    sizes = np.array([[len(group) for group in mine] for mine in groups])
    longest = np.array([[lengths[group].max() for group in mine] for mine in groups])
    padded = sizes * cost(longest)
    packed = np.array([[cost(lengths[group]).sum() for group in mine] for mine in groups])
    ideal = float(cost(lengths).sum()) / ranks
    room = ullage.plan(lengths, ranks=ranks, capacity=int((sizes * longest).max()), cost=cost).statistics()
    return {
        "workload": workload,
        "n": n,
        "ranks": ranks,
        "seed": seed,
        "microbatches": count,
        "padding": 1 - float(lengths.sum()) / float((sizes * longest).sum()),
        "largest_over_capacity": float((sizes * longest).max()) / capacity,
        "padded_critical_path": float(padded.max(0).sum()) / ideal,
        "packed_critical_path": float(packed.max(0).sum()) / ideal,
        "packed_rank_imbalance": float(packed.sum(1).max()) / ideal,
        "ullage_critical_path": found.critical_path,
        "ullage_rank_imbalance": found.rank_imbalance,
        "ullage_critical_path_same_room": room.critical_path,
        "milliseconds": spent,
    }


def show_rebalanced(console: Console, seeds: int) -> list[dict[str, float | str]]:
    """One line per workload, geometric means over the draws."""
    every = []
    for n, ranks in SIZES:
        table = Table(title=f"transformers' batch_rebalance, {n:,} sequences on {ranks} ranks, its own cost")
        columns = (
            "padding",
            "largest batch ÷ capacity",
            "critical path, padded",
            "packed",
            "ullage",
            "in its room",
            "ms",
        )
        for column in ("", *columns):
            table.add_column(column, justify="left" if not column else "right")
        found = [rebalanced(workload, n, ranks, seed) for workload in WORKLOADS for seed in range(seeds)]
        paths = ("padded", "packed", "ullage")
        names = [
            "largest_over_capacity",
            *(f"{path}_critical_path" for path in paths),
            "ullage_critical_path_same_room",
        ]
        for workload in [*WORKLOADS, "all"]:
            mine = [row for row in found if workload in ("all", row["workload"])]
            padding = float(np.mean([row["padding"] for row in mine]))
            ratios = [f"{mean(float(row[name]) for row in mine):.3f}" for name in names]
            spent = float(np.median([row["milliseconds"] for row in mine]))
            table.add_row(workload, f"{padding:.1%}", *ratios, f"{spent:.1f}")
        console.print(table)
        every += found
    return every


def show_bins(console: Console, n: int) -> list[dict[str, float]]:
    """Bins of ``pack_lengths`` above the L2 bound, and its time."""
    table = Table(title=f"pack_lengths, {n:,} sequences")
    for column in ("workload", "bins", "L2 bound", "above", "ms"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    found = []
    for workload, make in WORKLOADS.items():
        lengths, capacity = make(n, 0), CAPACITIES[workload]
        begin = time.thread_time()
        bins = ullage.pack_lengths(lengths, capacity).num_bins
        spent, bound = (time.thread_time() - begin) * 1000, bin_bound(lengths, capacity)
        table.add_row(workload, f"{bins:,}", f"{bound:,}", f"{bins - bound}", f"{spent:.1f}")
        found.append({"workload": workload, "n": n, "bins": bins, "bound": bound, "milliseconds": spent})
    console.print(table)
    return found


def of_size(console: Console, names: list[str], n: int, ranks: int, seeds: int, repeats: int) -> list[Row]:
    """Every planner of ``names`` on one size, as a table; returns the rows."""
    rows = [
        measure(name, workload, n, ranks, seed, 1 if name in _ONCE else repeats)
        for name in names
        for workload in WORKLOADS
        for seed in range(seeds)
    ]
    show(console, f"{n:,} sequences on {ranks} ranks, {seeds} seeds", rows, lambda row: row.planner)
    show(console, "ullage, by workload", [row for row in rows if row.planner == "ullage"], lambda row: row.workload)
    return rows


def main(
    seeds: int = 5,
    large: bool = True,
    trl: bool = True,
    peers_only: bool = False,
    checkout: Annotated[list[str] | None, typer.Option(help="slime=PATH or prime-rl=PATH.")] = None,
    output: Path = Path("benchmarks/results"),
) -> None:
    """Prints the tables and writes everything measured as JSON."""
    for given in checkout or []:
        framework, _, path = given.partition("=")
        name, make = peers.FROM_CHECKOUT[framework]
        PLANNERS[name] = make(Path(path))
    console = Console(width=130)
    compile_all()
    names = [name for name in PLANNERS if trl or name != "TRL bfd"]
    repeats = 1 if peers_only else 5
    rows = of_size(console, names, *SIZES[0], seeds, repeats)
    rows += of_size(console, [name for name in names if name not in _SMALL_ONLY], *SIZES[1], seeds, repeats)
    found, bins = [], []
    if not peers_only:
        found = show_rebalanced(console, seeds)
        untuned = [
            measure("ullage", w, n, r, 1000 + seed, 1) for n, r in UNTUNED for w in WORKLOADS for seed in range(seeds)
        ]
        show(console, "ullage, shapes and seeds nobody tuned for", untuned, lambda row: f"{row.n:,} on {row.ranks}")
        rows += untuned
    if large and not peers_only:
        many = [measure("ullage", w, n, r, 0, 3) for n, r in LARGE for w in WORKLOADS]
        show(console, "ullage, large", many, lambda row: f"{row.n:,}: {row.workload}")
        rows += many
        bins = [found for n, _ in LARGE for found in show_bins(console, n)]
    record = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__},
        "rows": [asdict(row) for row in rows],
        "bins": bins,
        "batch_rebalance": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"planning{'-peers' if peers_only else ''}-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
