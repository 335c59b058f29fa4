"""What an installation takes: seconds and megabytes of the core and its extras, the import, and the first plan.

Each set of extras gets an environment of its own, which has PyTorch already. Packages come from where pip finds them,
its cache included. Then, each in a process of its own: ``import ullage``, five times, and the first plan, with numba's
folder of compiled code empty (once), and five times more. Seconds of processes are those of the processor, which other
work on the machine changes little.

    python benchmarks/campaigns/installing.py
    python benchmarks/campaigns/installing.py --torch torch==2.13.0 --extras hf
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("", "fast", "hf")
#: Sequences of the plans: one step of a small run, and one of a large one.
SIZES = (512, 4096)
REPEATS = 5
PLAN = """
import sys, numpy as np
from ullage import plan
lengths = np.random.default_rng(0).lognormal(6.5, 1.0, int(sys.argv[1])).clip(1, 16384).astype(int)
plan(lengths, ranks=8, capacity=16384)
"""


def megabytes(folder: Path) -> float:
    """What the files of a folder take, in units of 10⁶ bytes."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def processor_seconds(python: Path, code: str, *arguments: object, **variables: str) -> float:
    """Processor time of a new process that runs ``code``; ends the campaign if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(python), "-W", "ignore", "-c", code, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=python.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{code} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def installed(folder: Path, extra: str, torch: str) -> dict[str, Any]:
    """One environment: what an installation of ullage adds to PyTorch's, and what the first calls take."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True, stderr=subprocess.DEVNULL)
    before, began, load = megabytes(folder), time.monotonic(), psutil.getloadavg()[0]
    subprocess.run([*pip, f"{ROOT}[{extra}]" if extra else str(ROOT)], check=True, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = {
        "seconds": time.monotonic() - began,
        "load_before": load,
        "megabytes": megabytes(folder) - before,
        "megabytes_before": before,
    }
    cache = {"NUMBA_CACHE_DIR": str(folder / "numba")}
    processor_seconds(python, "import ullage")  # which compiles to bytecode what pip has not
    found["import"] = statistics.median(processor_seconds(python, "import ullage") for _ in range(REPEATS))
    for size in SIZES:
        found[f"first plan of {size}"] = processor_seconds(python, PLAN, size, **cache)
        later = [processor_seconds(python, PLAN, size, **cache) for _ in range(REPEATS)]
        found[f"plan of {size}"] = statistics.median(later)
    return found


def main(
    torch: Annotated[str, typer.Option(help="PyTorch, as pip takes it.")] = "torch",
    extras: Annotated[list[str] | None, typer.Option(help="Sets of extras; '' for the core.")] = None,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Install, measure, print the table, and write dated JSON."""
    rows: dict[str, dict[str, Any]] = {}
    for extra in extras if extras is not None else EXTRAS:
        with tempfile.TemporaryDirectory() as folder:
            rows[extra] = installed(Path(folder), extra, torch)
    plans = [name for name in next(iter(rows.values())) if "plan" in name]
    table = Table("", "adds", "pip", "import", *plans)
    for extra, found in rows.items():
        seconds = [f"{found[name]:.2f} s" for name in ("import", *plans)]
        table.add_row(
            f"\\[{extra}]" if extra else "core", f"{found['megabytes']:.0f} MB", f"{found['seconds']:.0f} s", *seconds
        )
    Console(width=130).print(table)
    record = {
        "campaign": "installing",
        "date": date.today().isoformat(),
        "ullage": ullage.__version__,
        "python": platform.python_version(),
        "cores": psutil.cpu_count(),
        "torch": torch,
        "rows": rows,
    }
    path = out / f"installing_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    typer.run(main)
