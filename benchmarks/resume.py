"""Bytes that ranks read to continue from a checkpoint of another layout, and that they read it exactly.

    python benchmarks/resume.py                                # every stage and size to every other: ten minutes
    python benchmarks/resume.py --stages 3 --worlds 4          # engines of one layout

Real DeepSpeed code writes checkpoints at ZeRO 1, 2 and 3 on 1, 2, 3, 4 and 8 ranks, with a known value in every element
(``tests/support/real_zero.py``). Real engines on gloo then load each of them with ``load_checkpoint``; every element of
masters, moments, weights, frozen parameters and buffers is compared bit for bit. A rank's share is the bytes of the
elements that it needs: its part of masters and moments, frozen parameters (at stage 3 its part) and buffers. The figure
is the largest ratio over the ranks of bytes read to share. Descriptions of files, which the first rank reads for all,
are not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.ranges_worker import load_everywhere, write_sources  # noqa: E402
from tests.support.real_zero import Recipe  # noqa: E402

WRITTEN_ON = (1, 2, 3, 4, 8)
#: Sizes that no number of ranks divides, a parameter of one element, a group shorter than eight ranks' alignment.
GROUPS = [
    {"embed.weight": (257, 96), "up.weight": (191, 96), "down.weight": (96, 191)},
    {"up.bias": (191,), "down.bias": (96,), "scale": (1,)},
]
RECIPE = Recipe(groups=GROUPS, frozen={"frozen.weight": (61, 33)}, buffers={"count": (77,)}, weight_decay=[0.1, 0.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4, 5])
    parser.add_argument("--folder", type=Path, help="where the JSON goes; by default benchmarks/results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "written"
        write_sources(
            folder,
            {f"ZeRO {s} on {w}": replace(RECIPE, stage=s, dp=w) for s in (1, 2, 3) for w in WRITTEN_ON},
        )
        for stage in args.stages:
            for world in args.worlds:
                began = time.perf_counter()
                target = Path(scratch) / f"results-{stage}-{world}"
                found = load_everywhere(folder, target, replace(RECIPE, stage=stage), world)
                mine = [row_of(name, stage, world, ranks) for name, ranks in found.items()]
                rows += mine
                worst = max(row["ratio"] for row in mine)
                seconds = time.perf_counter() - began
                print(f"ZeRO {stage} on {world}: {worst:.4f} at most, {seconds:.0f} s", flush=True)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": versions(),
        "exact": all(row["exact"] for row in rows),
        "largest ratio": max(row["ratio"] for row in rows),
        "rows": rows,
    }
    place = (args.folder or ROOT / "benchmarks" / "results") / f"resume_{datetime.now(UTC):%Y-%m-%d}.json"
    place.write_text(json.dumps(result, indent=1) + "\n")
    print(f"exact: {result['exact']}; at most {result['largest ratio']:.4f} of its share; {place}")


def row_of(name: str, stage: int, world: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: one checkpoint, one layout of the engine."""
    return {
        "written by": name,
        "loaded by": f"ZeRO {stage} on {world}",
        "share": [row["share"] for row in ranks],
        "read": [row["read"] for row in ranks],
        "ratio": round(max(row["read"] / row["share"] for row in ranks), 5),
        "sums compared": ranks[0]["compared"],
        "exact": not any(row["differences"] for row in ranks),
    }


def versions() -> dict[str, str]:
    """Of what wrote and loaded."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "deepspeed")} | {"python": platform.python_version()}


if __name__ == "__main__":
    main()
