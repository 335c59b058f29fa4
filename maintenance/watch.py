"""What the adapters rely on in other frameworks, held against their sources; says what has changed.

    make watch VERL=path SWIFT=ms_swift-4.6.0-....whl ...   # checkouts and wheels; the others where they are installed
    python maintenance/watch.py --update VERL=path   # write what is there now as expected, once the adapter fits it

Sources are read by ``ast``: nothing is imported, so nothing has to be installed but Python. What is expected is data,
``watched.json``: for each framework where it was read, on which day, and per file the signatures of functions
(``name`` or ``Class.method``), the fields of classes and the values of constants. Two things more decide whether an
adapter works where its framework does: how the file starts processes (:data:`STARTS`), since one that is spawned has
nothing replaced, and which versions of what we share the framework asks for (``requires``).
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import date
from email.parser import Parser
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_name("watched.json")
MISSING = "(not there)"
#: Stands among the names of a file for the ways in which it starts processes, and what such ways are called.
STARTS = "(start methods)"
_STARTING = {"get_context", "set_start_method", "Process", "Pool", "ProcessPoolExecutor"}
#: Packages that we share with the frameworks.
SHARED = ("torch", "numpy", "numba", "transformers", "accelerate", "datasets", "trl", "peft", "deepspeed", "python")


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


def start_methods(tree: ast.AST) -> list[str]:
    """Contexts of multiprocessing, processes, pools and actors of Ray that a file asks for, as it writes them."""
    found = set()
    for node in ast.walk(tree):
        for each in getattr(node, "decorator_list", []):
            shown = ast.unparse(each).partition("(")[0]
            found |= {shown} if shown.endswith(".remote") else set()
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in _STARTING:
                found.add(ast.unparse(node if name in ("get_context", "set_start_method") else node.func))
    return sorted(found)


def requirements(root: Path, distribution: str) -> list[str] | None:
    """What a framework asks of :data:`SHARED`, by its metadata in ``root`` or its project file; None without either."""
    stem = distribution.replace("-", "_")
    project = next((path for path in (root / "pyproject.toml", root.parent / "pyproject.toml") if path.is_file()), None)
    if found := sorted(root.glob(f"{stem}-*.dist-info/METADATA")):
        metadata = Parser().parsestr(found[0].read_text())
        lines = [*metadata.get_all("Requires-Dist", []), f"python{metadata.get('Requires-Python', '')}"]
    elif project and "dependencies" in (told := tomllib.loads(project.read_text()).get("project", {})):
        lines = [*told["dependencies"], f"python{told.get('requires-python', '')}"]
    else:
        return None
    plain = [line.replace(" ", "") for line in lines if "extra" not in line]
    names = [re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for line in plain]
    return sorted(line for line, name in zip(plain, names) if name in SHARED)


def unpacked(wheel: Path, folder: Path) -> Path:
    """The folder of a wheel's packages; their metadata lies in it."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    for pure in folder.glob("*.data/purelib"):
        for path in pure.iterdir():
            path.rename(folder / path.name)
    return folder


def root_of(
    name: str, wanted: dict[str, Any], given: dict[str, str], scratch: Path
) -> tuple[Path, str, list[str] | None] | None:
    """The folder that holds a framework's package, what version that is, and what it requires."""
    if name.upper() in given:
        root = Path(given[name.upper()])
        if root.suffix == ".whl":
            root, version = unpacked(root, scratch / name), root.name.split("-")[1]
            return root, version, requirements(root, wanted["distribution"])
        root = root / "src" if (root / "src" / wanted["package"]).is_dir() else root
        shown = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        return root, shown.stdout.strip()[:12] or "a folder", requirements(root, wanted["distribution"])
    found = importlib.util.find_spec(wanted["package"])
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(next(iter(found.submodule_search_locations))).parent
    return root, importlib.metadata.version(wanted["distribution"]), requirements(root, wanted["distribution"])


def observed(root: Path, files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same files and names, with what is there now."""
    found: dict[str, dict[str, Any]] = {}
    for file, wanted in files.items():
        path = root / file
        tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        found[file] = {name: start_methods(tree) if name == STARTS else describe(find(name, tree)) for name in wanted}
    return found


def changes(expected: dict[str, dict[str, Any]], there: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for file, wanted in expected.items():
        for name, before in wanted.items():
            now = there[file][name]
            if now == before:
                continue
            if isinstance(before, list) and isinstance(now, list):
                kind = "" if name == STARTS else " field"
                lines += [f"{file}: {name} has a new{kind} {field}" for field in now if field not in before]
                lines += [f"{file}: {name} has no{kind} {field} any more" for field in before if field not in now]
                if sorted(now) == sorted(before):
                    lines.append(f"{file}: the fields of {name} are in another order")
            else:
                lines.append(f"{file}: {name}\n    was {before}\n    is  {now}")
    return lines


def changed_pins(before: list[str] | None, now: list[str] | None) -> list[str]:
    """Requirements that came, went or have other versions; None where either side does not say."""
    if before is None or now is None:
        return []
    lines = [f"it requires {each} now" for each in now if each not in before]
    return lines + [f"it requires {each} no more" for each in before if each not in now]


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
    with tempfile.TemporaryDirectory() as scratch:
        changed = _compared(frameworks, places, given.update, Path(scratch))
    if given.update:
        expected.write_text(json.dumps(frameworks, indent=1) + "\n")
        return 0
    return 1 if changed else 0


def _compared(frameworks: dict[str, Any], places: dict[str, str], update: bool, scratch: Path) -> int:
    """Print what has changed in each framework, and count it; ``update`` writes what is there into ``frameworks``."""
    changed = 0
    for name, wanted in frameworks.items():
        place = root_of(name, wanted, places, scratch)
        if place is None:
            print(f"{name}: not here; {name.upper()}=path names a checkout")
            continue
        root, version, required = place
        there = observed(root, wanted["files"])
        lines = changes(wanted["files"], there) + changed_pins(wanted.get("requires"), required)
        held = f"expected as of {wanted['read']}, {wanted['version']}"
        print(f"{name} {version}: {f'{len(lines)} changes' if lines else 'nothing has changed'} ({held})")
        print("".join(f"  {line}\n" for line in lines), end="")
        changed += len(lines)
        if update and name.upper() in places | dict.fromkeys([] if places else [name.upper()]):
            wanted.update(read=date.today().isoformat(), version=version, files=there)
            if required is not None:
                wanted["requires"] = required
    return changed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
