"""One packed step of the Trainer for every type that the audit knows: trained, refused with its reason, or neither.

A tiny model of each type trains one step of several packed microbatches, on text, or on text with images. Loss and
gradient norm are compared with those of its sequences alone, or else with a padded step of the same Trainer
(``tests/support/every_type.py``). Each type runs in a forked child of its own, within a time limit, and the record is
written after each: ``--resume`` goes on with what is missing. An error that is not one of ullage's is a defect, and so
is a type that is refused and was not in the record given as ``--before``: the command then ends with status 1.

    python benchmarks/campaigns/packed_step.py                        # every type, half an hour
    python benchmarks/campaigns/packed_step.py --only gemma4 --only gemma3n_text
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import sys
import tempfile
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import deepspeed  # noqa: F401  once, and not in each child
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the step is that of the tests

from maintenance.models_page import entries  # noqa: E402
from tests.support import every_type  # noqa: E402

_FORK = multiprocessing.get_context("fork")


def _child(kind: str, name: str, pipe: Any) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the child ends
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(every_type.verdict(kind, name, folder))


def in_child(kind: str, name: str, limit: float) -> dict[str, Any]:
    """The verdict on a type; ``raw error`` too for a child that dies or takes longer than ``limit`` seconds."""
    mine, its = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_child, args=(kind, name, its))
    child.start()
    its.close()
    try:
        if mine.poll(limit):
            return mine.recv()
        return {"verdict": "raw error", "error": "TimeoutError", "reason": f"no end within {limit:g} s"}
    except EOFError:
        child.join()
        return {"verdict": "raw error", "error": "ChildProcessError", "reason": f"exit status {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def refused(types: dict[str, dict[str, Any]]) -> set[str]:
    """The types that do not train, for whatever reason that ullage gives."""
    return {name for name, found in types.items() if found["verdict"] == "refused"}


def main(
    only: Annotated[list[str], typer.Option(help="A type; repeat for several.")] = [],  # noqa: B006
    limit: Annotated[float, typer.Option(help="Seconds that one type may take.")] = 240.0,
    resume: Annotated[bool, typer.Option(help="Keep what today's record has.")] = False,
    before: Annotated[Path | None, typer.Option(help="A record of an earlier version.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the JSON.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print what did not train, and write dated JSON. Exit status 1 for raw errors and types newly refused."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = [(kind, name) for kind, name in entries() if not only or name in only]
    path = out / f"packed_step_{date.today().isoformat()}.json"
    types: dict[str, Any] = json.loads(path.read_text())["types"] if resume and path.is_file() else {}
    earlier: dict[str, Any] = {} if before is None else json.loads(before.read_text())["types"]
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "bound": every_type.BOUND,
    }
    for kind, name in tqdm([each for each in chosen if "/".join(each) not in types], unit="type"):
        types[f"{kind}/{name}"] = in_child(kind, name, limit)
        record["counts"] = Counter(found["verdict"] for found in types.values())
        record["raw errors before"] = sorted(n for n in earlier if earlier[n]["verdict"] == "raw error")
        record["refused and not before"] = sorted(
            n for n in refused(types) if earlier.get(n, {}).get("verdict", "refused") not in ("refused", "raw error")
        )
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**record, "types": types}, indent=1) + "\n")
    table = Table("type", "verdict", "why", title=f"one packed step: {dict(record.get('counts', {}))}")
    for name, found in types.items():
        if found["verdict"] not in ("trained", "not built"):
            told = f"{found.get('error', '')}: {found['reason']}" if "reason" in found else str(found)
            table.add_row(name, found["verdict"], told[:160])
    console = Console(width=160)
    console.print(table)
    console.print(f"written to {path}; refused and not before: {record.get('refused and not before')}")
    sys.exit(int(bool(record.get("refused and not before")) or record.get("counts", {}).get("raw error", 0) > 0))


if __name__ == "__main__":
    typer.run(main)
