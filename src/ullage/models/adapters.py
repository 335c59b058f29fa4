"""LoRA for recurrent weights, through PEFT's own ``target_parameters``.

PEFT adapts layers by their type, and knows no recurrent one. It also adapts parameters by their name: while such a
module runs, its weight *W* is *W* + *BA* (a torch parametrisation), whatever the module does with it. That is all a
recurrent weight needs, so nothing has to be registered, and an adapter is saved, loaded and merged by PEFT alone. Only
the names are missing; :func:`lora_targets` finds them for any cell, your own too.

Source: ``peft.tuners.lora.layer.ParamWrapper``, PEFT 0.17 and later.
"""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from ullage.core.errors import InputError
from ullage.models.cells import Cell


def lora_targets(model: nn.Module) -> dict[str, list[str]]:
    """Keywords of ``peft.LoraConfig`` that adapt every weight matrix of a model's cells.

    Use all of them: ``LoraConfig(r=8, **lora_targets(model))``. ``target_parameters`` are the matrices that lie in a
    cell itself. ``target_modules`` are the ``nn.Linear`` layers of cells without such a matrix; in a cell that has
    both, the layers stay as they are, because PEFT does not merge an adapter inside another. Names are as short as
    they can be without matching anything else in the model. Raises ``InputError`` for a model without cells.
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
        parameters |= {_dotted_name(name, own) for own in matrices}
        modules |= {_dotted_name(name, inner) for inner in layers if not matrices}
    return {
        "target_modules": _shortest(modules, {name for name, _ in model.named_modules()}),
        "target_parameters": _shortest(parameters, {name for name, _ in model.named_parameters()}),
    }


def _dotted_name(*names: str) -> str:
    return ".".join(name for name in names if name)


def _shortest(wanted: Set[str], names: Set[str]) -> list[str]:
    """Endings of dotted names that match all the wanted ones and nothing else."""
    endings: set[str] = set()
    for name in wanted:
        parts = name.split(".")
        # From the last part to the whole name: the first ending that matches wanted names only.
        tails = (".".join(parts[-k:]) for k in range(1, len(parts) + 1))
        endings.add(next(t for t in tails if {n for n in names if f".{n}".endswith(f".{t}")} <= wanted))
    return sorted(endings)
