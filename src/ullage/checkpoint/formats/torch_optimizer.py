"""A torch optimizer's ``state_dict``: state by number, in the order in which the parameters were given to it.

The numbers say nothing of names. A parameter's name is known, in this order, from

1. ``param_names`` of the groups, where the optimizer was given names (ours are written with them);
2. the shapes, where no two weights have the same;
3. an order that a model's class gives (:func:`trainer_orders`), where each state has the shape of the weight at its
   place.

In any other case the state is refused by the name of the file. Source: ``torch/optim/optimizer.py`` of torch 2.13.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import TorchFile, as_checkpoint_error, as_number
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import Tensor
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.states import WEIGHTS_ONLY

#: The names of each group, in order.
Order = list[list[str]]


@dataclass
class NumberedState:
    """An optimizer's state by name: its tensors, steps and numbers by group; or the problem that prevents it."""

    groups: list[dict[str, Any]]
    tensors: list[Tensor] = field(default_factory=list)
    steps: dict[int, tuple[Any, str | None]] = field(default_factory=dict)
    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    names: Order = field(default_factory=list)
    problem: Problem | None = None


def read_numbered(
    saved: Any,
    weights: dict[str, Tensor],
    source: TorchFile,
    file: int,
    name: str,
    orders: Callable[[], list[Order]] | None = None,
) -> NumberedState:
    """The optimizer's state by name.

    Args:
        saved: the ``state_dict``, as its file describes it.
        weights: the trained weights that there may be.
        source: the file.
        file: its number in the inventory.
        name: its name, for the problem.
        orders: gives orders of a model to be tried, where nothing else tells.

    Raises ``CheckpointError`` for what is no such ``state_dict``.
    """
    where = source.path
    saved = metadata.mapping(saved, "optimizer", where)
    given = metadata.sequence(saved.get("param_groups"), "param_groups", where)
    found = NumberedState([metadata.mapping(group, "param_groups", where) for group in given])
    state = metadata.mapping(saved.get("state"), "state of the optimizer", where)
    ids = [metadata.integers(group.get("params"), "params", where) for group in found.groups]
    shapes = {number: _shapes(state.get(number), where) for listed in ids for number in listed}
    names = _names(found.groups, ids, shapes, weights, orders, where)
    if isinstance(names, str):
        return replace(found, problem=unnamed(name, names))
    found.names = names
    for group, (numbers, listed) in enumerate(zip(ids, names)):
        for number, parameter in zip(numbers, listed):
            problem = _add(found, group, parameter, state.get(number) or {}, weights, source, file)
            if problem is not None:
                return NumberedState(
                    found.groups, problem=replace(unnamed(name, parameter), what=problem, expected=None)
                )
    return found


def unnamed(file: str, found: str) -> Problem:
    """The problem of state whose names are not known."""
    return Problem(
        "the optimizer's state is saved by number, and nothing says which parameter has which",
        file,
        expected="an optimizer that was given names, or weights of different shapes",
        found=found,
        hint=WEIGHTS_ONLY,
    )


def _add(
    found: NumberedState,
    group: int,
    name: str,
    held: dict[Any, Any],
    weights: dict[str, Tensor],
    source: TorchFile,
    file: int,
) -> str | None:
    """Add one parameter's state to ``found``; what is wrong with it, where it cannot be carried.

    Args:
        found: gets the tensors, the step and the numbers.
        group: number of the parameter's group.
        name: of the parameter.
        held: its state.
        weights: the weights by name.
        source: the file.
        file: its number in the inventory.
    """
    for key, value in held.items():
        number = as_number(value, source)
        if key == "step" and number is not None:
            step = number, value.dtype if isinstance(value, TensorRef) else None
            if found.steps.setdefault(group, step) != step:
                return "parameters of one group are at two steps"
        elif isinstance(key, str) and isinstance(value, TensorRef) and tuple(value.shape) == weights[name].shape:
            made = modules.whole_tensor(name, key, value, file, source, "parameter")
            found.tensors.append(replace(made, group=group))
        elif isinstance(key, str) and number is not None:
            kept = found.numbers.setdefault(group, {})
            if kept.setdefault(key, number) != number:
                return f"optimizer state {metadata.brief(key)} is a number that differs between parameters of one group"
        elif value is not None:
            return f"optimizer state {metadata.brief(key)} does not have the shape of its parameter"
    return None


