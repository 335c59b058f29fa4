"""Drawn losses of one's own, packed: trained as the padded batch is, or refused; on one rank and on two.

Forty losses are drawn by their seeds (``tests/support/drawn_losses.py``): what they are divided by, where they are
computed, by token or by sequence, labels of all tokens or some, names of classes. Each trains two steps at a capacity
that holds the batch and at one that does not. The command ends with status 1 where a run trains another loss without a
word, where a sum or a mean is refused, and for an error that is not one of ullage's.

    python benchmarks/campaigns/own_losses.py                 # ten minutes
    python benchmarks/campaigns/own_losses.py --first 100     # other draws
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import drawn_losses  # noqa: E402


def main(
    first: Annotated[int, typer.Option(help="The first seed.")] = 100,
    number: Annotated[int, typer.Option(help="Losses to draw.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder of the JSON.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Train the drawn losses, and keep what became of each."""
    seeds = [str(seed) for seed in range(first, first + number)]
    rows: list[dict[str, Any]] = []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    surroundings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tqdm(total=4 * number, unit="run") as progress:
        for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]):
            command = [sys.executable, *launcher, drawn_losses.__file__, *seeds]
            running = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=surroundings
            )
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith('{"seed"'):
                    rows.append(json.loads(line))
                    progress.update()
    wrong = [
        each
        for each in rows
        if each["outcome"] not in ("exact", *(() if each["rule"] in drawn_losses.EXACT else ("refused",)))
    ]
    kinds = Counter((each["rule"], each["outcome"]) for each in rows)
    for (rule, outcome), count in sorted(kinds.items()):
        print(f"{rule:28}{outcome:10}{count:4}")
    for each in wrong:
        print("WRONG", each)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record = {"date": str(date.today()), "versions": versions, "runs": len(rows), "wrong": len(wrong), "rows": rows}
    (out / f"own_losses_{date.today()}.json").write_text(json.dumps(record, indent=1) + "\n")
    raise typer.Exit(1 if wrong or len(rows) < 4 * number else 0)


if __name__ == "__main__":
    typer.run(main)
