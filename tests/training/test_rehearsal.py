"""A few samples go through evaluation before the first step; evaluation without labels, where no loss is asked for."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import BertConfig, BertForQuestionAnswering, BertForTokenClassification, TrainerCallback

from tests.support import story
from tests.support.processes import raised
from tests.support.small_runs import on_ranks, quiet, serve
from ullage import InputError
from ullage.training import RaggedCollator, Trainer, TrainingArguments

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = {"vocab_size": 24, "max_position_embeddings": 32, "num_labels": 2, **SIZES}


def samples(number=8, labels=True):
    rows = [[3 + (i + k) % 20 for k in range(2 + i % 5)] for i in range(number)]
    return [{"input_ids": ids, **({"labels": [k % 2 for k in ids]} if labels else {})} for ids in rows]


def make_trainer(folder, kind=Trainer, arguments=TrainingArguments, model=BertForTokenClassification, **options: Any):
    named = ("compute_metrics", "eval_dataset", "train_dataset", "callbacks")
    functions = {name: options.pop(name) for name in named if name in options}
    verify = options.pop("packing_verify", True)
    torch.manual_seed(0)
    options = {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2, **options}
    args = quiet(folder, arguments, max_steps=2, **options)
    args.packing_verify = verify
    functions = {"train_dataset": samples(), "eval_dataset": samples(), **functions}
    return kind(model(BertConfig(**CONFIG)), args, data_collator=RaggedCollator(), **functions)


def of_a_list(given):
    assert isinstance(given.predictions, list), "no list"
    return {}


@pytest.mark.regression
@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (TrainingArguments, {"eval_strategy": "no", "do_eval": True}),
        (transformers.TrainingArguments, {"eval_strategy": "epoch"}),
    ],
)
def test_metrics_that_fail_do_so_before_the_first_step(tmp_path, arguments, asked):
    trainer = make_trainer(tmp_path, arguments=arguments, compute_metrics=of_a_list, **asked)
    with pytest.raises(AssertionError, match="no list") as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    assert "packing_verify=False leaves this check out" in caught.value.__notes__[0]
    trainer = make_trainer(
        tmp_path, arguments=arguments, compute_metrics=of_a_list, packing_verify=False, eval_strategy="no", do_eval=True
    )
    trainer.train()
    assert trainer.state.global_step == 2


def test_what_fails_on_few_samples_only_ends_no_run_and_a_stream_is_not_consumed(tmp_path):
    def compute(given):
        assert len(given.predictions) > 4, "too few"
        return {"number": len(given.predictions)}

    class Once(torch.utils.data.IterableDataset):
        """A stream that can be read once."""

        def __init__(self):
            self.rows = iter(samples())

        def __iter__(self):
            return self.rows

    for data in (samples(), Once()):
        trainer = make_trainer(tmp_path, compute_metrics=compute, eval_dataset=data)
        trainer.train()
        assert [entry["eval_number"] for entry in trainer.state.log_history if "eval_number" in entry] == [8]


class Heard(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_prediction_step(self, args, state, control, **_):
        self.events.append(("prediction", state.global_step))

    def on_evaluate(self, args, state, control, **_):
        self.events.append(("evaluate", state.global_step))

    def on_log(self, args, state, control, **_):
        self.events.append(("log", state.global_step))


def test_nothing_is_logged_counted_or_drawn(tmp_path):
    """The losses of a run with dropout, whose samples draw too, are those of a run without; bit for bit."""

    class Drawing(story.Samples):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            return {**sample, "input_ids": [int(torch.randint(3, 20, ())) for _ in sample["input_ids"]]}

    runs = []
    for verify in (True, False):
        heard, called = Heard(), []
        data = {"train_dataset": Drawing(samples()), "eval_dataset": {"one": Drawing(samples()), "two": samples()}}
        options = {"packing_verify": verify, "packing_capacity": 64, "batch_eval_metrics": True, "callbacks": [heard]}
        options["compute_metrics"] = lambda given, compute_result, called=called: (
            called.append(compute_result) or {"a": 1.0}
        )
        trainer = make_trainer(tmp_path, **data, **options)
        trainer.train()
        log = [{k: v for k, v in e.items() if "loss" in k or k == "step"} for e in trainer.state.log_history]
        runs.append((log, heard.events))
        assert called == [True] * (4 if verify else 2)
    assert runs[0] == runs[1]
    assert ("evaluate", 2) in runs[0][1]
    assert all(step > 0 for _, step in runs[0][1])


def test_a_best_metric_that_nobody_computes_is_named_before_the_first_step(tmp_path):
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, compute_metrics=lambda given: {"f1": 0.5}, metric_for_best_model="f2", **options)
    with pytest.raises(InputError, match=r"chooses the best model.*expected one of \['eval_f1', 'eval_loss'.*'f2'"):
        trainer.train()
    assert trainer.state.global_step == 0


class Answering(Trainer):
    """The evaluation of transformers' ``trainer_qa.py``: features without labels, metrics by its own means."""

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            loss_only = True if compute_metrics is None else None
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
        finally:
            self.compute_metrics = compute_metrics
        if compute_metrics is None:
            return output.metrics
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in compute_metrics(output.predictions).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def places(predictions):
    start, end = predictions  # as the script: two arrays [N, L]
    assert len(start) == len(end) == 8  # all features, or the script's post-processing has nothing to match them with
    return {"places": float(np.argsort(start, 1)[:, -1].sum() + np.argsort(end, 1)[:, -1].sum())}


@pytest.mark.regression
@pytest.mark.parametrize("capacity", [None, 16])
def test_a_trainers_own_evaluation_needs_no_labels(tmp_path, capacity):
    answered = [
        {**each, "start_positions": 0, "end_positions": len(each["input_ids"]) - 1} for each in samples(labels=False)
    ]
    data = {"train_dataset": answered, "eval_dataset": samples(labels=False), "compute_metrics": places}
    options = {"model": BertForQuestionAnswering, **data, "packing_capacity": capacity}
    trainer = make_trainer(tmp_path, Answering, **options)
    trainer.train()
    found = [entry["eval_places"] for entry in trainer.state.log_history if "eval_places" in entry]
    assert len(found) == 1
    trainer.compute_metrics = None
    assert "eval_loss" not in trainer.evaluate()  # nothing is reported, and transformers says no more


def test_a_loss_that_is_asked_for_needs_labels(tmp_path):
    data = {"eval_dataset": samples(labels=False)}
    for compute in (None, lambda given: {}):
        with pytest.raises(InputError, match="would report no loss"):
            make_trainer(tmp_path, compute_metrics=compute, **data).evaluate()
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2, "compute_metrics": places}
    trainer = make_trainer(tmp_path, Answering, **options, **data)
    with pytest.raises(InputError, match="would report no loss"):  # metric_for_best_model is the loss
        trainer.train()
    assert trainer.state.global_step == 0
    assert make_trainer(tmp_path, **data).predict(samples(labels=False)).predictions.shape == (8, 6, 2)


def run(folder):
    def compute(given):
        if int(os.environ["RANK"]) == 1:
            raise ValueError("only here")
        return {"loss": math.inf}

    trainer = make_trainer(folder, compute_metrics=compute)
    return [raised(trainer.train), trainer.state.global_step]


@pytest.mark.slow
@pytest.mark.distributed
def test_every_rank_ends_where_one_fails(tmp_path):
    (other, step), mine = on_ranks(2, sys.modules[__name__], tmp_path, None)
    assert "another rank failed while evaluating its batches (rank 1)" in other
    assert (mine, step) == (["ValueError: only here", 0], 0)


if __name__ == "__main__":
    serve(run)