def _shapes(held: Any, where: str) -> set[tuple[int, ...]]:
    """Shapes of states such as exp_avg, which have that of their parameter; a step of one element tells nothing."""
    held = metadata.mapping(held, "state of the optimizer", where)
    return {tuple(v.shape) for k, v in held.items() if isinstance(v, TensorRef) and k != "step" and v.shape}


def _names(
    groups: list[dict[str, Any]],
    ids: list[list[int]],
    shapes: dict[int, set[tuple[int, ...]]],
    weights: dict[str, Tensor],
    orders: Callable[[], list[Order]] | None,
    where: str,
) -> Order | str:
    """The names of each group in the order of its numbers; a text that says what was found, where none are known.

    Args:
        groups: hyperparameters by group.
        ids: numbers by group.
        shapes: of the states of each number.
        weights: by name.
        orders: as for :func:`read_numbered`.
        where: the file.
    """
    given = [metadata.names(group.get("param_names"), "param_names", where) for group in groups]
    flat = [name for listed in given for name in listed]
    if [*map(len, given)] == [*map(len, ids)] and set(flat) <= set(weights) and len(set(flat)) == len(flat):
        return given
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in weights.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    told = [[by_shape.get(next(iter(shapes[n])), []) if len(shapes[n]) == 1 else [] for n in listed] for listed in ids]
    if all(len(names) == 1 for listed in told for names in listed):
        found = [[names[0] for names in listed] for listed in told]
        flat = [name for listed in found for name in listed]
        # Two states that found one weight: then the shapes do not tell them apart after all.
        if len(set(flat)) == len(flat):
            return found
    for order in orders() if orders is not None else ():
        if _proven(order, ids, shapes, weights):
            return order
    vague = next((n for listed, many in zip(ids, told) for n, names in zip(listed, many) if len(names) != 1), None)
    if vague is None:
        return "weights of one shape"
    return (
        f"{len(by_shape.get(next(iter(shapes[vague])), []))} weights of shape {list(next(iter(shapes[vague])))}"
        if len(shapes[vague]) == 1
        else "no state"
    )


def _proven(
    order: Order, ids: list[list[int]], shapes: dict[int, set[tuple[int, ...]]], weights: dict[str, Tensor]
) -> bool:
    """Whether each state has the shape of the weight that ``order`` gives it, and there is a state at all."""
    if [*map(len, order)] != [*map(len, ids)] or not any(shapes.values()):
        return False
    pairs = [(name, shapes[number]) for names, numbers in zip(order, ids) for name, number in zip(names, numbers)]
    return all(name in weights and held <= {weights[name].shape} for name, held in pairs)


def trainer_orders(folder: Path) -> list[Order]:
    """Orders in which a Trainer may have given the parameters of the model in ``folder`` to its optimizer.

    They are those of the model's class, which ``config.json`` names and transformers has: parameters that decay first,
    then the others; or all in one group. ``[]`` where there is no such class. No code of the folder is run.
    """
    path = folder / "config.json"
    if not path.is_file():
        return []
    with as_checkpoint_error(str(path)):
        text = path.read_bytes()
    try:
        import torch
        import transformers

        said = json.loads(text)
        made = getattr(transformers, said["architectures"][0])
        with torch.device("meta"):
            model = made(made.config_class.from_dict(said))
    except Exception:
        return []  # whatever the class makes of a configuration, it gives no order
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    by_decay = decaying_first(model)
    return [by_decay, [names for names in by_decay if names], [trained]]


def decaying_first(model: Any) -> Order:
    """The trained parameters by name in the two groups of Trainer's optimizer: those that decay, and the others.

    Source: transformers 5.23 ``trainer.py``: ``create_optimizer``.
    """
    import transformers

    # The method reads nothing of its object, so it needs no Trainer.
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [[name for name in trained if (name in decayed) is chosen] for chosen in (True, False)]
