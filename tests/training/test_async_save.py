"""A checkpoint that is written while training goes on is the one that a save that waits would have written."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from tests.support import async_script
from tests.support.async_script import BYTES, differing
from tests.support.kill_save import Runs
from tests.support.small_runs import losses, on_ranks
from tests.training import test_saving
from tests.training.test_saving import Line, names
from ullage.core.errors import InputError, TrainingError
from ullage.training import RaggedTrainerMixin, Trainer, TrainingArguments
from ullage.training.saving.background import HostMemory, Snapshot
from ullage.training.saving.damage import examine


class Counting(Line):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, labels=None):
        self.seen += 1
        return super().forward(x, labels)


def make(folder: Path, cls: type = Trainer, **options) -> Trainer:
    return test_saving.make(folder, cls, Counting, TrainingArguments, **options)


def test_what_is_written_later_is_what_was_there(tmp_path, monkeypatch):
    """No byte of a save is written before training has changed the weights."""
    make(tmp_path / "waited").train()
    write, written = Snapshot.write, []

    def late(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        begun, until = trainer.state.global_step, time.monotonic() + 20
        while trainer.state.global_step == begun < 6 and time.monotonic() < until:
            time.sleep(0.002)
        write(self)
        written.append((begun, trainer.state.global_step > begun))

    monkeypatch.setattr(Snapshot, "write", late)
    trainer = make(tmp_path / "async", async_save=True)
    trainer.train()
    assert written == [(2, True), (4, True), (6, False)]
    assert names(tmp_path / "async") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert differing(tmp_path / "waited", tmp_path / "async") == []
    for checkpoint in names(tmp_path / "async"):
        finding = examine(tmp_path / "async" / checkpoint)
        assert finding.has_manifest
        assert not finding.damage
    resumed = make(tmp_path / "async", async_save=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "async" / "checkpoint-4"))
    assert losses(resumed) == losses(trainer)
    # Its state tells of two processes.
    assert differing(tmp_path / "waited", tmp_path / "async") == ["checkpoint-6/trainer_state.json"]


def test_a_failure_ends_training_before_the_next_step_and_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    write = Snapshot.write

    def full(self) -> None:
        if any("checkpoint-4" in str(path) for path, _ in self._files):
            raise OSError(28, "No space left on device")
        write(self)

    monkeypatch.setattr(Snapshot, "write", full)
    trainer = make(tmp_path, async_save=True, save_total_limit=1)

    class Wait(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            trainer._background._thread.join()  # so that the very next step hears of it

    trainer.add_callback(Wait())
    with pytest.raises(TrainingError, match=r"the disk is full .*checkpoint-4.* No space left on device"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert [name for name in names(tmp_path) if not name.startswith("_")] == ["checkpoint-2"]
    monkeypatch.setattr(Snapshot, "write", write)
    again = make(tmp_path, async_save=True, save_total_limit=1)
    again.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-6"]


def test_the_best_checkpoint_is_kept_and_loaded_as_ever(tmp_path):
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 0.05,
    }  # fmt: skip
    found = {}
    for way in (False, True):
        trainer = make(tmp_path / str(way), async_save=way, **options)
        trainer.train()
        found[way] = trainer
        best = tmp_path / str(way) / "checkpoint-2"  # the first evaluation's: training lowers the loss
        assert names(best.parent) == ["checkpoint-2"]
        assert trainer.state.best_model_checkpoint == str(best)
        state = json.loads((best / "trainer_state.json").read_text())
        assert (state["best_model_checkpoint"], state["best_global_step"]) == (str(best), 2)
    weights = [each.model.layer.weight for each in found.values()]
    assert torch.equal(*weights)


def test_an_error_in_training_waits_for_the_save_under_way(tmp_path, monkeypatch):
    write = Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda self: (time.sleep(0.3), write(self))[1])

    class Broken(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise RuntimeError("broken")

    trainer = make(tmp_path, async_save=True)
    trainer.add_callback(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert not examine(tmp_path / "checkpoint-2").damage


def test_who_cannot_save_so_is_refused(tmp_path):
    bare = type("Bare", (RaggedTrainerMixin, transformers.Trainer), {})
    with pytest.raises(InputError, match=r"written by transformers itself .*async_save.*found Bare"):
        make(tmp_path, bare, async_save=True).train()
    trainer = make(tmp_path, async_save=True)
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, "every_save"
    with pytest.raises(InputError, match="uploaded when its save returns"):
        trainer._background._require_possible()
    assert not (tmp_path / "checkpoint-2").exists()


def test_a_snapshot_writes_the_bytes_that_a_save_writes(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    base = torch.randn(64)
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
    tensors = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in dtypes} | {
        "empty": torch.empty(0, 3), "one": torch.ones(1), "scalar": torch.tensor(2.0), "turned": base.view(8, 8).t(),
    }  # fmt: skip
    content = {**tensors, "shared": [base, base[3:9]], "step": 3, "text": "ä", "large": torch.zeros(1 << 20)}
    flat = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def save(place: Path) -> None:
        place.mkdir()
        torch.save(content, place / "state.pt")
        save_file(flat, place / "model.safetensors", {"format": "pt"})
        torch.save(1, place / "removed.pt")
        (place / "removed.pt").unlink()
        (place / "text").write_text("at once")

    save(tmp_path / "waited")
    memory = HostMemory()
    for number in range(2):
        place = tmp_path / f"copied{number}"
        snapshot = Snapshot(memory)
        with snapshot.taking(place):
            save(place)
            torch.save(1, tmp_path / "elsewhere.pt")  # not of this checkpoint
        held = memory.num_bytes
        before = [(path, (tmp_path / "waited" / path.name).read_bytes()) for path in sorted(place.iterdir())]
        assert (tmp_path / "elsewhere.pt").stat().st_size
        assert not (place / "state.pt").stat().st_size
        kept = base.clone()
        base.zero_(), flat["one"].zero_()
        snapshot.write()
        base.copy_(kept), flat["one"].fill_(1)
        assert [path for path, expected in before if path.read_bytes() != expected] == []
        assert names(place) == ["model.safetensors", "state.pt", "text"]
    assert memory.num_bytes == held  # the second snapshot took the memory of the first
    assert torch.save.__module__ == "torch.serialization"
    assert {"model.safetensors", "optimizer.pt"} < set(BYTES)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kinds", [["ddp", "zero2", "zero3"], ["fsdp", "fsdp, sharded"]])
def test_ranks_save_what_they_would_have_waited_for_and_fail_together(tmp_path, kinds):
    """Two processes; a process that has trained otherwise cannot shard by accelerate any more."""
    ranks = on_ranks(2, async_script, tmp_path, {kind: [kind] for kind in kinds}, DS_BUILD_OPS="0")
    for rank, found in enumerate(ranks):
        if "fsdp" in kinds:
            sharded = found.pop("fsdp, sharded")["said"]
            assert "InputError: FSDP's ranks write their shards together" in sharded
        for kind, run in found.items():
            assert run["differing"] == [], kind
            assert run["there"] == ["checkpoint-4", "checkpoint-5"], kind
            waited, asynchronous, resumed = run["losses"]
            assert len(waited) == 5
            assert waited == asynchronous == resumed, kind
            assert bool(run["folders"]) == kind.startswith("zero"), kind
            failed, last = run["failed"], run["failed at the end"]
            for each in (failed, last):
                own = "TrainingError: the disk is full" if rank else "DistributedError: another rank failed"
                assert each["said"].startswith(own), (kind, each)
                assert "No space left on device" in each["said"]
            assert failed["step"] in (3, 4), kind  # before the next save at the latest
            assert failed["there"] == [], kind
            assert (last["step"], last["there"]) == (4, ["checkpoint-2"]), kind


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, 1])
def test_a_killed_save_leaves_the_former_checkpoint(tmp_path, moment):
    runs = Runs(tmp_path)
    draw = random.Random()
    outcome = runs.kill(moment, save=1 + moment % 2, delay=draw.uniform(0.0, 0.06))
    assert outcome.problems == [], outcome
    assert outcome.before, outcome
