"""What the adapters rely on in other frameworks, held against their sources; says what has changed.

    make watch VERL=path MEGATRON=path ...           # checkouts; the others are looked for where they are installed
    python maintenance/watch.py --update VERL=path   # write what is there now as expected, once the adapter fits it

Sources are read by ``ast``: nothing is imported, so nothing has to be installed but Python. What is expected is data,
``watched.json``: for each framework where it was read, on which day, and per file the signatures of functions
(``name`` or ``Class.method``), the fields of classes and the values of constants.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_name("watched.json")
MISSING = "(not there)"


def find(name: str, tree: ast.Module) -> ast.AST | None:
    """The definition or assignment of ``name``, which may be ``Class.method``."""
    body: list[ast.stmt] = tree.body
    found: ast.AST | None = None
    for part in name.split("."):
        found = next((node for node in statements(body) if part in names(node)), None)
        body = getattr(found, "body", [])
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those within ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            parts = [node.body, node.orelse, *([handler.body for handler in getattr(node, "handlers", [])])]
            for part in parts:
                yield from statements(part)


def names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def describe(node: ast.AST | None) -> str | list[str]:
    """A function's arguments with their defaults, the fields or members of a class, a constant's value."""
    if node is None:
        return MISSING
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = node.args
        for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
            if argument is not None:
                argument.annotation = None
        return ast.unparse(given)
    if isinstance(node, ast.ClassDef):
        return [name for part in node.body if isinstance(part, (ast.AnnAssign, ast.Assign)) for name in names(part)]
    value = getattr(node, "value", None)
    return ast.unparse(value) if value is not None else MISSING


def root_of(name: str, wanted: dict[str, Any], given: dict[str, str]) -> tuple[Path, str] | None:
    """The folder that holds a framework's package, and what version that is."""
    if name.upper() in given:
        root = Path(given[name.upper()])
        root = root / "src" if (root / "src" / wanted["package"]).is_dir() else root
        shown = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        return root, shown.stdout.strip()[:12] or "a folder"
    found = importlib.util.find_spec(wanted["package"])
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))).parent, importlib.metadata.version(wanted["distribution"])


def observed(root: Path, files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same files and names, with what is there now."""
    found: dict[str, dict[str, Any]] = {}
    for file, wanted in files.items():
        path = root / file
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        found[file] = {name: describe(find(name, tree)) for name in wanted}
    return found


def changes(expected: dict[str, dict[str, Any]], there: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for file, wanted in expected.items():
        for name, before in wanted.items():
            now = there[file][name]
            if now == before:
                continue
            if isinstance(before, list) and isinstance(now, list):
                lines += [f"{file}: {name} has a new field {field}" for field in now if field not in before]
                lines += [f"{file}: {name} has no field {field} any more" for field in before if field not in now]
                if sorted(now) == sorted(before):
                    lines.append(f"{file}: the fields of {name} are in another order")
            else:
                lines.append(f"{file}: {name}\n    was {before}\n    is  {now}")
    return lines


def main(arguments: list[str], expected: Path = EXPECTED) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", metavar="NAME=PATH")
    parser.add_argument("--update", action="store_true", help="write what is there as expected, for those named")
    given = parser.parse_args(arguments)
    places = dict(each.split("=", 1) for each in given.checkouts)
    frameworks = json.loads(expected.read_text())
    unknown = sorted(set(places) - {name.upper() for name in frameworks})
    if unknown:
        parser.error(f"no such framework: {', '.join(unknown)}; there are {', '.join(map(str.upper, frameworks))}")
    changed = 0
    for name, wanted in frameworks.items():
        place = root_of(name, wanted, places)
        if place is None:
            print(f"{name}: not here; {name.upper()}=path names a checkout")
            continue
        root, version = place
        there = observed(root, wanted["files"])
        lines = changes(wanted["files"], there)
        held = f"expected as of {wanted['read']}, {wanted['version']}"
        print(f"{name} {version}: {f'{len(lines)} changes' if lines else 'nothing has changed'} ({held})")
        print("".join(f"  {line}\n" for line in lines), end="")
        changed += len(lines)
        if given.update and name.upper() in places | dict.fromkeys([] if places else [name.upper()]):
            wanted.update(read=date.today().isoformat(), version=version, files=there)
    if given.update:
        expected.write_text(json.dumps(frameworks, indent=1) + "\n")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
