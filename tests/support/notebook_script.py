"""Runs the code cells of a notebook without a kernel: the text that each shows, as JSON in a file.

python notebook_script.py NOTEBOOK TARGET
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path


def shown(source, names):
    """What a cell prints, and its last value as text; asserts that a notebook has a drawing of that."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last is not None else None
    if value is not None:
        out.write(repr(value))
        if type(value).__module__.startswith("ullage"):
            assert value._repr_html_()
    return out.getvalue()


if __name__ == "__main__":
    notebook, target = map(Path, sys.argv[1:])
    names = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    target.write_text(json.dumps([shown("".join(cell["source"]), names) for cell in cells]))
