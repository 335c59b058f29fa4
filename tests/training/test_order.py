"""A run that goes on inside an epoch: with the samples that are left of it, or with a warning that names the sampler."""

import pytest

from tests.support import order_script
from tests.support.order_script import NUMBER, interrupted
from tests.support.small_runs import on_ranks

#: Samplers that draw from the global random state. Packed steps seed all of them but one of a trainer's own.
REPEATS = {"LengthGroupedSampler", "OwnSampler", "RandomSampler"}


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", order_script.KINDS)
def test_an_order_that_a_checkpoint_does_not_hold_is_said(tmp_path, kind, packed):
    if kind == "own loader" and packed:
        pytest.skip("packs what the loader gives, as without packing")
    found = interrupted(tmp_path, kind, 1, packed)
    once = found["samples"] == dict.fromkeys(range(NUMBER), 1)
    # An own loader's sampler is torch's, which seeds itself from the global random state.
    named = {"own loader": "RandomSampler"}.get(kind, kind)
    repeats = named in REPEATS and (not packed or named == "OwnSampler")
    assert (found["warned"], once) == (([named], False) if repeats else ([], True))


@pytest.mark.regression
@pytest.mark.parametrize("kind", ["LengthGroupedSampler", "seedable"])
def test_the_first_epoch_is_drawn_again_as_it_was(tmp_path, kind):
    found = interrupted(tmp_path, kind, 0)
    assert found == {"warned": [], "samples": dict.fromkeys(range(NUMBER), 1)}


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.distributed
def test_two_ranks_say_it_once(tmp_path):
    cases = [["LengthGroupedSampler", 1, False], ["RandomSampler", 1, True], ["seedable", 1, False]]
    first, second = on_ranks(2, order_script, tmp_path, cases, timeout=500)
    for case, mine, other in zip(cases, first, second, strict=True):
        counted = [mine["samples"].get(str(i), 0) + other["samples"].get(str(i), 0) for i in range(NUMBER)]
        repeats = case[0] in REPEATS and not case[2]
        assert (mine["warned"], other["warned"]) == (([case[0]] if repeats else []), []), case
        assert (counted == [1] * NUMBER) is not repeats, (case, counted)
