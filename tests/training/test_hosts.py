"""A run on hosts without a shared disk, or with a store, goes on from what all of them have saved together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.support import object_store, processes
from tests.support.async_script import make
from tests.support.small_runs import losses
from ullage.checkpoint.core.paths import checkpoint_path, key_of, store_at
from ullage.ranks.world import gather
from ullage.training.saving import store
from ullage.training.saving.damage import examine
from ullage.training.saving.parts import Readers, bring
from ullage.training.saving.staging import write_whole

#: The same path on every rank; each has a working directory of its own, which stands for the disk of a host.
RUN = Path("/proc/self/cwd/run")
KEPT = RUN.with_name("kept")
LOADS = ("torch", "training")
URL = "s3://bucket/run"


def on_host(rank, world, root):
    """Be the only process of a host with a disk of its own, as torchrun's agent there would start it."""
    host = Path(root) / f"host{rank}"
    host.mkdir(exist_ok=True)
    os.chdir(host)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the ranks have met already


def train(folder, kind, resume=None, **options):
    """The losses by step, or what was raised."""
    trainer = make(folder, kind, **{"save_total_limit": 3, **options})
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses(trainer)


def remove_on(host, rank, folder):
    gather(None)
    if rank == host:
        shutil.rmtree(folder)
    gather(None)


def checkpoints(names):
    return sorted({name.partition("/")[0] for name in names if name.startswith("checkpoint-")})


def saved_and_resumed(rank, world, root, kind, each):
    on_host(rank, world, root)
    found = {"shared": train(Path(root) / "shared", kind), "hosts": train(RUN, kind, save_on_each_node=each)}
    remove_on(1, rank, RUN / "checkpoint-5")  # killed before it had put its part of the last one in place
    found["resumed"] = train(RUN, kind, True, save_on_each_node=each)
    found["there"] = sorted(path.name for path in RUN.iterdir())
    shutil.copytree(RUN, KEPT)
    remove_on(1, rank, RUN)  # a new machine
    found["new"] = train(RUN, kind, True, save_on_each_node=each)
    return found


def on_another_layout(rank, world, root):
    on_host(rank, world, root)
    return train(RUN, "ddp", KEPT / "checkpoint-4")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "each"), [("ddp", False), ("ddp", True), ("zero2", False), ("zero3", True)])
def test_two_hosts_resume_from_what_each_has_saved(tmp_path, kind, each):
    """What a host lacks is sent to it, where another has it; else it is named, with the host that wrote it."""
    runs = processes.values(processes.run(saved_and_resumed, 2, str(tmp_path), kind, each, loads=LOADS))
    for found in runs:
        assert len(found["shared"]) == 5
        assert found["hosts"] == found["resumed"] == found["shared"]
        assert found["there"] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        if kind == "ddp":
            assert found["new"] == found["shared"]
        else:
            assert re.fullmatch(
                r"CheckpointError: this checkpoint is not whole on the hosts of this run \(/proc/self/cwd/run/"
                r"checkpoint-5/global_step5/zero_pp_rank_1_mp_rank_00_(optim|model)_states.pt\): expected [\d,]+ bytes, "
                r"written by .+ \(rank 1\), found it on no host of this run(, and 1 more such file)?. There is no whole "
                "one before it; start that host again, or copy the file into this folder on any host of the run",
                found["new"],
            )
    if kind != "ddp":  # in new processes, which DeepSpeed has not touched: each reads the shards of both
        others = processes.values(processes.run(on_another_layout, 2, str(tmp_path), loads=LOADS))
        assert others == [pytest.approx(runs[0]["shared"], abs=1e-5)] * 2


