"""Reduction of gradients under ZeRO: once for all microbatches of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def gradients_meet_once(engine: Any) -> Iterator[bool]:
    """Make a DeepSpeed engine reduce and step once, after the block, where it can; yields whether it does.

    ``engine``: None for none. Source: DeepSpeed's ``engine.coalesce_grad_reduction`` (stages 1 to 3, since 0.19).
    """
    optimizer = getattr(engine, "optimizer", None)
    # BF16_Optimizer and FP16_Optimizer lack the optimizer's attribute; the engine raises NotImplementedError for them,
    # as it does at stage 0.
    if not (hasattr(engine, "coalesce_grad_reduction") and hasattr(optimizer, "_coalesce_grad_reduction")):
        yield False
        return
    # Leaving the block reduces, and sets the boundary back to what it was before. The step that accelerate would have
    # made after the last backward is made here. The engine updates weights only at a boundary, hence the flag.
    with engine.coalesce_grad_reduction():
        yield True
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.step()
