"""Starts processes for tests: torchrun on loopback, one thread each, a bound on the time."""

import contextlib
import json
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.forked import ROOT, TORCHRUN, Process, environment

__all__ = ["ROOT", "environment", "full_disk", "real_torchrun", "records", "torchrun"]


def torchrun(processes, script, *arguments, timeout=240, **extra):
    """Runs a script of the tests on several processes; returns what it printed. Fails with its output.

    The ranks are forked from a server that has its imports. ``extra``: environment variables.
    """
    command = [sys.executable, *TORCHRUN, processes, script, *arguments]
    launched = Process(list(map(str, command)), env=environment(PYTHONFAULTHANDLER="1", **extra), cwd=ROOT)
    try:
        launched.wait(timeout)
    except subprocess.TimeoutExpired:
        launched.ranks.end(signal.SIGABRT)  # at which faulthandler prints the stack of every thread
        _not_done(timeout, "".join(launched.printed()))
    output = "".join(launched.printed())
    assert launched.returncode == 0, output[-6000:]
    return output


def records(processes, script, *cases, timeout=400):
    """The line of JSON that a script prints for each of its cases, all of them in one launch."""
    output = torchrun(processes, script, *cases, timeout=timeout)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [record["case"] for record in found] == list(cases), output[-3000:]
    return found


def real_torchrun(processes, script, *arguments, timeout=240, **extra):
    """The same with the real launcher and with interpreters of their own."""
    launcher = subprocess.Popen(
        list(map(str, [sys.executable, *TORCHRUN, processes, script, *arguments])),
        env=environment(PYTHONFAULTHANDLER="1", **extra),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output = "".join(launcher.communicate(timeout=timeout))
    except subprocess.TimeoutExpired:
        _not_done(timeout, _aborted(launcher))
    assert launcher.returncode == 0, output[-6000:]
    return output


def _not_done(timeout, output):
    pytest.fail(f"not done in {timeout} s; the end of what it printed, and where it was:\n{output[-20000:]}")


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
