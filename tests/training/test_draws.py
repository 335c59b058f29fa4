"""What a changed import draws: the random state at every draw of another's script, with packing and without.

A collator that masks at random notes the states of python, numpy and torch at each call; so do each forward pass and each
step. A run of transformers' Trainer on the same data says what they must be.
"""

import hashlib
import json
import random
import shutil
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import get_worker_info
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, TrainerCallback, set_seed

from tests.support import trl_cases
from tests.support.small_runs import quiet
from ullage.training import Trainer, TrainingArguments
from ullage.training.run import beginning, rehearsal

THEIRS = (transformers.Trainer, transformers.TrainingArguments)
OURS = (Trainer, TrainingArguments)


@pytest.fixture(scope="module")
def tokenizer():
    made = trl_cases.tokenizer()
    made.mask_token = made.mask_token or made.eos_token
    return made


def states():
    state: Any = np.random.get_state(legacy=False)["state"]  # noqa: NPY002  the one that scripts draw from
    numpy = f"{state['key'].tolist()} {state['pos']}"
    held = (repr(random.getstate()).encode(), numpy.encode(), torch.get_rng_state().numpy().tobytes())
    return [hashlib.sha1(each).hexdigest()[:12] for each in held]


class Notes(TrainerCallback):
    """The draws of a run in their order; those of worker processes go to a file."""

    def __init__(self, folder):
        self.kept, self.off, self.folder = [], False, folder

    def add(self, *what):
        worker = get_worker_info()
        if worker is not None:
            with (self.folder / f"worker{worker.id}.jsonl").open("a") as file:
                file.write(json.dumps([what, states()]) + "\n")
        elif not self.off:
            self.kept.append((*what, *states()))

    def on_step_end(self, *args, **kwargs):
        self.add("step")

    def kept_but(self, kind):
        return [each for each in self.kept if each[0] != kind]

    def of_workers(self):
        return [path.read_text() for path in sorted(self.folder.glob("worker*.jsonl"))]


class Masking:
    """Masks as transformers does, and draws from python's and numpy's generators too. ``own``: draws from these."""

    def __init__(self, tokenizer, notes, seed, own):
        self.inner, self.notes = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=seed), notes
        self.generators = Generators() if own else None

    def __call__(self, samples):
        self.notes.add(
            "collate", [len(sample["input_ids"]) for sample in samples], self.generators and self.generators()
        )
        random.random(), np.random.rand()  # noqa: NPY002  # pyright: ignore[reportUnusedExpression]
        batch = self.inner(samples)
        self.notes.add("masked", batch["labels"].tolist())
        return batch


class Generators:
    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.old, self.python = np.random.RandomState(3), random.Random(4)

    def __call__(self):
        drawn = torch.rand(1, generator=self.torch).item(), self.numpy.random(), self.old.rand(), self.python.random()
        return list(drawn)


def rows(number, seed):
    drawn = np.random.default_rng(seed)
    return datasets.Dataset.from_list(
        [{"input_ids": drawn.integers(5, 40, int(drawn.integers(4, 14))).tolist()} for _ in range(number)]
    )


def run(
    kinds, folder, tokenizer, monkeypatch, *, does=("train", "evaluate", "predict"), dropout=0.0, seed=None, own=False,
    resumes=None, metrics=None, evaluates=10, **options,
):  # fmt: skip
    folder.mkdir(exist_ok=True, parents=True)
    notes = Notes(folder)
    for place, name in ((rehearsal.Rehearsal, "run"), (beginning, "collated")):  # looks ahead are no draws of a script
        look = getattr(place, name)

        def unnoted(*args, look=look, **kwargs):
            notes.off = True
            try:
                return look(*args, **kwargs)
            finally:
                notes.off = False

        monkeypatch.setattr(place, name, unnoted)
    set_seed(3)
    chances: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes, **chances))
    model.register_forward_pre_hook(lambda module, given: notes.add("forward", module.training))
    trainer_type, arguments_type = kinds
    batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "num_train_epochs": 1, "seed": 5}
    trainer = trainer_type(
        model=model,
        args=quiet(folder / "out", arguments_type, **{**batches, "learning_rate": 1e-2, **options}),
        train_dataset=rows(14, 1),
        eval_dataset=rows(evaluates, 2),
        data_collator=Masking(tokenizer, notes, seed, own),
        compute_metrics=metrics,
        callbacks=[notes],
    )
    notes.add("made")
    results = []
    for name in does:
        if name == "train":
            trainer.train(resume_from_checkpoint=resumes)
        else:
            given = [rows(8, 3)] if name == "predict" else []
            found = getattr(trainer, name)(*given)
            results.append(found if name == "evaluate" else found.metrics)
        notes.add(f"{name} ended")
    return notes, results


