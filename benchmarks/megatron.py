"""Megatron's schedule of packed sequences against ours, on its own mock lengths: plans only, nothing trains.

``dp_balanced`` is Megatron-LM's default scheduler, written from its description: sequences in arrival order, a pack
closed when the next one does not fit into ``max_seqlen_per_dp_cp_rank · cp``, the packs split until they are a multiple
of dp. *fill* is real tokens over the slots of all microbatches. *critical path* is the sum over microbatches of the
dearest rank over the mean rank's work: how much longer a step takes than evenly shared work would.

    python benchmarks/megatron.py          # half a minute; writes benchmarks/results/megatron-DATE.json
"""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import ullage
from ullage.datasets import mock_lengths
from ullage.planning import TransformerCost

MOCK = {"mode": "distribution", "type": "lognormal"}
#: Name -> lengths, and slots a dp·cp rank holds.
WORKLOADS = {
    "mock SFT of the pull request (1024 to 8192, mean 4096)": (
        {**MOCK, "min_seq_len": 1024, "max_seq_len": 8192, "mean_seq_len": 4096, "lognormal_sigma": 1.1},
        8192,
    ),
    "short SFT (64 to 8192, mean 600)": (
        {**MOCK, "min_seq_len": 64, "max_seq_len": 8192, "mean_seq_len": 600, "lognormal_sigma": 1.1},
        8192,
    ),
}
#: dp, cp, multiple of the number of microbatches (virtual pipeline stages), sequences a dp rank.
SHAPES = ((4, 1, 1, 32), (8, 2, 1, 32), (32, 1, 1, 16), (16, 1, 4, 32), (128, 2, 1, 16))
# Layers of a 7B model: hidden size 4096.
COST = TransformerCost(linear=24576, quadratic=1)


@dataclass
class Row:
    """One plan of one draw by one scheduler."""

    scheduler: str
    workload: str
    dp: int
    cp: int
    multiple: int
    seed: int
    microbatches: int
    fill: float
    critical_path: float
    longest_microbatch: int
    milliseconds: float


def dp_balanced(slots: np.ndarray, dp: int, capacity: int, multiple: int) -> list[list[int]]:
    """The packs of Megatron-LM's scheduler in their order; pack *k* is microbatch ``k // dp`` of rank ``k % dp``.

    Raises ``ValueError`` where upstream fails: no pack left to split.
    """
    packs: list[list[int]] = [[]]
    used = 0
    for i, slot in enumerate(slots.tolist()):
        if used + slot > capacity:
            packs.append([])
            used = 0
        packs[-1].append(i)
        used += slot
    behind = len(packs) - 1
    while len(packs) % (dp * multiple):
        if behind < 1:
            raise ValueError("not enough sequences to split")
        if len(packs[behind]) > 1:
            packs.append([packs[behind].pop()])
        else:
            behind -= 1
    return packs


def measure(scheduler: str, workload: str, dp: int, cp: int, multiple: int, count: int, seed: int) -> Row:
    config, capacity = WORKLOADS[workload]
    lengths = mock_lengths(config, count * dp, seed)
    pad_to_multiple_of = 2 * cp if cp > 1 else 1
    options = {
        "ranks": dp, "capacity": capacity * cp, "pad_to_multiple_of": pad_to_multiple_of,
        "microbatch_multiple": multiple, "cost": COST
    }  # fmt: skip
    begin = time.thread_time()
    if scheduler == "dp_balanced":
        packs = dp_balanced(-(-lengths // pad_to_multiple_of) * pad_to_multiple_of, dp, capacity * cp, multiple)
        spent = time.thread_time() - begin
        plan = ullage.plan(lengths, strategy="preassigned", assignment=packs, **options)
    else:
        plan = ullage.plan(lengths, strategy=scheduler, **options)
        spent = time.thread_time() - begin
    found = plan.statistics()
    longest = max(plan.layout(m, r).size for m in range(plan.num_microbatches) for r in range(dp))
    fill, path = 1 - found.ullage, found.critical_path
    return Row(scheduler, workload, dp, cp, multiple, seed, found.num_microbatches, fill, path, longest, 1000 * spent)


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(float(np.mean([math.log(value) for value in values])))


def main(seeds: int = 5, output: Path = Path("benchmarks/results")) -> None:
    """Prints a table a workload and writes everything measured as JSON."""
    console = Console(width=130)
    ullage.plan([1], ranks=1, capacity=1)
    rows = []
    for workload in WORKLOADS:
        table = Table(title=f"{workload}, {seeds} seeds, geometric means")
        for column in (
            "dp · cp · vpp",
            "scheduler",
            "microbatches",
            "fill",
            "critical path",
            "÷ dp_balanced",
            "plan ms",
        ):
            table.add_column(column, justify="left" if column in ("dp · cp · vpp", "scheduler") else "right")
        for dp, cp, multiple, count in SHAPES:
            upstream: list[Row] = []
            for scheduler in ("dp_balanced", "balanced"):
                mine = [measure(scheduler, workload, dp, cp, multiple, count, seed) for seed in range(seeds)]
                rows += mine
                upstream = upstream or mine
                ratio = mean([row.critical_path / base.critical_path for row, base in zip(mine, upstream)])
                table.add_row(
                    f"{dp} · {cp} · {multiple}",
                    scheduler,
                    f"{np.mean([row.microbatches for row in mine]):.1f}",
                    f"{mean([row.fill for row in mine]):.1%}",
                    f"{mean([row.critical_path for row in mine]):.3f}",
                    f"{ratio:.3f}",
                    f"{np.median([row.milliseconds for row in mine]):.2f}",
                )
        console.print(table)
    record = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "rows": [asdict(row) for row in rows],
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"megatron-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
