"""The gradient of a packed step is that of its sequences, one by one, however they are packed, dealt and weighed.

``benchmarks/campaigns/exactness.py`` takes thousands of steps where these tests take forty.
"""

import json
from collections import Counter

import pytest

from tests.support import exactness, exactness_script
from tests.support.launch import torchrun

SEEDS = range(40)


@pytest.mark.slow
@pytest.mark.property
def test_the_gradient_of_a_step_does_not_depend_on_packing():
    seen, found = set(), Counter()
    for seed in SEEDS:
        case, dtype = exactness.Case.draw(seed), list(exactness.DTYPES)[seed % 2]
        off = exactness.check(case, dtype)
        assert max(off.values()) <= exactness.TOLERANCES[dtype], (seed, dtype, case, off)
        found.update(exactness.covered(case))
        seen |= {case.family, case.weighting, case.strategy, case.sync, case.oversize, case.plan.ranks, dtype}
    # None of it is for want of cases.
    expected = {*exactness.FAMILIES, *exactness.WEIGHTINGS, *exactness.STRATEGIES, "microbatch", "step", *range(1, 9)}
    assert expected <= seen
    assert [name for name, number in found.items() if not number] == []


def test_a_difference_would_be_found():
    """Against the other weightings, the same step is off by far more than rounding."""
    drawn = (exactness.Case.draw(seed, "llama") for seed in range(100))
    case = next(case for case in drawn if case.weighting == "sequence" and len(case.samples) > 4)
    _, packed = exactness.packed_gradient(case, "float64")
    model = exactness.unpacked_model("llama", "float64")
    samples = [{**sample, "weight": 1.0 + i} for i, sample in enumerate(exactness.kept_samples(case))]
    for weighting in ("token", "weight"):
        _, other = exactness.gradient_by_hand(model, "llama", weighting, samples)
        assert exactness.difference(packed, other) > 1e-3, weighting


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("processes", "first", "last"), [(2, 0, 5), (4, 5, 9)])
def test_steps_of_the_trainer_on_real_processes(tmp_path, processes, first, last):
    torchrun(processes, exactness_script.__file__, tmp_path, first, last)
    runs = json.loads((tmp_path / "results0.json").read_text())
    assert len(runs) == last - first
    for run in runs:
        assert len(run["differences"]) == exactness_script.STEPS
        assert max(run["differences"]) <= exactness.TOLERANCES[run["dtype"]], run
