"""examples/13_first_look.ipynb: it runs in a kernel and shows what it says it shows."""

import json
import re

import pytest

from maintenance.notebook import NOTEBOOK, executed, text_of
from tests.support.launch import environment


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def saved():
    return json.loads(NOTEBOOK.read_text())


@pytest.mark.long
@pytest.mark.slow
def test_a_kernel_shows_what_was_saved(tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    compared = 0
    for cell, run in zip(code_cells(saved()), code_cells(executed(NOTEBOOK, tmp_path)), strict=True):
        said, text = text_of(run), text_of(cell)
        if "varies" in cell["metadata"].get("tags", ()):
            assert re.sub(r"[\d.]+", "0", said) == re.sub(r"[\d.]+", "0", text)
        else:
            assert said == text
            compared += text != ""
    assert compared >= 7
