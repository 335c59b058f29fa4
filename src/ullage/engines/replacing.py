"""Functions of other frameworks that stand for something else until they are put back."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from ullage.core.errors import InputError

_LOG = logging.getLogger(__name__)
#: What stands in this process for a framework's method -> that method.
_stood: dict[Any, Any] = {}


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
        """Let the method ``name`` of a class be ``value``, static if it was."""
        before = vars(cls)[name]
        if getattr(before, "__func__", before) is value:
            return
        _stood[value] = before
        value = staticmethod(value) if isinstance(before, staticmethod) else value
        self._methods.append((cls, name, before, value))
        setattr(cls, name, value)

    def put_everywhere(self, original: Any, value: Any, package: str | None = None) -> None:
        """Let every name of a loaded module that stands for ``original`` stand for ``value``.

        ``package``: its modules alone; None for all modules.
        """
        if value is original:
            return
        for full_name, module in sys.modules.copy().items():  # at once: another thread may be importing
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
            _stood.pop(getattr(value, "__func__", value), None)
        self._made.clear()
        self._methods.clear()


def replace(table: Mapping[str, Any], optional: Collection[str] = ()) -> Replacements:
    """Put functions in the place of a framework's own.

    Args:
        table: dotted name of the function or method -> its replacement.
        optional: names of the table that a version of the framework may lack.

    The module that defines a function is imported. So are replaced all modules of the same package that imported it by
    name before; modules imported later find the replacement. One line of the log says that it is so. Only this process
    is changed: those that it forks have it, and :func:`original` is for those that it spawns. Raises ``InputError``
    where the framework has no such module or function, before anything is changed.
    """
    found: list[tuple[Any, str, Any]] = []
    for place, ours in table.items():
        try:
            holder, name = _holder(place)
            vars(holder)[name]
        except (ImportError, AttributeError, KeyError) as error:
            if place in optional:
                continue
            raise InputError(
                "the installed framework has not the function to replace",
                where=place,
                found=f"{type(error).__name__}: {error}",
                hint="this adapter was written for another version of it; assign the function where it is now",
            ) from error
        found.append((holder, name, ours))
    made = Replacements()
    for holder, name, ours in found:
        if isinstance(holder, type):
            made.put_method(holder, name, ours)
        else:
            made.put_everywhere(vars(holder)[name], ours, holder.__name__.partition(".")[0])
    if made.places:
        # A warning: most frameworks, and logging that nobody has set up, show nothing below.
        _LOG.warning("ullage is active in process %d: %s", os.getpid(), ", ".join(made.places))
    return made


def _holder(place: str) -> tuple[Any, str]:
    """The module or class that a dotted name is in, and its name there."""
    home, _, name = place.rpartition(".")
    try:
        return importlib.import_module(home), name
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        outer, _, cls = home.rpartition(".")
        holder = getattr(importlib.import_module(outer), cls, None) if outer else None
        if not isinstance(holder, type):
            raise
        return holder, name


def original(ours: Any, install: Callable[[], Any]) -> Any:
    """The framework's own method, for which ``ours`` stands, in whichever process asks.

    A process that was spawned starts with nothing replaced. What it is to run reached it by name: where that name is
    ours, it has imported our module to find it, and ``install`` replaces there what its parent had replaced.
    """
    if ours not in _stood:
        install()
    return _stood[ours]
