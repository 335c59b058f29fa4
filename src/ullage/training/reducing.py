"""What ZeRO does around steps: gradients reduced once for all microbatches, and the order of modules that it keeps."""

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


def forget_trace(model: Any) -> None:
    """Let ZeRO 3 record the order of modules anew: that of calls before a step is not that of the step.

    DeepSpeed 0.19.8 gathers and lets go of parameters by the first order that it sees, and a step of a model with
    adapters then met parameters that had been let go ("size of tensor a (0)").
    """
    coordinate = getattr(
        getattr(getattr(model, "optimizer", None), "parameter_offload", None), "get_param_coordinator", None
    )
    if coordinate is None:
        return
    coordinator = coordinate()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    coordinator.reset_step()
