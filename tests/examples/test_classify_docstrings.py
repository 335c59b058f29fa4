"""examples/06_classify_docstrings.py, as a person runs it, a little shorter: it beats naming the largest package."""

import re

import pytest

from tests.support.examples import run_example


@pytest.mark.slow
def test_the_classifier_beats_the_majority(tmp_path):
    done = run_example("06_classify_docstrings.py", "--steps", 120, cwd=tmp_path)
    told = re.search(r"accuracy, held out: ([\d.]+) \(always \w+: ([\d.]+)\)", done.stdout)
    assert told is not None, done.stdout
    found, baseline = map(float, told.groups())
    assert 0.1 < baseline < 0.6
    assert found > baseline + 0.05
