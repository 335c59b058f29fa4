"""A global batch is the run's: the same samples in the same steps with the same losses, on whatever ranks there are."""

import pytest

from tests.support import shared_script
from tests.support.small_runs import on_ranks, quiet
from ullage.core.errors import InputError
from ullage.training import Trainer

pytestmark = pytest.mark.distributed

WAYS = {"unpacked": {}, "packed": {"packing_capacity": 64, "packing_plan_strategy": "next_fit"}}


def assert_same(ranks, alone, steps):
    """Of these steps: every sample that one process trains on, on one of the ranks; the same losses, rates and epochs."""
    keys = [str(step) for step in steps]
    assert sorted({key for rank in ranks for key in rank["samples"]}) == keys
    for key in keys:
        whole = sorted(sample for rank in ranks for sample in rank["samples"][key])
        assert whole == sorted(alone["samples"][key]), key
        assert len(set(whole)) == len(whole)
    for rank in ranks:
        assert rank["max_steps"] == alone["max_steps"]
        for key in keys:
            loss, norm, rate, epoch = rank["rows"][key]
            assert loss == pytest.approx(alone["rows"][key][0], abs=2e-6), key
            assert norm == pytest.approx(alone["rows"][key][1], rel=1e-5), key
            assert [rate, epoch] == alone["rows"][key][2:]


def trained(number, folder, cases):
    """What each rank made of the cases, by their names."""
    folder.mkdir(exist_ok=True)
    ranks = on_ranks(number, shared_script, folder, [[name, options] for name, options in cases.items()], timeout=500)
    return {name: [rank[k] for rank in ranks] for k, name in enumerate(cases)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, uninterrupted."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: ranks[0] for name, ranks in trained(1, folder, WAYS).items()}


@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks_to_the_losses_of_one_process(tmp_path, alone):
    """Three ranks, then two: 13 samples divide over neither, and the last step of an epoch has 4."""
    first = trained(3, tmp_path, {name: {**options, "until": 2} for name, options in WAYS.items()})
    second = trained(2, tmp_path, WAYS)
    for name in WAYS:
        assert_same(first[name], alone[name], [1, 2])
        assert_same(second[name], alone[name], [3, 4, 5, 6])
        for rank in second[name]:
            assert rank["eval_loss"] == pytest.approx(alone[name]["eval_loss"], abs=2e-6)
            assert rank["said"] == []
    epoch = [sample for step in "123" for sample in alone["packed"]["samples"][step]]
    assert sorted(epoch) == list(range(30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps would say it again.*found 2\. Leave it out"),
        ({"packing_global_batch_size": 0}, r"packing_global_batch_size must be an integer: expected >= 1, found 0"),
        ({"average_tokens_across_devices": False}, r"the loss is that of the whole step"),
        ({"train_sampling_strategy": "batch_rebalance"}, r"makes batches for one number of ranks"),
    ],
)
def test_what_says_otherwise_is_refused(tmp_path, options, message):
    arguments = quiet(tmp_path, **{"packing_global_batch_size": 4, **options})
    with pytest.raises(InputError, match=message):
        Trainer(shared_script.make_model("llama"), arguments, train_dataset=[{"input_ids": [1, 2]}])


@pytest.mark.matrix
@pytest.mark.parametrize("trainer", ["Swallowing", "Flagged", "Masked", "Summed"])
def test_a_loss_of_ones_own_is_that_of_the_whole_step(tmp_path, trainer):
    """In one part of 13 samples, and in parts of 5, 4 and 4."""
    options = {"trainer": trainer, "num_train_epochs": 1, "evaluates": False}
    whole, parts = (
        shared_script.run(str(tmp_path), str(size), per_device_train_batch_size=size, **options) for size in (13, 5)
    )
    assert_same([parts], whole, [1, 2, 3])


@pytest.mark.long
@pytest.mark.slow
def test_a_run_goes_on_on_four_three_and_five_ranks_under_ddp_and_zero(tmp_path, alone):
    cases = {f"{name} {stage}": {**WAYS[name], "stage": stage} for name in WAYS for stage in (0, 1, 2, 3)}
    for ranks, steps in ((4, (1, 2)), (3, (3, 4)), (5, (5, 6))):
        found = trained(ranks, tmp_path, {name: {**case, "until": steps[-1]} for name, case in cases.items()})
        for name in cases:
            assert_same(found[name], alone[name.split()[0]], steps)
