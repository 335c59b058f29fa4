"""Every example in a docstring of the library is run and says what it prints."""

import doctest
import importlib

import pytest

from tests.support.launch import ROOT

SOURCE = ROOT / "src"
#: Only what has an example is imported: not the engines' libraries.
MODULES = sorted(path for path in SOURCE.rglob("*.py") if ">>>" in path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_examples_of_a_module_print_what_they_say(path):
    module = importlib.import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    said: list[str] = []
    examples, failed = 0, 0
    for found in doctest.DocTestFinder(exclude_empty=True).find(module):
        result = doctest.DocTestRunner(verbose=False).run(found, out=said.append)
        examples, failed = examples + result.attempted, failed + result.failed
    assert failed == 0, "".join(said)
    assert examples > 0
    assert "doctest: +SKIP" not in path.read_text()


def test_there_are_examples_to_run():
    assert {"planning/planner.py", "core/layout.py", "core/batch.py"} <= {
        str(path.relative_to(SOURCE / "ullage")) for path in MODULES
    }
