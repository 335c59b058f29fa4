"""A capacity that ranks find together, and what a process holds that trains with one it has found."""

import pytest

from tests.support import capacity_script
from tests.support.small_runs import on_ranks

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return on_ranks(2, capacity_script, folder, STAGES, timeout=300)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_take_the_smallest_and_train_as_with_the_number(pair, stage):
    """Under DDP and ZeRO 1, 2 and 3; bit for bit, so nothing of the dry runs is left in an engine either."""
    (found, given), (other, _) = (rank[str(stage)] for rank in pair)
    assert found["capacity"] == other["capacity"] == found["kept"]
    assert 300 <= found["capacity"] < 1216
    assert found["losses"] == given["losses"]
    assert found["norms"] == given["norms"]
    assert found["steps"] == 3


@pytest.mark.slow
def test_training_stays_within_the_memory_given(tmp_path):
    (found,) = on_ranks(1, capacity_script, tmp_path, [], timeout=200)
    assert found["capacity"] >= 1500
    assert found["steps"] == len(found["peaks"]) == 3
    # Rows of many shapes fragment the C library's heap: a tenth more, at most, than dry runs of one shape.
    assert max(found["peaks"]) <= 0.1 * found["allowed"], found
    assert max(found["peaks"]) >= -100 * 2**20, "half of what was free was left unused"
