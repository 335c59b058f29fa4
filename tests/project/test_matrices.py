"""A matrix of cases runs in part, the same part on every worker, another one with another seed, and whole in a campaign."""

from types import SimpleNamespace

from tests.support.matrices import WHOLE, part


class Case:
    def __init__(self, name, mark=None):
        self.nodeid, self._mark = name, mark

    def get_closest_marker(self, name):
        return self._mark if name == "matrix" else None


THIRD = SimpleNamespace(kwargs={})


def cases(name, count):
    return [Case(f"{name}[{i}]", THIRD) for i in range(count)]


def test_the_seed_and_the_test_decide_which():
    items = cases("a.py::first", 30) + cases("a.py::second", 30)
    names = [case.nodeid for case in part(items, "one")[0]]
    assert names == [case.nodeid for case in part(cases("a.py::first", 30) + items[30:], "one")[0]]
    assert names != [case.nodeid for case in part(items, "another")[0]]
    first, second = ([name.partition("[")[2] for name in names if test in name] for test in ("first", "second"))
    assert len(first) == len(second) == 10
    assert first != second


def test_in_time_every_case_runs():
    items = cases("a.py::test", 12)
    assert {case for seed in range(60) for case in part(items, str(seed))[0]} == set(items)
    assert part(items, WHOLE) == (items, [])
