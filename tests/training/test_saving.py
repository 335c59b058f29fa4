"""A checkpoint is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import copy
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.support import packing_script
from tests.support.checkpoints import flip
from tests.support.launch import full_disk
from tests.support.small_runs import losses, quiet
from ullage.core.errors import CheckpointError, TrainingError
from ullage.training import Trainer as OurTrainer
from ullage.training.saving.checkpoints import WholeCheckpointMixin, checkpoints_in, require_checkpoint
from ullage.training.saving.damage import examine
from ullage.training.saving.staging import staging_of


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


class WholeTrainer(WholeCheckpointMixin, Trainer):
    pass


def make(folder: Path, cls: type = WholeTrainer, model: type = Line, arguments: type = TrainingArguments, **options):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(16)]
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4, **options}
    return cls(model=model(), args=quiet(folder, arguments, **options), train_dataset=data, eval_dataset=data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_leaves_whole_checkpoints_with_trainers_own_files(tmp_path):
    make(tmp_path / "plain", Trainer).train()
    make(tmp_path / "whole").train()
    assert names(tmp_path / "whole") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for checkpoint in names(tmp_path / "whole"):
        own = set(names(tmp_path / "whole" / checkpoint)) - {"manifest.json"}
        assert sorted(own) == names(tmp_path / "plain" / checkpoint)


def test_a_failed_save_raises_and_leaves_the_older_checkpoint(tmp_path):
    class Failing(WholeTrainer):
        def _save_rng_state(self, output_dir):
            if self.state.global_step == 4:
                raise OSError("no space left on device")
            super()._save_rng_state(output_dir)

    with pytest.raises(TrainingError) as error:
        make(tmp_path, Failing).train()
    assert str(error.value) == (
        f"this cannot be written ({tmp_path}/checkpoint-4): found OSError: no space left on device. Make room, or give "
        "a folder that can be written to; what was there before is as it was"
    )
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert (staging_of(tmp_path / "checkpoint-4") / "checkpoint-4" / "model.safetensors").exists()
    make(tmp_path).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_model_is_saved_file_by_file_and_others_files_stay(tmp_path):
    trainer = make(tmp_path)
    (tmp_path / "model.safetensors").write_text("torn")
    (tmp_path / "notes.txt").write_text("mine")
    trainer.save_model()
    assert names(tmp_path) == ["model.safetensors", "notes.txt", "training_args.bin"]
    assert (tmp_path / "model.safetensors").read_bytes()[:4] != b"torn"
    trainer.save_model(str(tmp_path / "else"))
    assert names(tmp_path / "else") == ["model.safetensors", "training_args.bin"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


#: what is done to a file, and what is said of it
DAMAGE = {
    "flipped": (flip, r"expected CRC-32 [0-9a-f]{8}, found [0-9a-f]{8}\. Take"),
    "cut": (cut, r"expected [0-9,]+ bytes, found [0-9,]+\. Take"),
    "deleted": (Path.unlink, r"expected [0-9,]+ bytes, found no such file\. Take"),
}
FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "training_args.bin",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder of a run that was killed in its fifth step, with a checkpoint after each second one."""
    folder = tmp_path_factory.mktemp("written")
    make(folder, OurTrainer).train()
    shutil.rmtree(folder / "checkpoint-6")
    return folder


@pytest.fixture
def run(written, tmp_path) -> Path:
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(("name", "what"), zip(FILES, [*DAMAGE, *DAMAGE]))
def test_nothing_is_loaded_from_a_damaged_checkpoint(run, name, what):
    do, said = DAMAGE[what]
    do(run / "checkpoint-4" / name)
    trainer = make(run, OurTrainer)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(CheckpointError) as error:
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    message = str(error.value)
    assert message.startswith(f"this checkpoint is damaged ({run}/checkpoint-4/{name}): expected")
    assert re.search(said, message), message
    assert f"Take {run}/checkpoint-2, the newest whole one before it" in message
    assert ("--allow_changed_checkpoint" in message) == (what != "deleted")
    assert all(torch.equal(before[key], value) for key, value in trainer.model.state_dict().items())


