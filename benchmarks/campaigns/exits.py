"""How runs end: exit statuses of many processes, with gloo's threads slowed at the moment that matters, and without.

A process may die at its end, "terminate called without an active exception", because a thread of gloo lets go of a
tensor while the interpreter ends (``src/ullage/ranks/ending.py``). *Slowed*: every layout of ``ullage train``,
packed and padded, stopped and finished, and scripts with our Trainer or ``PackedIterator``, with gloo's threads pausing
after each collective and the interpreter taking longer to end (``tests/support/slow_gloo.c``, ``fork_server.py``).
*Natural*: two-process evaluations under torchrun, one after another, with nothing slowed. *Left to chance*: slowed
evaluations without what ends the groups of a run: some die, or nothing was slowed where it matters.

    python benchmarks/campaigns/exits.py                        # 20 slowed runs of the command, 40 natural ones
    python benchmarks/campaigns/exits.py --slowed 5 --natural 3
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the ranks are those of the tests

from tests.support.exits import HERE, RUNS, Server, texts  # noqa: E402
from tests.support.launch import environment  # noqa: E402

#: Cases of ``exit_script.py``, and on how many processes each.
SCRIPTS = {
    "evaluate": 2,
    "evaluate, and go on": 2,
    "iterator": 4,
    "iterator, destroyed by the script": 4,
    "iterator that is left": 4,
}


def slowed_runs(folder: Path, commands: int, scripts: int) -> list[dict[str, Any]]:
    """``commands`` runs of ``ullage train`` over the layouts in turn, and ``scripts`` of each case."""
    found = []
    data = texts(folder)
    with Server(folder, slowed=True) as server:
        for seed, name in zip(range(commands), itertools.cycle(RUNS)):
            train = [*RUNS[name], "--data", data, "--output_dir", folder / f"run{seed}"]
            found.append({"run": name, "statuses": server.run(2, seed=seed, train=train).statuses})
        for case, world in SCRIPTS.items():
            for seed in range(scripts):
                left = server.script("exit_script.py", case, folder / "out", world=world, seed=seed)
                found.append({"run": f"script: {case}", "statuses": left.statuses})
    return found


def runs_left_to_chance(folder: Path, number: int) -> list[list[int]]:
    """Statuses of slowed evaluations that end without ``ranks/ending.py``."""
    case = "evaluate, and leave the end to chance"
    with Server(folder, slowed=True) as server:
        return [
            server.script("exit_script.py", case, folder / "out", seed=seed, limit=60).statuses
            for seed in range(number)
        ]


def natural_run(folder: Path) -> dict[str, Any]:
    """One evaluation on two processes, as a user starts it: torchrun's own exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(HERE / "exit_script.py"), "evaluate", str(folder)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    return {"run": "natural evaluation", "statuses": [done.returncode]}


def main(
    slowed: int = 20,
    scripts: int = 6,
    natural: int = 40,
    chance: int = 24,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print what did not end with 0, and write dated JSON. Exit status 1 if anything did not."""
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        runs = slowed_runs(Path(folder), slowed, scripts)
        runs += [natural_run(Path(folder)) for _ in range(natural)]
        (Path(folder) / "chance").mkdir()
        left = runs_left_to_chance(Path(folder) / "chance", chance)
    table = Table("run", "runs", "all ranks 0", "statuses of the others")
    names = dict.fromkeys(run["run"] for run in runs)
    for name in names:
        mine = [run["statuses"] for run in runs if run["run"] == name]
        bad = [statuses for statuses in mine if any(statuses)]
        table.add_row(name, str(len(mine)), str(len(mine) - len(bad)), " ".join(map(str, bad)))
    console.print(table)
    bad = [run for run in runs if any(run["statuses"])]
    record = {
        "date": date.today().isoformat(),
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {"ullage": ullage.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": {"slowed": slowed, "scripts": scripts, "natural": natural, "left to chance": chance},
        "summary": {"runs": len(runs), "all ranks 0": len(runs) - len(bad), "others": dict(_counts(bad))},
        "left to chance": {"runs": chance, "with a rank that died": sum(any(statuses) for statuses in left)},
        "runs": runs,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"exits_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"left to chance: {sum(any(statuses) for statuses in left)} of {chance} runs had a rank that died")
    console.print(f"{len(runs) - len(bad)} of {len(runs)} ended with 0 on all ranks; written to {path.name}")
    if bad:
        raise typer.Exit(1)


def _counts(bad: list[dict[str, Any]]) -> Counter[str]:
    return Counter(str(status) for run in bad for status in run["statuses"] if status)


if __name__ == "__main__":
    typer.run(main)
