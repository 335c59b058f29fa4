"""A checkpoint that is written while training goes on is the one that a save that waits would have written."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from tests.support import async_script
from tests.support.async_script import differing
from tests.support.kill_save import Runs
from tests.support.small_runs import losses, on_ranks
from tests.training import test_saving
from tests.training.test_saving import Line, names
from ullage.core.errors import InputError, TrainingError
from ullage.training import RaggedTrainerMixin, Trainer, TrainingArguments
from ullage.training.saving import background
from ullage.training.saving.background import BackgroundSave, MemoryFolder
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
    """No byte of a save is moved to the disk before training has changed the weights."""
    make(tmp_path / "waited").train()
    move, written = MemoryFolder.move, []

    def late(self, *place) -> None:
        assert threading.current_thread() is not threading.main_thread()
        begun, until = trainer.state.global_step, time.monotonic() + 20
        while trainer.state.global_step == begun < 6 and time.monotonic() < until:
            time.sleep(0.002)
        move(self, *place)
        assert [path.name for path in self.path.iterdir()] == ["lock"]  # its memory is free again
        written.append((begun, trainer.state.global_step > begun))

    monkeypatch.setattr(MemoryFolder, "move", late)
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
    move = MemoryFolder.move

    def full(self, name, to) -> None:
        if name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        move(self, name, to)

    monkeypatch.setattr(MemoryFolder, "move", full)
    trainer = make(tmp_path, async_save=True, save_total_limit=1)

    class Wait(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            trainer._background._thread.join()  # so that the very next step hears of it

    trainer.add_callback(Wait())
    with pytest.raises(TrainingError, match=r"the disk is full .*checkpoint-4.* No space left on device"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert [name for name in names(tmp_path) if not name.startswith("_")] == ["checkpoint-2"]
    monkeypatch.setattr(MemoryFolder, "move", move)
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
    move = MemoryFolder.move
    monkeypatch.setattr(MemoryFolder, "move", lambda self, *place: (time.sleep(0.3), move(self, *place))[1])

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


def test_without_room_in_memory_a_save_waits_which_is_said_once(tmp_path, monkeypatch, caplog):
    make(tmp_path / "waited").train()
    for number, free in enumerate((0, 1 << 40)):
        monkeypatch.setattr(background, "free_host_memory", lambda free=free: free)
        threads, begin = [], BackgroundSave.begin
        monkeypatch.setattr(
            BackgroundSave,
            "begin",
            lambda self, end, begin=begin, threads=threads: (threads.append(end), begin(self, end)),
        )
        caplog.clear()
        make(tmp_path / str(number), async_save=True).train()
        monkeypatch.setattr(BackgroundSave, "begin", begin)
        said = [record.getMessage() for record in caplog.records if "async_save: no room" in record.getMessage()]
        assert len(threads) == (3 if free else 0)
        assert len(said) == (0 if free else 1)
        assert differing(tmp_path / "waited", tmp_path / str(number)) == []


def test_a_run_leaves_nothing_in_memory_and_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_MEMORY", tmp_path)
    left, young = tmp_path / "ullage-save-left", tmp_path / "ullage-save-young"
    for folder in (left, young):
        folder.mkdir()
        (folder / "lock").touch()
    os.utime(left, (1, 1))
    running = MemoryFolder()
    os.utime(running.path, (1, 1))
    make(tmp_path / "run", async_save=True).train()
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert sorted(path.name for path in tmp_path.glob("ullage-save-*")) == sorted([running.path.name, young.name])
    running.close()
    assert not running.path.exists()


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
