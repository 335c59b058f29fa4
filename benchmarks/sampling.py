"""Balanced batches of a plain Trainer: ullage's ``BalancedSampler`` against transformers' ``batch_rebalance``.

Both get the same lengths, hence the same samples in each step, in as many groups. *critical* is the cost of the most
expensive rank of each step, summed over the steps and divided by the mean rank's cost without padding: 1 is what no
sampler can be below. *imbalance* divides the same by the mean rank's cost with padding. Costs are transformers' own:
``length + 0.001·length²`` per row of a group, each row as long as the longest (*padded*), or as it is (*tokens*).

    python benchmarks/sampling.py             # half a minute; writes benchmarks/results/sampling-DATE.json
"""

from __future__ import annotations

import json
import platform
import time
from datetime import date
from pathlib import Path

import numpy as np
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers.trainer_pt_utils import BatchRebalanceSampler

from ullage.datasets.lengths import WORKLOADS
from ullage.training.grouping import Measure
from ullage.training.sampling import BalancedSampler

#: Ranks, accumulated batches, samples in a group.
SHAPES = ((8, 1, 8), (8, 4, 8), (32, 2, 4))


def measured(sampler: BatchRebalanceSampler, measure: Measure) -> dict[str, float]:
    """Figures of an epoch of a sampler: of all its steps and ranks."""
    lengths = np.asarray(sampler.lengths, np.int64)
    most = total = ideal = computed = tokens = spent = largest = 0.0
    order = np.arange(len(lengths))
    for step in range(sampler.num_global_batches):
        ids = order[step * sampler.effective_batch_size : (step + 1) * sampler.effective_batch_size]
        begin = time.thread_time()
        by_rank = sampler._assign(ids.tolist(), lengths[ids].tolist())
        spent += time.thread_time() - begin
        costs = [sum(measure.cost_of(lengths[group]) for group in mine) for mine in by_rank]
        sizes = [measure.size_of(lengths[group]) for mine in by_rank for group in mine]
        most, total = most + max(costs), total + sum(costs) / len(costs)
        ideal += float(measure.costs(lengths[ids]).sum()) / len(costs)
        computed, tokens, largest = computed + sum(sizes), tokens + float(lengths[ids].sum()), max(largest, *sizes)
    return {
        "critical": most / ideal,
        "imbalance": most / total,
        "padding": 1 - tokens / computed,
        "largest_group": largest,
        "milliseconds_per_step": spent * 1000 / sampler.num_global_batches,
    }


def main(steps: int = 8, output: Path = Path("benchmarks/results")) -> None:
    """Prints a table for each cost and writes everything measured as JSON."""
    console = Console(width=130)
    found = []
    for cost in ("padded", "tokens"):
        table = Table(title=f"cost={cost!r}: transformers → ullage")
        for column in (
            "ranks x batches",
            "workload",
            "critical",
            "imbalance",
            "padding",
            "largest group",
            "ms per step",
        ):
            table.add_column(column, justify="left" if column in ("workload", "ranks x batches") else "right")
        for ranks, slots, each in SHAPES:
            size = ranks * slots * each
            for workload, draw in WORKLOADS.items():
                lengths = draw(steps * size, 0).tolist()
                ours = BalancedSampler(lengths, size, ranks, slots, cost=cost)
                theirs = BatchRebalanceSampler(lengths, size, ranks, slots)
                ours._assign(list(range(size)), lengths[:size])  # loads compiled code
                figures = [measured(sampler, ours.measure) for sampler in (theirs, ours)]
                names = ("transformers", "ullage")
                shape = {"cost": cost, "ranks": ranks, "accumulated": slots, "samples": size, "workload": workload}
                found += [{**shape, "sampler": name, **each} for name, each in zip(names, figures)]
                table.add_row(
                    f"{ranks} x {slots}",
                    workload,
                    *(" → ".join(f"{each[name]:.3f}" for each in figures) for name in ("critical", "imbalance")),
                    " → ".join(f"{each['padding']:.1%}" for each in figures) if cost == "padded" else "",
                    " → ".join(f"{each['largest_group']:,.0f}" for each in figures),
                    " → ".join(f"{each['milliseconds_per_step']:.1f}" for each in figures),
                )
        console.print(table)
        for name in ("critical", "imbalance"):
            means = [
                np.exp(np.mean([np.log(row[name]) for row in found if row["cost"] == cost and row["sampler"] == who]))
                for who in ("transformers", "ullage")
            ]
            console.print(f"{name}, geometric mean: {means[0]:.3f} → {means[1]:.3f}")
    record = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "transformers": transformers.__version__},
        "rows": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"sampling-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
