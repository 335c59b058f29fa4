"""The first module of a model in which a packed row differs from its sequences alone.

All modules are watched while the sequences run once more, alone and as a row. Of what goes in and comes out only one
number per token is kept, weighed by numbers that are always the same, so the memory is small. A module whose input is
what it should be, and whose output is not, holds the cause; modules end from the inside out, so the innermost is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from ullage.mixers.at_rest import own_attention
from ullage.mixers.outcome import Outcome, TrialRun
from ullage.mixers.trial import Trial


@dataclass(eq=False)
class _Call:
    """One call of a module: numbers [n, L] per token of its input and of its output; None where there is no token.

    Where gradients are watched, they are those that come out of its input, and those that reach its output.
    """

    path: str
    given: Tensor | None = None
    made: Tensor | None = None


def first_module(model: nn.Module, trial: Trial, limit: float, *, backward: bool = False) -> str | None:
    """The path and class of the first module whose output differs and whose input does not; None if none does.

    Args:
        model: bare and at rest.
        trial: the calls.
        limit: of the relative difference.
        backward: whether only gradients differ; then going backward, from outputs to inputs.
    """
    run = TrialRun(model, trial, backward=backward)
    outcomes: list[Outcome] = []
    alone: list[dict[str, list[_Call]]] = []
    with own_attention(model):
        for place in range(len(trial.alone)):
            with _watched(model, backward) as calls:
                outcomes.append(run.alone(place))
            by_path: dict[str, list[_Call]] = {}
            for call in calls:
                by_path.setdefault(call.path, []).append(call)
            alone.append(by_path)
    with _watched(model, backward) as calls:
        run.packed(outcomes)
    counted: dict[tuple[str, Any], int] = {}
    # Calls are in the order in which they began. Going forward the innermost ends first.
    found = None
    for call in reversed(calls) if backward else _by_end(calls):
        shape = None if call.made is None else call.made.shape
        number = counted[call.path, shape] = counted.get((call.path, shape), -1) + 1
        first, second = (call.made, call.given) if backward else (call.given, call.made)
        names = ("made", "given") if backward else ("given", "made")
        if backward:
            number = -1 - number
        before = _differs(first, names[0], call.path, number, alone, trial, limit)
        after = _differs(second, names[1], call.path, number, alone, trial, limit)
        if after and not before:
            found = call.path
            break
    if found is None:
        return None
    return f"{found or 'the forward of the model itself'} ({type(model.get_submodule(found)).__name__})"


def _differs(
    value: Tensor | None,
    name: str,
    path: str,
    number: int,
    alone: Sequence[Mapping[str, list[_Call]]],
    trial: Trial,
    limit: float,
) -> bool:
    """Whether what a call took or gave is not that of each sequence alone; False where that is not known."""
    if value is None:
        return False
    for sizes in (trial.sizes, trial.target_sizes):
        members = None if sizes is None else _members(value, sizes)
        if members is None or sizes is None:
            continue
        expected = [_of_call(alone[place].get(path, ()), name, sizes[place], number) for place in members]
        known = [each.flatten() for each in expected if each is not None]
        if len(known) == len(expected):
            wanted = torch.cat(known)
            difference, scale = float((value.flatten() - wanted).abs().max()), float(wanted.abs().max())
            return isfinite(scale) and not (isfinite(difference) and difference <= limit * max(scale, 1e-30))
    return False


def _members(value: Tensor, sizes: Sequence[int]) -> list[int] | None:
    """The sequences that numbers [n, L] belong to, in order: all, in a row, or those of one length; None if unknown."""
    if tuple(value.shape) == (1, sum(sizes)):
        return list(range(len(sizes)))
    alike = [place for place, size in enumerate(sizes) if size == value.shape[1]]
    return alike if len(alike) == value.shape[0] else None


def _of_call(calls: Sequence[_Call], name: str, size: int, number: int) -> Tensor | None:
    found = [value for call in calls if (value := getattr(call, name)) is not None and tuple(value.shape) == (1, size)]
    return found[number] if -len(found) <= number < len(found) else None


class _Calls(list[_Call]):
    """Calls in the order in which they began; ``ended`` in that in which they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[_Call] = []


def _by_end(calls: _Calls) -> list[_Call]:
    return calls.ended


@contextmanager
def _watched(model: nn.Module, backward: bool) -> Iterator[_Calls]:
    """Watch all modules, or the gradients of what goes through them."""
    calls, open_calls = _Calls(), []

    def began(path: str, module: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        call = _Call(path)
        calls.append(call)
        open_calls.append(call)
        _mark((*given, *named.values()), functools.partial(setattr, call, "given"), backward)

    def ended(path: str, module: nn.Module, given: Any, output: Any) -> None:
        call = open_calls.pop()
        calls.ended.append(call)
        _mark(output, functools.partial(setattr, call, "made"), backward)

    handles = []
    for path, each in model.named_modules():
        handles.append(each.register_forward_pre_hook(functools.partial(began, path), with_kwargs=True))
        handles.append(each.register_forward_hook(functools.partial(ended, path)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _mark(values: Any, keep: Callable[[Tensor], None], backward: bool) -> None:
    value = _first_tensor(values)
    if value is None:
        return
    if not backward:
        keep(_by_token(value))
    elif value.requires_grad:
        value.register_hook(lambda gradient: keep(_by_token(gradient)))


def _by_token(value: Tensor) -> Tensor:
    """One number for each token of a value [n, L, ...], or of one [T, d] as of a row."""
    value = value.detach()
    flat = (value if value.ndim > 2 else value[None]).flatten(2).double()
    place = torch.arange(1, flat.shape[2] + 1, device=flat.device, dtype=flat.dtype)
    return flat @ torch.cos(place * place)


def _first_tensor(output: Any) -> Tensor | None:
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    return next(
        (each for each in parts if isinstance(each, Tensor) and each.ndim > 1 and each.is_floating_point()), None
    )
