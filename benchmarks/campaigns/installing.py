"""What an installation takes: seconds and megabytes of the core and its extras, the import, and the first plan.

One environment with PyTorch gets the core, then ``[fast]``, then ``[hf]``: what each adds to the one before. Packages
come from where pip finds them, its cache included. With the core and with ``[fast]``, each in a process of its own:
``import ullage``, and the first plan, which with numba is timed with an empty folder of compiled code, too. Seconds of
processes are those of the processor, which other work on the machine changes little; of pip, by the clock as well.

    python benchmarks/campaigns/installing.py
    python benchmarks/campaigns/installing.py --torch torch==2.13.0
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


def timed(command: list[object], **variables: str) -> tuple[float, float]:
    """Seconds of a process by the clock, and of its processor; ends the campaign if it fails."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd="/")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def installed(folder: Path, extra: str) -> dict[str, Any]:
    """What an installation of ullage with this extra adds to an environment."""
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    before, load = megabytes(folder), psutil.getloadavg()[0]
    seconds, processor = timed([*pip, f"{ROOT}[{extra}]" if extra else ROOT])
    return {"megabytes": megabytes(folder) - before, "seconds": seconds, "processor": processor, "load": load}


def first_calls(folder: Path) -> dict[str, float]:
    """Processor seconds of the import, and of the first plan of a process, the first of all and a later one."""
    python = [folder / "bin" / "python", "-W", "ignore", "-c"]
    cache = {"NUMBA_CACHE_DIR": str(folder / "numba")}
    timed([*python, "import ullage"])  # which compiles to bytecode what pip has not
    found = {"import": statistics.median(timed([*python, "import ullage"])[1] for _ in range(REPEATS))}
    for size in SIZES:
        found[f"first plan of {size}"] = timed([*python, PLAN, size], **cache)[1]
        later = [timed([*python, PLAN, size], **cache)[1] for _ in range(REPEATS)]
        found[f"plan of {size}"] = statistics.median(later)
    return found


def main(
    torch: Annotated[str, typer.Option(help="PyTorch, as pip takes it.")] = "torch",
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Install, measure, print the table, and write dated JSON."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        timed([folder / "bin" / "python", "-m", "pip", "install", "--quiet", torch])
        with_torch = megabytes(folder)
        for extra in EXTRAS:
            rows[extra or "core"] = installed(folder, extra) | (first_calls(folder) if extra != "hf" else {})
            print(f"{extra or 'core'}: {rows[extra or 'core']}", file=sys.stderr, flush=True)
    calls = [name for name in rows["core"] if name not in ("megabytes", "seconds", "processor", "load")]
    table = Table("", "adds", "pip, by the clock", *calls)
    for name, found in rows.items():
        seconds = [f"{found[call]:.2f} s" if call in found else "" for call in calls]
        table.add_row(name, f"{found['megabytes']:.0f} MB", f"{found['seconds']:.0f} s", *seconds)
    Console(width=130).print(table)
    record = {
        "campaign": "installing",
        "date": date.today().isoformat(),
        "ullage": ullage.__version__,
        "python": platform.python_version(),
        "cores": psutil.cpu_count(),
        "torch": torch,
        "megabytes_with_torch": with_torch,
        "rows": rows,
    }
    path = out / f"installing_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    typer.run(main)
