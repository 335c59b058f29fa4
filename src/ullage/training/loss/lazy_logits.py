"""Logits that are not computed: a model's own forward runs on them as far as its loss, which then runs in chunks.

Models slice, scale, cap and cast their logits in ways of their own before they hand them to a loss. None of these
forwards is written again here. For one call a stand-in takes the place of the head and hands its hidden states on, as
:class:`LazyLogits`. What selects tokens or changes the other dims is done to the hidden states at once. What changes
each score by itself (a scale, a soft cap, a bias, a cast) is kept, to be done to the scores of a chunk. Where
``torch.nn.functional.cross_entropy`` gets them, head and loss run in chunks (:mod:`ullage.training.loss.chunked_loss`).
Anything else, a trained bias too, computes the logits, and the call goes on with them: the loss is the same either way.

What the outputs then hold as logits is not there. Whoever uses it after the call gets an error that names the switch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.training.loss.chunked_loss import chunked_cross_entropy

#: Operations that change the dims alone, in the order of the elements.
_RESHAPING = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
#: Operations on each score by itself, with numbers or one value per word beside it.
_ELEMENTWISE = frozenset({
    "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "neg", "tanh", "clamp",
    "float", "double", "bfloat16", "half", "to",
})  # fmt: skip
_EITHER_WAY = frozenset({"add", "radd", "mul", "rmul"})
_SIZES = frozenset({"size", "dim", "numel", "len", "is_floating_point"})


@dataclass(eq=False)
class HeadCall:
    """One call of a head in whose place a stand-in was called.

    Attributes:
        head: the module.
        counted: labels that count in its loss, at most; None where that is not known.
        losses: cross-entropies that ran in chunks.
        is_computed: whether something needed the logits themselves.
        has_ended: whether the call of the model has.
        alive: the logits of it, and parts of them, that somebody holds.
    """

    head: Any
    counted: int | None = None
    losses: int = 0
    is_computed: bool = False
    has_ended: bool = False
    alive: weakref.WeakSet[LazyLogits] = field(default_factory=weakref.WeakSet)


class LazyLogits:
    """Scores [..., words] of hidden states [..., H] that are not computed before an operation needs them.

    Attributes:
        call: of the head that would have made them.
        hidden: [..., H], with what selections and views have done to all but the last dim.
        like: [..., words], a tensor of their shape, dtype and device that takes no memory.
        steps: what has been done to each score: function, arguments and keywords.
    """

    def __init__(self, call: HeadCall, hidden: Tensor, like: Tensor, steps: tuple[Any, ...] = ()) -> None:
        self.call, self.hidden, self.like, self.steps = call, hidden, like, steps
        self._computed: Tensor | None = None
        call.alive.add(self)

    def __repr__(self) -> str:
        return f"LazyLogits({'not there' if self.call.has_ended else list(self.like.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # An operator and the function that it stands for are one: __mul__, mul; mul_ is another.
        name, kwargs = func.__name__, dict(kwargs or {})
        name = name.strip("_") if name.endswith("__") else name
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if len(args) == 2 and name in _EITHER_WAY and not isinstance(args[0], cls):
            args = args[::-1]  # a scale that stands before them
        mine = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        if len(mine) == 1 and mine[0] is args[0] and mine[0]._computed is None:
            result = mine[0]._recorded(name, func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        if _is_in_place(func.__name__) and isinstance(args[0], cls) and len(args[0].call.alive) > 1:
            raise InputError(
                "logits that are not computed cannot be changed in place while parts of them are held",
                where=func.__name__,
                hint="set TrainingArguments(packing_chunked_loss=False)",
            )
        given: Any = tree_map(lambda each: each.compute() if isinstance(each, cls) else each, (args, kwargs))
        return func(*given[0], **given[1])

    def _recorded(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation, not computed either, or the loss; ``NotImplemented`` for any other operation."""
        self._require_there()
        if name == "cross_entropy":
            return self._cross_entropy(*args, **kwargs)
        if name in _SIZES:
            return func(self.like, *args, **kwargs)
        if name == "contiguous":
            return self
        if name == "getitem":
            return self._selected(args[0])
        if name in _ELEMENTWISE:
            return self._elementwise(func, args, kwargs)
        if name not in _RESHAPING or any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
            return NotImplemented
        # [2, 6, words].view(-1, words) is [12, words], so hidden states [2, 6, H] become [12, H].
        shape = func(self.like, *args, **kwargs).shape
        if len(shape) < 2 or shape[-1] != self.like.shape[-1]:
            return NotImplemented
        return self._with(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    def _with(self, hidden: Tensor) -> LazyLogits:
        like = self.like.new_empty(()).expand(*hidden.shape[:-1], self.like.shape[-1])
        return LazyLogits(self.call, hidden, like, self.steps)

    def _selected(self, index: Any) -> Any:
        # Of [2, 6, 9] and [2, 6, 8], what leaves the last dim as it is makes [..., 9] and [..., 8].
        words, entries = self.like.shape[-1], index if isinstance(index, tuple) else (index,)
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            keeps_words = index.ndim < self.like.ndim
        elif all(each is None or each is Ellipsis or isinstance(each, (int, slice)) for each in entries):
            keeps_words = self.like[index].shape[-1:] + self.like[..., 1:][index].shape[-1:] == (words, words - 1)
        else:
            keeps_words = False
        return self._with(self.hidden[index]) if keeps_words else NotImplemented

    def _elementwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(prod(each.shape[:-1]) != 1 or each.ndim > self.like.ndim or each.requires_grad for each in operands):
            return NotImplemented
        # A value per word [1, 1, words] stands beside scores [n, words] too, without its dims of size one.
        args, kwargs = tree_map(
            lambda each: each.reshape(each.shape[-1:]) if isinstance(each, Tensor) else each, (args, kwargs)
        )
        # What an operation makes of no scores at all tells its dtype and device.
        none = func(self.like.new_empty(0, self.like.shape[-1]), *args, **kwargs)
        if none.device != self.like.device or none.shape[-1] != self.like.shape[-1]:
            return NotImplemented
        like = none.new_empty(()).expand(self.like.shape)
        return LazyLogits(self.call, self.hidden, like, (*self.steps, (func, args, kwargs)))

    def _cross_entropy(
        self, target: Any, *, ignore_index: int, reduction: str, label_smoothing: float, **others: Any
    ) -> Any:
        """``torch.nn.functional.cross_entropy``, which names all its arguments, in chunks; or ``NotImplemented``."""
        is_index = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == self.like.shape[:-1]
        is_plain = not label_smoothing and all(each is None for each in others.values())
        if not is_plain or not is_index or self.like.ndim != 2 or reduction not in ("sum", "mean"):
            return NotImplemented
        if ignore_index != IGNORED_LABEL:
            target = target.masked_fill(target == ignore_index, IGNORED_LABEL)
        loss = self.loss(target).to(torch.promote_types(self.like.dtype, torch.float32))
        return loss / (target != IGNORED_LABEL).sum() if reduction == "mean" else loss

    def loss(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of the cross-entropies of these logits [T, words], times ``weights`` [T] if given, in chunks."""
        head, steps = self.call.head, self.steps
        while steps and steps[-1][0] is Tensor.float:
            steps = steps[:-1]  # a loss in chunks is computed in float32 in any case
        transform = functools.partial(_after, steps) if steps else None
        self.call.losses += 1
        options = {"labels": labels, "weights": weights, "transform": transform, "counted": self.call.counted}
        return _within(head, functools.partial(chunked_cross_entropy, head=head, **options), self.hidden)

    def compute(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._computed is None:
            self._require_there()
            self.call.is_computed = True
            self._computed = _after(self.steps, self.call.head(self.hidden))
        return self._computed

    def _require_there(self) -> None:
        if self.call.has_ended:
            raise InputError(
                "these logits were not computed: head and loss ran in chunks, which never hold them all",
                where="outputs.logits",
                expected="only the loss to be used in training",
                hint="set TrainingArguments(packing_chunked_loss=False) to have logits too",
            )

    def __getattr__(self, name: str) -> Any:
        known = getattr(Tensor, name, None)
        if name.startswith("__") or known is None:
            raise AttributeError(name)
        if callable(known):
            return functools.partial(self._run, known)
        self._require_there()
        found = getattr(self.like, name)
        return getattr(self.compute(), name) if isinstance(found, Tensor) else found

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return LazyLogits.__torch_function__(func, (), (self, *args), kwargs)


# All operators are functions of tensors, comparisons too.
for _name in ({*dir(Tensor)} - {*dir(object)}) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}:
    if _name.startswith("__") and not _name.startswith("__torch_") and callable(getattr(Tensor, _name)):
        setattr(LazyLogits, _name, functools.partialmethod(LazyLogits._run, getattr(Tensor, _name)))


def _after(steps: tuple[Any, ...], scores: Tensor) -> Tensor:
    for func, args, kwargs in steps:
        scores = func(scores, *args, **kwargs)
    return scores


def _is_in_place(name: str) -> bool:
    is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))


def hooks_of(module: nn.Module) -> list[Any]:
    named = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in named for hook in vars(module)[name].values()]


def _within(head: nn.Module, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """``function(hidden)`` as a call of the head, so that an engine's hooks gather its parameters, once for all chunks.

    The gradients are made here, but the parameters get them in the backward pass; the hooks on the result gather them
    there too.
    """
    if not hooks_of(head):
        return function(hidden)

    def run(rows: Tensor) -> Tensor:
        vars(head).pop("forward", None)
        return function(rows)

    vars(head)["forward"] = run
    try:
        return head(hidden)
    finally:
        vars(head).pop("forward", None)


class _StandIn(nn.Module):
    """A stand-in for a head: gives the logits of its calls uncomputed; in all else it is the head."""

    def __init__(self, place: nn.Module, head: nn.Module, calls: list[HeadCall], counted: int | None) -> None:
        super().__init__()
        # Behind nn.Module's back, so that nobody finds the head's parameters twice.
        vars(self).update(_place=place, _head=head, _calls=calls, _counted=counted)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_place"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        if len(args) != 1 or kwargs or not isinstance(hidden, Tensor) or not torch.is_grad_enabled() or hidden.ndim < 2:
            return self._place(*args, **kwargs)
        device, head = hidden.device.type, self._head
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        self._calls.append(HeadCall(head, self._counted))
        like = hidden.new_empty((), dtype=dtype).expand(*hidden.shape[:-1], head.out_features)
        return LazyLogits(self._calls[-1], hidden, like)


@contextmanager
def head_in_chunks(model: nn.Module, counted: int | None = None) -> Iterator[list[HeadCall]]:
    """For calls of ``model`` within this block, compute its head and its loss in chunks, where its forward allows it.

    Yields the calls of the head, as they come. ``model``: bare. ``counted``: labels that count, at most, where the host
    knows. Raises ``InputError`` where :func:`head_problem` tells of one.
    """
    problem = head_problem(model)
    if problem is not None:
        raise InputError("head and loss cannot run in chunks", where=type(model).__name__, found=problem)
    place = _output_embeddings(model)
    assert place is not None
    calls: list[HeadCall] = []
    stand_in = _StandIn(place, _within_adapters(place), calls, counted)
    owners = [
        (parent, name)
        for parent in model.modules()
        for name, child in vars(parent)["_modules"].items()
        if child is place
    ]
    for parent, name in owners:
        vars(parent)["_modules"][name] = stand_in
    try:
        yield calls
    finally:
        for parent, name in owners:
            vars(parent)["_modules"][name] = place
        for call in calls:
            call.has_ended = True


def head_problem(model: nn.Module) -> str | None:
    """Why the head of a bare model cannot run in chunks; None where it can."""
    place = _output_embeddings(model)
    if place is None:
        return "the model names no head (get_output_embeddings)"
    head = _within_adapters(place)
    if not _is_linear(head):
        return f"its head is a {type(head).__name__}, not a linear layer"
    if any("forward" in vars(each) for each in (place, head)):
        return "somebody has given its head another forward"
    if any(not _is_engines(hook) for each in (place, *head.modules()) for hook in hooks_of(each)):
        return "somebody reads its head by hooks"
    if any(hooks_of(each) for each in head.modules() if each is not head):
        return "the parts of its head are gathered one by one"
    if next(head.parameters()).dtype == torch.float16:
        return "float16 needs its loss scaled before the gradients are made"
    return None


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        found = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _within_adapters(place: nn.Module) -> nn.Module:
    """The module that runs where PEFT trains a copy of the head (``modules_to_save``); else the head."""
    copies: Any = getattr(place, "modules_to_save", None)
    if type(place).__name__ != "ModulesToSaveWrapper" or not isinstance(copies, nn.ModuleDict):
        return place
    active: Any = place.active_adapters
    if place.disable_adapters or not active or active[0] not in copies:
        return place.original_module  # pyright: ignore[reportReturnType]
    return copies[active[0]]


def _is_linear(head: nn.Module) -> bool:
    """Whether a head is torch's linear layer, or one that PEFT's LoRA has put in its place."""
    is_lora = type(head).__module__.startswith("peft.tuners.lora") and type(head).__name__ == "Linear"
    layer = getattr(head, "base_layer", None) if is_lora else head
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _is_engines(hook: Any) -> bool:
    """Whether DeepSpeed has registered a hook, to gather parameters and let them go."""
    return (getattr(hook, "__module__", "") or "").startswith("deepspeed.")
