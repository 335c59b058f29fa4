"""The names of docs/reference/contract.md against the code: each is there, of its kind, with its parameters in order."""

import dataclasses
import importlib
import inspect
import re

import pytest

from tests.support.launch import ROOT
from ullage.cli import VERBS

_KINDS = {"function": callable, "method": callable, "class": inspect.isclass}


def rows():
    """``(name, kind, parameters)`` of each name in the rows of the table."""
    text = (ROOT / "docs" / "reference" / "contract.md").read_text()
    found = re.findall(r"^\| (`[\w.`, ]+`) \| (\w+) \| (?:`(.*)` )?\|$", text, flags=re.MULTILINE)
    return [(name, *rest) for names, *rest in found for name in re.findall(r"[\w.]+", names)]


def resolve(name):
    """The object of a dotted name: the longest part that is a module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def keeps(function, promised):
    """Whether a function has the parameters of a row: by position the same, in order, first; by keyword among its own."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first, _, keywords = promised.replace(" ", "").partition("*,")
    named = [name for name in first.split(",") if name]
    return by_position[: len(named)] == named and set(filter(None, keywords.split(","))) <= {p.name for p in parameters}


def has(name):
    """Whether the class around an attribute has it, as a property, a field or an annotation."""
    owner = resolve(name.rpartition(".")[0])
    attribute = name.rpartition(".")[2]
    fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    return hasattr(owner, attribute) or attribute in fields | getattr(owner, "__annotations__", {}).keys()


@pytest.mark.parametrize(("name", "kind", "expected"), rows())
def test_a_name_of_the_contract_is_in_the_code(name, kind, expected):
    if kind == "attribute":
        assert has(name)
        return
    found = resolve(name)
    assert _KINDS[kind](found)
    assert keeps(found, expected)


def test_the_commands_of_the_contract_are_those_of_the_command_line():
    text = (ROOT / "docs" / "reference" / "contract.md").read_text()
    assert re.findall(r"^\| `ullage (\w+)` \|", text, flags=re.MULTILINE) == list(VERBS)
    assert len({name for name, _, _ in rows()}) == len(rows()) > 90
    assert keeps(resolve, "name")
    assert not keeps(resolve, "name, second")
