"""``maintenance/watch.py`` on a made-up framework: what has changed in it is found, and said by name."""

import importlib.util
import json

import pytest

from tests.support.launch import ROOT

spec = importlib.util.spec_from_file_location("watch", ROOT / "maintenance" / "watch.py")
watch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watch)

SOURCE = """
LIMIT = 3
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
    }
    entry = {"package": "made_up", "distribution": "made-up", "read": "2026-08-22", "version": "1.0"}
    expected = tmp_path / "watched.json"
    expected.write_text(json.dumps({"made": {**entry, "files": {"made_up/packing.py": wanted}}}))
    return file, expected, f"MADE={tmp_path / 'made'}"


def test_nothing_has_changed(framework, capsys):
    _, expected, place = framework
    assert watch.main([place], expected) == 0
    assert "nothing has changed (expected as of 2026-08-22, 1.0)" in capsys.readouterr().out


@pytest.mark.parametrize(("before", "after", "said"), [
    (
        "cap: int = 8",
        "cap: int = 9",
        "pack\n    was lengths, cap=8, *, groups=None\n    is  lengths, cap=9, *, groups=None",
    ),
    ("def pack", "def pack_all", "pack\n    was lengths, cap=8, *, groups=None\n    is  (not there)"),
    ("first: int", "first: int\n    third: int", "Params has a new field third"),
    ("    first: int\n", "", "Params has no field first any more"),
    ("send(self, to)", "send(self, to, at)", "Params.send\n    was self, to\n    is  self, to, at"),
    ("LIMIT = 3", "LIMIT = 4", "LIMIT\n    was 3\n    is  4"),
])  # fmt: skip
def test_a_change_is_found(framework, capsys, before, after, said):
    file, expected, place = framework
    file.write_text(SOURCE.replace(before, after))
    assert watch.main([place], expected) == 1
    out = capsys.readouterr().out
    assert "1 changes" in out
    assert said in out.replace("\n      ", "\n    ")
    assert watch.main([place, "--update"], expected) == 0
    assert watch.main([place], expected) == 0


def test_a_framework_that_is_not_here(framework, capsys):
    file, expected, place = framework
    assert watch.main([], expected) == 0
    assert "made: not here; MADE=path names a checkout" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        watch.main([place, "OTHER=x"], expected)
    assert "no such framework: OTHER; there are MADE" in capsys.readouterr().err
    file.unlink()
    assert watch.main([place], expected) == 1


def test_the_expectations_are_dated_and_whole():
    frameworks = json.loads(watch.EXPECTED.read_text())
    assert len(frameworks) >= 13
    for name, wanted in frameworks.items():
        assert wanted["read"] >= "2026-07", name
        assert wanted["version"], name
        values = [value for names in wanted["files"].values() for value in names.values()]
        assert values, name
        assert watch.MISSING not in values, name
