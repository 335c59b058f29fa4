"""Adapters to other training frameworks: their function names and signatures over ullage's plans and steps.

None is imported by ``import ullage``, so that no framework has to be installed. ``ullage.engines.slime`` is a module
without a file, as for each of ``FRAMEWORKS`` but axolotl and verl: what ``frameworks`` has for it, under its own names.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

#: Frameworks that ``frameworks.TABLE`` has functions of.
FRAMEWORKS = (
    "axolotl",
    "llama_factory",
    "miles",
    "nemo_rl",
    "openrlhf",
    "skyrl",
    "slime",
    "swift",
    "trl_async",
    "verl",
)


class _Framework(ModuleType):
    """The functions of one framework, looked up when they are asked for, and ``install()``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home, framework = importlib.import_module(f"{__name__}.frameworks"), self.__name__.rpartition(".")[2]
        found = {place.rpartition(".")[2]: ours for place, ours in home.TABLE[framework].items()}

        def install() -> Any:
            """Replace this framework's functions, wherever it imported them; returns what was replaced."""
            return home.install(framework)

        found["install"] = install
        if name not in found:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: it has {', '.join(found)}")
        return found[name]


for _name in FRAMEWORKS:
    if _name not in ("axolotl", "verl"):
        globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Framework(f"{__name__}.{_name}")


def __getattr__(name: str) -> Any:
    """Tell type checkers that there are more names than they can see."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
