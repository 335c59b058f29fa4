"""Whether a commit does what the one before it did: plans, checkpoints, training, exchanges, commands, signatures.

    python benchmarks/campaigns/unchanged.py                              # digests of this commit, dated, in results
    python benchmarks/campaigns/unchanged.py --against FILE               # and every difference from an earlier record
    python benchmarks/campaigns/unchanged.py --only plans,exchanges       # some of the parts
    python benchmarks/campaigns/unchanged.py --twice                      # every part twice: which cases are exact?

*plans*: 250 drawn by a seed over every argument, and bins. *checkpoints*: every kind that the tests build, converted to
each format and back, the bytes of each file. *training*: eight steps of our Trainer and TRL's trainers on one and two
processes, losses, gradient norms and weights by their bits. *exchanges*: what each of 2 and 3 ranks gets. *commands*:
what the examples of the docs and forty wrong commands print, and their status. *signatures*: every public name.

A field that two runs of one commit do not agree on is listed under ``unstable``: its numbers are compared with a
tolerance, its digests not at all. Exit status 1 where something differs from the record that is given.
"""

from __future__ import annotations

import os

# Before numpy or torch is imported, here or in a fork: sums in one order, and output of one width.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
os.environ.update(COLUMNS="120", NO_COLOR="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", HF_DATASETS_OFFLINE="1")

import argparse
import importlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.unchanged import records  # noqa: E402
from benchmarks.unchanged.records import Cases, Unstable  # noqa: E402

PARTS = ("plans", "signatures", "exchanges", "checkpoints", "commands", "training")
LIBRARIES = ("torch", "numpy", "transformers", "accelerate", "trl", "peft", "deepspeed", "megatron-core", "datasets")


def measure(
    parts: list[str], seed: int, jobs: int, keep: Path | None, only: str = ""
) -> tuple[dict[str, Cases], dict[str, float]]:
    """The cases of each part, and the seconds of processor time that each took."""
    found, seconds = {}, {}
    folder = keep / "unchanged-kept0000" if keep else Path(tempfile.mkdtemp(prefix="unchanged-"))
    try:
        for part in parts:
            began = _spent()
            module = importlib.import_module(f"benchmarks.unchanged.{part}")
            found[part] = module.run(folder / part, seed, jobs, only)
            seconds[part] = round(_spent() - began, 1)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return found, seconds


def _spent() -> float:
    times = os.times()
    return sum(times[:4])


def against(record: dict[str, Any], path: Path) -> int:
    """Prints what differs from the record at ``path``; the exit status."""
    before = records.read(path)
    parts = [part for part in record["parts"] if part in before["parts"]]
    unstable: Unstable = {}
    for part in parts:
        for held in (before, record):
            for case, fields in held.get("unstable", {}).get(part, {}).items():
                unstable.setdefault(part, {}).setdefault(case, []).extend(fields)
    now = {part: record["parts"][part] for part in parts}
    if record.get("cases"):
        before["parts"] = {part: {c: f for c, f in before["parts"][part].items() if c in now[part]} for part in parts}
    if before.get("complete") is False:  # a run that was stopped: what it has not measured differs from nothing
        now = {part: {c: f for c, f in now[part].items() if c in before["parts"][part]} for part in parts}
    found = list(records.differences(before["parts"], now, unstable))
    if before["seed"] != record["seed"]:
        print(f"the seeds differ: {before['seed']} and {record['seed']}")
    for name, was in before["versions"].items():
        if was != record["versions"][name]:
            print(f"{name} was {was} and is {record['versions'][name]}")
    for each in found:
        print(f"{each['part']} | {each['case']} | {each['field']}\n  before: {each['before']}\n  now:    {each['now']}")
    counts = Counter(each["part"] for each in found)
    print(f"against {path.name} (commit {before['commit']}):")
    for part in parts:
        loose = sum(map(len, unstable.get(part, {}).values()))
        near = f", {loose} fields not compared bit for bit" if loose else ""
        print(f"  {part}: {counts[part]} differences in {len(now[part])} cases{near}")
    return 1 if found else 0


def commit() -> str:
    """The commit of the working tree, with ``+`` where files of the package differ from it."""
    told = [
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src"])
    ]
    return told[0] + "+" * bool(told[1])


def main() -> int:
    """Run the parts, write the record, compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--cases", default="", help="only cases with this text in their name, where a part has few")
    parser.add_argument("--against", type=Path, help="a record of an earlier commit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--twice", action="store_true", help="run every part twice, and list what is not the same")
    parser.add_argument("--out", type=Path, help="the record; default: benchmarks/results/unchanged_DATE.json")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is left as it is")
    options = parser.parse_args()
    parts = [part for part in PARTS if part in options.only.split(",")]
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    began = time.monotonic()
    found, seconds = measure(parts, options.seed, options.jobs, options.keep, options.cases)
    unstable: Unstable = {}
    if options.twice:
        unstable = records.disagreements(found, measure(parts, options.seed, options.jobs, None, options.cases)[0])
    now = datetime.now(UTC)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "seed": options.seed,
        "cases": options.cases,
        "seconds of processor time": seconds,
        "run twice": options.twice,
        "unstable": unstable,
        "parts": found,
    }
    out = options.out or ROOT / "benchmarks" / "results" / f"unchanged_{now:%Y-%m-%d}.json"
    status = against(record, options.against) if options.against else 0
    records.write(out, record)
    for part, cases in found.items():
        errors = sum("error" in fields for fields in cases.values())
        print(f"{part}: {len(cases)} cases, {errors} of them errors, {seconds[part]} s of processor time")
    for part, cases in unstable.items():
        for case, fields in cases.items():
            print(f"unstable: {part} | {case} | {', '.join(fields)}")
    print(f"{time.monotonic() - began:.0f} s; written to {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
