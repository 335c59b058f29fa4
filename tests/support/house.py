"""The imports, classes and names of a source tree, read from its syntax trees without importing it.

A tree is a dict of sources by module name, so that the tests of the rules can plant a violation.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path


def read_tree(source: Path, package: str) -> dict[str, str]:
    """The sources of a package by module name; a package stands under its own name."""
    tree = {}
    for path in sorted((source / package).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        tree[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return tree


def packages(tree: dict[str, str]) -> set[str]:
    """The modules that hold other modules."""
    return {module.rpartition(".")[0] for module in tree} - {""}


def imports(tree: dict[str, str]) -> dict[str, set[str]]:
    """For each module those that it imports, at the top, inside functions, or for types alone.

    ``from package import name`` is an import of the module of that name if there is one. A name of the root package is
    an import of the module that the root takes it from. The root itself imports nothing here: it is only a face.
    """
    root = min(tree, key=len)
    home = {name: source for source, name in _from_imports(tree[root]) if name and f"{root}.{name}" not in tree}
    found: dict[str, set[str]] = {}
    for module, text in tree.items():
        targets = set()
        for source, name in _from_imports(text):
            inner = f"{source}.{name}"
            if name is not None and inner in tree:
                targets.add(inner)
            elif source == root and name in home:
                targets.add(home[name])
            elif source in tree:
                targets.add(source)
        found[module] = targets - {module} if module != root else set()
    return found


@cache
def _from_imports(text: str) -> list[tuple[str, str | None]]:
    """Module and name of each import; ``None`` for the module as a whole."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
    return found


def room_of(module: str) -> str:
    """The room of a module: the part below the root package, "" for the root; of the foundation each module is one."""
    _, room, inner, *_ = [*module.split("."), "", ""]
    if room == "core":
        return f"core.{inner}" if inner else ""
    return room


def upward(tree: dict[str, str], order: list[str]) -> set[tuple[str, str]]:
    """The imports of a room that stands below: ``(module, imported)``. The root may be asked for the version."""
    rank = {room: i for i, room in enumerate(["", *order])}
    return {
        (module, target)
        for module, targets in imports(tree).items()
        for target in targets
        if rank.get(room_of(target), len(rank)) > rank.get(room_of(module), -1)
    }


def circles(tree: dict[str, str]) -> set[frozenset[str]]:
    """The sets of modules that import each other, directly or through others."""
    graph = imports(tree)
    reached: dict[str, set[str]] = {}
    for start in graph:
        found: set[str] = set()
        left = list(graph[start])
        while left:
            module = left.pop()
            if module not in found:
                found.add(module)
                left += graph.get(module, ())
        reached[start] = found
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def doubled(tree: dict[str, str], *, functions: bool) -> dict[str, list[str]]:
    """The names that several modules define, with these modules: of classes, or of public functions at the top."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, text in tree.items():
        parsed = ast.parse(text)
        for node in parsed.body if functions else ast.walk(parsed):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if functions else ast.ClassDef
            if isinstance(node, kinds) and not (functions and node.name.startswith("_")):
                found[node.name].add(module)
    return {name: sorted(modules) for name, modules in found.items() if len(modules) > 1}


def entries(tree: dict[str, str]) -> dict[str, list[str]]:
    """For each folder the modules and folders that lie in it; its ``__init__`` is the folder itself."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in sorted(tree):
        if "." in module:
            found[module.rpartition(".")[0]].append(module)
    return dict(found)


def mutual_folders(tree: dict[str, str]) -> set[frozenset[str]]:
    """The pairs of folders of which each imports from the other. A folder within a folder is another one.

    What a package's own ``__init__`` takes from below is its face, and no import of the folder.
    """
    folders = packages(tree)

    def folder_of(module: str) -> str:
        return module if module in folders else module.rpartition(".")[0]

    pairs = {
        (folder_of(module), folder_of(target))
        for module, targets in imports(tree).items()
        for target in targets
        if not (module in folders and target.startswith(f"{module}."))
    }
    return {frozenset(pair) for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs}


def hidden_modules(tree: dict[str, str]) -> set[str]:
    """The modules of whose name the package around them binds something else."""
    hidden = set()
    for package in packages(tree):
        for node in ast.walk(ast.parse(tree[package])):
            names: dict[str, str] = {}
            if isinstance(node, ast.ImportFrom):
                names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = {node.name: ""}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names = {node.id: ""}
            hidden |= {f"{package}.{name}" for name, meant in names.items() if f"{package}.{name}" != meant}
    return hidden & tree.keys()


def lazy_tables(tree: dict[str, str]) -> dict[str, tuple[set[tuple[str, str]], set[tuple[str, str]]]]:
    """For each package with lazy names: ``(module, name)`` of its table, and of its imports for type checkers."""
    tables = {}
    for package in packages(tree):
        parsed = ast.parse(tree[package])
        calls = [node for node in ast.walk(parsed) if isinstance(node, ast.Call)]
        calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "lazy_names"]
        if not calls:
            continue
        table = ast.literal_eval(calls[0].args[1])
        listed = {(f"{package}.{module}", name) for module, names in table.items() for name in names}
        for keyword in calls[0].keywords:
            listed |= {(package, name) for name in ast.literal_eval(keyword.value)}
        [typed] = [node for node in parsed.body if isinstance(node, ast.If)]
        froms = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
        tables[package] = listed, {(str(node.module), alias.name) for node in froms for alias in node.names}
    return tables
