"""A torch optimizer's ``state_dict``: state by number, in the order in which the parameters were given to it.

The numbers say nothing of names. A parameter's name is known, in this order, from

1. ``param_names`` of the groups, where the optimizer was given names (ours are written with them);
2. the shapes, where no two weights have the same;
3. an order that a model's class gives (:func:`trainer_orders`), where each state has the shape of the weight at its
   place.

In any other case the state is refused by the name of the file. A state has the shape of its parameter, or that of its
sums along one dim, as Adafactor's (:func:`may_be_state`). Source: ``torch/optim/optimizer.py`` and ``_adafactor.py`` of
torch 2.13, ``optimization.py`` of transformers 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import Tensor
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import TorchFile, as_checkpoint_error
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats.entries import saved_number
from ullage.checkpoint.zero import modules
from ullage.checkpoint.zero.states import RECOMPUTED, WEIGHTS_ONLY, Details

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

    def details(self, **more: Any) -> Details:
        """What writers of other formats need of it; without the groups where their names are not known."""
        groups = self.groups if self.problem is None else []
        return Details(steps=self.steps, param_groups=groups, names=self.names, numbers=self.numbers, **more)


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
    held = metadata.mapping(saved.get("state"), "state of the optimizer", where)
    ids = [metadata.integers(group.get("params"), "params", where) for group in found.groups]
    states = [
        [metadata.mapping(held.get(number), "state of the optimizer", where) for number in listed] for listed in ids
    ]
    named = [metadata.names(group.get("param_names"), "param_names", where) for group in found.groups]
    names = _names(named, [list(map(_shapes, listed)) for listed in states], weights, orders)
    if isinstance(names, str):
        return replace(found, problem=unnamed(name, names))
    found.names = names
    for group, (listed, parameters) in enumerate(zip(states, names)):
        for state, parameter in zip(listed, parameters):
            for key, value in state.items():
                number, _ = step = saved_number(value, source)
                what, shape = f"optimizer state {metadata.brief(key)}", weights[parameter].shape
                problem = None
                if key == "step" and number is not None:
                    if found.steps.setdefault(group, step) != step:
                        problem = "parameters of one group are at two steps"
                elif (
                    isinstance(key, str)
                    and isinstance(value, TensorRef)
                    and may_be_state(key, tuple(value.shape), shape)
                ):
                    made = modules.whole_tensor(parameter, key, value, file, source, "parameter")
                    found.tensors.append(replace(made, group=group))
                elif isinstance(key, str) and number is not None and key not in RECOMPUTED:
                    if found.numbers.setdefault(group, {}).setdefault(key, number) != number:
                        problem = f"{what} is a number that differs between parameters of one group"
                elif value is not None and key not in RECOMPUTED:
                    problem = f"{what} does not have the shape of its parameter"
                if problem is not None:
                    said = replace(unnamed(name, parameter), what=problem, expected=None)
                    return NumberedState(found.groups, problem=said)
    return found


def may_be_state(key: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a state can be that of a parameter of shape ``whole``: of its shape, or a sum over rows or columns."""
    dim = _summed(key)
    if dim is None or len(whole) < 2:
        return shape == whole
    before, behind = whole[: len(whole) + dim], whole[len(whole) + dim + 1 :]
    return shape in ((*before, *behind), (*before, 1, *behind))


def _summed(key: str) -> int | None:
    """The dim that a state has lost: ``row_var``, ``col_var`` of torch's Adafactor, ``exp_avg_sq_row`` of HF's."""
    return next((dim for word, dim in (("row", -1), ("col", -2)) if word in key.split("_")), None)


def unnamed(file: str, found: str) -> Problem:
    """The problem of state whose names are not known."""
    return Problem(
        "the optimizer's state is saved by number, and nothing says which parameter has which",
        file,
        expected="an optimizer that was given names, or weights of different shapes",
        found=found,
        hint=WEIGHTS_ONLY,
    )


def _shapes(state: dict[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of states such as exp_avg; a step of one element tells nothing."""
    return {str(k): tuple(v.shape) for k, v in state.items() if isinstance(v, TensorRef) and k != "step" and v.shape}


def _names(
    given: Order,
    shapes: list[list[dict[str, tuple[int, ...]]]],
    weights: dict[str, Tensor],
    orders: Callable[[], list[Order]] | None,
) -> Order | str:
    """The names of each group in the order of its numbers; a text that says what was found, where none are known.

    Args:
        given: those that the groups list.
        shapes: of the states by key, by group and number.
        weights: by name.
        orders: as for :func:`read_numbered`.
    """

    def fits(order: Order) -> bool:
        """Whether each number has a name, no two the same one, of a weight that there is."""
        flat = [name for listed in order for name in listed]
        return [*map(len, order)] == [*map(len, shapes)] and set(flat) <= set(weights) and len(set(flat)) == len(flat)

    if fits(given):
        return given
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in weights.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    # What is summed has lost its parameter's shape.
    whole = [[{s for key, s in held.items() if _summed(key) is None} for held in listed] for listed in shapes]
    told = [[by_shape.get(next(iter(held)), []) if len(held) == 1 else [] for held in listed] for listed in whole]
    found = [[names[0] for names in listed if len(names) == 1] for listed in told]
    # Two states that found one weight: then the shapes do not tell them apart after all.
    if fits(found):
        return found
    for order in orders() if orders is not None and any(map(any, shapes)) else ():
        if fits(order):  # whether each state has its weight's shape is seen where it is read
            return order
    flat = zip((held for listed in whole for held in listed), (names for listed in told for names in listed))
    held, names = next(((held, names) for held, names in flat if len(names) != 1), (None, []))
    if held is None:
        return "weights of one shape"
    return f"{len(names)} weights of shape {list(next(iter(held)))}" if len(held) == 1 else "no state"


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
    return orders_of(model)


def orders_of(model: Any) -> list[Order]:
    """Orders in which a Trainer may have given the trained parameters of a model to its optimizer.

    Source: transformers 5.23 ``trainer.py``: ``create_optimizer``.
    """
    import transformers

    # The method reads nothing of its object, so it needs no Trainer.
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    by_decay = [[name for name in trained if (name in decayed) is chosen] for chosen in (True, False)]
    return [by_decay, [names for names in by_decay if names], [trained]]
