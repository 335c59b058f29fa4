"""A model at rest: calls that tell what it computes, without chance in them and without a trace behind them.

Two calls of one model can only be compared where nothing in it is drawn by chance, and a call that is not part of the
training must not change it. Dropout is taken out wherever it stands: as a number that a module or a config holds (so
kernels that drop by themselves, and layers that are dropped as a whole, are meant too), and as a function called with
a number of its own. What a forward may change is put back: modes, counters, buffers and random states. Gradients are
asked for with ``torch.autograd.grad``, which runs no hook of an engine and leaves every ``.grad`` as it is.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ullage.core.errors import InputError
from ullage.mixers.forwards import CheckpointedRow, FoundForward

#: Parts of the names of probabilities and scales of noise, as modules and configs hold them.
_CHANCES = ("drop", "jitter")
#: Of NEFTune, on an embedding; it may be a whole number.
_NOISE = "neftune_noise_alpha"
_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
        *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
    }
)
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {F.linear, F.conv1d, torch.matmul, torch.bmm, torch.addmm, Tensor.matmul, Tensor.__matmul__}
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Where ``scaled_dot_product_attention`` takes its dropout, if it is given by place.
_SDPA_DROPOUT = 4


@contextmanager
def at_rest(model: nn.Module, *, training: bool) -> Iterator[Precision]:
    """Run a model in training mode, or in that of evaluation, without dropout; afterwards it is what it was.

    Gives the lowest precision of a product within the block, as it becomes known. Reentrant checkpoints, which
    ``torch.autograd.grad`` cannot go through, are made the other kind, and compiled modules run uncompiled. Not for
    several threads at once. ``model``: bare, or as a training loop calls it.
    """
    precision = Precision()
    with ExitStack() as stack:
        devices = [each for each in _devices(model) if each.type == "cuda"]
        stack.enter_context(random_states_kept(devices, model.modules()))
        stack.enter_context(modules_kept(model))
        stack.enter_context(_numbers_kept(model))
        model.train(training)
        _without_chance(model)
        _repeatable_checkpoints(model)
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and it loads slowly
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_WithoutDropout(precision))
        yield precision


@contextmanager
def random_states_kept(devices: list[torch.device] | None = None, holders: Iterable[Any] = ()) -> Iterator[None]:
    """Whatever is drawn within the block is drawn again afterwards; of the CPU, and of these ``devices``.

    ``holders``: collators, data sets, modules: their own generators, and those of what they wrap, do so too.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what data sets draw from
    objects = [getattr(each, "__self__", each) for each in holders]  # a collator may be a method
    for _ in range(2):
        objects += [part for each in objects for part in getattr(each, "__dict__", {}).values()]
    kept = [(each.__dict__, dict(each.__dict__)) for each in objects if isinstance(getattr(each, "__dict__", 0), dict)]
    for values, before in kept:
        values.update({name: copy.deepcopy(each) for name, each in before.items() if type(each) in _GENERATORS})
    with torch.random.fork_rng(devices=devices or []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for values, before in kept:  # one may have been made in the place of None
                drawn = [name for name, each in values.items() if type(each) in _GENERATORS]
                values.update({name: before.get(name) for name in drawn})


@dataclass
class Precision:
    """The lowest precision of any product of a block: None before the first."""

    dtype: torch.dtype | None = None

    def add(self, dtype: torch.dtype) -> None:
        """Take note of the dtype of a result."""
        if dtype.is_floating_point and (self.dtype is None or torch.finfo(dtype).eps > torch.finfo(self.dtype).eps):
            self.dtype = dtype


@dataclass(frozen=True, eq=False)
class Leaf:
    """What one call of an embedding gave.

    Attributes:
        name: path of the embedding, or the keyword of inputs that are numbers.
        ids: what was looked up; None for numbers.
        value: a leaf of the graph, [*ids.shape, d].
    """

    name: str
    ids: Tensor | None
    value: Tensor


@contextmanager
def embedded_inputs(model: nn.Module) -> Iterator[list[Leaf]]:
    """Within it, everything that a model embeds is a leaf of the graph, in the order of the calls.

    So gradients can be asked for where embeddings are frozen, gathered or sharded. ``model``: bare.
    """
    leaves: list[Leaf] = []
    lookups = _Lookups()

    def taken(name: str, module: nn.Module, given: Any, named: dict[str, Any], output: Any) -> Any:
        ids, lookups.ids = lookups.ids, None
        if ids is None:
            ids = next((each for each in (*given, *named.values()) if isinstance(each, Tensor)), None)
        if not torch.is_grad_enabled() or ids is None or ids.is_floating_point():
            return None
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.shape[: ids.ndim] != ids.shape:
            return None
        leaf = output.detach().requires_grad_()
        leaves.append(Leaf(name, ids, leaf))
        return leaf.clone()  # a model may write into it, which it may not into a leaf

    handles = [
        module.register_forward_hook(functools.partial(taken, path), with_kwargs=True)
        for path, module in input_embeddings(model)
    ]
    try:
        with lookups:
            yield leaves
    finally:
        for handle in handles:
            handle.remove()


def input_embeddings(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What a model embeds tokens by, with its path: all tables but those that a search has found to count."""
    embeddings: list[tuple[str, nn.Module]] = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not _is_restarted(module)
    ]
    try:
        named = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return embeddings
    if isinstance(named, nn.Module) and not any(isinstance(part, nn.Embedding) for part in named.modules()):
        embeddings += [(path, module) for path, module in model.named_modules() if module is named]
    return embeddings


def embedding_of(model: nn.Module) -> nn.Module:
    """The table that a model embeds tokens by. Raises ``InputError`` for one that has none."""
    get = getattr(model, "get_input_embeddings", None)
    table = None
    if get is not None:
        try:
            table = get()
        except NotImplementedError:
            table = None
    if not isinstance(table, nn.Module):
        table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if table is None:
        raise InputError("the model has no embedding of tokens", where=type(model).__name__)
    return table


def _is_restarted(module: nn.Module) -> bool:
    """Whether a table counts: what it gives is not what it looked up, so the gradient of its weights tells."""
    return isinstance(vars(module).get("forward"), FoundForward)


class _Lookups(TorchFunctionMode):
    """The ids of the last lookup: a table of positions is called with tokens, and looks up one row for several."""

    ids: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            self.ids = args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


class _WithoutDropout(TorchFunctionMode):
    """Functions of dropout give what they are given."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > _SDPA_DROPOUT:
                args = (*args[:_SDPA_DROPOUT], 0.0, *args[_SDPA_DROPOUT + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        result = func(*args, **kwargs)
        if func in _PRODUCTS and isinstance(result, Tensor):
            self._precision.add(result.dtype)
        return result


def _without_chance(model: nn.Module) -> None:
    """Put every probability of dropout and every scale of noise to zero, on modules and configs."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            vars(module)["p"] = 0.0
        _put_to_zero(vars(module))
    for config in _configs(model):
        _put_to_zero(vars(config))


def _put_to_zero(values: dict[str, Any]) -> None:
    for name, value in values.items():
        is_chance = isinstance(value, float) and any(part in name for part in _CHANCES)
        if is_chance or (name == _NOISE and value):
            values[name] = 0.0


def _repeatable_checkpoints(model: nn.Module) -> None:
    """Make reentrant checkpoints the other kind; where another's function does the checkpointing, switch it off."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is None:
            continue
        row = function if isinstance(function, CheckpointedRow) else None
        inner = function if row is None else row.function
        if not isinstance(inner, functools.partial) or inner.func is not checkpoint:
            vars(module)["gradient_checkpointing"] = False
            continue
        # The second run may be in a thread of the backward's own, where the mode of this thread is not in force.
        kept = {name: value for name, value in inner.keywords.items() if name not in ("use_reentrant", "context_fn")}
        inner = functools.partial(checkpoint, use_reentrant=False, context_fn=_second_run, **kept)
        vars(module)["_gradient_checkpointing_func"] = inner if row is None else CheckpointedRow(inner)


def _second_run() -> tuple[Any, Any]:
    return nullcontext(), _WithoutDropout(Precision())


@contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """Put modes, plain attributes and buffers of all modules back, and the functions that checkpoint."""
    modules = [(each, _plain(each), dict(each._buffers)) for each in model.modules()]
    values = {id(each): (each, each.detach().clone()) for each in model.buffers()}
    try:
        yield
    finally:
        for module, plain, buffers in modules:
            vars(module).update(plain)
            # A buffer may have been replaced, by one for longer rows for example.
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.values():
                if not torch.equal(buffer, value):  # else a graph that holds it would be disturbed
                    buffer.copy_(value)


@contextmanager
def _numbers_kept(model: nn.Module) -> Iterator[None]:
    """Put the numbers of all configs back."""
    kept = [(vars(each), {k: v for k, v in vars(each).items() if isinstance(v, float)}) for each in _configs(model)]
    try:
        yield
    finally:
        for values, numbers in kept:
            values.update(numbers)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, words or nothing, such as the length that its cache is made for."""
    return {
        name: value
        for name, value in vars(module).items()
        if value is None or isinstance(value, (bool, int, float, str)) or name == "_gradient_checkpointing_func"
    }


def _configs(model: nn.Module) -> list[Any]:
    """The configs that modules hold, each once."""
    configs = {id(config): config for part in model.modules() if hasattr(config := vars(part).get("config"), "to_dict")}
    return list(configs.values())


def _devices(model: nn.Module) -> set[torch.device]:
    return {each.device for each in model.parameters()}
