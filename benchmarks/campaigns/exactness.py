"""Gradients of random packed steps against the same sequences one by one, by hand: on simulated ranks and on real ones.

Each simulated step draws a model, lengths, labels with holes, weights, 1 to 8 ranks, a capacity, a strategy and what
becomes of long sequences (``tests/support/exactness.py``). A real Trainer stands for all ranks, one after another, so
that counting, weighing, losses and backward are its own. Some steps run again through the Trainer on 2 and 4 processes.
The difference is that of the gradients, relative to the gradient's norm: at most 1e-6 in float32, 1e-12 in float64.

    python benchmarks/campaigns/exactness.py                   # 2,000 steps in both precisions, 40 on 2 and 4 processes
    python benchmarks/campaigns/exactness.py --steps 200 --runs 0
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the steps are those of the tests

from tests.support import exactness, exactness_script  # noqa: E402
from tests.support.launch import torchrun  # noqa: E402

PROCESSES = (2, 4)


def simulated(steps: int) -> dict[str, Any]:
    """``steps`` random steps in each precision: the largest differences, what was covered, and the failures."""
    largest: dict[str, dict[str, float]] = {dtype: defaultdict(float) for dtype in exactness.DTYPES}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    covered: Counter[str] = Counter()
    failures = []
    for seed in range(steps):
        case = exactness.Case.draw(seed)
        covered.update(exactness.covered(case))
        for name in ("family", "weighting", "strategy", "sync", "oversize"):
            counts[name][getattr(case, name)] += 1
        counts["ranks"][str(case.plan.ranks)] += 1
        for dtype, tolerance in exactness.TOLERANCES.items():
            off = exactness.check(case, dtype)
            worst = largest[dtype]
            worst["loss"] = max(worst["loss"], off["loss"])
            worst["gradient"] = max(worst["gradient"], off["gradient"])
            name = f"{case.family}, {case.weighting}"
            worst[name] = max(worst[name], off["gradient"])
            if not max(off.values()) <= tolerance:  # nan is a failure too
                failures.append({"seed": seed, "dtype": dtype, **off})
    return {
        "steps": steps,
        "drawn": {name: dict(sorted(counter.items())) for name, counter in counts.items()},
        "covered": dict(covered),
        "largest differences": largest,
        "failures": failures,
    }


def on_processes(processes: int, runs: int) -> dict[str, Any]:
    """Runs of the Trainer under torchrun, every step compared."""
    first = runs * PROCESSES.index(processes)
    with tempfile.TemporaryDirectory() as folder:
        torchrun(processes, exactness_script.__file__, folder, first, first + runs, timeout=600)
        found = json.loads((Path(folder) / "results0.json").read_text())
    largest = dict.fromkeys(exactness.DTYPES, 0.0)
    for run in found:
        largest[run["dtype"]] = max(largest[run["dtype"]], *run["differences"])
    failures = [run for run in found if not max(run["differences"]) <= exactness.TOLERANCES[run["dtype"]]]
    steps = sum(len(run["differences"]) for run in found)
    return {"processes": processes, "steps": steps, "largest differences": largest, "runs": found, "failures": failures}


def main(
    steps: int = 2000,
    runs: int = 40 // exactness_script.STEPS,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print the largest differences, and write dated JSON. Exit status 1 if any is above its bound."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    started = time.process_time()
    found = simulated(steps)
    real = [on_processes(processes, runs) for processes in PROCESSES] if runs else []
    console = Console(width=110)
    table = Table("steps", "ranks", *exactness.DTYPES, title="largest difference of a step's gradient, relative")
    for name, ranks, each in [
        (str(found["steps"]), "1 to 8, simulated", found),
        *((str(each["steps"]), f"{each['processes']} processes", each) for each in real),
    ]:
        differences = each["largest differences"]
        numbers = (differences[dtype] for dtype in exactness.DTYPES)
        worst = [number["gradient"] if isinstance(number, dict) else number for number in numbers]
        table.add_row(name, ranks, *(f"{number:.1e}" for number in worst))
    console.print(table)
    console.print(", ".join(f"{number:,} {what}" for what, number in found["covered"].items()))
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "process_seconds": time.process_time() - started,
        "bounds": exactness.TOLERANCES,
        "simulated": found,
        "processes": real,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"exactness_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")
    failures = [*found["failures"], *(failure for each in real for failure in each["failures"])]
    if failures:
        console.print(f"failures: {failures}")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
