"""Starts real processes for tests: torchrun on loopback, one thread each, a bound on the time."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def torchrun(processes, script, *arguments, timeout=240, **extra):
    """Runs a script of the tests on several processes; returns what it printed. Fails with its output.

    ``extra``: environment variables.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    launcher = subprocess.Popen(
        [*command, str(script), *map(str, arguments)],
        env=environment(PYTHONFAULTHANDLER="1", **extra),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output = "".join(launcher.communicate(timeout=timeout))
    except subprocess.TimeoutExpired:
        output = _aborted(launcher)
        pytest.fail(f"not done in {timeout} s; the end of what it printed, and where it was:\n{output[-20000:]}")
    assert launcher.returncode == 0, output[-6000:]
    return output


def _aborted(launcher):
    """All that a launcher and its ranks printed, and then the stack of every thread: faulthandler's, at SIGABRT."""
    started = psutil.Process(launcher.pid).children(recursive=True)  # the ranks, and the workers of their DataLoaders
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    psutil.wait_procs(started, timeout=10)
    for process in (*started, launcher):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return "".join(launcher.communicate())


@contextlib.contextmanager
def full_disk(num_bytes=1000, full=True):
    """A limit on the size of files that this process may write, as if the disk had no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
