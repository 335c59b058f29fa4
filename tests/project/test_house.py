"""The rules of the source tree: which room imports which, one module per class name, and what a package binds."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from operator import attrgetter

from tests.support import house
from tests.support.forked import environment
from tests.support.launch import ROOT

TREE = house.read_tree(ROOT / "src", "ullage")

#: The most modules and folders that lie in one folder.
MOST = 15
#: Folders that import each other, with the reason: the command line asks the root for the version.
MUTUAL = {frozenset({"ullage", "ullage.cli"})}
#: Public functions of several modules, where one name is right: a verb is called as the function that it runs, and every
#: framework has its own way to be installed and asked.
SHARED = {"audit", "plan", "report", "install", "get_minimum_num_micro_batch_size"}


def rooms():
    """The rooms in the order of the table in docs/layout.md."""
    table = (ROOT / "docs" / "layout.md").read_text().partition("## The house")[2]
    first_cells = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", table, flags=re.MULTILINE)
    return [room for cell in first_cells for room in re.findall(r"[\w.]+", cell)]


def test_every_room_is_in_the_table_and_every_row_is_a_room():
    there = {house.room_of(module) for module in TREE} - {"", "__main__"}
    assert len(there) > 10
    assert sorted(rooms()) == sorted(there)


def test_the_drawing_has_every_room_on_a_floor_that_agrees_with_the_table():
    drawing = (ROOT / "docs" / "assets" / "house.svg").read_text()
    floors = {}
    for y, room in re.findall(r'<text x="[\d.]+" y="(\d+)" text-anchor="middle">(\w+)</text>', drawing):
        floors[room] = -int(y)
    listed = [room.partition(".")[0] for room in rooms()]
    assert floors.keys() == set(listed)
    assert max(floors["core"], floors["ranks"]) < min(y for room, y in floors.items() if room not in ("core", "ranks"))
    rest = [floors[room] for room in listed if room not in ("core", "ranks")]
    assert rest == sorted(rest)


def test_no_room_imports_one_below_it():
    assert house.upward(TREE, [*rooms(), "__main__"]) == set()


def test_no_modules_import_each_other():
    assert house.circles(TREE) == set()


def test_a_class_name_and_a_public_function_belong_to_one_module():
    assert house.doubled(TREE, functions=False) == {}
    found = house.doubled(TREE, functions=True)
    assert {name: modules for name, modules in found.items() if name not in SHARED} == {}


def test_a_folder_holds_no_more_than_a_stranger_reads_at_a_glance():
    assert {folder for folder, inside in house.entries(TREE).items() if len(inside) > MOST} == set()


def test_no_folders_import_each_other():
    assert house.mutual_folders(TREE) - MUTUAL == set()


def test_no_name_of_a_package_hides_a_module():
    assert house.hidden_modules(TREE) == set()


def test_what_dir_shows_of_the_package_is_for_its_users():
    import ullage

    assert {"TYPE_CHECKING", "annotations", "lazy_names"}.isdisjoint(dir(ullage))
    assert {*ullage.__all__, "__version__", "Trainer", "TrainingArguments", "RaggedCollator"} <= {*dir(ullage)}
    code = "import sys, ullage; print({*dir(ullage)} >= {'Trainer'}, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.split() == ["True", "False"]


def test_lazy_names_are_those_that_type_checkers_see():
    tables = house.lazy_tables(TREE)
    assert {"ullage", "ullage.training", "ullage.datasets", "ullage.engines.fsdp"} <= tables.keys()
    for package, (listed, typed) in tables.items():
        assert listed == typed, package


def test_every_room_is_an_attribute_and_every_public_name_loads():
    ullage = importlib.import_module("ullage")
    for room in rooms():
        module = importlib.import_module(f"ullage.{room}")  # first: what is not offered loads with who needs it
        assert attrgetter(room)(ullage) is module
    for package in house.lazy_tables(TREE):
        module = importlib.import_module(package)
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert getattr(module, name) is not None
        star: dict[str, object] = {}
        exec(f"from {package} import *", star)
        assert set(module.__all__) <= star.keys()


def bound_twice(text):
    """Names that a module assigns or defines twice at its top: the second silently changes what uses the first."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names += [] if node.decorator_list else [node.name]  # overloads, and functions that register themselves
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return sorted({name for name in names if names.count(name) > 1})


def test_a_module_binds_a_name_once():
    assert {name: found for name, text in TREE.items() if (found := bound_twice(text))} == {}
    text = "_ROUNDS = 30\n\ndef first(): ...\n\n_ROUNDS: int = 60\n\nclass first: ...\n"
    assert bound_twice(text) == ["_ROUNDS", "first"]


def test_a_module_is_as_long_as_its_idea():
    assert {name for name, text in TREE.items() if len(text.splitlines()) > 700} == set()


PLANTED = {
    "lib": "from lib.low import Low\n",
    "lib.high": "class High: ...\nclass Row: ...\n",
    "lib.low": "def read():\n    from lib.high import High\n    return High\nclass Low: ...\n",
    "lib.rows": "from lib.rows.first import second\n",
    "lib.rows.first": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lib.rows.second import Row\n",
    "lib.rows.second": "import lib.rows.first\nclass Row: ...\n",
}


def test_planted_violations_are_found():
    assert house.upward(PLANTED, ["low", "high", "rows"]) == {("lib.low", "lib.high")}
    assert house.upward(PLANTED, ["high", "low", "rows"]) == set()
    assert house.circles(PLANTED) == {frozenset({"lib.rows.first", "lib.rows.second"})}
    assert house.doubled(PLANTED, functions=False) == {"Row": ["lib.high", "lib.rows.second"]}
    assert house.hidden_modules(PLANTED) == {"lib.rows.second"}
    assert house.mutual_folders(PLANTED) == set()
    assert house.entries(PLANTED) == {
        "lib": ["lib.high", "lib.low", "lib.rows"],
        "lib.rows": ["lib.rows.first", "lib.rows.second"],
    }
    both_ways = {**PLANTED, "lib.rows.first": "from lib.low import Low\n", "lib.low": "import lib.rows.second\n"}
    assert house.mutual_folders(both_ways) == {frozenset({"lib", "lib.rows"})}
    parted = {"lib.high": "def read(): ...\ndef _own(): ...\n", "lib.low": "def _own(): ...\nasync def read(): ...\n"}
    assert house.doubled({**PLANTED, **parted}, functions=True) == {"read": ["lib.high", "lib.low"]}
    foundation = {"lib": "", "lib.core": "", "lib.core.base": "import lib.core.shape\n", "lib.core.shape": ""}
    assert house.upward(foundation, ["core.base", "core.shape"]) == {("lib.core.base", "lib.core.shape")}
    through_the_root = {**PLANTED, "lib.high": "from lib import Low\n"}
    assert house.upward(through_the_root, ["high", "low", "rows"]) == {("lib.high", "lib.low")}


def test_what_the_gpu_tests_import_is_there():
    """They run where a GPU is, which is seldom: a name that has moved would be noticed late."""
    found = []
    for path in sorted((ROOT / "tests" / "gpu").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("tests", "ullage"):
                found += [(node.module, alias.name) for alias in node.names]
    assert len(found) > 20
    for module, name in found:
        loaded = importlib.import_module(module)
        assert hasattr(loaded, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)
