"""Packages whose names load when they are first used.

A package lists its names once for type checkers, as imports under ``TYPE_CHECKING``, and once for Python, as a table
of the modules that define them::

    if TYPE_CHECKING:
        from ullage.training.batches.collators import RaggedCollator as RaggedCollator
    else:
        __getattr__, __dir__, __all__ = lazy_names(__name__, {"collators": ["RaggedCollator"]})

``X as X`` marks a name as public for type checkers. ``tests/project/test_house.py`` compares the two lists.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as for type checkers in ``typing``, which takes ten times as long to load as all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazy_names(
    package: str, table: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, ``__dir__`` and ``__all__`` of a package (PEP 562).

    Args:
        package: its ``__name__``.
        table: for each module of the package, the names that are taken from it.
        modules: modules of the package that are public themselves.
    """
    home = {name: module for module, names in table.items() for name in names}
    public = sorted({*home, *modules})

    def load(name: str) -> Any:
        # Called for names that the package does not have yet, see PEP 562.
        import importlib

        from ullage.core.extras import needed_by

        if name in home:
            with needed_by(f"{package}.{name}"):
                value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
            setattr(sys.modules[package], name, value)  # the next use does not come here
            return value
        if name in modules:
            with needed_by(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public} - {"TYPE_CHECKING", "annotations", "lazy_names"})

    return load, names, public
