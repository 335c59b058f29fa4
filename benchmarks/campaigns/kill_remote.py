"""Whether a conversion to an object store that is killed at any moment is ended exactly by the same command.

    python benchmarks/campaigns/kill_remote.py --kills 40 --fail 0.05

A small ZeRO checkpoint (real DeepSpeed's) lies on an S3 server of its own process, which lets a share of the requests
fail. A client converts it to the same server and is killed after a random time, again and again, until one of its calls
ends; then every object must be, byte for byte, what a conversion from folder to folder writes, nothing else may lie
there, and ``verify`` must find no difference. Between kills the target must be refused by readers, or be complete.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.campaigns.kill_conversion import conclude  # noqa: E402
from tests.support import object_store, real_zero  # noqa: E402
from ullage import checkpoint  # noqa: E402
from ullage.core.errors import CheckpointError  # noqa: E402

FORMATS = ("universal", "safetensors", "dcp")
GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"a.weight": (300, 1100), "b.weight": (301, 1100), "c": (1,)},
    {f"n{i}": (50 + i,) for i in range(40)},
]
#: Converts, and says when it begins, for the time of the kill.
CLIENT = """
import json, sys
from ullage import checkpoint
inventory = checkpoint.read(sys.argv[1], storage_options=json.loads(sys.argv[4]))
print("begun", flush=True)
checkpoint.convert(inventory, sys.argv[2], format=sys.argv[3], storage_options=json.loads(sys.argv[4]))
"""


def main() -> int:
    """Run the campaign; 0 where every conversion was exact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--fail", type=float, default=0.05, help="share of requests that the server lets fail")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, rows, work = random.Random(options.seed), [], Path(tempfile.mkdtemp(prefix="kill-remote-"))
    try:
        with object_store.serve(seed=options.seed) as store:
            truth = real_zero.write(work / "source", real_zero.Recipe(stage=1, dp=3, groups=GROUPS))
            store.system().put(str(truth.folder), "bucket/source", recursive=True)
            for format in FORMATS:
                checkpoint.convert(truth.folder, work / format, format=format)
            store.counts(options.fail)
            while sum(row["kills"] for row in rows) < options.kills:
                format = FORMATS[len(rows) % len(FORMATS)]
                rows.append(one(store, f"bucket/out/{len(rows)}/{format}", work / format, format, chance))
                print(json.dumps(rows[-1]), flush=True)
    finally:
        shutil.rmtree(work)
    return conclude("kill_remote", rows, fail=options.fail, seed=options.seed)


def one(store: Any, key: str, expected: Path, format: str, chance: random.Random) -> dict[str, Any]:
    """One conversion, killed up to four times; the row of the table."""
    kills, states, wrong = 0, [], []
    for attempt in range(5):
        delay = chance.uniform(0.0, 3.0) if attempt < 4 else None
        status = client(store, key, format, delay)
        if status == 0 or (status == 1 and states[-1:] == ["complete"]):  # killed between its end and its exit
            break
        if status != -signal.SIGKILL:
            wrong.append(f"status {status}")
            break
        kills += 1
        states.append(state(store, key))
    wrong += differences(store, key, expected)
    return {"key": key, "kills": kills, "states": states, "wrong": wrong}


def client(store: Any, key: str, format: str, delay: float | None) -> int:
    """The status of a client that is killed ``delay`` seconds after its beginning."""
    command = [sys.executable, "-c", CLIENT, "s3://bucket/source", f"s3://{key}", format, json.dumps(store.options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            return process.wait(delay or 240)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return process.wait()


def state(store: Any, key: str) -> str:
    """What a reader makes of a target whose writer was killed."""
    try:
        inventory = checkpoint.read(f"s3://{key}", storage_options=store.options)
    except CheckpointError as error:
        return (
            "unfinished"
            if "not finished" in str(error)
            else "nothing"
            if "no such folder" in str(error)
            else str(error)
        )
    return "damaged" if inventory.problems() else "complete"


def differences(store: Any, key: str, expected: Path) -> list[str]:
    """Names of objects that are not what a folder holds, and what ``verify`` says."""
    system = store.system()
    system.invalidate_cache()
    there = {name[len(key) + 1 :] for name in system.find(key)}
    files = {p.relative_to(expected).as_posix(): p for p in expected.rglob("*") if p.is_file()}
    wrong = sorted(there ^ set(files))
    for name in sorted(there & set(files) - {"ullage.json"}):
        for _ in range(10):  # the server lets our own requests fail too
            try:
                data = system.cat_file(f"{key}/{name}")
                break
            except Exception:
                time.sleep(0.1)
        else:
            data = b""
        if data != files[name].read_bytes():
            wrong.append(name)
    problems = checkpoint.verify(expected, f"s3://{key}", storage_options=store.options)
    return wrong + [str(problem) for problem in problems]


if __name__ == "__main__":
    sys.exit(main())
