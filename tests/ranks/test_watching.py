"""A lost rank ends the run on all others within the limit, and each says which it was; a slow rank is not lost."""

import json
import threading
import time

import pytest

from tests.support import processes, watch_cases
from tests.support.watch_cases import LIMIT
from ullage.ranks.watching import RankWatch

#: What a busy machine adds to the time in which a rank is noticed.
_BUSY = 20.0


def lived(case, tmp_path, waits_for, store="launcher"):
    """The statuses of three ranks, what they printed, and the seconds until those that are waited for have ended."""
    log = tmp_path / "log"
    ranks = processes.start(watch_cases.live, 3, case, output=log, store=store)
    began = time.monotonic()
    try:
        statuses = list(ranks.wait(60 + _BUSY, ranks=waits_for))
    finally:
        ranks.end()
    return statuses, log.read_text(), time.monotonic() - began


@pytest.mark.parametrize(
    ("case", "lost", "found"),
    [
        ("killed", 1, "its process has ended"),
        ("stopped", 1, "its process is stopped, no sign of life for"),
        pytest.param("hangs", 1, "it has been drawing the batches of a step for", marks=pytest.mark.slow),
    ],
)
def test_each_of_the_others_says_which_rank_is_lost_and_what_is_saved(case, lost, found, tmp_path):
    others = [rank for rank in range(3) if rank != lost]
    statuses, text, seconds = lived(case, tmp_path, others)
    assert [statuses[rank] for rank in others] == [75, 75], text
    told = [line for line in text.splitlines() if f"rank {lost} on " in line and found in line]
    assert sum("noticed by rank" in line and f"noticed by rank {lost}" not in line for line in told) == 2, text
    assert all("Saved is run/checkpoint-4" in line for line in told), text
    assert seconds < LIMIT + 10 + _BUSY
    if case == "killed":  # the main thread's own error
        assert [json.loads(line)["ranks"] for line in text.splitlines() if line.startswith("{")] == [[1], [1]]


@pytest.mark.slow
def test_the_loss_of_the_machine_that_holds_the_store_is_told_as_such(tmp_path):
    statuses, text, _ = lived("store_stopped", tmp_path, [1, 2], store="rank")
    assert statuses[1:] == [75, 75], text
    assert text.count("the store of the ranks cannot be reached (rank ") == 2, text


def test_a_rank_that_raises_is_not_taken_for_lost(tmp_path):
    statuses, text, _ = lived("failed", tmp_path, [0, 1, 2])
    assert statuses[1] == 3, text
    assert 0 not in statuses
    assert "is lost" not in text


@pytest.mark.slow
def test_a_slow_rank_is_not_lost_and_nothing_is_left_running(tmp_path):
    """In a first step, within a step, and after the last one; the rank that holds the store waits for the last."""
    statuses, text, seconds = lived("slow", tmp_path, [0, 1, 2], store="rank")
    assert statuses == [0, 0, 0], text
    assert seconds > 3 * LIMIT


def test_one_process_watches_nobody():
    before = threading.active_count()
    with RankWatch().on():
        assert threading.active_count() == before
