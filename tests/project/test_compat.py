"""What ``make compat`` tries of each release packs exactly with this one, and has a type of every family."""

import pytest

from benchmarks.campaigns import versions
from tests.support.launch import ROOT


@pytest.mark.parametrize("named", [*versions.QUICK_TESTS, *versions.TRL_TESTS])
def test_the_tests_that_it_runs_are_there(named):
    path, _, name = named.partition("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_family_of_forwards_has_a_type():
    """Of the releases that ``make compat`` tries."""
    found = versions.packed()
    assert found["failed"] == {}
    assert versions.families() == set(found["families"])