CASES = {
    "two epochs, evaluate, predict": {"num_train_epochs": 2},
    "dropout": {"dropout": 0.1},
    "evaluate alone": {"does": ("evaluate", "evaluate")},
    "predict, evaluate, train": {"does": ("predict", "evaluate", "train")},
    "every two steps": {"eval_strategy": "steps", "eval_steps": 2},
    "on start": {"eval_strategy": "epoch", "eval_on_start": True},
    "workers": {"does": ("train",), "eval_strategy": "epoch", "dataloader_num_workers": 2},
    "a seed of the collator's": {"do_eval": True, "seed": 7},
    "generators of the collator's": {"eval_strategy": "epoch", "own": True},
}


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("name", list(CASES))
def test_a_changed_import_draws_what_transformers_draws_and_a_packed_run_too(tmp_path, tokenizer, monkeypatch, name):
    """Packed, what a collator draws; without dropout, which draws by the shapes that it meets."""
    packs = {"packing_capacity": 32} if "dropout" not in CASES[name] else {}
    runs = [(THEIRS, {}), (OURS, {}), *([(OURS, packs)] if packs else [])]
    theirs, ours, *packed = (
        run(kinds, tmp_path / f"{k}", tokenizer, monkeypatch, **CASES[name], **options)[0]
        for k, (kinds, options) in enumerate(runs)
    )
    assert len(theirs.kept) > 5
    assert ours.kept == theirs.kept
    for each in packed:
        assert each.kept_but("forward") == theirs.kept_but("forward")
    assert all(each.of_workers() == theirs.of_workers() for each in (ours, *packed))
    assert len(theirs.of_workers()) == CASES[name].get("dataloader_num_workers", 0)


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize("packing", [{}, {"packing_capacity": 32}])
def test_a_run_goes_on_from_a_checkpoint_with_transformers_draws(tmp_path, tokenizer, monkeypatch, packing):
    dropout = {"dropout": 0.0 if packing else 0.1}
    saves = {"does": ("train",), "save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, **dropout}
    found = []
    for kinds, name, options in ((THEIRS, "theirs", {}), (OURS, "ours", packing)):
        run(kinds, tmp_path / name, tokenizer, monkeypatch, **saves, **options)
        kept = shutil.copytree(tmp_path / name / "out" / "checkpoint-6", tmp_path / f"{name}_kept" / "checkpoint-6")
        more = {"does": ("train", "evaluate"), "resumes": str(kept), "num_train_epochs": 2, **dropout}
        notes, _ = run(kinds, tmp_path / f"{name} again", tokenizer, monkeypatch, **more, **options)
        found.append(notes.kept_but("forward") if packing else notes.kept)
    assert found[0] == found[1]
    assert sum(each[0] == "step" for each in found[0]) == 2


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize("packing", [{}, {"packing_capacity": 256}])
def test_the_evaluation_of_run_mlm_masks_what_transformers_masks(tmp_path, tokenizer, monkeypatch, packing):
    """One batch, as the script's: accuracy on the masked tokens and loss are theirs to every digit."""

    def accuracy(given):
        masked = given.label_ids != -100
        return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids)[masked].mean())}

    case = {"metrics": accuracy, "per_device_eval_batch_size": 32, "evaluates": 32, "do_eval": True}
    case |= {"does": ("train", "evaluate", "evaluate"), "num_train_epochs": 4}
    _, theirs = run(THEIRS, tmp_path / "theirs", tokenizer, monkeypatch, **case)
    _, ours = run(OURS, tmp_path / "ours", tokenizer, monkeypatch, **case, **packing)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["eval_accuracy"] == other["eval_accuracy"] > 0
        assert np.float32(mine["eval_loss"]) == pytest.approx(other["eval_loss"], rel=1e-6 if packing else 0, abs=0)
    assert ours[0]["eval_loss"] != ours[1]["eval_loss"]  # each evaluation masks others
