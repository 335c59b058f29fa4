"""A checkpoint is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.launch import environment
from ullage.errors import CheckpointError, TrainingError
from ullage.training.saving import WholeCheckpointMixin, check_checkpoint, checkpoints_in
from ullage.training.staging import partial_of


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


class WholeTrainer(WholeCheckpointMixin, Trainer):
    pass


def make(folder: Path, cls: type = WholeTrainer, **options):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(16)]
    options = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, **options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        per_device_train_batch_size=4,
        **options,
    )
    return cls(model=Line(), args=arguments, train_dataset=data, eval_dataset=data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_leaves_whole_checkpoints_with_trainers_own_files(tmp_path):
    make(tmp_path / "plain", Trainer).train()
    make(tmp_path / "whole").train()
    assert names(tmp_path / "whole") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for checkpoint in names(tmp_path / "whole"):
        own = set(names(tmp_path / "whole" / checkpoint)) - {"manifest.json"}
        assert sorted(own) == names(tmp_path / "plain" / checkpoint)


def test_rotation_and_the_best_checkpoint_name_the_final_place(tmp_path):
    trainer = make(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first evaluation is the best one: training lowers the loss
        learning_rate=0.05,
        max_steps=8,
    )
    trainer.train()
    # Trainer keeps the best one and the one to resume from, then drops the latter at the end
    assert names(tmp_path) == ["checkpoint-2"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    assert state["best_global_step"] == 2


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
    assert (partial_of(tmp_path / "checkpoint-4") / "checkpoint-4" / "model.safetensors").exists()
    make(tmp_path).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_checkpoint_of_the_same_name_is_replaced_whole(tmp_path):
    make(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "left-over").write_text("of an earlier run")
    make(tmp_path, max_steps=2).train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert "left-over" not in names(tmp_path / "checkpoint-2")


def test_a_model_is_saved_file_by_file_and_others_files_stay(tmp_path):
    trainer = make(tmp_path)
    (tmp_path / "model.safetensors").write_text("torn")
    (tmp_path / "notes.txt").write_text("mine")
    trainer.save_model()
    assert names(tmp_path) == ["model.safetensors", "notes.txt", "training_args.bin"]
    assert (tmp_path / "model.safetensors").read_bytes()[:4] != b"torn"
    trainer.save_model(str(tmp_path / "else"))
    assert names(tmp_path / "else") == ["model.safetensors", "training_args.bin"]


KILLED = """
    import os, signal, sys
    from tests.unit.test_saving import WholeTrainer, make
    from pathlib import Path

    class Killed(WholeTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            if self.state.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_optimizer_and_scheduler(output_dir)

    make(Path(sys.argv[1]), Killed).train()
"""


def test_sigkill_while_saving_leaves_a_checkpoint_that_training_continues_from(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert names(tmp_path) == ["_checkpoint-4.partial", "checkpoint-2"]
    assert (tmp_path / "_checkpoint-4.partial" / "checkpoint-4").is_dir()  # it was killed in the middle of a save
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    whole = make(tmp_path / "whole")
    whole.train()
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (whole, trainer)]
    assert losses[0] == losses[1]


def test_checkpoints_are_listed_by_step(tmp_path):
    for name in (
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-x",
        "_checkpoint-11.partial/checkpoint-11",
        "checkpoint-3.old",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkpoint-12").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert checkpoints_in(tmp_path / "nowhere") == []


def test_what_is_no_checkpoint_is_said_so(tmp_path):
    make(tmp_path, max_steps=2).train()
    whole = tmp_path / "checkpoint-2"
    assert check_checkpoint(whole) == whole
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(tmp_path / "nowhere")
    assert str(error.value) == (
        f"this is no checkpoint ({tmp_path}/nowhere): expected a folder, found nothing there. Take {whole}"
    )
    with pytest.raises(CheckpointError, match=r"no checkpoint to continue from .*expected trainer_state.json, model"):
        check_checkpoint(tmp_path)
    (whole / "optimizer.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"expected optimizer.pt, found manifest.json, model.safetensors, rng_state.pth"
    ):
        check_checkpoint(whole)
    unfinished = partial_of(tmp_path / "checkpoint-4") / "checkpoint-4"
    unfinished.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="never finished"):
        check_checkpoint(unfinished)
