"""A run on hosts without a shared disk saves on each, and goes on from what they hold together."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.async_script import make
from tests.support.small_runs import losses
from ullage.checkpoint.core.paths import checkpoint_path, key_of, store_at
from ullage.ranks.world import gather
from ullage.training.saving.store import _stores

#: The same path on every rank; each has a working directory of its own, which stands for the disk of a host.
RUN = Path("/proc/self/cwd/run")


def on_host(rank, world, root):
    """Be the only process of a host with a disk of its own, as torchrun's agent there would start it."""
    host = Path(root) / f"host{rank}"
    host.mkdir(exist_ok=True)
    os.chdir(host)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the ranks have met already


def there():
    return sorted(path.name for path in RUN.iterdir())


def train(folder, kind, resume=None, **options):
    """The losses by step; or what was raised, without the folder."""
    trainer = make(folder, kind, save_total_limit=3, **options)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses(trainer)


def saved_and_resumed(rank, world, root, kind, each):
    on_host(rank, world, root)
    found = {"shared": train(Path(root) / "shared", kind), "hosts": train(RUN, kind, save_on_each_node=each)}
    found["there"] = there()
    if rank == 1:  # killed before it had put its part of the last one in place
        shutil.rmtree(RUN / "checkpoint-5")
    found["resumed"] = train(RUN, kind, True, save_on_each_node=each)
    found["again"] = there()
    gather(None)
    if rank == 1:  # a new machine
        shutil.rmtree(RUN)
    gather(None)
    found["new"] = train(RUN, kind, True, save_on_each_node=each)
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "each"), [("ddp", False), ("ddp", True), ("zero2", False), ("zero3", True)])
def test_two_hosts_resume_from_what_they_saved_each(tmp_path, kind, each):
    runs = processes.run(saved_and_resumed, 2, str(tmp_path), kind, each, loads=("torch", "training"))
    for found in processes.values(runs):
        assert len(found["shared"]) == 5
        assert found["hosts"] == found["resumed"] == found["shared"]
        assert found["there"] == found["again"] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
        if kind == "ddp":
            assert found["new"] == found["shared"]
        else:
            lost = "global_step5/.*zero_pp_rank_1_mp_rank_00_optim_states.pt"
            assert found["new"] == lost, socket.gethostname()


URL = "s3://bucket/run"


def beside_store(rank, world, root, options):
    """On a host of its own, with working folders of its own, and a store that both see."""
    on_host(rank, world, root)
    tempfile.tempdir = "/proc/self/cwd"
    os.environ |= {
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
    }


def stored(url=URL):
    place = checkpoint_path(url)
    return sorted(store_at(place).look(key_of(place)))


def kept_in_a_store(rank, world, root, options, kind, url):
    beside_store(rank, world, root, options)
    found = {"shared": train(Path(root) / "shared", kind), "stored": train(url, kind, async_save=kind == "zero2")}
    found["there"] = stored(url)
    gather(None)
    _stores.clear()
    shutil.rmtree("/proc/self/cwd/", ignore_errors=True)
    found["new"] = train(url, kind, True, max_steps=7)
    found["long"] = train(Path(root) / "longer", kind, max_steps=7)
    found["left"] = stored(url)
    return found
