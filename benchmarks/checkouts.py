"""Sources of other projects, read from a checkout: their functions run as they are, without an installation."""

from __future__ import annotations
import __future__

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def read(
    path: Path, *, only: tuple[str, ...] = (), left_out: tuple[type[Exception], ...] = (ImportError,), **given: Any
) -> SimpleNamespace:
    """The names of a source file, run statement by statement; those in ``given`` stand.

    ``only``: the functions to run, and nothing else. ``left_out``: a statement that raises one of these is left out.
    """
    space: dict[str, Any] = {"__name__": __name__, **given}
    for node in ast.parse(path.read_text()).body:
        if only and getattr(node, "name", None) not in only:
            continue
        code = compile(ast.Module([node], []), str(path), "exec", __future__.annotations.compiler_flag)
        try:
            exec(code, space)
        except left_out:
            continue
        space.update(given)
    return SimpleNamespace(**space)
