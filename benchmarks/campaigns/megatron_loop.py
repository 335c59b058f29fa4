"""Losses of a Megatron loop packed by two lines, in every layout on 1 to 8 processes, against single sequences.

``PackingScheduler`` packs the loop of the tests (``tests/support/megatron_parity.py``). Four steps of an optimizer and
one of evaluation, and the gradients of the first, are compared with a plain loop over single sequences in one process.
All is float64, but for the cross-entropy, which megatron-core computes in float32.

    python benchmarks/campaigns/megatron_loop.py                 # every layout, about ten minutes on two cores
    python benchmarks/campaigns/megatron_loop.py --processes 4   # those on four processes
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the ranks are those of the tests

from tests.support.launch import torchrun  # noqa: E402

#: Layouts by number of processes; the rest of the world is data-parallel.
LAYOUTS = {
    1: ("dp1",),
    2: ("dp2", "tp2", "tp2+sp", "pp2", "pp2.vpp2", "cp2", "dp2.auto"),
    3: ("dp3", "cp3"),
    4: ("dp4", "tp4+sp", "pp4", "cp4", "tp2.pp2+sp", "pp2.vpp2.dp2", "cp2.dp2", "tp2.cp2+sp", "pp2.cp2"),
    8: ("dp8", "tp2.pp2.dp2+sp", "tp2.cp2.dp2+sp", "pp2.vpp2.dp4", "pp2.vpp2.tp2.cp2+sp"),
}
BOUND = 2e-6


def failed(record: dict[str, Any]) -> bool:
    """Whether a layout differs from single sequences in a loss, or from the data in a count."""
    same = record["same totals"] and [step[1:] for step in record["totals"]] == record["counted"]
    return not (record["error"] <= BOUND and same)


def main(processes: int = 0, out: Path = ROOT / "benchmarks" / "results") -> None:
    """Run, print a table, and write dated JSON after each number of processes. Exit status 1 if anything differs."""
    console = Console(width=110)
    records: list[dict[str, Any]] = []
    path = out / f"megatron_loop_{date.today().isoformat()}.json"
    for count, layouts in LAYOUTS.items():
        if processes in (0, count):
            cases = [f"{layout}+double" for layout in layouts]
            printed = torchrun(count, ROOT / "tests" / "support" / "megatron_parity.py", *cases, timeout=900)
            records += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
            write(records, path)
    table = Table("processes", "layout", "microbatches of the script", "packed", "largest relative error of 5 losses")
    for record in records:
        packed = ", ".join(map(str, record["microbatches"]))
        error = f"{record['error']:.1e}"
        table.add_row(str(record["processes"]), record["case"], str(record["script's microbatches"]), packed, error)
    console.print(table)
    bad = [record for record in records if failed(record)]
    console.print(f"{len(records) - len(bad)} of {len(records)} within {BOUND}; written to {path.name}")
    if bad or not records:
        raise typer.Exit(1)


def write(records: list[dict[str, Any]], path: Path) -> None:
    told = {
        "date": date.today().isoformat(),
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "megatron-core": version("megatron-core"),
            "python": platform.python_version(),
        },
        "bound": BOUND,
        "failed": [record["case"] for record in records if failed(record)],
        "records": records,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
