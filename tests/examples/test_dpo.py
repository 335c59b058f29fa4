"""examples/12_dpo.py, as a person runs it: the loss falls, and padding is told apart from tokens."""

import re

import pytest

from tests.support.examples import run_example


@pytest.mark.slow
def test_dpo_learns_its_pairs_packed(tmp_path):
    done = run_example("12_dpo.py", cwd=tmp_path)
    told = re.search(r"loss ([\d.]+) to ([\d.]+), ", done.stdout)
    assert told is not None, done.stdout
    first, last = map(float, told.groups())
    assert first == pytest.approx(0.6931, abs=1e-4), "policy and reference begin alike"
    assert last < first
    told = re.search(r"([\d,]+) tokens; padded rows would have been ([\d,]+), (\d+)%", done.stdout)
    assert told is not None, done.stdout
    tokens, padded = (int(number.replace(",", "")) for number in told.groups()[:2])
    assert 1.3 * tokens < padded
