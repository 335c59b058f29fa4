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
from ullage.mixers.outcome import CallOutcome, TrialRun
from ullage.mixers.trial import Trial


@dataclass(eq=False)
class _Call:
    """One call of a module: numbers [n, L] per token of its input and of its output; None where there is no token.

    Where gradients are watched, they are those that come out of its input, and those that reach its output.
    """

    path: str
    given: Tensor | None = None
    made: Tensor | None = None


def first_module(run: TrialRun, limit: float, *, backward: bool = False) -> str | None:
    """The path and class of the first module whose output differs and whose input does not; None if none does.

    Args:
        run: the calls, of a model at rest.
        limit: of the relative difference.
        backward: whether only gradients differ; then going backward, from outputs to inputs.
    """
    model, trial = run.model, run.trial
    outcomes: list[CallOutcome] = []
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
    first, second = ("made", "given") if backward else ("given", "made")
    for call in reversed(calls) if backward else calls.ended:
        shape = None if call.made is None else call.made.shape
        number = counted[call.path, shape] = counted.get((call.path, shape), -1) + 1
        compared = _Compared(trial, alone, call, -1 - number if backward else number, limit)
        if compared.differs(second) and not compared.differs(first):
            kind = type(model.get_submodule(call.path)).__name__
            return f"{call.path or 'the forward of the model itself'} ({kind})"
    return None


@dataclass(frozen=True)
class _Compared:
    """One call of a row beside the calls of each sequence alone.

    Attributes:
        trial: the sizes of the sequences.
        alone: for each sequence, the calls of each module by path.
        call: of the row.
        number: which call of this module, of its shape; negative from the last on.
        limit: of the relative difference.
    """

    trial: Trial
    alone: Sequence[Mapping[str, list[_Call]]]
    call: _Call
    number: int
    limit: float

    def differs(self, name: str) -> bool:
        """Whether what the call took or gave is not that of each sequence alone; False where that is not known."""
        value = getattr(self.call, name)
        for sizes in (self.trial.sizes, self.trial.target_sizes):
            members = None if sizes is None or value is None else _members(value, sizes)
            if members is None or sizes is None:
                continue
            known = [self._of_call(place, name, sizes[place]) for place in members]
            expected = [each.flatten() for each in known if each is not None]
            if isinstance(value, Tensor) and len(expected) == len(known):
                wanted = torch.cat(expected)
                difference, scale = float((value.flatten() - wanted).abs().max()), float(wanted.abs().max())
                return isfinite(scale) and not (isfinite(difference) and difference <= self.limit * max(scale, 1e-30))
        return False

    def _of_call(self, place: int, name: str, size: int) -> Tensor | None:
        values = [getattr(each, name) for each in self.alone[place].get(self.call.path, ())]
        found = [value for value in values if value is not None and tuple(value.shape) == (1, size)]
        return found[self.number] if -len(found) <= self.number < len(found) else None


def _members(value: Tensor, sizes: Sequence[int]) -> list[int] | None:
    """The sequences that numbers [n, L] belong to, in order: all, in a row, or those of one length; None if unknown."""
    if tuple(value.shape) == (1, sum(sizes)):
        return list(range(len(sizes)))
    alike = [place for place, size in enumerate(sizes) if size == value.shape[1]]
    return alike if len(alike) == value.shape[0] else None


class _WatchedCalls(list[_Call]):
    """Calls in the order in which they began; ``ended`` in that in which they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[_Call] = []


@contextmanager
def _watched(model: nn.Module, backward: bool) -> Iterator[_WatchedCalls]:
    """Watch all modules, or the gradients of what goes through them."""
    calls, open_calls = _WatchedCalls(), []

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
