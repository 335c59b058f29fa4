"""Sequences with images, planned by the work of their tokens alone and by the sum of both costs.

A mixed data set is drawn: of five sequences one is text only, three have one image, one has two to six; images have
256 to 5,184 patches, four of which become a token. The cost is that of Qwen2.5-VL, read off the default configuration
of transformers. All plans are priced by it. *imbalance* is the critical path over the mean rank, *most patches* what
the fullest microbatch of any rank holds, which decides on the memory of the tower. Ratios are geometric means over
seeds, patches the largest of all, microbatches their sum.

    python benchmarks/pictures_planned.py     # a few seconds; writes benchmarks/results/pictures_planned_DATE.json
"""

from __future__ import annotations

import json
import time
from datetime import date
from pathlib import Path
from typing import Annotated

import machine
import numpy as np
import transformers
import typer
from rich.console import Console
from rich.table import Table

import ullage

RANKS, TOKENS, PATCHES = 8, 16_384, 32_768
SIZES = (512, 4096)


def draw(seed: int, n: int) -> tuple[np.ndarray, list[list[int]]]:
    """Lengths, and the patches of each image of each sequence."""
    random = np.random.default_rng(seed)
    kinds = random.choice(3, n, p=[0.2, 0.6, 0.2])
    counts = np.where(kinds == 2, random.integers(2, 7, n), kinds)
    items = [(4 * np.clip(random.lognormal(5.6, 0.8, count), 64, 1296).astype(int)).tolist() for count in counts]
    text = np.clip(random.lognormal(np.log(400), 1.0, n), 16, 4096).astype(np.int64)
    return text + np.array([sum(each) // 4 for each in items]), items


def plans(seed: int, n: int, cost: ullage.MultimodalCost) -> dict[str, dict[str, float]]:
    """Figures of each way to plan one step."""
    lengths, items = draw(seed, n)
    amounts = {"patches": items}
    priced = ullage.plan(lengths, ranks=1, capacity=1 << 40, amounts=amounts, cost=cost).costs
    found = {}
    for name, options in {
        "arrival order": {"strategy": "next_fit", "cost": cost},
        "tokens alone": {"cost": cost.text},
        "sum of both": {"cost": cost},
        "sum of both, with a capacity of patches": {"cost": cost, "capacities": {"patches": PATCHES}},
    }.items():
        began = time.process_time()
        plan = ullage.plan(lengths, ranks=RANKS, capacity=TOKENS, amounts=amounts, **options)
        seconds = time.process_time() - began
        bins = [[plan.members(m, r) for r in range(RANKS)] for m in range(plan.num_microbatches)]
        same = ullage.plan(
            lengths, ranks=RANKS, capacity=TOKENS, amounts=amounts, cost=priced, strategy="preassigned", assignment=bins
        ).statistics()
        (use,) = plan.statistics().resources
        assert not plan.problems()
        found[name] = {
            "imbalance": same.critical_path, "most_patches": use.largest, "microbatches": plan.num_microbatches,
            "lower_bound": plan.statistics().lower_bound, "milliseconds": 1000 * seconds,
        }  # fmt: skip
    return found


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Steps of each size.")] = 10,
    output: Annotated[Path, typer.Option(help="Folder of the JSON.")] = Path("benchmarks/results"),
) -> None:
    """Print a table and write dated JSON."""
    config = transformers.Qwen2_5_VLConfig()
    cost = ullage.MultimodalCost.from_config(config)
    plans(0, SIZES[-1], cost)  # compiled, and loaded
    rows = []
    for n in SIZES:
        drawn = [plans(seed, n, cost) for seed in range(seeds)]
        for name in drawn[0]:
            each = [one[name] for one in drawn]
            rows.append(
                {
                    "sequences": n,
                    "planned by": name,
                    "imbalance": float(np.exp(np.mean([np.log(one["imbalance"]) for one in each]))),
                    "most_patches": int(max(one["most_patches"] for one in each)),
                    "microbatches": sum(one["microbatches"] for one in each),
                    "lower_bound": sum(one["lower_bound"] for one in each),
                    "milliseconds": float(np.median([one["milliseconds"] for one in each])),
                }
            )
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else f"{value}" for value in row.values()))
    Console(width=160).print(table)
    settings = {"ranks": RANKS, "capacity": TOKENS, "capacity_of_patches": PATCHES, "seeds": seeds}
    record = {"date": date.today().isoformat(), "machine": machine.processor(), "settings": settings, "rows": rows}
    path = output / f"pictures_planned_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
