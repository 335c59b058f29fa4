"""The seventh example learns what it says it learns, on strings that it has not seen."""

import re

import pytest

from tests.support.examples import run_example


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reverse", "dates"])
def test_it_is_right_to_the_last_character(task, tmp_path):
    arguments = ["--task", task, "--output_dir", tmp_path / "run"]
    done = run_example("07_reverse_digits.py", *arguments, cwd=tmp_path, timeout=900)
    (right,) = re.findall(r"exact match on 500 held-out strings: ([0-9.]+)%", done.stdout)
    assert float(right) >= 99.0, done.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()
    shown = re.findall(r"^(\S.*) -> (\S+)$", done.stdout, flags=re.MULTILINE)
    assert len(shown) == 5
    if task == "reverse":
        assert sum(source[::-1] == target for source, target in shown) >= 4
