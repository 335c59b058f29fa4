"""The steps of the exchange, each alone, on real processes."""

import pytest

from tests.support import exchange_cases as cases
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_every_token_arrives_once_in_worlds_of_one_to_eight_ranks_in_any_order():
    done = values(run(cases.exchange_in_worlds, 8))
    assert sum(done) == 10 * sum(range(1, 9))


def test_ranks_that_share_a_bin_all_get_it():
    ids = values(run(cases.exchange_shared_bins, 4))
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert sorted(ids[0] + ids[2]) == list(range(30))


@pytest.fixture(scope="module")
def ranks():
    return values(run(cases.steps, 3))


@pytest.fixture
def failures(ranks):
    return [rank["failures_of_steps"] for rank in ranks]


@pytest.mark.slow
def test_steps_that_grow_and_shrink_are_materialized_alike_and_shared_microbatches_are_the_source_s(ranks):
    assert [rank["steps_that_grow_and_shrink"] for rank in ranks] == [True] * 3
    assert [rank["share_cases"] for rank in ranks] == [True] * 3
    assert [rank["failures_of_steps"]["nothing"] for rank in ranks] == [None] * 3


def everyone(failures, name):
    assert None not in [raised[name] for raised in failures], failures
    return [raised[name] for raised in failures]


@pytest.mark.parametrize(("name", "field", "found"), [
    ("extra field", "reward", "float32 per sequence"),
    ("shape", "mask", "shape [2]"),
    ("unit", "id", "int64 per token"),
    ("no field", "mask", "no such field"),
    ("long header", "field 39", "shape [2]"),
])  # fmt: skip
def test_other_fields_than_the_rest_raise_everywhere_and_name_rank_and_field(failures, name, field, found):
    for line in everyone(failures, name):
        assert line.startswith("DistributedError: a rank has other fields than the rest")
        assert "rank 2" in line
        assert field in line
        assert found in line


@pytest.mark.parametrize(("name", "words"), [
    ("missing key", ["sample 2", "'mask'"]),
    ("another length", ["sample 3", "length"]),
    ("too few", ["samples", "expected 4, found 3"]),
    ("a plan of other ranks", ["another number of ranks"]),
    ("bad lengths", ["negative"]),
    ("share of nothing", ["must have microbatches"]),
])  # fmt: skip
def test_one_rank_at_fault_raises_its_error_there_and_tells_the_others(failures, name, words):
    lines = everyone(failures, name)
    assert [line.split(":")[0] for line in lines] == ["DistributedError", "DistributedError", "InputError"]
    for line in lines:
        assert all(word in line for word in words), line
    assert all("rank 2" in line for line in lines[:2])


def test_ranks_of_other_dtypes_get_the_promoted_one_and_different_plans_raise_everywhere(failures):
    """Batches travel like samples."""
    assert everyone(failures, "dtype") == ["w torch.float32, x torch.int64"] * 3
    assert len(set(everyone(failures, "another plan"))) == 1
    assert "different plans" in failures[0]["another plan"]
