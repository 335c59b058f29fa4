"""Logits that are not computed: a model's own forward runs on them as far as its loss, which then runs in chunks.

Models slice, scale, cap and cast their logits in ways of their own before they hand them to a loss. None of these
forwards is written again here. For one call a stand-in takes the place of the head. It returns :class:`LazyLogits`: the
hidden states, and what is done to their scores, recorded operation by operation. Where they reach
``torch.nn.functional.cross_entropy``, as they do in every loss of transformers over words, head and loss run in chunks
(:mod:`ullage.training.loss.chunked_loss`). An operation that cannot be recorded computes the logits, and the call goes
on with them as it would have without: the loss is the same either way.

A slice of tokens or another form of the leading dims is the same of the hidden states, as long as the last dim stays
apart from the others. :func:`_indexed` and :func:`_reshaped` give the hidden states of the result, and a step on the
scores if the last dim is cut; None for what is no such view.

What the outputs then hold as logits is not there. Whoever uses it after the call gets an error that names the switch.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.training.loss.chunked_loss import chunked_cross_entropy

#: An operation on scores [n, words].
ScoreStep = Callable[[Tensor], Tensor]
View = tuple[Tensor, ScoreStep | None]


def _indexed(hidden: Tensor, words: int, index: Any) -> View | None:
    # Of hidden states [N, T, H], s[None, 1:, ..., :7] has the entries [None, 1:, :, :7], of which the last is about
    # words: the hidden states are those of [None, 1:, :, :], and the scores of each are cut to seven.
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or isinstance(each, (int, slice, Tensor)) for each in entries):
        return None
    taken = [0 if each is None or each is Ellipsis else _dims_of(each) for each in entries]
    rest = hidden.ndim - sum(taken)
    places = [place for place, each in enumerate(entries) if each is Ellipsis]
    if rest < 0 or len(places) > 1:
        return None
    place = places[0] if places else len(entries)
    entries[place : place + 1] = [slice(None)] * rest
    # The last entry that takes a dim takes that of the words.
    last = max((place for place, each in enumerate(entries) if each is not None), default=None)
    if last is None or not isinstance(entries[last], slice) or any(each is None for each in entries[last:]):
        return None
    chosen, entries[last] = entries[last], slice(None)
    rows = hidden[tuple(entries)]
    if chosen.indices(words) == (0, words, 1):
        return rows, None
    return rows, lambda scores: scores[..., chosen]


def _dims_of(entry: Any) -> int:
    is_mask = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.ndim if is_mask else 1


def _reshaped(
    hidden: Tensor, words: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> View | None:
    # Torch itself tells the sizes, in whatever way they are asked for: [2, 6, words].view(-1, words) is [12, words], so
    # hidden states [2, 6, H] become [12, H]. Where the last dim is that of the words, all others were among themselves.
    if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
        return None
    try:
        sizes = func(torch.empty((*hidden.shape[:-1], words), device="meta"), *args, **kwargs).shape
    except (RuntimeError, TypeError):  # with no tokens, -1 could be anything
        return None
    if len(sizes) < 2 or sizes[-1] != words or prod(sizes[:-1]) != prod(hidden.shape[:-1]) or not hidden.numel():
        return None
    return hidden.reshape(*sizes[:-1], hidden.shape[-1]), None


#: Operations that change the dims alone.
_RESHAPING = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
#: Operations on each score by itself, with numbers, single values or one value per word beside it.
_ELEMENTWISE = frozenset({
    "add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply", "div", "divide", "truediv", "true_divide",
    "neg", "negative", "tanh", "clamp", "clip", "float", "double", "bfloat16", "half", "to",
})  # fmt: skip
_EITHER_WAY = frozenset({"add", "radd", "mul", "rmul", "multiply"})
_IN_PLACE = frozenset({
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__setitem__",
})  # fmt: skip
_OPERATORS = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__",
    "__pow__", "__rpow__", "__matmul__", "__rmatmul__", "__floordiv__", "__mod__", "__abs__", "__invert__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__",
    "__getitem__", "__iter__", "__bool__", "__float__", "__int__", "__array__",
)  # fmt: skip
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class HeadCall:
    """One call of a head in whose place a stand-in was called.

    Attributes:
        head: the module.
        hidden: [..., H], what it was given; None once the call of the model has ended.
        counted: labels that count in its loss, at most; None where that is not known.
        losses: cross-entropies that ran in chunks.
        is_computed: whether something needed the logits themselves.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, counted: int | None = None) -> None:
        self.head, self.losses, self.is_computed, self.counted = head, 0, False, counted
        self.hidden: Tensor | None = hidden
        self._alive: weakref.WeakSet[LazyLogits] = weakref.WeakSet()

    def end(self) -> None:
        """Let go of the hidden states: nothing is computed of them any more."""
        self.hidden = None
        for each in self._alive:
            each.forget()

    def remember(self, logits: LazyLogits) -> None:
        self._alive.add(logits)

    def compute_all(self) -> None:
        """Compute all logits of this call that somebody still holds, as views of each other where they are."""
        for each in list(self._alive):
            each.compute()

    def loss(self, logits: LazyLogits, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of the cross-entropies of ``logits`` [T, words], times ``weights`` [T] if given, in chunks."""
        self.losses += 1

        def run(hidden: Tensor) -> Tensor:
            return chunked_cross_entropy(
                hidden,
                self.head,
                labels,
                weights=weights,
                transform=logits.transform,
                parameters=logits.operands,
                counted=self.counted,
            )

        assert logits.hidden is not None
        return _within(self.head, run, logits.hidden)


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


class LazyLogits:
    """Scores [..., words] of hidden states [..., H] that are not computed before an operation needs them.

    Attributes:
        call: of the head that would have made them.
        hidden: [..., H], with what slices and views have done to all but the last dim.
        steps: what has been done to each score, in order.
        operands: tensors within ``steps``.
        words: size of the last dim.
        dtype: of the scores.
    """

    def __init__(
        self,
        call: HeadCall,
        hidden: Tensor,
        words: int,
        dtype: torch.dtype,
        made: tuple[LazyLogits, Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None,
        steps: tuple[ScoreStep, ...] = (),
        operands: tuple[Tensor, ...] = (),
    ) -> None:
        self.call, self.words, self.dtype, self.steps, self.operands = call, words, dtype, steps, operands
        self.hidden: Tensor | None = hidden
        self._made, self._value = made, None
        call.remember(self)

    # What is known without computing them.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._there().shape[:-1], self.words))

    @property
    def ndim(self) -> int:
        return self._there().ndim

    @property
    def device(self) -> torch.device:
        return self._there().device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyLogits({'not there' if self.hidden is None else list(self.shape)})"

    @property
    def transform(self) -> ScoreStep | None:
        """All steps as one function of scores [n, words]; None without one."""
        if not self.steps:
            return None
        steps = self.steps

        def run(scores: Tensor) -> Tensor:
            for step in steps:
                scores = step(scores)
            return scores

        return run

    # Operations.

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(args) == 2 and func.__name__.strip("_") in _EITHER_WAY and isinstance(args[0], Tensor):
            args = args[::-1]  # a scale that stands before them
        first = args[0] if args else kwargs.get("input")
        others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, LazyLogits)]
        others = others[isinstance(first, LazyLogits) :]  # the same ones twice are two
        if isinstance(first, LazyLogits) and first._value is None and not others:
            rest = args[1:]
            named = {name: value for name, value in kwargs.items() if args or name != "input"}
            result = first._recorded(func, rest, named)
            if result is not NotImplemented:
                return result
        name = func.__name__
        if name in _IN_PLACE or name == "__idiv__" or (name.endswith("_") and not name.startswith("_")):
            # In place: whatever else there is of these logits may see it.
            for each in (*others, first):
                if isinstance(each, LazyLogits):
                    each.call.compute_all()
        computed: Any = tree_map(lambda each: each.compute() if isinstance(each, LazyLogits) else each, (args, kwargs))
        return func(*computed[0], **computed[1])

    def compute(self) -> Tensor:
        """The logits themselves, computed once."""
        if self._value is None:
            self._there()
            if self._made is None:
                self.call.is_computed = True
                self._value = self.call.head(self.hidden)
            else:
                parent, func, args, kwargs = self._made
                self._value = func(parent.compute(), *args, **kwargs)
        return self._value

    def forget(self) -> None:
        """The call of the model has ended: from now on there is nothing to compute them of."""
        self.hidden = self._made = None
        self.steps = self.operands = ()

    def _there(self) -> Tensor:
        if self.hidden is None:
            raise InputError(
                "these logits were not computed: head and loss ran in chunks, which never hold them all",
                where="outputs.logits",
                expected="only the loss to be used in training",
                hint="set TrainingArguments(packing_chunked_loss=False) to have logits too",
            )
        return self.hidden

    def _recorded(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation, not computed either, or its loss; ``NotImplemented`` for any other operation."""
        # An operator and the function that it stands for are one: __mul__, mul.
        hidden, name = self._there(), func.__name__.strip("_")
        if name == "cross_entropy":
            return self._cross_entropy(args, kwargs)
        if name == "contiguous":
            return self
        view = None
        if name == "getitem":
            view = _indexed(hidden, self.words, *args, **kwargs)
        elif name in _RESHAPING:
            view = _reshaped(hidden, self.words, func, args, kwargs)
        if view is not None:
            rows, step = view
            steps = self.steps if step is None else (*self.steps, step)
            return self._derived((func, args, kwargs), rows, steps, self.operands)
        if name in _ELEMENTWISE:
            return self._elementwise(func, args, kwargs)
        return NotImplemented

    def _elementwise(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not all(self._is_per_word(each) for each in tensors) or self._moves(args, kwargs):
            return NotImplemented
        # A value per word [1, 1, words] stands beside scores [n, words] too, without its dims of size one.
        args, kwargs = tree_map(
            lambda each: each.reshape(each.shape[-1:]) if isinstance(each, Tensor) else each, (args, kwargs)
        )
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        steps: tuple[ScoreStep, ...] = (*self.steps, lambda scores: func(scores, *args, **kwargs))
        return self._derived((func, args, kwargs), self._there(), steps, (*self.operands, *operands))

    def _is_per_word(self, operand: Tensor) -> bool:
        return (
            prod(operand.shape[:-1]) == 1
            and operand.ndim <= self.ndim
            and operand.shape[-1:].numel() in (1, self.words)
        )

    def _moves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation would bring the scores to another device."""
        given = [*args, *kwargs.values()]
        devices = [torch.device(each) for each in given if isinstance(each, (str, torch.device)) and each != "floor"]
        return any(each.type != self.device.type or each.index not in (None, self.device.index) for each in devices)

    def _derived(
        self,
        made: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        hidden: Tensor,
        steps: tuple[ScoreStep, ...],
        operands: tuple[Tensor, ...],
    ) -> LazyLogits:
        """The logits that an operation makes of these."""
        words, dtype = self.words, self.dtype
        if len(steps) > len(self.steps):
            # What a step makes of no scores at all tells its dtype and the size of its last dim.
            with torch.no_grad():
                none = steps[-1](torch.empty(0, words, dtype=dtype, device=hidden.device))
            words, dtype = none.shape[-1], none.dtype
        return LazyLogits(self.call, hidden, words, dtype, (self, *made), steps, operands)

    def _cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``F.cross_entropy`` of these logits, in chunks; ``NotImplemented`` for what it does not do so."""
        bound = _CROSS_ENTROPY.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given, labels = bound.arguments, bound.arguments["target"]
        if (
            self.ndim != 2
            or not isinstance(labels, Tensor)
            or labels.shape != self.shape[:1]
            or labels.dtype != torch.int64
            or not self.dtype.is_floating_point
            or given["weight"] is not None
            or given["size_average"] is not None
            or given["reduce"] is not None
            or given["reduction"] not in ("sum", "mean")
            or given["label_smoothing"]
        ):
            return NotImplemented
        if given["ignore_index"] != IGNORED_LABEL:
            labels = labels.masked_fill(labels == given["ignore_index"], IGNORED_LABEL)
        loss = self.call.loss(self, labels).to(torch.promote_types(self.dtype, torch.float32))
        return loss / (labels != IGNORED_LABEL).sum() if given["reduction"] == "mean" else loss

    # Operators and methods: the functions of torch that they are.

    def __getattr__(self, name: str) -> Any:
        known = getattr(Tensor, name, None)
        if name.startswith("__") or known is None:
            raise AttributeError(name)
        if not callable(known):
            return getattr(self.compute(), name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return LazyLogits.__torch_function__(known, (), (self, *args), kwargs)

        return method


def _operator(name: str) -> Callable[..., Any]:
    def run(self: LazyLogits, *args: Any) -> Any:
        return LazyLogits.__torch_function__(getattr(Tensor, name), (), (self, *args))

    return run


for _name in (*_OPERATORS, *_IN_PLACE):
    setattr(LazyLogits, _name, _operator(_name))
# By identity, as tensors: comparing two of them computes them.
LazyLogits.__hash__ = object.__hash__


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
        call = HeadCall(head, hidden, self._counted)
        self._calls.append(call)
        return LazyLogits(call, hidden, head.out_features, dtype)


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
            call.end()


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
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return True
    base = getattr(head, "base_layer", None)
    is_lora = type(head).__module__.startswith("peft.tuners.lora") and type(head).__name__ == "Linear"
    return is_lora and isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward


def _is_engines(hook: Any) -> bool:
    """Whether DeepSpeed has registered a hook, to gather parameters and let them go."""
    return (getattr(hook, "__module__", "") or "").startswith("deepspeed.")
