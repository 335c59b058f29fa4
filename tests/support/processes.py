"""Processes for tests: a function on every rank of a gloo world on the loopback, and what each rank returned.

The processes are forked from a server that has everything loaded, so sixteen of them start in about a second.
"""

import base64
import json
import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.forked import ROOT, environment, server

TIMEOUT = 60


def _rank(rank, world, folder, function, arguments, timeout, joined):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    outcome = {"rank": rank}
    try:
        if joined:
            join(rank, world, Path(folder) / "store", timeout)
        outcome["value"] = function(rank, world, *arguments)
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        outcome["traceback"] = traceback.format_exc()
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(outcome))
    part.rename(Path(folder) / f"{rank}.json")
    # A process that ends closes its connections: not before the others have read what they wait for.
    until = time.monotonic() + 10
    while time.monotonic() < until and not (Path(folder) / "leave").exists():
        time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank, world, store, timeout=TIMEOUT):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def start(function, world, *arguments, loads=("torch",), output=None, store=None, **extra):
    """``function(rank, *arguments)`` in ``world`` forks, which end alone: as :class:`tests.support.forked.Ranks`.

    ``function``: one of a module's. ``loads``: what the server has imported before. ``output``: a file for what they
    print. ``store``: ``"rank"`` if variables say where rank 0 is to be met. ``extra``: environment variables.
    """
    call = base64.b64encode(pickle.dumps((function, arguments))).decode()
    with open(os.devnull) as nothing, open(output or os.devnull, "w") as printed:
        return server().start(
            [nothing.fileno(), printed.fileno(), 2 if output is None else printed.fileno()],
            call=call, ranks=world, environment=environment(**extra), directory=str(ROOT), loads=list(loads),
            ends="alone", store=store,
        )  # fmt: skip


def call(function, *arguments, loads=("torch",), timeout=240):
    """``function(0, *arguments)`` in one process; raises ``RuntimeError`` with what it printed if it fails."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        ranks = start(function, 1, *arguments, loads=loads, output=log.name)
        try:
            statuses = ranks.wait(timeout)
        except TimeoutError:
            ranks.end(signal.SIGABRT)
            raise
        if statuses != [0]:
            raise RuntimeError(f"exit status {statuses[0]}:\n{log.read()[-6000:]}")


def run(function, world, *arguments, timeout=TIMEOUT, deaths=(), joined=True, loads=("torch",)):
    """``function(rank, world, *arguments)`` on every rank: dicts with ``value``, or ``error`` and ``traceback``.

    A rank in ``deaths`` is expected to die and has ``None``. ``joined``: whether the ranks meet before the function.
    ``loads``: what the server has imported. Fails if a rank ends otherwise, or not at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(_rank, world, world, folder, function, arguments, timeout, joined, loads=loads)
        paths = [Path(folder) / f"{rank}.json" for rank in range(world)]
        until = time.monotonic() + 2 * timeout + TIMEOUT
        waiting = list(range(world))
        while waiting and time.monotonic() < until:
            statuses = list(ranks.poll())
            waiting = [r for r in range(world) if not paths[r].exists() and statuses[r] is None]
            if any(path.exists() and "error" in json.loads(path.read_text()) for path in paths):
                until = min(until, time.monotonic() + 10)  # the others may be waiting for the one that failed
            time.sleep(0.02)
        (Path(folder) / "leave").touch()
        try:
            ranks.wait(5 if not waiting else 0)
        except TimeoutError:
            ranks.end()
        outcomes = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        errors = [outcome["traceback"] for outcome in outcomes if outcome and "error" in outcome]
        assert not waiting, f"ranks {waiting} hang; errors of the others: {errors[:1]}"
    dead = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    assert dead == sorted(deaths), f"ranks {dead} died, {sorted(deaths)} should have"
    return outcomes


def values(outcomes):
    """What each rank returned; fails with the traceback of the first that raised."""
    for outcome in outcomes:
        assert "error" not in outcome, outcome["traceback"]
    return [outcome["value"] for outcome in outcomes]


def raised(function, *arguments, **keywords):
    """The type and text of what a call raises, or None."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
