"""Real processes for tests: a function on every rank of a gloo world on the loopback, and what each rank returned.

The processes are forked from a server that has everything loaded, so sixteen of them start in about a second.
"""

import json
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60


def _context(method):
    context = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["tests.support.preload"])
    return context


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


def run(function, world, *arguments, timeout=TIMEOUT, deaths=(), method="forkserver", joined=True):
    """``function(rank, world, *arguments)`` on every rank: dicts with ``value``, or ``error`` and ``traceback``.

    A rank in ``deaths`` is expected to die and has ``None``. ``method``: ``"fork"`` from a process that has loaded more
    than the server. ``joined``: whether the ranks meet before the function. Fails if a rank ends otherwise, or not at all.
    """
    context = _context(method)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, function, arguments, timeout, joined), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        paths = [Path(folder) / f"{rank}.json" for rank in range(world)]
        until = time.monotonic() + 2 * timeout + TIMEOUT
        waiting = list(range(world))
        while waiting and time.monotonic() < until:
            waiting = [r for r in range(world) if not paths[r].exists() and processes[r].is_alive()]
            if any(path.exists() and "error" in json.loads(path.read_text()) for path in paths):
                until = min(until, time.monotonic() + 10)  # the others may be waiting for the one that failed
            time.sleep(0.02)
        (Path(folder) / "leave").touch()
        for process in processes:
            process.join(5 if not waiting else 0)
            if process.is_alive():
                process.kill()
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
