"""The seventh example learns what it says it learns, on strings that it has not seen."""

import re
import sys

import pytest

from tests.support import forked
from tests.support.launch import ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reverse", "dates"])
def test_it_is_right_to_the_last_character(task, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "07_reverse_digits.py"), "--task", task]
    done = forked.run(
        [*command, "--output_dir", str(tmp_path / "run")],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (right,) = re.findall(r"exact match on 500 held-out strings: ([0-9.]+)%", done.stdout)
    assert float(right) >= 99.0, done.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()
    shown = re.findall(r"^(\S.*) -> (\S+)$", done.stdout, flags=re.MULTILINE)
    assert len(shown) == 5
    if task == "reverse":
        assert sum(source[::-1] == target for source, target in shown) >= 4
