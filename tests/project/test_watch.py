"""``maintenance/watch.py`` on a made-up framework: what has changed in it is found, and said by name."""

import importlib.util
import json

import pytest

from tests.support.launch import ROOT

spec = importlib.util.spec_from_file_location("watch", ROOT / "maintenance" / "watch.py")
watch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watch)

SOURCE = """
import multiprocessing
LIMIT = 3
pool = multiprocessing.get_context("fork").Pool
try:
    import fast
except ImportError:
    fast = None
else:
    def pack(lengths, cap: int = 8, *, groups=None): ...
class Params:
    first: int
    second: str = "b"
    def send(self, to): ...
"""

PROJECT = """
[project]
requires-python = ">=3.10"
dependencies = ["torch >= 2.8", "numpy>=2", "rich"]
"""


@pytest.fixture
def framework(tmp_path):
    """A checkout with a ``src`` folder, and what is expected of it."""
    file = tmp_path / "made" / "src" / "made_up" / "packing.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    wanted = {
        "pack": "lengths, cap=8, *, groups=None",
        "Params": ["first", "second"],
        "Params.send": "self, to",
        "LIMIT": "3",
        "(start methods)": ["multiprocessing.get_context('fork')"],
    }
    (tmp_path / "made" / "pyproject.toml").write_text(PROJECT)
    requires = ["numpy>=2", "python>=3.10", "torch>=2.8"]
    entry = {"package": "made_up", "distribution": "made-up", "read": "2026-08-22", "version": "1.0"}
    expected = tmp_path / "watched.json"
    entry["requires"] = requires
    expected.write_text(json.dumps({"made": {**entry, "files": {"made_up/packing.py": wanted}}}))
    return file, expected, f"MADE={tmp_path / 'made'}"


def test_every_change_is_found_and_said_by_name(framework, capsys):
    file, expected, place = framework
    assert watch.main([place], expected) == 0
    assert "nothing has changed (expected as of 2026-08-22, 1.0)" in capsys.readouterr().out
    changes = {
        "cap: int = 8": "cap: int = 9",
        "first: int\n": "third: int\n",
        "send(self, to)": "send(self, to, at)",
        "LIMIT = 3": "NO_LIMIT = 4",
        '"fork"': '"spawn"',
    }
    text = SOURCE
    for before, after in changes.items():
        text = text.replace(before, after)
    file.write_text(text)
    project = file.parents[2] / "pyproject.toml"
    project.write_text(PROJECT.replace("numpy>=2", "numpy<2"))
    assert watch.main([place], expected) == 1
    out = capsys.readouterr().out.replace("\n      ", "\n    ")
    for said in (
        "pack\n    was lengths, cap=8, *, groups=None\n    is  lengths, cap=9, *, groups=None",
        "Params has a new field third",
        "Params has no field first any more",
        "Params.send\n    was self, to\n    is  self, to, at",
        "LIMIT\n    was 3\n    is  (not there)",
        "(start methods) has a new multiprocessing.get_context('spawn')",
        "(start methods) has no multiprocessing.get_context('fork') any more",
        "it requires numpy<2 now",
        "it requires numpy>=2 no more",
        "9 changes",
    ):
        assert said in out
    assert watch.main([place, "--update"], expected) == 0
    assert watch.main([place], expected) == 0


def test_the_expectations_are_dated_and_whole():
    frameworks = json.loads(watch.EXPECTED.read_text())
    assert len(frameworks) >= 13
    for name, wanted in frameworks.items():
        assert wanted["read"] >= "2026-07", name
        assert wanted["version"], name
        values = [value for names in wanted["files"].values() for value in names.values()]
        assert values, name
        assert watch.MISSING not in values, name
