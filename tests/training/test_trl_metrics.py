"""Metrics that TRL's trainers append per call, under packing: one value per step, weighed by what is in it."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.support import trl_cases
from tests.support.small_runs import on_ranks
from ullage.training import trl
from ullage.training.step import call_metrics as trl_metrics
from ullage.training.step.call_metrics import CallMetrics, Difference

NAMES = ("loss", "entropy", "mean_token_accuracy", "num_tokens")
EVALUATED = tuple(f"eval_{name}" for name in NAMES)
ARRIVAL = {"packing_capacity": 16, "packing_plan_strategy": "next_fit"}


class Accelerator:
    def gather(self, values):
        raise AssertionError("a collective within a call")

    gather_for_metrics = reduce = gather


class Fake:
    """A trainer that keeps metrics as TRL's do; ``rules`` are those of its class."""

    def __init__(self):
        self.accelerator, self.args = Accelerator(), SimpleNamespace(world_size=1, device=torch.device("cpu"))
        self._metrics, self._total_train_tokens = {"train": defaultdict(list), "eval": defaultdict(list)}, 5


@pytest.fixture
def rules(monkeypatch):
    found = {"kl": "labels", "low": "min", "high": "max", "calls": "sum", "margin": Difference("good", "bad")}
    monkeypatch.setitem(trl_metrics.RULES, f"{__name__}.Fake", found)


def merged(*calls, mode="train", num_tokens=0, trainer=None):
    """What one value per metric is, of calls given as weights and what is appended: {name: value or values}."""
    trainer = trainer or Fake()
    kept, taken = CallMetrics(trainer), []
    for weights, values in calls:
        with kept.collect(taken, mode, weights):
            trainer.accelerator.gather_for_metrics(torch.tensor(1.0))
            trainer._total_train_tokens += 1000
            for name, value in values.items():
                trainer._metrics[mode][name].extend(value if isinstance(value, list) else [value])
    kept.merge(taken, mode, num_tokens)
    return dict(trainer._metrics[mode])


def weights(tokens, labels):
    return {"tokens": tokens, "labels": labels, "sequences": 1}


def test_a_metric_is_weighed_by_its_kind(rules):
    first = (weights(10, 1), {"kl": 1.0, "entropy": 1.0, "low": 3.0, "high": 3.0, "calls": 2.0})
    second = (weights(30, 4), {"kl": 6.0, "entropy": 5.0, "low": -2.0, "high": 4.0, "calls": 5.0})
    assert merged(first, second) == {"kl": [5.0], "entropy": [4.0], "low": [-2.0], "high": [4.0], "calls": [7.0]}


def test_what_is_not_a_number_counts_nowhere(rules):
    nan = (weights(9, 9), {"kl": math.nan, "low": math.nan, "calls": math.nan})
    assert merged(nan, (weights(1, 1), {"kl": 2.0, "low": 7.0})) == {"kl": [2.0], "low": [7.0]}
    assert merged(nan) == {}


def test_a_difference_is_that_of_the_merged_metrics(rules):
    """Not of the microbatches that have both: each side may be in other ones."""
    both = (weights(1, 1), {"good": 5.0, "bad": 1.0, "margin": 4.0})
    assert merged(both, (weights(3, 1), {"good": 1.0})) == {"good": [2.0], "bad": [1.0], "margin": [1.0]}
    assert "margin" not in merged((weights(3, 1), {"good": 1.0}))


def test_a_call_that_fails_leaves_the_trainer_as_it_was():
    trainer = Fake()
    kept, taken, lists = CallMetrics(trainer), [], trainer._metrics["train"]

    def fail():
        with kept.collect(taken, "train", weights(1, 1)):
            trainer._metrics["train"]["entropy"].append(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert taken == []
    assert trainer._metrics["train"] is lists
    assert vars(trainer.accelerator) == {}
    assert trainer._total_train_tokens == 5


def test_a_trainer_without_lists_is_left_alone():
    trainer = SimpleNamespace(accelerator=Accelerator())
    kept, taken = CallMetrics(trainer), []
    with kept.collect(taken, "train", weights(1, 1)):
        assert vars(trainer.accelerator) == {}
    kept.merge(taken, "train", 3)
    assert vars(trainer) == {"accelerator": trainer.accelerator}


def test_every_table_names_a_trainer_of_trls_and_rules_that_are_known():
    for rules in trl_metrics.RULES.values():
        for name, rule in rules.items():
            if isinstance(rule, Difference):
                assert {rule.minuend, rule.subtrahend} <= rules.keys(), name
    trainers = [name.removesuffix("Trainer") for name in trl.__all__ if name.endswith("Trainer")]
    assert set(trl_metrics.RULES) == {f"trl.trainer.{name.lower()}_trainer.{name}Trainer" for name in trainers}


def same(found, expected, names=NAMES):
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert {name: mine[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-6)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The logs and the evaluation of TRL's own trainer, on one process, each step and the evaluation in one batch."""
    return trl_cases.outcome(trl_cases.make_sft("llama", tmp_path_factory.mktemp("trl"), mixed=False))


@pytest.mark.slow
def test_a_step_in_which_no_label_counts_gives_no_mean_over_labels(tmp_path):
    data = trl_cases.ids(labelled=lambda i: i >= 4)
    packed = trl_cases.run("llama", tmp_path, data=data, max_length=None, **ARRIVAL)
    assert packed["logged"][0]["loss"] == 0.0
    assert not {"entropy", "mean_token_accuracy"} & packed["logged"][0].keys()
    assert [entry["num_tokens"] for entry in packed["logged"]] == [sum(trl_cases.LENGTHS[:n]) for n in (4, 8, 12)]
    assert packed["logged"][1]["entropy"] > 3


@pytest.mark.slow
@pytest.mark.distributed
def test_metrics_of_packed_sft_on_two_processes_are_those_of_trl(unpacked, tmp_path):
    """One rank has an empty microbatch; evaluated in batches of two, the ranks have unequally many microbatches."""
    cases = {
        "arrival": ["llama", ARRIVAL],
        "small batches": ["llama", {**ARRIVAL, "per_device_eval_batch_size": 2}],
        "own": ["llama", {**ARRIVAL, "own": True, "max_steps": 2}],
        "experts": ["mixtral", {**ARRIVAL, "hand": True}],
    }
    ranks = on_ranks(2, trl_cases, tmp_path, cases)
    for case in cases:
        counts = [rank[case]["sequences"] for rank in ranks]
        assert 0 in counts[0][0] + counts[1][0]
        assert ranks[0][case]["weights"] == ranks[1][case]["weights"]
        assert ranks[0][case]["logged"] == ranks[1][case]["logged"]
    for case in ("arrival", "small batches"):
        same(ranks[0][case]["logged"], unpacked[0])
        same([ranks[0][case]["evaluated"]], [unpacked[1]], EVALUATED)
        assert ranks[0][case]["logged"][-1]["num_tokens"] == sum(trl_cases.LENGTHS)
    for found in (rank["experts"] for rank in ranks):
        assert found["largest"] > 1e-3
        assert found["apart"] < 1e-6 * found["largest"]
        assert found["logged"][0]["aux_loss"] == pytest.approx(found["experts"], rel=1e-6)
    # Tokens of a microbatch, weighed by themselves, over those of the second rank; a placeholder has one and adds none.
    tokens = ranks[1]["own"]["tokens"]
    assert [entry["own"] for entry in ranks[0]["own"]["logged"]] == pytest.approx(
        [sum(n * n for n in step) / sum(step) for step in tokens]
    )
    assert any(0 in step for step in tokens), "the second rank has no empty microbatch"
