"""Ranks that watch each other, and what befalls one of them: functions for forks, by case."""

import json
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from ullage.core.leaving import LOST
from ullage.ranks.watching import RankLost, RankWatch

LIMIT = 2.0


def live(rank, case):
    """A rank of a case. Prints what it raised and what went before; its status is that of a process of ours."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method="env://")
    watch = RankWatch(limit=lambda: LIMIT, saved=lambda: "saved is run/checkpoint-4")
    began = time.monotonic()
    try:
        with watch.on():
            CASES[case](rank, watch)
            dist.all_reduce(torch.ones(1))
    except RankLost as error:
        said = {"said": str(error), "ranks": [which for which, _ in error.failures], "after": time.monotonic() - began}
        os.write(1, f"{json.dumps(said)}\n".encode())  # one line, whatever the others print
        os._exit(LOST)
    except ValueError:
        os._exit(3)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ullage")]
    os._exit(0 if not left else 4)


def killed(rank, watch):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def stopped(rank, watch):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def store_stopped(rank, watch):
    if rank == 0:  # which holds the store
        os.kill(os.getpid(), signal.SIGSTOP)


def failed(rank, watch):
    if rank == 1:
        raise ValueError("of its own")


def hangs(rank, watch):
    for step in range(3):
        watch.begin_step()
        if rank == 1 and step == 2:
            time.sleep(60)
        watch.end_drawing()
        dist.all_reduce(torch.ones(1))
        watch.end_step()


def slow(rank, watch):
    """Ranks that are long in the first step, within a step, between two steps, and at the end, one after another."""
    for step in range(2):
        watch.begin_step()
        if step == 0 and rank == 0:
            time.sleep(1.5 * LIMIT)
        watch.end_drawing()
        dist.all_reduce(torch.ones(1))
        if rank == 1 and step == 1:
            time.sleep(1.5 * LIMIT)
        watch.end_step()
    if rank == 2:
        time.sleep(1.5 * LIMIT)


CASES = {each.__name__: each for each in (killed, stopped, store_stopped, failed, hangs, slow)}
