"""examples/06_classify_docstrings.py, as a person runs it, a little shorter: it beats naming the largest package."""

import re
import sys

import pytest

from tests.support import forked
from tests.support.launch import ROOT, environment


@pytest.mark.slow
def test_the_classifier_beats_the_majority(tmp_path):
    script = ROOT / "examples" / "06_classify_docstrings.py"
    done = forked.run(
        [sys.executable, str(script), "--steps", "120"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.search(r"accuracy, held out: ([\d.]+) \(always \w+: ([\d.]+)\)", done.stdout)
    assert told is not None, done.stdout
    found, baseline = map(float, told.groups())
    assert 0.1 < baseline < 0.6
    assert found > baseline + 0.05
