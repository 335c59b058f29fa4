"""What other systems lack is not imported: a reading of the source, and no run on Windows or macOS."""

import ast

from tests.support import house
from tests.support.launch import ROOT

#: Modules that Windows has not.
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def imported_at_once(text):
    """Modules that a module imports while it is loaded, other than those whose absence it handles."""
    found, open_ = set(), list(ast.parse(text).body)
    while open_:
        node = open_.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.If | ast.With | ast.ClassDef):
            open_ += node.body
    return found


def test_no_module_of_one_system_is_imported_at_once():
    tree = house.read_tree(ROOT / "src", "ullage")
    assert {name: found for name, text in tree.items() if (found := imported_at_once(text) & POSIX)} == {}
    assert imported_at_once(
        "import fcntl\nif True:\n    import pwd\ntry:\n    import tty\nexcept ImportError: ..."
    ) == {"fcntl", "pwd"}
