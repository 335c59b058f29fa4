"""Functions of other frameworks that stand for something else until they are put back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ullage.core.errors import InputError


class Replacements:
    """Global names of modules, and methods of classes, that stand for something else until :meth:`undo`."""

    def __init__(self) -> None:
        self._made: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._methods: list[tuple[type, str, Any, Any]] = []

    @property
    def places(self) -> list[str]:
        """Dotted names of all places that were replaced: ``verl.trainer.sft_trainer_ray.rearrange_micro_batches``."""
        methods = [f"{cls.__module__}.{cls.__qualname__}.{name}" for cls, name, _, _ in self._methods]
        return sorted([*(f"{scope.get('__name__')}.{name}" for scope, name, _, _ in self._made), *methods])

    def put(self, scope: dict[str, Any], name: str, value: Any) -> None:
        """Let the global ``name`` of one module stand for ``value``. ``scope``: the module's ``vars``."""
        self._made.append((scope, name, scope[name], value))
        scope[name] = value

    def put_method(self, cls: type, name: str, value: Any) -> None:
        """Let the method ``name`` of a class be ``value``."""
        self._methods.append((cls, name, vars(cls)[name], value))
        setattr(cls, name, value)

    def put_everywhere(self, original: Any, value: Any, package: str | None = None) -> None:
        """Let every name of a loaded module that stands for ``original`` stand for ``value``.

        ``package``: its modules alone; None for all modules.
        """
        if value is original:
            return
        for full_name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or (package and not f"{full_name}.".startswith(f"{package}.")):
                continue
            for name in [name for name, held in list(vars(module).items()) if held is original]:
                self.put(vars(module), name, value)

    def undo(self) -> None:
        """Put back what stood there, unless something else has been put in its place since."""
        for scope, name, original, value in reversed(self._made):
            if scope.get(name) is value:
                scope[name] = original
        for cls, name, original, value in reversed(self._methods):
            if vars(cls).get(name) is value:
                setattr(cls, name, original)
        self._made.clear()
        self._methods.clear()


def replace(table: Mapping[str, Any]) -> Replacements:
    """Put functions in the place of a framework's own; ``table``: dotted name of the function -> its replacement.

    The module that defines a function is imported. So are replaced all modules of the same package that imported it by
    name before; modules imported later find the replacement. Only this process is changed: in worker processes that do
    not descend from it by fork, call it there too. Raises ``InputError`` where the framework has no such module or
    function, before anything is changed.
    """
    found: list[tuple[str, Any, Any]] = []
    for place, ours in table.items():
        home, _, name = place.rpartition(".")
        try:
            original = vars(importlib.import_module(home))[name]
        except (ImportError, KeyError) as error:
            raise InputError(
                "the installed framework has not the function to replace",
                where=place,
                found=f"{type(error).__name__}: {error}",
                hint="this adapter was written for another version of it; assign the function where it is now",
            ) from error
        found.append((home.partition(".")[0], original, ours))
    made = Replacements()
    for package, original, ours in found:
        made.put_everywhere(original, ours, package)
    return made
