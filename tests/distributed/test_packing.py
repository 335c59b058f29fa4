"""Packed training gives one process, DDP and ZeRO the same losses, with other numbers of microbatches on each rank."""

import json

import pytest

from tests import packing_script
from tests.launch import torchrun

MODELS = ("llama", "recurrent")
#: A balanced plan leaves no microbatch empty if it can; arrival order leaves some.
ARRIVAL = {"packing_plan_strategy": "next_fit"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    return {name: packing_script.run(name, folder) for name in MODELS}


def on_two(folder, cases):
    torchrun(2, packing_script.__file__, folder, json.dumps(cases), timeout=500)
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in (0, 1)]


def assert_same(result, reference):
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4)
    assert result["eval_loss"] == pytest.approx(reference["eval_loss"], rel=1e-5)
    assert result["flos"] == pytest.approx(reference["flos"])


def assert_uneven(ranks, k):
    real = [rank[k]["real"] for rank in ranks]
    assert real[0] != real[1], "the ranks had equally many microbatches, which shows nothing"
    assert ranks[0][k]["planned"] == ranks[1][k]["planned"]


def test_ddp_trains_as_one_process(alone, tmp_path):
    ranks = on_two(tmp_path, [*([name, 0, ARRIVAL] for name in MODELS), *([name, 0, {}] for name in MODELS)])
    for k, name in enumerate(MODELS * 2):
        assert_same(ranks[0][k], alone[name])
        if k < len(MODELS):
            assert_uneven(ranks, k)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_one_process(alone, tmp_path, stage):
    cases = [[name, stage, ARRIVAL] for name in MODELS]
    if stage > 1:
        cases.append(["llama", stage, {**ARRIVAL, "packing_coalesce_gradients": False}])
    ranks = on_two(tmp_path, cases)
    for k, (name, _, _) in enumerate(cases):
        assert_same(ranks[0][k], alone[name])
        assert_uneven(ranks, k)


def test_packing_changes_no_loss(alone, tmp_path):
    """However the step is cut into microbatches: capacity for two sequences, for all, and no packing at all."""
    for name in MODELS:
        for options in ({"packing_capacity": 1000}, {"packing_capacity": None}, {"packing_capacity": 128, **ARRIVAL}):
            other = packing_script.run(name, str(tmp_path), **options) if options["packing_capacity"] else None
            if other is None:
                trainer = packing_script.make_trainer(name, str(tmp_path), **options)
                trainer.train()
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            else:
                losses = other["losses"]
            assert losses == pytest.approx(alone[name]["losses"], rel=1e-5)


def test_people_can_watch(alone):
    watched = set(alone["llama"]["watched"])
    assert {"tokens_per_second", "ullage", "imbalance", "flops_per_second"} <= watched
