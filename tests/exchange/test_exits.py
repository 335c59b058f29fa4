"""A run that went well ends with 0, whatever gloo's threads are doing when the interpreter ends; an error with its own.

The slow ones end real processes through the end of their interpreter. ``benchmarks/campaigns/exits.py`` does so many
times over, and counts how many die without ``ranks/ending.py``, which depends on the machine.
"""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.exits import RUNS, Server, texts
from tests.support.processes import run, values
from ullage.exchange import PackedIterator, iterator
from ullage.ranks import Topology, ending

pytestmark = pytest.mark.distributed


def _iterate(topology):
    samples = [{"input_ids": [3] * (i % 5 + 1)} for i in range(12)]
    with PackedIterator(samples, topology, global_batch_size=6, capacity=32, shared=True) as steps:
        return len(list(steps))


def end_after_use(rank, world):
    topology = Topology.from_groups(dp=dist.group.WORLD)
    steps, idle = _iterate(topology), len(iterator._idle)
    return [steps, idle, ending.end_groups(), len(iterator._idle), dist.is_initialized(), ending.end_groups()]


def end_with_one_under_way(rank, world, told):
    """Rank 1 begins a collective that rank 0 never joins, and ends meanwhile."""
    _iterate(Topology.from_groups(dp=dist.group.WORLD))
    late = dist.new_group([0, 1])
    dist.barrier()
    before = time.monotonic()
    if rank == 1:
        work = dist.all_reduce(torch.ones(1), group=late, async_op=True)
        del late  # to destroy a group that a variable holds waits for nothing
        ended = ending.end_groups(1.0)
        Path(told).write_text(f"{ended} {1.0 <= time.monotonic() - before < 20.0}")
        os._exit(0 if work is not None else 1)
    while not Path(told).exists():
        time.sleep(0.05)
    return True


def end_in_a_fork(rank, world):
    _iterate(Topology.from_groups(dp=dist.group.WORLD))
    child = os.fork()
    if child == 0:
        os._exit(0 if ending.end_groups() and dist.is_initialized() else 1)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), dist.is_initialized()]


@pytest.mark.slow
def test_the_end_drops_idle_groups_and_destroys_the_rest():
    assert values(run(end_after_use, 2)) == [[2, 1, True, 0, False, True]] * 2


@pytest.mark.slow
def test_the_end_waits_for_no_rank_that_has_not_joined(tmp_path):
    run(end_with_one_under_way, 2, str(tmp_path / "told"), deaths=(1,))
    assert (tmp_path / "told").read_text() == "False True"


@pytest.mark.slow
def test_a_forked_process_does_not_end_the_groups_of_its_parent():
    assert values(run(end_in_a_fork, 2)) == [[0, True]] * 2


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("slowed"), slowed=True) as server:
        yield server


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", ["evaluate", "evaluate, and go on"])
def test_a_script_with_our_trainer_ends_well_without_doing_anything(slowed, tmp_path, case):
    for seed in range(2):
        left = slowed.script("exit_script.py", case, tmp_path, seed=seed)
        assert left.statuses == [0, 0], left.logs


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", ["iterator", "iterator, destroyed by the script", "iterator that is left"])
def test_a_script_with_a_packed_iterator_ends_well_on_four_processes(slowed, tmp_path, case):
    left = slowed.script("exit_script.py", case, tmp_path, world=4)
    assert left.statuses == [0, 0, 0, 0], left.logs


@pytest.mark.slow
@pytest.mark.parametrize("case", ["an error on rank 1", "an error while the others wait"])
def test_after_an_error_the_status_is_the_error_s(slowed, tmp_path, case):
    left = slowed.script("exit_script.py", case, tmp_path)
    assert left.statuses == [0, 1], left.logs
    assert "ValueError: of the script itself" in left.logs[1]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", ["DDP, packed, finished", "ZeRO 2, packed, stopped", "ZeRO 3, padded, finished"])
def test_a_run_of_the_command_ends_well(slowed, tmp_path, name):
    left = slowed.run(2, seed=1, train=[*RUNS[name], "--data", texts(tmp_path), "--output_dir", tmp_path / "out"])
    assert left.statuses == [0, 0], left.logs
    said = "stopped at step 1 of 2" if "stopped" in name else "model = AutoModelForCausalLM.from_pretrained("
    assert said in left.logs[0]
