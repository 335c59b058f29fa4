"""Saving and checking by several ranks, on machines that share a disk and on machines that do not."""

import json
import os
from pathlib import Path

import pytest

from tests.support import processes
from ullage.training.saving import damage, resuming, staging

pytestmark = pytest.mark.distributed

WORLD = 3


def attempt(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def part_of(rank):
    def write(place):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rng_state_{rank}.pth").write_text(f"drawn by {rank}" * 9)

    return write


def look(folder, **options):
    finding = damage.examine(Path(folder), **options)
    return [f"{d.name}: {d.kind}" for d in finding.damage], list(finding.changed), list(finding.notes)


def two_machines(rank, world, root):
    """Ranks 0 and 1 are on one machine, rank 2 on another: one name, and a disk for each."""
    machine = Path(root) / ("one" if rank < 2 else "two")
    machine.mkdir(exist_ok=True)
    os.chdir(machine)
    place = Path("/proc/self/cwd/saved")  # the same path on every rank, and another folder
    os.environ["LOCAL_RANK"] = str(rank % 2)  # as a launcher numbers them
    staging.write_whole(place, part_of(rank))
    said = [look(place)]
    processes.dist.barrier()
    if rank == 2:
        path = place / "rng_state_2.pth"
        path.write_text(path.read_text().upper())
    processes.dist.barrier()
    said += [look(place), look(place, allow_changed=True)]
    staging.write_whole(place, part_of(rank))
    return [*said, look(place)]


def one_disk(rank, world, root):
    """What is said when folders differ, when one rank cannot write, and when nobody wrote a manifest."""
    place = Path(root) / "saved"
    os.environ["LOCAL_RANK"] = str(rank)
    said = [attempt(lambda: staging.write_whole(place.with_name(f"rank{rank % 2}"), part_of(rank)))]
    staging.write_whole(place, part_of(rank))

    def fail(folder):
        part_of(rank)(folder)
        if rank == 1:
            raise OSError("no space left on device")

    said.append(attempt(lambda: staging.write_whole(place, fail)))
    said.append(look(place))
    processes.dist.barrier()
    if rank == 0:
        (place / "manifest.json").unlink()
    processes.dist.barrier()
    said.append(look(place))
    return said


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("disks")


def test_each_disk_has_a_manifest_of_what_lies_on_it(root):
    said = processes.values(processes.run(two_machines, WORLD, str(root)))
    everything = {}
    for machine, name in (("one", "manifest.json"), ("two", "manifest_2.json")):
        listed = json.loads((root / machine / "saved" / name).read_text())["files"]
        everything[machine] = sorted(listed)
        assert sorted(path.name for path in (root / machine / "saved").iterdir()) == sorted([name, *listed])
    assert everything == {"one": ["rng_state_0.pth", "rng_state_1.pth"], "two": ["rng_state_2.pth"]}
    passed = [f"{Path('/proc/self/cwd/saved')}: taken as changed on purpose: rng_state_2.pth"]
    for rank in said:  # what one machine found, the ranks of the other know
        assert rank[0] == [[], [], []]
        assert rank[1] == [["rng_state_2.pth: changed"], [], []]
        assert rank[2] == [[], ["rng_state_2.pth"], passed]
        assert rank[3] == [[], [], []]
    assert sorted(path.name for path in (root / "two").iterdir()) == ["saved", "saved.damaged"]


def test_all_ranks_raise_what_one_of_them_found(root):
    said = processes.values(processes.run(one_disk, WORLD, str(root)))
    for rank, (folders, disk, after, without) in enumerate(said):
        assert folders == (
            "DistributedError: the ranks name different folders for one checkpoint: expected the same path on every "
            f"rank, found rank 0, 2: {root}/rank0; rank 1: {root}/rank1. Make the name on rank 0 and broadcast it, "
            "or take a fixed one"
        )
        own = f"TrainingError: this cannot be written ({root}/saved): found OSError: no space left on device"
        assert disk.startswith(own if rank == 1 else "DistributedError: another rank failed while writing a checkpoint")
        assert own in disk
        assert after == [[], [], []]  # the one before is whole
        assert without == [[], [], [f"{root}/saved has no manifest.json, so its files are loaded unchecked"]]
    assert not list(root.glob("rank*"))


def notes_on(rank, world, *checkpoints):
    return [resuming.state_notes(Path(checkpoint)) for checkpoint in checkpoints]


def test_random_states_that_are_not_there_are_told_by_every_rank(tmp_path):
    """Of one rank of two, and of a run on one process."""
    wanted = []
    for name, file, held in (("older", "rng_state_0.pth", "none for rank 1"), ("fewer", "rng_state.pth", "not of 2")):
        checkpoint = tmp_path / name
        checkpoint.mkdir()
        for each in (file, "optimizer.pt", "scheduler.pt"):
            (checkpoint / each).touch()
        ending = "what is drawn there, such as dropout, goes on from the seed"
        wanted.append([f"{checkpoint} holds random states of 1 process, {held}: {ending}"])
    places = map(str, (tmp_path / "older", tmp_path / "fewer"))
    assert processes.values(processes.run(notes_on, 2, *places)) == [wanted, wanted]
