"""Runs killed with SIGKILL while a checkpoint is written in the background, at random moments of the writing.

A Trainer with ``async_save=True`` saves after every third step. Each run is killed at a random moment after the copy of
one of its saves; then every checkpoint under its own name must be whole, the save before must be there, and the same
command, continuing, must end with the weights, moments and random states of a run that nobody killed, bit for bit.

    python benchmarks/campaigns/kill_save.py                     # 20 moments
    python benchmarks/campaigns/kill_save.py --moments 5 --width 300
"""

from __future__ import annotations

import json
import platform
import random
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.kill_save import Runs  # noqa: E402


def main(
    moments: Annotated[int, typer.Option(help="Runs to kill.")] = 20,
    width: Annotated[int, typer.Option(help="Of the model; a checkpoint has 12 × width² bytes.")] = 1200,
    seconds: Annotated[float, typer.Option(help="Kill at most so long after a copy.")] = 0.25,
    seed: int = 0,
    results: Path = ROOT / "benchmarks" / "results",
) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        runs = Runs(Path(place), width)
        found = []
        for number in range(moments):
            found.append(runs.kill(number, draw.randrange(3), draw.uniform(0.0, seconds)))
            print(found[-1], flush=True)
    table = Table("save", "after, ms", "killed", "left", "goes on from", "problems")
    for each in found:
        left = ", ".join(each.left)
        row = (each.save, f"{each.delay * 1e3:.1f}", each.killed, left, each.before or "the beginning")
        table.add_row(*map(str, row), "; ".join(each.problems))
    Console(width=160).print(table)
    during = sum(any(name.endswith(".partial") for name in each.left) for each in found)
    wrong = sum(bool(each.problems) for each in found)
    print(f"{len(found)} killed, {during} of them while a staging folder was there; {wrong} with a problem")
    record = {
        "date": date.today().isoformat(), "ullage": ullage.__version__, "torch": torch.__version__,
        "machine": platform.machine(), "width": width, "seed": seed, "during_a_save": during,
        "runs": [asdict(each) for each in found],
    }  # fmt: skip
    path = results / f"kill_save_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
