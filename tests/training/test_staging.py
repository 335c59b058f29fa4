"""What is saved is the old or the new one, whole, whatever happens and whoever saves beside it."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.support import processes
from ullage.checkpoint.core import manifest
from ullage.checkpoint.core.manifest import problems_of, read_manifests
from ullage.core.errors import CheckpointError, TrainingError
from ullage.training.saving import damage, resuming, staging
from ullage.training.saving.staging import old_of, recover, staging_of, write_into, write_whole


def writer(text: str):
    """Writes two files that say ``text``, one of them in a folder."""

    def write(place: Path) -> None:
        (place / "inner").mkdir(parents=True)
        (place / "weights.bin").write_text(text)
        (place / "inner" / "state.json").write_text(text)

    return write


def content(folder: Path) -> str:
    """What the files of a whole folder say."""
    listed = read_manifests(folder)
    assert listed is not None
    assert listed.damage == ()
    assert problems_of(folder) == []
    [text] = {(folder / name).read_text() for name in ("weights.bin", "inner/state.json")}
    return text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced_whole(tmp_path):
    for text in ("old", "new"):
        write_whole(tmp_path / "saved", writer(text))
        assert content(tmp_path / "saved") == text
    assert names(tmp_path) == ["saved"]
    assert names(tmp_path / "saved") == ["inner", "manifest.json", "weights.bin"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_what_does_not_come_to_the_disk_takes_no_place(tmp_path, monkeypatch, code):
    """Where a disk takes what is written before it knows that it has room, the flush is told so."""
    write_whole(tmp_path / "saved", writer("old"))

    def fail(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    problem = "the disk is full" if code == errno.ENOSPC else "this cannot be written"
    with pytest.raises(TrainingError, match=f"{problem} .*found {os.strerror(code)}"):
        write_whole(tmp_path / "saved", writer("new"))
    monkeypatch.undo()
    assert content(tmp_path / "saved") == "old"


def test_a_file_system_that_does_not_flush_folders_is_used(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    write_whole(tmp_path / "saved", writer("new"))
    assert content(tmp_path / "saved") == "new"


def test_saves_to_siblings_never_touch_each_other(tmp_path):
    write_whole(tmp_path / "a", writer("of the run before"))

    def write(place: Path) -> None:
        writer("a")(place)
        write_whole(tmp_path / "b", writer("b"))  # a whole save in the middle of another's

    write_whole(tmp_path / "a", write)
    assert (content(tmp_path / "a"), content(tmp_path / "b")) == ("a", "b")


def test_two_saves_to_one_folder_are_told_apart(tmp_path):
    def write(place: Path) -> None:
        writer("first")(place)
        write_whole(tmp_path / "saved", writer("second"))

    with pytest.raises(CheckpointError, match=r"has been removed before it was in its place .* Another process saves"):
        write_whole(tmp_path / "saved", write)
    assert content(tmp_path / "saved") == "second"


def test_what_is_not_whole_is_not_put_in_its_place(tmp_path):
    def check(place: Path) -> None:
        if not (place / "metadata").is_file():
            raise CheckpointError("no metadata", where=str(place))

    write_whole(tmp_path / "saved", writer("old"))
    with pytest.raises(CheckpointError, match="no metadata"):
        write_whole(tmp_path / "saved", writer("new"), check=check)
    with pytest.raises(CheckpointError, match="has been removed"):
        write_whole(tmp_path / "saved", lambda place: None)
    assert content(tmp_path / "saved") == "old"


def test_a_damaged_folder_is_set_aside_not_replaced(tmp_path):
    for text in ("one", "two", "three"):
        write_whole(tmp_path / "saved", writer(text))
        with open(tmp_path / "saved" / "weights.bin", "r+b") as stream:
            stream.write(b"x")  # the same size
    assert names(tmp_path) == ["saved", "saved.damaged", "saved.damaged2"]
    assert (tmp_path / "saved.damaged" / "weights.bin").read_text() == "xne"
    assert (tmp_path / "saved.damaged2" / "weights.bin").read_text() == "xwo"


def test_files_that_are_put_into_a_folder_leave_the_others_alone(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "left-over").touch()
    (tmp_path / "notes.txt").write_text("mine")
    write_into(tmp_path, lambda place: writer("new")(place / "deep") or writer("new")(place))
    assert names(tmp_path) == ["deep", "inner", "notes.txt", "weights.bin"]
    assert names(tmp_path / "inner") == ["state.json"]


def test_where_nothing_can_be_written_one_line_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"this cannot be written \(.*/file/saved\): found Not a directory. Make"):
        write_whole(tmp_path / "file" / "saved", writer("new"))
    with pytest.raises(CheckpointError, match=r"a file lies where the folder should \(.*/file\)"):
        write_whole(tmp_path / "file", writer("new"))


def events_of(target: Path, kill_at: int) -> int:
    """Saves in a process that is killed before it does its ``kill_at``-th thing to the disk; how many it did."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        done = 0

        def watch(event: str, arguments: tuple) -> None:
            nonlocal done
            if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree") or (
                event == "open" and arguments[1] not in ("r", "rb", None)
            ):
                if done == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                os.write(write, b".")

        sys.addaudithook(watch)
        write_whole(target, writer("new"))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        count = len(stream.read())
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return count if status else -1


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(tmp_path):
    target = tmp_path / "saved"
    found = []
    for kill_at in range(100):
        write_whole(target, writer("old"))
        did = events_of(target, kill_at)
        aside = not target.exists()
        if aside:
            assert content(old_of(target)) == "old"
        recover(target)
        found.append((content(target), aside))
        write_whole(target, writer("next"))
        assert content(target) == "next"
        assert names(tmp_path) == ["saved"]
        if did < 0:
            break
    assert found[0] == ("old", False)
    assert found[-1] == ("new", False)
    assert len(found) > 8
    assert any(aside for _, aside in found)  # there is a moment without the name, in which the old one lies aside
    assert sorted(found, key=lambda state: state[0] == "new") == found  # first the old one, then the new one


