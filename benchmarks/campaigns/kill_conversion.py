"""Whether a conversion that is killed at any moment is ended exactly by the same command.

    python benchmarks/campaigns/kill_conversion.py --kills 20

A ZeRO checkpoint (real DeepSpeed's) with many small tensors and a few large ones is converted to each format by a
process that is killed after a random time, again and again, until one of its calls ends. Then every file must be, byte
for byte, what a conversion in one go writes. After each kill the target must not be there.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import real_zero  # noqa: E402
from ullage import checkpoint  # noqa: E402

FORMATS: dict[str, dict[str, Any]] = {"universal": {}, "safetensors": {"optimizer": True}, "dcp": {}}
FORMATS |= {"zero2": {"ranks": 5}, "zero3": {"ranks": 3}, "trainer": {}}
GROUPS: list[dict[str, tuple[int, ...]]] = [
    {f"large{i}": (700, 1000 + i) for i in range(4)},
    {f"small{i}": (50 + i % 40,) for i in range(1500)},
]
#: The folder that is written; shards lie in one of such a name.
TAG = "global_step3"
CLIENT = """
import json, sys
from ullage import checkpoint
checkpoint.convert  # loads all that a conversion needs
print("begun", flush=True)
checkpoint.convert(sys.argv[1], sys.argv[2], format=sys.argv[3], workers=2, **json.loads(sys.argv[4]))
"""


def main() -> int:
    """Run the campaign; 0 where every conversion was exact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, rows, work = random.Random(options.seed), [], Path(tempfile.mkdtemp(prefix="kill-conversion-"))
    try:
        truth = real_zero.write(work / "source", real_zero.Recipe(stage=1, dp=3, groups=GROUPS))
        seconds = {}
        for format, more in FORMATS.items():
            began = time.monotonic()
            checkpoint.convert(truth.folder, work / "whole" / format / TAG, format=format, **more)
            seconds[format] = time.monotonic() - began
        while sum(row["kills"] for row in rows) < options.kills:
            format = list(FORMATS)[len(rows) % len(FORMATS)]
            rows.append(
                one(truth.folder, work / str(len(rows)) / format / TAG, work / "whole" / format / TAG, seconds, chance)
            )
            print(json.dumps(rows[-1]), flush=True)
    finally:
        shutil.rmtree(work)
    return conclude("kill_conversion", rows, seed=options.seed)


def conclude(name: str, rows: list[dict[str, Any]], **settings: object) -> int:
    """Print what the rows come to and write them to ``benchmarks/results``; returns the exit status."""
    wrong = [row for row in rows if row["wrong"]]
    print(f"{sum(row['kills'] for row in rows)} kills in {len(rows)} conversions, {len(wrong)} not exact")
    result = ROOT / "benchmarks" / "results" / f"{name}_{datetime.now(UTC):%Y-%m-%d}.json"
    result.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")
    return 1 if wrong or not rows else 0


def one(source: Path, target: Path, whole: Path, seconds: dict[str, float], chance: random.Random) -> dict[str, Any]:
    """One conversion, killed up to four times; the row of the table."""
    kills, halves, wrong, format = 0, 0, [], target.parent.name
    command = [sys.executable, "-c", CLIENT, source, target, format, json.dumps(FORMATS[format])]
    for attempt in range(5):
        delay = chance.uniform(0.0, seconds[format]) if attempt < 4 else 240.0
        with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                status = process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        if status != -signal.SIGKILL:
            break
        kills += 1
        halves += target.with_name(target.name + ".partial").exists()
        if target.exists():  # killed between its end and its exit
            break
    wrong += [] if status in (0, -signal.SIGKILL) else [f"status {status}"]
    wrong += differences(whole, target)
    return {"format": format, "kills": kills, "with a partial": halves, "wrong": wrong}


def differences(whole: Path, made: Path) -> list[str]:
    """Names of files that are not byte for byte those of the conversion in one go."""
    held = [
        {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (whole, made)
    ]
    names = held[0].keys() | held[1].keys()
    return sorted(n for n in names if held[0].get(n) != held[1].get(n) and n != "ullage.json")


if __name__ == "__main__":
    sys.exit(main())
