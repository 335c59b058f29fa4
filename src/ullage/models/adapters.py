"""LoRA for recurrent weights, through PEFT's own ``target_parameters``.

PEFT adapts layers by their type, and knows no recurrent one. It also adapts parameters by their name: while such a
module runs, its weight *W* is *W* + *BA* (a torch parametrisation), whatever the module does with it. That is all a
recurrent weight needs, so nothing has to be registered, and an adapter is saved, loaded and merged by PEFT alone. What
is missing is the names; :func:`lora_targets` tells them for any cell, one's own too.

Source: ``peft.tuners.lora.layer.ParamWrapper``, PEFT 0.17 and later.
"""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from ullage.errors import InputError
from ullage.models.cells import Cell


def lora_targets(model: nn.Module) -> dict[str, list[str]]:
    """What ``peft.LoraConfig`` has to be told to adapt every weight matrix of a model's cells.

    Give it away whole: ``LoraConfig(r=8, **lora_targets(model))``. ``target_parameters`` are the matrices that lie in
    a cell itself. ``target_modules`` are the ``nn.Linear`` layers of cells that have no such matrix; of a cell that
    has both, its layers are left as they are, because PEFT does not merge an adapter inside another. Names are as
    short as they can be without meaning anything else of the model. Raises ``InputError`` for a model without cells.
    """
    cells = {name: module for name, module in model.named_modules() if isinstance(module, Cell)}
    if not cells:
        raise InputError(
            "there is nothing recurrent to adapt",
            where=type(model).__name__,
            expected="a model of ullage.models, not yet wrapped by PEFT",
            hint="for other models, name the layers in LoraConfig(target_modules=...)",
        )
    parameters: set[str] = set()
    modules: set[str] = set()
    for name, cell in cells.items():
        matrices = {own for own, parameter in cell.named_parameters(recurse=False) if parameter.ndim == 2}
        layers = {inner for inner, module in cell.named_modules() if isinstance(module, nn.Linear)}
        parameters |= {_joined(name, own) for own in matrices}
        modules |= {_joined(name, inner) for inner in layers if not matrices}
    return {
        "target_modules": _shortest(modules, {name for name, _ in model.named_modules()}),
        "target_parameters": _shortest(parameters, {name for name, _ in model.named_parameters()}),
    }


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _shortest(wanted: Set[str], names: Set[str]) -> list[str]:
    """Endings of dotted names that match all the wanted ones and nothing else."""
    endings: set[str] = set()
    for name in wanted:
        parts = name.split(".")
        tails = (".".join(parts[-k:]) for k in range(1, len(parts) + 1))
        endings.add(next(t for t in tails if {n for n in names if f".{n}".endswith(f".{t}")} <= wanted))
    return sorted(endings)
