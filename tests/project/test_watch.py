"""What ``make watch`` expects of other frameworks is dated and whole."""

import json

from tests.support.launch import ROOT


def test_the_expectations_are_dated_and_whole():
    frameworks = json.loads((ROOT / "maintenance" / "watched.json").read_text())
    assert len(frameworks) >= 13
    for name, wanted in frameworks.items():
        assert wanted["read"] >= "2026-07", name
        assert wanted["version"], name
        values = [value for names in wanted["files"].values() for value in names.values()]
        assert values, name
        assert "(not there)" not in values, name
