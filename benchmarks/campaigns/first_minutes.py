"""First minutes of a new user, by the clock: a new clone, a new environment, the quickstart, the README's ten lines.

Each run clones the committed tree, installs what the quickstart needs (from pip's cache, where packages are in it),
runs ``make quickstart``, and then the first Python block of the README in the same environment.

    python benchmarks/campaigns/first_minutes.py             # five times
    python benchmarks/campaigns/first_minutes.py --runs 1
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that installation and quickstart may take together.
AIM = 240
PARTS = ("install", "quickstart", "ten lines")


def timed(folder: Path, *command: object) -> tuple[float, str]:
    """Seconds of a command in ``folder``, and what it printed; ends the campaign if the command fails."""
    begin = time.monotonic()
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - begin
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return seconds, done.stdout


def one_run(folder: Path, python: str) -> dict[str, Any]:
    """Seconds of each part, and what the last lines of each say."""
    load = psutil.getloadavg()[0]
    timed(folder, "git", "clone", "--quiet", ROOT, "clone")
    clone = folder / "clone"
    install, _ = timed(clone, "make", f"PYTHON={python}", ".venv/.first")
    quickstart, told = timed(clone, "make", f"PYTHON={python}", "quickstart")
    block = re.search(r"```python\n(.*?)```", (clone / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (clone / "ten_lines.py").write_text(block[1], encoding="utf-8")
    ten_lines, printed = timed(clone, clone / ".venv" / "bin" / "python", "ten_lines.py")
    return {
        "seconds": dict(zip(PARTS, (install, quickstart, ten_lines), strict=True)),
        "load_before": load,
        "quickstart": [line.strip() for line in told.splitlines() if "times the real tokens" in line],
        "ten_lines": [line.strip() for line in printed.splitlines() if line.startswith(("padded", "packed"))],
    }


def main(runs: int = 5, out: Path = ROOT / "benchmarks" / "results") -> None:
    """Run, print the seconds, and write dated JSON. Exit status 1 if installation and quickstart passed the aim."""
    # The Python that made this environment, which is the one that a user would call.
    python = getattr(sys, "_base_executable", sys.executable)
    found: list[dict[str, Any]] = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(one_run(Path(folder), python))
    table = Table("run", *PARTS, "install and quickstart", "padded and packed")
    totals = [run["seconds"]["install"] + run["seconds"]["quickstart"] for run in found]
    for number, (run, total) in enumerate(zip(found, totals, strict=True), 1):
        seconds = [f"{run['seconds'][part]:.0f} s" for part in PARTS]
        table.add_row(str(number), *seconds, f"{total:.0f} s", "; ".join(run["ten_lines"]))
    Console(width=130).print(table)
    record = {
        "campaign": "first_minutes",
        "date": date.today().isoformat(),
        "ullage": ullage.__version__,
        "python": platform.python_version(),
        "cores": psutil.cpu_count(),
        "aim_seconds": AIM,
        "runs": found,
    }
    path = out / f"first_minutes_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)
    if max(totals) > AIM:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
