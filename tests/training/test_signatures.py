"""What an editor and a type checker know of our trainers: the parameters of the trainers beneath."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import transformers

import ullage.training.trl
from tests.support.launch import ROOT
from ullage.training import RaggedTrainerMixin, Seq2SeqTrainer, Trainer

ACCEPTED = """
from pathlib import Path

from torch import nn
from transformers.trainer_utils import TrainOutput

import ullage
from ullage.training import PackedSequenceCollator, RaggedCollator, Seq2SeqCollator, Seq2SeqTrainer, Trainer
from ullage.training import TrainingArguments
from ullage.training.trl import SFTConfig, SFTTrainer

model = nn.Linear(1, 1)
trainer = Trainer(model, TrainingArguments("x", packing_capacity=3), RaggedCollator(labels_from="input_ids"))
out: TrainOutput = trainer.train(resume_from_checkpoint=Path("x"), allow_changed_checkpoint=True)
Trainer(model=model, train_dataset=None, data_collator=PackedSequenceCollator(), callbacks=[])
Seq2SeqTrainer(model=model, data_collator=Seq2SeqCollator())
rows = [{"input_ids": [3, 4], "labels": [3, 4]}, {"input_ids": [5]}]
listed = Trainer(model, TrainingArguments("x"), train_dataset=rows, eval_dataset={"a": rows})
print(listed.evaluate(rows)["eval_loss"], listed.predict(test_dataset=rows).predictions)
SFTTrainer(model="m", args=SFTConfig("x", packing_capacity=3), peft_config=None)
written: Path = ullage.plan([1], ranks=1, capacity=1).to_html("p.html", source="step 0")
"""
#: Each of these lines has one mistake.
REFUSED = """
from ullage.training import Seq2SeqTrainer, Trainer
from ullage.training.trl import DPOTrainer, SFTTrainer
Trainer(arg=None)
Trainer(model=3)
Trainer(train_dataset=["a text"])
Seq2SeqTrainer(modell=None)
SFTTrainer(model="m", train_data=None)
DPOTrainer(model="m", reference=None)
Trainer().train(resume=True)
"""


@pytest.mark.parametrize("ours", [Trainer, Seq2SeqTrainer])
def test_a_trainer_has_the_parameters_of_the_one_beneath(ours):
    beneath = getattr(transformers, ours.__name__)
    found = inspect.signature(ours)
    assert {"model", "args", "train_dataset", "callbacks"} <= found.parameters.keys()
    assert found == inspect.signature(beneath)


def test_a_constructor_of_ones_own_is_shown_as_it_is():
    class Mine(Trainer):
        def __init__(self, depth: int):
            super().__init__()

    class Theirs(transformers.Trainer):
        def __init__(self, width: int):
            super().__init__()

    class Both(RaggedTrainerMixin, Theirs): ...

    assert list(inspect.signature(Mine).parameters) == ["depth"]
    assert list(inspect.signature(Both).parameters) == ["width"]


def test_train_has_the_parameters_of_the_one_beneath_and_ours_by_keyword():
    theirs = inspect.signature(transformers.Trainer.train).parameters
    ours = dict(inspect.signature(Trainer.train).parameters)
    assert ours.pop("allow_changed_checkpoint").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours) == list(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ullage.training.trl.__all__ if name.endswith("Trainer")])
def test_trainers_of_trl_have_their_own_parameters(name):
    trl = pytest.importorskip("trl")
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (ullage.training.trl, trl))
    assert "train_dataset" in ours.parameters
    assert ours == theirs


@pytest.mark.long
@pytest.mark.slow
def test_a_type_checker_accepts_what_is_right_and_refuses_each_mistake(tmp_path):
    for name, text in (("accepted", ACCEPTED), ("refused", REFUSED)):
        (tmp_path / f"{name}.py").write_text(text)
    settings = {"venvPath": str(ROOT), "venv": ".venv", "extraPaths": [str(ROOT / "src")], "include": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 2, done.stdout + done.stderr
    errors = [d for d in found["generalDiagnostics"] if d["severity"] == "error"]
    assert [d["message"] for d in errors if d["file"].endswith("accepted.py")] == []
    lines = sorted(d["range"]["start"]["line"] for d in errors)
    assert lines == [k for k, line in enumerate(REFUSED.splitlines()) if line and "import" not in line]
