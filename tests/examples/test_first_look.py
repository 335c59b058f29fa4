"""examples/13_first_look.ipynb: it runs, in a kernel where there is one, and shows what it says it shows."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from maintenance.notebook import NOTEBOOK, executed, text_of
from tests.support.launch import ROOT, environment


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def saved():
    return json.loads(NOTEBOOK.read_text())


def compare(said):
    cells = code_cells(saved())
    compared = 0
    for cell, text in zip(cells, said, strict=True):
        if "varies" in cell["metadata"].get("tags", ()):
            assert re.sub(r"[\d.]+", "0", text) == re.sub(r"[\d.]+", "0", text_of(cell))
        else:
            assert text == text_of(cell)
            compared += text != ""
    assert compared >= 7


def test_the_saved_notebook_is_small_and_of_no_machine():
    text = NOTEBOOK.read_text()
    assert len(text) < 150_000
    for word in ("/work", "/home", "/tmp", "site-packages", "stderr", "http"):
        assert word not in text, word
    drawings = [o["data"] for cell in code_cells(saved()) for o in cell["outputs"] if "data" in o]
    assert [sorted(data) for data in drawings] == [["text/html", "text/plain"]] * 5
    assert {"".join(data["text/plain"]).partition("(")[0] for data in drawings} == {
        *("Layout", "RaggedBatch", "Plan", "Inventory")
    }


@pytest.mark.slow
def test_the_notebook_shows_what_was_saved(tmp_path):
    target = tmp_path / "said.json"
    script = ROOT / "tests" / "support" / "notebook_script.py"
    done = subprocess.run(
        [sys.executable, str(script), str(NOTEBOOK), str(target)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    as_output = [{"outputs": [{"text": text}]} for text in json.loads(target.read_text())]
    compare([text_of(cell) for cell in as_output])


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))), reason="no nbclient or ipykernel is installed"
)
def test_a_kernel_shows_what_was_saved(tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    compare([text_of(cell) for cell in code_cells(executed(NOTEBOOK, tmp_path))])
