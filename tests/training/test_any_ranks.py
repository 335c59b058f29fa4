"""A global batch is the run's: the same samples in the same steps with the same losses, on whatever ranks there are."""

import pytest

from tests.support import shared_script
from tests.support.small_runs import on_ranks

pytestmark = pytest.mark.distributed

UNPACKED, PACKED = {}, {"packing_capacity": 64}
WAYS = {"unpacked": UNPACKED, "packed": PACKED}


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
