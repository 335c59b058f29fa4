"""Module calls in progress, read off the Python stack: what a layer's attention and its mask are not handed.

An attention function gets one layer, a mask function not even that. Whether a packed call is safe depends on the
model around them, and on arguments that many models use up before their layers: ``position_ids`` often go into the
embeddings alone. Nothing is read under ``torch.compile``, which has no such frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Call(NamedTuple):
    """One call of a module, with the arguments of its ``forward`` as its caller gave them, without ``self``."""

    module: nn.Module
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """The argument of this name of ``forward``, given by keyword or by position; None if it was not given."""
        if name in self.keywords:
            return self.keywords[name]
        names = _parameters(type(self.module)) if self.positional else ()
        return dict(zip(names, self.positional)).get(name)


class Given(NamedTuple):
    """Arguments of the module calls in progress.

    Attributes:
        positions: each tensor that was given as ``position_ids``, once.
        lengths: whether ``cu_seq_lens_q`` was given, and no forward around the calls has run them by these lengths.
        model: the outermost ``PreTrainedModel`` among the modules, if there is one.
    """

    positions: tuple[Tensor, ...]
    lengths: bool
    model: PreTrainedModel | None


def module_calls() -> Iterator[Call]:
    """Module calls in progress in this thread, the innermost first.

    Frames of ``nn.Module.__call__`` are looked for: their first three variables are the module and the arguments of its
    call. Nothing plainer tells. A user loads a model with ``attn_implementation="ullage"`` and calls it; ullage never
    sees the model before its layers ask for attention, and no hook can have been put on it; hooks on all modules are
    given no keywords, and cost every module of the process; and what transformers registers is given no model.
    """
    code = nn.Module.__call__.__code__
    module, positional, keywords = code.co_varnames[:3]
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            variables = frame.f_locals
            yield Call(variables[module], variables[positional], variables[keywords])
        frame = frame.f_back


def given() -> Given | None:
    """Arguments of the module calls in progress; None under ``torch.compile``. Does not wait for the device."""
    if torch.compiler.is_compiling():
        return None
    positions: dict[int, Tensor] = {}
    lengths, model = False, None
    for call in module_calls():
        if isinstance(call.module, PreTrainedModel):
            model = call.module
        has_lengths = call.argument("cu_seq_lens_q") is not None
        # A packed model that runs by lengths has cut the row: what it was called with, and what calls it, is not of the
        # sequences that its layers get.
        if has_lengths and getattr(vars(call.module).get("forward"), "cuts_rows", False):
            break
        position_ids = call.argument("position_ids")
        if isinstance(position_ids, Tensor):
            # Modules hand the same tensor down to their parts: keep it once.
            positions[id(position_ids)] = position_ids
        lengths = lengths or has_lengths
    return Given(tuple(positions.values()), lengths, model)


def holders(module: nn.Module) -> list[nn.Module]:
    """Modules in progress that contain ``module``, the innermost first; the module itself if it is called alone."""
    around = [call.module for call in module_calls() if any(part is module for part in call.module.modules())]
    return around or [module]


@lru_cache(maxsize=256)
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
