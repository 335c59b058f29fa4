"""Replacement of a framework's functions in every module that holds them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ullage.errors import InputError


@dataclass(frozen=True)
class Replacement:
    """Functions that were replaced.

    Attributes:
        originals: what stood at each place, by its dotted name: ``verl.trainer.ppo.ray_trainer.calculate_workload``.
    """

    originals: dict[str, Any]

    @property
    def places(self) -> list[str]:
        """Dotted names of all places that were replaced."""
        return sorted(self.originals)

    def undo(self) -> None:
        """Put back what stood there."""
        for place, original in self.originals.items():
            module, _, name = place.rpartition(".")
            setattr(sys.modules[module], name, original)


def replace(table: Mapping[str, Any]) -> Replacement:
    """Put functions in the place of a framework's own; ``table``: dotted name of the function -> its replacement.

    The module that defines a function is imported. So are replaced all modules of the same package that imported it by
    name before; modules imported later find the replacement. Only this process is changed: in worker processes that do
    not descend from it by fork, call it there too. Raises ``InputError`` where the framework has no such module or
    function, before anything is changed.
    """
    found: list[tuple[ModuleType, str, Any, Any]] = []
    for place, ours in table.items():
        home, _, name = place.rpartition(".")
        try:
            module = importlib.import_module(home)
            original = vars(module)[name]
        except (ImportError, KeyError) as error:
            raise InputError(
                "the installed framework has not the function to replace",
                where=place,
                found=f"{type(error).__name__}: {error}",
                hint="see that it imports here; where it has moved the function, assign it there",
            ) from error
        found.append((module, name, original, ours))
    originals: dict[str, Any] = {}
    for module, _, original, ours in found:
        package = module.__name__.partition(".")[0]
        for holder in _modules_of(package):
            names = [name for name, value in list(vars(holder).items()) if value is original and value is not ours]
            for name in names:
                originals[f"{holder.__name__}.{name}"] = original
                setattr(holder, name, ours)
    return Replacement(originals)


def _modules_of(package: str) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == package or name.startswith(package + "."))
    ]