def test_a_host_needs_what_its_ranks_read():
    shards = [f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    names = ["latest", *shards, *(f"rng_state_{rank}.pth" for rank in range(4))]
    assert Readers(4, 2).need(names, [2, 3]) == ["latest", *shards[2:], "rng_state_2.pth", "rng_state_3.pth"]
    for other in (Readers(2, 2), Readers(4, 3), Readers(4, 0)):  # another layout reads ranges of all shards
        assert other.need(names, [1]) == ["latest", *shards, "rng_state_1.pth"]


def lost_and_away(rank, world, root):
    """A host of three gets a new disk; another one comes back with an older save of the step."""
    on_host(rank, world, root)
    place, said = RUN / "checkpoint-4", []

    def save(text):
        def write(folder):
            folder.mkdir(parents=True)
            (folder / f"rng_state_{rank}.pth").write_text("drawn")
            if rank < 2:  # as each saw the run
                (folder / "trainer_state.json").write_text(f"{text} by {rank}")

        write_whole(place, write)

    def look():
        finding = examine(place)
        notes = [re.sub(r"[^ ]+ (\(rank)", r"HOST \1", note) for note in bring(place, Readers(world, 0))]
        held = {path.name: path.read_text() for path in place.iterdir() if "_" in path.stem and path.suffix != ".pth"}
        again = examine(place)
        state = held["trainer_state.json"]
        said.append(
            (str(finding.damage), notes, state, str(again.damage), sorted(p.name for p in place.parent.iterdir()))
        )

    save("old")
    remove_on(0, rank, place)
    look()
    if rank == 2:
        shutil.copytree(place, "away")
    save("new")
    if rank == 2:
        shutil.rmtree(place)
        Path("away").rename(place)
    look()
    return said


@pytest.mark.distributed
def test_a_new_disk_and_a_host_that_was_away_get_what_the_others_have(tmp_path):
    said = processes.values(processes.run(lost_and_away, 3, str(tmp_path)))
    lines = [
        f"/proc/self/cwd/run/checkpoint-4: HOST (rank {rank}) is sent 1 file, 8 B, by HOST (rank {source})"
        for rank, source in ((0, 1), (2, 1), (2, 0))
    ]
    for rank, (new, away) in enumerate(said):
        assert new == ["()", lines[:2], "old by 1", "()", ["checkpoint-4"]]
        folders = ["checkpoint-4", "checkpoint-4.damaged"] if rank == 2 else ["checkpoint-4"]
        assert away == ["()", lines[2:], f"new by {rank % 2}", "()", folders]


def beside_store(rank, world, root, options):
    """On a host of its own, with working folders of its own, and a store that all hosts see."""
    on_host(rank, world, root)
    tempfile.tempdir = "/proc/self/cwd"
    os.environ |= {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    os.environ["AWS_ENDPOINT_URL"] = options["endpoint_url"]


def stored():
    place = checkpoint_path(URL)
    return sorted(store_at(place).look(key_of(place)))


def on_empty_machines():
    """Forget the store of this process, and what lies in the working folder."""
    gather(None)
    store._stores.clear()
    for folder in Path("/proc/self/cwd/").glob("ullage-*"):
        shutil.rmtree(folder)


def kept_in_a_store(rank, world, root, options, kind):
    beside_store(rank, world, root, options)
    steady = {"lr_scheduler_type": "constant", "save_total_limit": 2}
    found = {"shared": train(Path(root) / "shared", kind, max_steps=7, **steady)}
    found["stored"] = train(URL, kind, async_save=kind == "zero2", **steady)
    found["there"] = stored()
    on_empty_machines()
    found["resumed"] = train(URL, kind, True, max_steps=7, **steady)
    found["left"] = stored()
    found["here"] = checkpoints(path.name for path in store.RunStore.at(URL).folder.iterdir())
    found["nowhere"] = train("s3://nowhere/run", kind)
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_a_run_in_a_store_goes_on_on_empty_machines(tmp_path, kind):
    with object_store.serve(fail=0.02) as served:
        runs = processes.values(
            processes.run(kept_in_a_store, 2, str(tmp_path), served.options, kind, loads=LOADS, timeout=120)
        )
    for found in runs:
        assert len(found["shared"]) == 7
        assert found["stored"] + found["resumed"][5:] == found["resumed"] == found["shared"]
        assert checkpoints(found["there"]) == ["checkpoint-4", "checkpoint-5"]
        assert checkpoints(found["left"]) == ["checkpoint-6", "checkpoint-7"]
        assert {"checkpoint-5/manifest.json", "checkpoint-5/manifest_1.json"} < set(found["there"])
        assert not [name for name in found["there"] if ".journal" in name]
        assert found["here"] == ["checkpoint-7"]  # the others are in the store
        assert "TrainingError: the bucket or the object is not there (s3://nowhere/run" in found["nowhere"]


def killed_while_uploading(rank, world, root, options):
    beside_store(rank, world, root, options)
    send = store.send_files

    def send_half(target, paths):
        if target.name == "checkpoint-4" and rank == 1:
            send(target, dict(list(paths.items())[:1]))
            os.kill(os.getpid(), signal.SIGKILL)
        send(target, paths)

    store.send_files = send_half
    said = train(URL, "ddp")
    return said, stored()


def resumed_from_the_one_before(rank, world, root, options):
    beside_store(rank, world, root, options)
    trainer = make(URL, "ddp", save_total_limit=3)
    trainer._continuation.whole_checkpoint(True, False)
    between = stored()
    return between, train(URL, "ddp", True), train(Path(root) / "shared", "ddp"), stored()


@pytest.mark.slow
@pytest.mark.distributed
def test_an_upload_that_was_killed_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    with object_store.serve() as served:
        arguments = (2, str(tmp_path), served.options)
        first, _ = processes.run(killed_while_uploading, *arguments, deaths=(1,), loads=LOADS)
        said, there = processes.values([first])[0]
        assert "a collective failed, for example because another rank ended" in said
        assert checkpoints(there) == ["checkpoint-2", "checkpoint-4"]
        assert "checkpoint-4/.journal/mark" in there
        assert "checkpoint-4/manifest.json" not in there
        runs = processes.values(processes.run(resumed_from_the_one_before, *arguments, loads=LOADS))
    for between, resumed, shared, left in runs:
        assert checkpoints(between) == ["checkpoint-2"]
        assert len(shared) == 5
        assert resumed == shared
        assert checkpoints(left) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        assert not [name for name in left if ".journal" in name]
