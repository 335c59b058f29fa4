"""The size of each room, in lines of Python: it may fall, and what makes it grow names what leaves instead.

``python -m tests.project.test_budget`` prints the table as it would be today.
"""

from collections import Counter

from tests.support.launch import ROOT

ROOMS = ROOT / "src" / "ullage"
#: Lines of a room at most, rounded up to 50; "" is for the modules of no room. The search in "mixers" came before all
#: that it replaces has gone: the module calls read off the stack in "attention", and in "mixers" the shapes that
#: ``by_lengths`` tells apart where a model runs as a whole. For ``attention.explain`` the head in chunks of "training"
#: gave way; for ``ullage env``, the words of others and the causes that verbs name ("cli"), lines of "mixers", "planning"
#: and "ranks".
BUDGET = {
    "": 100,
    "attention": 3300,
    "checkpoint": 11100,
    "cli": 2250,
    "core": 2850,
    "datasets": 2250,
    "engines": 4250,
    "exchange": 2200,
    "mixers": 5450,
    "models": 3550,
    "planning": 4250,
    "proofs": 700,
    "ranks": 1150,
    "report": 1500,
    "training": 13750,
}


def sizes() -> Counter[str]:
    """The lines of each room."""
    lines: Counter[str] = Counter()
    for path in ROOMS.rglob("*.py"):
        room = path.relative_to(ROOMS).parts[0] if path.parent != ROOMS else ""
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def test_no_room_is_larger_than_its_budget():
    found = sizes()
    assert {room: found[room] for room in found if found[room] > BUDGET.get(room, 0)} == {}
    assert sorted(found) == sorted(BUDGET)  # and a room that left is out of the table


if __name__ == "__main__":
    for name, number in sorted(sizes().items()):
        print(f'    "{name}": {-(-number // 50) * 50},')