def test_the_newest_whole_checkpoint_is_taken_after_saying_so(run, caplog):
    flip(run / "checkpoint-4" / "optimizer.pt")
    trainer = make(run, OurTrainer)
    trainer.train(resume_from_checkpoint=True)
    [line] = caplog.messages
    assert line.startswith(f"{run}/checkpoint-4 is damaged and left as it is: optimizer.pt: expected CRC-32")
    assert trainer.state.global_step == 6
    # its step came again
    assert names(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-4.damaged", "checkpoint-6"]
    assert "optimizer.pt" in (run / "checkpoint-4.damaged" / "damaged.txt").read_text()
    whole = make(run.parent / "whole", OurTrainer)
    whole.train()
    assert losses(trainer) == losses(whole)
    for path in checkpoints_in(run):
        cut(path / "optimizer.pt")
    with pytest.raises(
        CheckpointError, match=r"damaged \(.*/checkpoint-6/optimizer.pt\).* There is no whole one before"
    ):
        make(run, OurTrainer).train(resume_from_checkpoint=True)


def test_a_file_that_was_changed_on_purpose_is_taken_when_told_so(run, caplog):
    state = run / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text().replace('"epoch": 1.0', '"epoch":  1.0'))
    trainer = make(run, OurTrainer)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"), allow_changed_checkpoint=True)
    assert caplog.messages == [f"{run}/checkpoint-4: taken as changed on purpose: trainer_state.json"]
    assert trainer.state.global_step == 6
    cut(run / "checkpoint-4" / "optimizer.pt")  # which nobody does on purpose
    with pytest.raises(CheckpointError, match=r"damaged \(.*/optimizer.pt\)"):
        make(run, OurTrainer).train(str(run / "checkpoint-4"), allow_changed_checkpoint=True)
    (run / "checkpoint-2" / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match=r"damaged \(.*/scheduler.pt\).* found no such file"):
        make(run, OurTrainer).train(str(run / "checkpoint-2"), allow_changed_checkpoint=True)


