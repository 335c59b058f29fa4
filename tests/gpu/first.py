"""The first ten minutes on a GPU as one command: right or wrong, then a Llama of a billion parameters, then attention.

    make gpu-first                            # results in build/gpu_first, or in OUT=FOLDER
    ULLAGE_TEST_DEVICE=cpu make gpu-first     # a rehearsal with small sizes, without the packages of ``bare``

Written for a bare machine: torch, transformers, accelerate, pytest and numba; what else is missing is skipped with the
reason. Each part is a process with minutes of its own, and each of its results is a line of a file at once, so that
what was measured stays whatever comes after. Status 1 if a part failed; 5 where no GPU is seen and REQUIRE_GPU=1.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.run import LINES, NOTHING_RUN, ROOT, candidates, probe

BARE = Path(__file__).with_name("bare")


@dataclass(frozen=True)
class Part:
    """``minutes``: of its own work, by which it ends itself. ``command``: of Python; ``{out}`` is the folder."""

    name: str
    minutes: float
    command: str


_TESTS = "tests/gpu/run.py -q --no-header -p no:cacheprovider"
_BENCH = "-m benchmarks.gpu --out {out} --minutes {minutes}"
#: What would be wrong on every GPU first.
PARTS = (
    Part("batches, models, the Trainer", 1.5, f"{_TESTS} tests/gpu/test_batches.py tests/gpu/test_packed_models.py "
         "tests/gpu/test_engines.py"),
    Part("attention and recurrent kernels", 1.5, f"{_TESTS} tests/gpu/test_attention.py tests/gpu/test_recurrent.py"),
    Part("whole steps of a Llama", 2.5, f"{_BENCH} --cases language_model --repeats 1"),
    Part("attention's speed", 1.5, f"{_BENCH} --cases attention --repeats 3"),
)  # fmt: skip


def main() -> int:
    on_cpu = os.environ.get("ULLAGE_TEST_DEVICE") == "cpu"
    if not on_cpu and not any((probe(python) or (False,))[0] for python in candidates()):
        print("no GPU: nothing was run")
        return NOTHING_RUN if os.environ.get("REQUIRE_GPU", "0") not in ("", "0") else 0
    out = Path(os.environ.get("OUT", ROOT / "build" / "gpu_first")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    statuses = [_run(part, out, on_cpu) for part in PARTS]
    print(f"each result is a line of a file in {out}")
    return int(any(statuses))


def _run(part: Part, out: Path, on_cpu: bool) -> int:
    """Run a part, tell how it ended, and keep its lines. Returns its exit status."""
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = part.command.format(out=out, minutes=part.minutes)
    if on_cpu:
        path.insert(0, str(BARE))
        command += " --device cpu --small" if "benchmarks.gpu" in command else ""
    variables = {"PYTHONPATH": os.pathsep.join(path), "MINUTES": str(part.minutes), "HF_HUB_OFFLINE": "1"}
    print(f"-- {part.name}", flush=True)
    began = time.monotonic()
    try:
        status = subprocess.run(
            [sys.executable, *shlex.split(command)],
            cwd=ROOT,
            env={**os.environ, **variables},
            timeout=60 * part.minutes + 75,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        status = -1
    seconds = round(time.monotonic() - began, 1)
    if "run.py" in command and LINES.exists():
        with open(out / "tests.jsonl", "a", encoding="utf-8") as kept, open(LINES, encoding="utf-8") as lines:
            shutil.copyfileobj(lines, kept)
    with open(out / "parts.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"part": part.name, "status": status, "seconds": seconds}) + "\n")
    print(f"-- {part.name}: {'ended' if status == 0 else f'status {status}'} after {seconds} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
