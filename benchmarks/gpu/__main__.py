"""Attention, recurrent models, hybrids and a model of a billion parameters on this machine's GPU, against their rivals.

    make bench-gpu                               # "no GPU: nothing was measured" and status 0 where there is none
    make bench-gpu ARGS="--cases attention"      # one part; the parts of a day are kept in one file
    python3 -m benchmarks.gpu --device cpu --small          # a rehearsal: every case runs, and no figure is kept

The Python that is chosen is the environment's or the machine's, whichever has a torch that sees a GPU; nothing is
installed. What that Python lacks is left out with the reason. Each case runs in a process of its own, so that one that
fails takes no other with it. All of it ends within --minutes: a case gets what the others left, and keeps the tables
that it had. Each table is a line of benchmarks/results/gpu_DATE.jsonl at once; after each case the results go into
gpu_DATE.json beside it, and from there into the page docs/benchmarks.md. REQUIRE_GPU=1: status 5 where there is no
GPU. Status 1 if a way failed or was not exact. docs/gpu.md says in which order to run this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu import record
from tests.gpu.run import NOTHING_RUN, ROOT, candidates, probe

#: The most telling first.
CASES = ("attention", "hybrids", "language_model", "recurrent")
REHEARSAL = "rehearsal on CPU, no figure"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "make bench-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="which, with commas; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, with --small")
    parser.add_argument("--small", action="store_true", help="sizes of a rehearsal")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement; the median counts")
    parser.add_argument("--minutes", type=float, default=8.5, help="for all cases together")
    parser.add_argument("--out", type=Path, help="folder for the results instead of benchmarks/results and the page")
    options = parser.parse_args(arguments)
    cases = options.cases.split(",")
    if unknown := sorted(set(cases) - set(CASES)):
        parser.error(f"unknown cases: {', '.join(unknown)}; there are {', '.join(CASES)}")
    rehearsal = options.device == "cpu" or options.small
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu is a rehearsal: add --small")
    python = choose(options.device == "cpu")
    if python is None:
        print("no GPU: nothing was measured")
        return NOTHING_RUN if os.environ.get("REQUIRE_GPU", "0") not in ("", "0") else 0
    if rehearsal:
        print(REHEARSAL)
    gpu = first_gpu()
    found = {"date": date.today().isoformat(), "rehearsal": rehearsal, "machine": record.machine(gpu), "cases": {}}
    ends = time.monotonic() + 60 * options.minutes
    written: list[Path] = []
    for name in cases:
        found["cases"][name] = case = run(python, name, options, ends - time.monotonic(), rehearsal)
        print(record.shown(name, case, rehearsal), flush=True)
        found["versions"] = next((case["versions"] for case in found["cases"].values() if "versions" in case), {})
        found["machine_after"] = record.machine(gpu)
        if not rehearsal or options.out:
            written = record.write(found, options.out)
    for path in written:
        print(f"written to {path}")
    return 1 if record.failures(found) else 0


def choose(on_cpu: bool) -> str | None:
    """A Python whose torch sees a GPU; for a rehearsal any that has torch."""
    for python in candidates():
        found = probe(python)
        if found is not None and (found[0] or (on_cpu and has_torch(python))):
            return python
    return None


def first_gpu() -> str:
    """The one GPU that is measured, by the name that nvidia-smi has for it: the first that may be seen."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def has_torch(python: str) -> bool:
    asked = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([python, "-c", asked], check=False).returncode == 0


def run(python: str, name: str, options: argparse.Namespace, seconds: float, rehearsal: bool) -> dict[str, Any]:
    """What a case's process wrote within some seconds, or how that ended, with the tables that it had by then."""
    if seconds < 5:
        return {"left_out": f"the others took the {options.minutes:g} minutes; --cases {name} runs it alone"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Of several GPUs transformers' Trainer would take all, in threads. nvidia-smi counts by the place on the bus.
    one = {"CUDA_VISIBLE_DEVICES": first_gpu(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if options.device == "cuda" else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        kept = Path(folder) if rehearsal and not options.out else options.out or record.RESULTS
        lines = kept / f"gpu_{date.today().isoformat()}.jsonl"
        kept.mkdir(parents=True, exist_ok=True)
        before = len(_tables(lines))
        command = [python, "-m", "benchmarks.gpu.worker", name, str(file), "--device", options.device]
        command += ["--repeats", str(options.repeats), *(["--small"] if options.small else []), "--lines", str(lines)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **one, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} s", "tables": _tables(lines)[before:]}
        if file.exists():
            return json.loads(file.read_text())
        had = _tables(lines)[before:]
    said = (done.stderr or done.stdout).strip().splitlines()
    return {"failed": f"exit status {done.returncode}: {said[-1] if said else 'nothing was said'}", "tables": had}


def _tables(lines: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


if __name__ == "__main__":
    sys.exit(main())
