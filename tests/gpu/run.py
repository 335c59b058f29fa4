"""Runs the tests in this folder with a Python whose torch sees a GPU: the environment's, else the machine's.

    make test-gpu                                # "no GPU: nothing was run" and status 0 where there is none
    REQUIRE_GPU=1 python3 tests/gpu/run.py       # then status 5
    ULLAGE_TEST_DEVICE=cpu make test-gpu         # the tests' own arithmetic, without a GPU

Needs nothing but the standard library. The Python that is chosen needs torch and pytest, and may lack everything else:
a test whose library is missing is skipped and says so. Nothing is installed. Each result is a line of
``build/test_gpu.jsonl`` at once. Tests that have not begun after MINUTES=8 are skipped, and all ends within a minute
more; ``make test-gpu PYTEST_ARGS="tests/gpu/test_kernels.py"`` runs a file.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTHING_RUN, TOO_LONG = 5, 6
LINES = ROOT / "build" / "test_gpu.jsonl"
#: What would be wrong on every GPU first, what needs other packages and several processes last.
FILES = [
    f"tests/gpu/test_{name}.py" for name in ("batches", "attention", "kernels", "packed_models", "recurrent", "engines")
]
#: Prints what this Python has, for the choice below.
PROBE = """
import importlib.util as u
print("gpu" if u.find_spec("torch") and __import__("torch").cuda.is_available() else "")
print("pytest" if u.find_spec("pytest") else "")
"""


def main() -> int:
    on_cpu = os.environ.get("ULLAGE_TEST_DEVICE") == "cpu"
    seen = [(python, found) for python in candidates() if (found := probe(python)) is not None]
    chosen = next(((python, found) for python, found in seen if on_cpu or found[0]), None)
    if on_cpu:
        chosen = next(((python, found) for python, found in seen if found[1]), chosen)
    if chosen is None:
        print("no GPU: nothing was run")
        return NOTHING_RUN if os.environ.get("REQUIRE_GPU", "0") not in ("", "0") else 0
    python, (_, has_pytest) = chosen
    if not has_pytest:
        print(f"{python} sees a GPU and has no pytest: nothing was run")
        return NOTHING_RUN
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    asked = sys.argv[1:]
    files = [] if any(each.startswith("tests/gpu/") for each in asked) else FILES
    command = [python, "-m", "pytest", *files, "-m", "gpu", "-rs", "--confcutdir", "tests/gpu", *asked]
    minutes = float(os.environ.get("MINUTES", "8"))
    environment = {"PYTHONPATH": path, "TEST_GPU_SECONDS": str(60 * minutes), "TEST_GPU_LINES": str(LINES)}
    LINES.parent.mkdir(exist_ok=True)
    LINES.unlink(missing_ok=True)
    began = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    try:
        return began.wait(60 * minutes + 50)
    except subprocess.TimeoutExpired:
        began.send_signal(signal.SIGINT)  # pytest ends with its summary
        with contextlib.suppress(subprocess.TimeoutExpired):
            began.wait(8)
        began.kill()
        print(f"not done after {minutes:g} minutes; what was done: {LINES.relative_to(ROOT)}")
        return TOO_LONG


def candidates() -> list[str]:
    """Pythons in the order in which they are tried."""
    environment = ROOT / ".venv" / "bin" / "python"
    return [*([str(environment)] if environment.exists() else []), sys.executable]


def probe(python: str) -> tuple[bool, bool] | None:
    """Whether this Python's torch sees a GPU, and whether it has pytest; None where it does not run."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError:
        return None
    said = done.stdout.splitlines()
    return (bool(said[0]), bool(said[1])) if done.returncode == 0 and len(said) == 2 else None


if __name__ == "__main__":
    sys.exit(main())
