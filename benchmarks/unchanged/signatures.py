"""Public names: those of every package of ullage, and those of the contract; kinds, signatures, methods, fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from benchmarks.unchanged.forks import Task, run_all
from benchmarks.unchanged.records import Cases, normal, said

ROOT = Path(__file__).resolve().parents[2]


def faces() -> list[str]:
    """``ullage`` and its packages: what is imported from one of their modules is nobody's promise."""
    import ullage

    inner = pkgutil.walk_packages(ullage.__path__, "ullage.", onerror=lambda _: None)
    return ["ullage", *sorted(module.name for module in inner if module.ispkg)]


def names_of(face: str) -> dict[str, dict[str, Any]]:
    """The public names of a package; what keeps it from being imported where something does."""
    try:
        module = importlib.import_module(face)
    except Exception as error:
        return {face: {"error": said(error)}}
    public = getattr(module, "__all__", None)
    if public is None:
        public = [name for name, value in vars(module).items() if name[0] != "_" and not inspect.ismodule(value)]
        public = [name for name in public if getattr(vars(module)[name], "__module__", "").startswith("ullage")]
    found = {}
    for name in sorted(public):
        try:
            found[f"{face}.{name}"] = described(getattr(module, name))
        except Exception as error:
            found[f"{face}.{name}"] = {"error": said(error)}
    return found


def described(value: Any) -> dict[str, Any]:
    """What can be asked of an object: its kind, how it is called, and what a class of ours holds."""
    if inspect.ismodule(value):
        return {"kind": "module"}
    if not inspect.isclass(value):
        if not callable(value):
            return {"kind": f"a {type(value).__name__}"}
        return {"kind": "function", "signature": signature(value)}
    found = {"kind": "class", "bases": ", ".join(base.__name__ for base in value.__mro__[1:-1]), "signature": ""}
    found["signature"] = signature(value)
    if dataclasses.is_dataclass(value):
        found["fields"] = ", ".join(f"{each.name}: {each.type}" for each in dataclasses.fields(value))
    return found | dict(sorted(members(value).items()))


def members(kind: type) -> dict[str, str]:
    """Methods and properties without an underscore that classes of ours define, in the order of resolution."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith("ullage"):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or (inspect.isclass(value) and value.__module__ != owner.__module__):
                continue
            if isinstance(value, property) or not callable(getattr(kind, name, None)):
                found[name] = "a property" if isinstance(value, property) else "an attribute"
            else:
                found[name] = signature(getattr(kind, name))
    return found


def signature(value: Any) -> str:
    """As ``inspect`` writes it, without addresses of objects."""
    try:
        return normal(str(inspect.signature(value)))
    except (ValueError, TypeError) as error:
        return f"none: {type(error).__name__}"


def contract() -> dict[str, dict[str, Any]]:
    """What the rows of the contract's page resolve to."""
    text = (ROOT / "docs" / "reference" / "contract.md").read_text()
    found = {}
    cells = re.findall(r"^\| (`[\w.`, ]+`) \| \w+ \| ", text, flags=re.MULTILINE)
    for name in (name for cell in cells for name in re.findall(r"[\w.]+", cell)):
        try:
            found[f"contract: {name}"] = _short(resolve(name))
        except (AttributeError, ImportError) as error:
            found[f"contract: {name}"] = {"kind": "an attribute of instances", "is": type(error).__name__}
    return found


def _short(value: Any) -> dict[str, Any]:
    whole = described(value)
    return {key: whole[key] for key in ("kind", "signature") if key in whole}


def resolve(name: str) -> Any:
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
    raise ModuleNotFoundError(name)


def run(folder: Path, seed: int, jobs: int, only: str = "") -> Cases:
    """In one fork, since every package is imported, some of which put things in others' places."""

    def ask(_: int) -> dict[str, Any]:
        cases: dict[str, Any] = {}
        for face in faces():
            cases |= names_of(face)
        return cases | contract()

    values = run_all([Task("signatures", ask, folder)], jobs, "signatures")["signatures"][0]
    return values if "error" not in values else {"(all)": values}