def test_a_checkpoint_without_a_manifest_is_loaded_after_saying_so(run, caplog):
    checkpoint = run / "checkpoint-4"
    (checkpoint / "manifest.json").unlink()
    make(run, OurTrainer).train(resume_from_checkpoint=str(checkpoint))
    unchecked = f"{checkpoint} has no manifest.json, so its files are loaded unchecked"
    assert caplog.messages == [unchecked]
    caplog.clear()
    (checkpoint / "rng_state.pth").unlink()
    (checkpoint / "optimizer.pt").unlink()
    make(run, OurTrainer).train(resume_from_checkpoint=str(checkpoint))
    assert caplog.messages == [
        unchecked,
        f"{checkpoint} holds no random states: what is drawn there, such as dropout, goes on from the seed",
        f"{checkpoint} holds no optimizer.pt: what belongs there begins anew",
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_cut_file_is_named_without_a_manifest_too(run, name):
    for checkpoint in checkpoints_in(run):
        (checkpoint / "manifest.json").unlink()
    cut(run / "checkpoint-4" / name)
    with pytest.raises(CheckpointError, match=rf"damaged \(.*/checkpoint-4/{name}\): .* Take {run}/checkpoint-2, the"):
        make(run, OurTrainer).train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_damaged_checkpoints_are_neither_counted_nor_deleted(run):
    cut(run / "checkpoint-2" / "optimizer.pt")
    make(run, OurTrainer, max_steps=10, save_total_limit=2).train(resume_from_checkpoint=True)
    assert names(run) == ["checkpoint-10", "checkpoint-2", "checkpoint-8"]
    flip(run / "checkpoint-10" / "optimizer.pt")  # found when it is read, remembered afterwards
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    make(run, OurTrainer, max_steps=12, **best).train(resume_from_checkpoint=True)
    assert {"checkpoint-2", "checkpoint-10.damaged"} < set(names(run))
    whole = [path.name for path in checkpoints_in(run) if path.name != "checkpoint-2"]
    assert len(whole) == 1


def test_the_best_model_is_not_loaded_from_a_damaged_checkpoint(tmp_path):
    class Damaging(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                flip(tmp_path / "checkpoint-2" / "model.safetensors")

    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = make(tmp_path, metric_for_best_model="loss", greater_is_better=True, learning_rate=0.05, **options)
    trainer.add_callback(Damaging())
    with pytest.raises(CheckpointError, match=r"damaged \(.*/checkpoint-2/model.safetensors\)"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"]


def test_a_checkpoint_without_weights_does_not_replace_a_good_one(tmp_path):
    class Emptied(WholeTrainer):
        def _save_rng_state(self, output_dir):
            (Path(output_dir) / "model.safetensors").unlink()
            super()._save_rng_state(output_dir)

    make(tmp_path, max_steps=2).train()
    with pytest.raises(CheckpointError) as error:
        make(tmp_path, Emptied, max_steps=2).train()
    place = staging_of(tmp_path / "checkpoint-2") / "checkpoint-2"
    assert str(error.value) == (
        f"the checkpoint that was written is not whole ({place}): expected weights, found optimizer.pt, rng_state.pth, "
        "scheduler.pt, trainer_state.json, training_args.bin. It is not put in place; what was there before is as it was"
    )
    assert examine(tmp_path / "checkpoint-2").damage == ()


def test_a_disk_that_is_full_is_said_in_one_line(tmp_path):
    make(tmp_path, max_steps=2).train()
    wide = make(tmp_path, max_steps=4)
    wide.model.layer = torch.nn.Sequential(torch.nn.Linear(4, 4000), torch.nn.Linear(4000, 1))  # 96 kB
    said = []
    for limit in (30_000, 100_000):  # the weights do not fit; they do, and the optimizer's state does not
        with full_disk(limit), pytest.raises(TrainingError) as error:
            wide.train()
        said.append(str(error.value))
    assert said[0].startswith(f"this cannot be written ({tmp_path}/checkpoint-2): found SafetensorError: ")
    assert said[1].startswith(f"this cannot be written ({tmp_path}/checkpoint-2): found RuntimeError: ")
    assert all(line.endswith("Make room, or give a folder that can be written to; what was there before is as it was")
               for line in said)  # fmt: skip
    assert examine(tmp_path / "checkpoint-2").damage == ()


@pytest.mark.slow
@pytest.mark.regression
def test_experts_that_are_saved_one_by_one_are_loaded(tmp_path):
    """transformers' own Trainer looks for them by their name in memory, where they are one tensor of a layer."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.01}
    runs = []
    for resumed in (None, str(tmp_path / "checkpoint-2")):
        mine = packing_script.make_trainer("mixtral", str(tmp_path), **options)
        mine.train(resume_from_checkpoint=resumed)
        runs.append((mine.evaluate()["eval_loss"], *losses(mine)))  # of the best model
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


def test_no_step_is_trained_where_none_is_left(tmp_path):
    """Six steps end inside the second epoch, at the fourth batch of four."""
    whole = make(tmp_path, OurTrainer, max_steps=6)
    output = whole.train()
    for checkpoint in ("checkpoint-6", True):
        again = make(tmp_path, OurTrainer, max_steps=6)
        result = again.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(tmp_path / checkpoint))
        assert (result.global_step, again.state.epoch) == (6, whole.state.epoch)
        assert result.training_loss == pytest.approx(output.training_loss)
        assert result.metrics["train_loss"] == pytest.approx(output.training_loss)
        assert losses(again) == losses(whole)
        for key, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[key], value)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_an_epoch_and_a_half_end_inside_an_epoch_too(tmp_path):
    make(tmp_path, OurTrainer, max_steps=-1, num_train_epochs=1.5).train()
    again = make(tmp_path, OurTrainer, max_steps=-1, num_train_epochs=1.5)
    assert again.train(resume_from_checkpoint=True).global_step == 6
    fewer = make(tmp_path, OurTrainer, max_steps=5)  # fewer than were taken
    assert fewer.train(resume_from_checkpoint=True).global_step == 6


def test_checkpoints_are_listed_by_step(tmp_path):
    for end in ("10", "9", "x", "3.old"):
        (tmp_path / f"checkpoint-{end}").mkdir()
    (tmp_path / "_checkpoint-11.partial" / "checkpoint-11").mkdir(parents=True)
    (tmp_path / "checkpoint-12").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert checkpoints_in(tmp_path / "nowhere") == []


def test_what_is_no_checkpoint_is_said_so(tmp_path):
    make(tmp_path, max_steps=2).train()
    whole = tmp_path / "checkpoint-2"
    assert require_checkpoint(whole) == whole
    with pytest.raises(CheckpointError) as error:
        require_checkpoint(tmp_path / "nowhere")
    assert str(error.value) == (
        f"this is no checkpoint ({tmp_path}/nowhere): expected a folder, found nothing there. Take {whole}"
    )
    with pytest.raises(CheckpointError, match=r"no checkpoint to continue from .*expected trainer_state.json, model"):
        require_checkpoint(tmp_path)
    (whole / "optimizer.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"expected optimizer.pt, found manifest.json, model.safetensors, rng_state.pth"
    ):
        require_checkpoint(whole)
    unfinished = staging_of(tmp_path / "checkpoint-4") / "checkpoint-4"
    unfinished.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="never finished"):
        require_checkpoint(unfinished)
