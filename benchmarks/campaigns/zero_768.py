"""A checkpoint of 768 ranks, written by DeepSpeed's own code, converted and compared with what was cut, bit for bit.

    python benchmarks/campaigns/zero_768.py                       # every way of cutting the model
    python benchmarks/campaigns/zero_768.py --ranks 96 --kinds pipeline

One process is each rank in turn, in torch's fake process group (``tests/support/real_zero.py``): DeepSpeed's engine
flattens, cuts and saves; the state is then known values, and a sentinel fills the padding. The model is so small that
most ranks hold padding alone, so that the padding of a group spans hundreds of shards. Every parameter and every moment
of the universal folder, and every weight of the safetensors one, must be what it was before it was cut; the status is 1
if one is not. Times are of this machine and whatever else ran on it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the writer is that of the tests

import ullage  # noqa: E402
from tests.support import real_zero, zero_grids  # noqa: E402
from ullage import checkpoint  # noqa: E402

#: How the model is cut: kind of checkpoint, and the sizes of tensor and pipeline parallel.
GRIDS: dict[str, tuple[str, int, int]] = {
    "bf16_optimizer": ("bf16_optimizer", 1, 1),
    "stage 1": ("stage 1", 1, 1),
    "stage 2": ("stage 2", 1, 1),
    "stage 3": ("stage 3", 1, 1),
    "megatron": ("bf16_optimizer", 4, 2),
    "pipeline": ("pipeline", 2, 4),
}


def file_names(folder: Path) -> dict[str, int]:
    """How many files of each kind a checkpoint has, their numbers replaced by ``*``."""
    kinds: dict[str, int] = {}
    for path in folder.iterdir():
        kind = re.sub(r"\d+", "*", path.name)
        kinds[kind] = kinds.get(kind, 0) + 1
    return dict(sorted(kinds.items()))


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(name: str, ranks: int, work: Path) -> dict[str, Any]:
    """Write, convert twice, compare: figures of one grid."""
    kind, tp, pp = GRIDS[name]
    began = time.perf_counter()
    truth = real_zero.write(work / "run", zero_grids.recipe(kind, ranks, tp=tp, pp=pp))
    row: dict[str, Any] = {
        "grid": name,
        "ranks": ranks,
        "dp": truth.recipe.dp,
        "tp": tp,
        "pp": pp,
        "write_seconds": time.perf_counter() - began,
        "files": file_names(truth.tag_folder),
        "source_bytes": size_of(truth.tag_folder),
    }
    began = time.perf_counter()
    inventory = checkpoint.read(truth.folder)
    row["read_seconds"] = time.perf_counter() - began
    paddings = [group.padding_of() for group in inventory.groups]
    row |= {
        "parameters": len(inventory.parameters),
        "elements": sum(int(group.pieces.length.sum()) for group in inventory.groups),
        "padding": sum(int(padding.sum()) for padding in paddings),
        "most shards of padding alone": max(
            int((padding == group.shard_size).sum()) for padding, group in zip(paddings, inventory.groups)
        ),
        "problems": [str(problem) for problem in inventory.problems()],
    }
    for format in ("universal", "safetensors"):
        began = time.perf_counter()
        checkpoint.convert(inventory, work / format, format=format)
        row[f"{format}_seconds"] = time.perf_counter() - began
        row[f"{format}_bytes"] = size_of(work / format)
    began = time.perf_counter()
    row["verify"] = [str(problem) for problem in checkpoint.verify(truth.folder, work / "universal")]
    row["verify_seconds"] = time.perf_counter() - began
    row["compared"] = sum(len(zero_grids.unsharded(truth, key)) for key in truth.keys) + len(inventory.parameters)
    row["differences"] = zero_grids.differences(truth, work / "universal", work / "safetensors")
    return row


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the figures of the grids so far, dated."""
    record = {
        "date": date.today().isoformat(),
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {"ullage": ullage.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "grids": rows,
    }
    path = ROOT / "benchmarks" / "results" / f"zero_768_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=768, help="a multiple of 8")
    parser.add_argument("--kinds", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--no_results", action="store_true", help="print only")
    arguments = parser.parse_args()
    rows, failed = [], False
    for name in arguments.kinds:
        with tempfile.TemporaryDirectory() as work:
            row = measure(name, arguments.ranks, Path(work))
        rows.append(row)
        wrong = row["problems"] + row["verify"] + row["differences"]
        failed = failed or bool(wrong)
        print(
            f"{name:15} dp {row['dp']:3} tp {row['tp']} pp {row['pp']}: {sum(row['files'].values()):4} files, "
            f"{row['source_bytes'] / 1e6:6.1f} MB, written in {row['write_seconds']:6.1f} s; "
            f"read {row['read_seconds']:.1f} s, universal {row['universal_seconds']:.1f} s, "
            f"safetensors {row['safetensors_seconds']:.1f} s; {row['most shards of padding alone']} shards of padding "
            f"alone; {row['compared']} tensors compared, {len(wrong)} wrong",
            flush=True,
        )
        for line in wrong[:10]:
            print(f"  WRONG  {line}")
        if not arguments.no_results:  # after each grid: the next one takes minutes
            keep(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
