"""Callback that keeps in the Trainer's state on which layout each step was trained, for ``ullage report``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ullage.training.run import LAYOUTS
from ullage.training.setup.sharding import sharding_of


class LayoutHistory(TrainerCallback):
    """Note the step after which a process begins, with its layout; what is trained again counts once."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add this process to those of the checkpoint that it goes on from."""
        before = [each for each in state.stateful_callbacks.get(LAYOUTS, ()) if each[0] < state.global_step]
        state.stateful_callbacks[LAYOUTS] = [*before, [state.global_step, layout_of(args, kwargs.get("model"))]]


def layout_of(args: Any, model: Any = None) -> str:
    """The processes of a run, and what shards its state, in words: "2 processes, ZeRO 2"."""
    number = args.world_size
    parts = [f"{number} process{'es' if number != 1 else ''}"]
    sharding, plugin = sharding_of(model), getattr(args, "deepspeed_plugin", None)
    if sharding is not None:
        topology = sharding.topology
        sizes = {name: getattr(topology, name).size for name in ("dp", "cp", "tp")}
        parts += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    elif plugin is not None:
        parts.append(f"ZeRO {plugin.zero_stage}")
    elif args.fsdp:
        parts.append("FSDP")
    return ", ".join(parts)
