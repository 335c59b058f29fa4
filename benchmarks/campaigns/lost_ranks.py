"""Runs that lose ranks: stories by seed, and the seconds from a killed host to the next step, by part.

A story is a run whose ranks, 1 to 4 of them, are killed, stopped, terminated or out of disk, and come back in another
number, a few times over; the same call begins each of its lives. Every sequence of every step is written down: together
the lives must have trained the steps of a run that nothing befell, with its losses to 2e-6, and leave no folder that
needs a person. Then one of two hosts, an agent of torchrun's with a rank each, is killed, and comes back.

    python benchmarks/campaigns/lost_ranks.py                  # 20 stories, and the hosts
    python benchmarks/campaigns/lost_ranks.py --stories 3 --first 100 --no-hosts
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.lost_ranks import EVERY, Lives, Story, two_hosts  # noqa: E402


def main(
    stories: Annotated[int, typer.Option(help="How many, one seed each.")] = 20,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds above the longest step for which a collective waits.")] = 10.0,
    hosts: Annotated[bool, typer.Option(help="Kill one of two hosts as well.")] = True,
    results: Path = ROOT / "benchmarks" / "results",
) -> None:
    told: list[Story] = []
    path = results / f"lost_ranks_{date.today().isoformat()}.json"
    with tempfile.TemporaryDirectory() as place:
        lives = Lives(Path(place), limit)
        measured = two_hosts(lives) if hosts else {}
        print(json.dumps(measured), flush=True)
        for seed in range(first, first + stories):
            told.append(lives.tell(Story.of(seed)))
            print(told[-1], flush=True)
            path.write_text(json.dumps(record(told, measured, limit), indent=1) + "\n")  # so far
    table = Table("seed", "ZeRO", "async", "lives", "problems")
    for each in told:
        words = [f"{life.ranks} {life.kind}{f' {life.rank} at {life.after}' * bool(life.kind)}" for life in each.lives]
        table.add_row(str(each.seed), str(each.zero), str(each.async_save), ", ".join(words), "; ".join(each.problems))
    Console(width=160).print(table)
    sums = record(told, measured, limit)
    print(f"{len(told)} stories, {sums['kinds']}; lives by steps trained twice {sums['twice']}; {sums['wrong']} wrong")
    path.write_text(json.dumps(sums, indent=1) + "\n")
    print(path)
    sys.exit(bool(sums["wrong"]))


def record(told: list[Story], hosts: dict[str, Any], limit: float) -> dict[str, Any]:
    """What is written down: the stories with their lives, and what they add up to."""
    return {
        "date": date.today().isoformat(), "ullage": ullage.__version__, "torch": torch.__version__,
        "machine": platform.machine(), "processors": os.cpu_count(), "load": os.getloadavg()[0], "limit": limit,
        "save_steps": EVERY, "wrong": sum(bool(each.problems) for each in told) + bool(hosts.get("problems")),
        "kinds": Counter(life.kind for each in told for life in each.lives if life.kind),
        "twice": Counter(number for each in told for number in each.twice()),
        "hosts": hosts, "stories": [asdict(each) for each in told],
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
