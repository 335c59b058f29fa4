"""A rank that is killed or stopped ends the run on all others, each with one line; one that is slow is not lost."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import processes
from ullage.core.leaving import LOST
from ullage.ranks import lost
from ullage.ranks.lost import LostRanks, RankLost

LIMIT = 3.0


def live(rank, case):
    """A rank of a case; its status is that of a process of ours."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    lost.ABOVE_LONGEST = LIMIT
    dist.init_process_group("gloo", init_method="env://")
    ranks = LostRanks(lambda: "the newest whole checkpoint is run/checkpoint-4")
    try:
        with ranks.on(), ranks.on():
            CASES[case](rank, ranks)
            dist.all_reduce(torch.ones(1))
    except RankLost as error:
        os.write(1, f"{error}\n".encode())  # one line, whatever the others print
        os._exit(LOST)
    except ValueError:
        os._exit(3)
    os._exit(0)


def step(ranks, before=0.0, within=0.0, quiet=True):
    ranks.begin_step()
    time.sleep(before)
    dist.all_reduce(torch.ones(1))
    ranks.met()
    time.sleep(within)
    dist.all_reduce(torch.ones(1))
    ranks.end_step(quiet)


def killed(rank, ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def failed(rank, ranks):
    if rank == 1:
        raise ValueError("of its own")


def stopped_in_a_step(rank, ranks):
    step(ranks)
    ranks.begin_step()
    dist.all_reduce(torch.ones(1))
    ranks.met()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def stopped_before_a_step(rank, ranks):
    step(ranks)
    step(ranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def slow(rank, ranks):
    """Ranks that are long in the first step, within a step, and after a save, one after another."""
    step(ranks, before=0 if rank else 2 * LIMIT)
    step(ranks, within=0.5 * LIMIT if rank == 1 else 0, quiet=False)
    time.sleep(4 * LIMIT if rank == 2 else 0)  # it saves: longer than any step took, and the limit
    step(ranks)


CASES = {each.__name__: each for each in (killed, failed, stopped_in_a_step, stopped_before_a_step, slow)}


def lived(case, tmp_path, waits_for):
    """The statuses of three ranks, what they printed, and the seconds until those that are waited for have ended."""
    log = tmp_path / "log"
    ranks = processes.start(live, 3, case, output=log, store="launcher")
    began = time.monotonic()
    try:
        statuses = list(ranks.wait(120, ranks=waits_for))
    finally:
        ranks.end()
    return statuses, log.read_text(), time.monotonic() - began


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("case", ["killed", "failed", "stopped_in_a_step", "stopped_before_a_step"])
def test_each_of_the_others_ends_with_a_line_that_says_what_is_saved(case, tmp_path):
    statuses, text, seconds = lived(case, tmp_path, [0, 2])
    assert [statuses[0], statuses[2]] == [LOST, LOST], text
    lines = [line for line in text.splitlines() if "another rank has ended or does not answer" in line]
    assert sorted("noticed by rank 0" in line for line in lines) == [False, True], text
    assert all(line.endswith("the newest whole checkpoint is run/checkpoint-4") for line in lines), text
    assert seconds < 60  # half an hour is gloo's own
    assert (statuses[1] == 3) == (case == "failed")


@pytest.mark.slow
def test_a_slow_rank_is_not_lost(tmp_path):
    statuses, text, seconds = lived("slow", tmp_path, [0, 1, 2])
    assert statuses == [0, 0, 0], text
    assert seconds > 5 * LIMIT


def test_one_process_waits_for_nobody():
    with pytest.raises(RuntimeError, match="a collective failed"), LostRanks(str).on():
        raise RuntimeError("a collective failed")
