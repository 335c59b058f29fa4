"""Module calls in progress, read from the Python stack: what a layer's attention and its mask are not handed.

An attention function gets one layer, a mask function not even that. Whether a packed call is safe depends on the
model around them, and on arguments that many models use up before their layers: ``position_ids`` often go into the
embeddings alone. Both can be read from the frames of ``nn.Module.__call__`` on the Python stack. Nothing is read
under ``torch.compile``, which has no such frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: The code object of ``nn.Module.__call__``, and its local names of the module and of the call's arguments.
_CALL = nn.Module.__call__.__code__
_SELF, _POSITIONAL, _KEYWORDS = _CALL.co_varnames[:3]


@dataclass(frozen=True)
class Call:
    """One call of a module, with the arguments as its caller gave them.

    Attributes:
        module: the module that was called.
        positional, keywords: the arguments of ``forward``, without ``self``.
    """

    module: nn.Module
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """The argument of this name of ``forward``, given by keyword or by position; None if it was not given."""
        if name in self.keywords:
            return self.keywords[name]
        names = _parameters(type(self.module)) if self.positional else ()
        return dict(zip(names, self.positional)).get(name)


@dataclass(frozen=True)
class Given:
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
    """Module calls in progress in this thread, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found = frame.f_locals
            yield Call(found[_SELF], found[_POSITIONAL], found[_KEYWORDS])
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
    found = [call.module for call in module_calls() if any(part is module for part in call.module.modules())]
    return found or [module]


@lru_cache(maxsize=256)
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