def test_the_next_save_keeps_the_only_copy_of_the_one_before(tmp_path):
    write_whole(tmp_path / "saved", writer("old"))
    (tmp_path / "saved").rename(old_of(tmp_path / "saved"))  # killed between two renames
    staging_of(tmp_path / "saved").mkdir()

    def fail(place: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(TrainingError, match="no space left"):
        write_whole(tmp_path / "saved", fail)
    assert content(tmp_path / "saved") == "old"


# By several ranks, on machines that share a disk; and what is said where they do not.
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


def unshared(rank, world, root):
    """Each rank is on a machine with a disk of its own, which it sees under the same name: what a start and a save say."""
    machine = Path(root) / f"machine{rank}"
    machine.mkdir()
    os.chdir(machine)
    os.environ["LOCAL_RANK"] = "0"
    place = Path("/proc/self/cwd/run/checkpoint-4")
    said = [attempt(lambda: staging.write_whole(place, part_of(rank)))]
    said.append(attempt(lambda: staging.require_shared(place.parent)))
    if rank == 0:
        part_of(0)(place)
        (place / "optimizer.pt").write_text("moments")
        found = manifest.joined_sums([manifest.sum_share(place, manifest.files_in(place))])
        manifest.write_manifest(place, found.values())
    said.append(attempt(lambda: resuming.newest_whole(place.parent)))
    return [*said, sorted(path.name for path in place.parent.glob("*"))]


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


@pytest.mark.slow
@pytest.mark.distributed
def test_hosts_that_share_no_folder_are_told_what_they_lack(root):
    said = processes.values(processes.run(unshared, WORLD, str(root)))
    for rank, (save, start, resumed, left) in enumerate(said):
        found = "this host does not see what the host of rank 0 writes (/proc/self/cwd/run"
        assert all(found in each and "a folder that all hosts of the run share" in each for each in (save, start))
        assert "CheckpointError: this checkpoint is damaged (/proc/self/cwd/run/checkpoint-4/optimizer.pt): " in resumed
        assert "expected 7 bytes, found no such file on " in resumed
        assert ", the host of rank 1, and 1 more damaged file." in resumed
        assert left == (["_checkpoint-4.partial", "checkpoint-4"] if rank == 0 else [])


@pytest.mark.slow
@pytest.mark.distributed
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
    noisy, quiet = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(p)) for p in (0.1, 0.0))
    return [[resuming.state_notes(Path(path), model) for model in (noisy, quiet)] for path in checkpoints]


@pytest.mark.slow
@pytest.mark.distributed
def test_random_states_of_other_numbers_of_processes_are_told_by_every_rank_where_there_is_dropout(tmp_path):
    ending = "dropout goes on with other noise than it would have had, so losses are not the same to rounding"
    wanted, files = [], {"one": ["rng_state.pth"], "two": ["rng_state_0.pth", "rng_state_1.pth"], "none": []}
    for name, states in files.items():
        checkpoint = tmp_path / name
        checkpoint.mkdir()
        for each in (*states, "optimizer.pt", "scheduler.pt"):
            (checkpoint / each).touch()
        wanted.append([[], []])
    wanted[0][0] = [f"{tmp_path}/one holds random states of 1 process, and this run has 2: {ending}"]
    none = f"{tmp_path}/none holds no random states: what is drawn there, such as dropout, goes on from the seed"
    wanted[2] = [[none], [none]]
    assert processes.values(processes.run(notes_on, 2, *(str(tmp_path / name) for name in files))) == [wanted] * 2
