"""examples/05_language_model.py, as a person runs it, but shorter: it learns, and what it writes is text."""

import re

import pytest

from tests.support.examples import run_example


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "minlstm"])
def test_the_language_model_learns(cell, tmp_path):
    sizes = ["--steps", 50, "--hidden_size", 64, "--cell", cell, "--output_dir", tmp_path / "model"]
    done = run_example("05_language_model.py", *sizes, cwd=tmp_path)
    told = re.search(r"bits per byte, held out: ([\d.]+) before, ([\d.]+) after", done.stdout)
    assert told is not None, done.stdout
    before, after = map(float, told.groups())
    assert 7.5 < before < 8.5  # a byte that nothing is known of has 8 bits
    assert after < 4.8  # how often bytes occur alone gives about 4.9
    assert "\n  Return " in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
