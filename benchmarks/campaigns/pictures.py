"""Five packed steps of twelve families that see images, against single sequences and padded batches, on 1 and 2 ranks.

Each family is a tiny model in float32, trained by the Trainer with ``packing_capacity``: in this process, and on two
with DDP, ZeRO 2 and ZeRO 3. Its losses and gradient norms are compared with those of a loop without a Trainer over one
sequence after another, and with those of the Trainer on padded batches in one process; the bound is 1e-5, relative. Of
the twenty sequences some have no image, one, or up to six of very unequal sizes, some a clip where the type takes one,
and in some steps a rank has text alone (``tests/support/picture_types.py``).

Mllama's padded batches hold sequences with equally many images: in others a token in front of the first image also
looks at the images of padding, and a text at images of zeros, as transformers has it. How far that is from single
sequences is in the record.

    python benchmarks/campaigns/pictures.py                                    # every family and two seeds, 15 minutes
    python benchmarks/campaigns/pictures.py --only qwen2_5_vl --only llava --seeds 3
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import deepspeed
import pytest
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the steps are those of the tests

from tests.support import picture_types  # noqa: E402
from tests.support.small_runs import on_ranks  # noqa: E402

BOUND = 1e-5
#: Ways to train on two processes, and the stage of ZeRO of each. Ranks of one launch run them one after the other.
ON_TWO = {"ddp": 0, "zero 2": 2, "zero 3": 3}


def check(model_type: str, seed: int, folder: Path) -> dict[str, Any]:
    """Differences of one family's runs by way, from single sequences and from padded batches."""
    began = time.perf_counter()
    alone = picture_types.by_hand(model_type, seed)
    with contextlib.redirect_stdout(io.StringIO()):
        batches = picture_types.run(model_type, folder, seed=seed, packed=False)
        runs = {"one process": [picture_types.run(model_type, folder, seed=seed)]}
    padded = picture_types.by_hand(model_type, seed, alone=False) if model_type == "mllama" else batches
    for ways in (("ddp",), ("zero 2", "zero 3")):
        cases = [[model_type, {"seed": seed, "stage": ON_TWO[way]}] for way in ways]
        ranks = on_ranks(2, picture_types, folder, cases, timeout=500)
        runs |= {way: [rank[place] for rank in ranks] for place, way in enumerate(ways)}
    found: dict[str, Any] = {
        "type": model_type,
        "seed": seed,
        "padded batches against single sequences": picture_types.difference(batches, alone),
        "seconds": time.perf_counter() - began,
        "losses": alone["losses"],
        "norms": alone["norms"],
        "ways": {},
    }
    for way, ranks in runs.items():
        found["ways"][way] = {
            "against single sequences": max(picture_types.difference(rank, alone) for rank in ranks),
            "against padded batches": max(picture_types.difference(rank, padded) for rank in ranks),
            "microbatches of text alone": picture_types.texts_beside_images([rank["images"] for rank in ranks]),
        }
    found["failures"] = [
        f"{way}, {name}: {value:.1e}"
        for way, each in found["ways"].items()
        for name, value in each.items()
        if name.startswith("against") and not value <= BOUND
    ] + [
        f"{way}: no rank had text alone beside one with images"
        for way in ON_TWO
        if not found["ways"][way]["microbatches of text alone"]
    ]
    return found


def main(
    only: Annotated[list[str], typer.Option(help="A family; repeat for several.")] = list(picture_types.TYPES),  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each family.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the JSON.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print a table, and write dated JSON after each family. Exit status 1 if anything is above the bound."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console, rows = Console(width=120), []
    path = out / f"pictures_{date.today().isoformat()}.json"
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "deepspeed": deepspeed.__version__,
        },
        "bound": BOUND,
        "rows": rows,
    }
    for model_type in only:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows.append(check(model_type, seed, Path(folder)))
                except (Exception, pytest.fail.Exception) as error:
                    failure = f"{type(error).__name__}: {str(error)[-1500:]}"
                    rows.append({"type": model_type, "seed": seed, "ways": {}, "failures": [failure]})
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
            console.print(f"{model_type}, seed {seed}: {'; '.join(rows[-1]['failures']) or 'the same'}")
    names = ("one process", *ON_TWO)
    table = Table("family", "seed", *names, title="largest difference of losses and norms: single sequences / padded")
    for row in rows:
        each = [row["ways"].get(way) for way in names]
        shown = [
            f"{way['against single sequences']:.0e} / {way['against padded batches']:.0e}" if way else "failed"
            for way in each
        ]
        table.add_row(row["type"], str(row["seed"]), *shown)
    console.print(table)
    console.print(f"written to {path}")
    if any(row["failures"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
