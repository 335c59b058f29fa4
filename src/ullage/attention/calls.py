"""The calls of modules that are under way: what a layer's attention and its mask cannot see from where they stand.

An attention function is handed one layer, a mask function not even that. Whether a packed call is safe depends on the
model around them, and on arguments that many models use up before their layers: ``position_ids`` often go into the
embeddings alone. Both stand on the Python stack, in the frames of ``nn.Module.__call__``. Nothing is read under
``torch.compile``, which has no such frames.
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

#: The code that runs in a frame of each call of a module, and what it calls the module and its arguments.
_CALL = nn.Module.__call__.__code__
_SELF, _POSITIONAL, _KEYWORDS = _CALL.co_varnames[:3]


@dataclass(frozen=True)
class Call:
    """One call of a module, with the arguments as its caller gave them."""

    module: nn.Module
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """What was given under this name of ``forward``, by keyword or by place; None if nothing was."""
        if name in self.keywords:
            return self.keywords[name]
        names = _parameters(type(self.module)) if self.positional else ()
        return dict(zip(names, self.positional)).get(name)


@dataclass(frozen=True)
class Given:
    """What the callers of the modules under way gave. ``positions``: each tensor of ``position_ids``, once.

    ``lengths``: whether ``cu_seq_lens_q`` was among it. ``model``: the outermost of transformers' models under way.
    """

    positions: tuple[Tensor, ...]
    lengths: bool
    model: PreTrainedModel | None


def module_calls() -> Iterator[Call]:
    """The calls of modules that are under way in this thread, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found = frame.f_locals
            yield Call(found[_SELF], found[_POSITIONAL], found[_KEYWORDS])
        frame = frame.f_back


def given() -> Given | None:
    """What the calls under way were given; None under ``torch.compile``. Does not wait for the device."""
    if torch.compiler.is_compiling():
        return None
    positions: dict[int, Tensor] = {}
    lengths, model = False, None
    for call in module_calls():
        if isinstance(call.module, PreTrainedModel):
            model = call.module
        position_ids = call.argument("position_ids")
        if isinstance(position_ids, Tensor):
            positions[id(position_ids)] = position_ids
        lengths = lengths or call.argument("cu_seq_lens_q") is not None
    return Given(tuple(positions.values()), lengths, model)


def holders(module: nn.Module) -> list[nn.Module]:
    """The modules under way of which ``module`` is a part, the innermost first; itself if it is called alone."""
    found = [call.module for call in module_calls() if any(part is module for part in call.module.modules())]
    return found or [module]


@lru_cache(maxsize=256)
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
