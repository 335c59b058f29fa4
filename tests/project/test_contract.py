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
    """``(name, kind, parameters)`` of each row of the table."""
    text = (ROOT / "docs" / "reference" / "contract.md").read_text()
    return re.findall(r"^\| `([\w.]+)` \| (\w+) \| (?:`(.*)` )?\|$", text, flags=re.MULTILINE)


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


def parameters(function):
    """The names of a signature in order, with its stars; a method without ``self``."""
    signature = inspect.signature(function)
    shown, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
        keyword_only = keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(stars + parameter.name)
    return ", ".join(shown)


def has(name):
    """Whether the class around an attribute has it, as a property, a field or an annotation."""
    owner = resolve(name.rpartition(".")[0])
    attribute = name.rpartition(".")[2]
    fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    return hasattr(owner, attribute) or attribute in fields | getattr(owner, "__annotations__", {}).keys()


def test_there_are_rows_to_compare():
    assert len(rows()) > 90
    assert {name for name, _, _ in rows()} >= {
        "ullage.plan",
        "ullage.engines.fsdp.Trainer",
        "ullage.ranks.Topology.single",
    }
    assert len({name for name, _, _ in rows()}) == len(rows())


@pytest.mark.parametrize(("name", "kind", "expected"), rows())
def test_a_name_of_the_contract_is_in_the_code(name, kind, expected):
    if kind == "attribute":
        assert has(name)
        return
    found = resolve(name)
    assert _KINDS[kind](found)
    if expected:
        assert parameters(found) == expected


def test_the_commands_of_the_contract_are_those_of_the_command_line():
    text = (ROOT / "docs" / "reference" / "contract.md").read_text()
    assert re.findall(r"^\| `ullage (\w+)` \|", text, flags=re.MULTILINE) == list(VERBS)
