"""The arguments of a training run: transformers' own, and what packing needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

from ullage.errors import InputError


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` and packing; plain ones work with our Trainer too, without packing."""

    packing: bool = field(
        default=False,
        metadata={"help": "Pack each global batch into microbatches without padding, balanced over ranks."},
    )
    capacity: int = field(default=8192, metadata={"help": "Tokens a rank holds in one packed microbatch."})
    strategy: str = field(
        default="balanced", metadata={"help": "How sequences are placed: balanced, next_fit, or one registered."}
    )
    oversize: str = field(
        default="error", metadata={"help": "A sequence longer than the capacity: error, truncate or drop."}
    )
    coalesce_gradients: bool = field(
        default=True,
        metadata={"help": "Under ZeRO, reduce gradients once a step. Off: after every microbatch, in less memory."},
    )


@dataclass(frozen=True)
class PackingOptions:
    """What packing needs to know, read from the arguments once."""

    capacity: int
    strategy: str
    oversize: str
    coalesce_gradients: bool

    @classmethod
    def of(cls, arguments: Any) -> PackingOptions | None:
        """The options, or None where the arguments do not ask for packing. Raises ``InputError`` for bad ones."""
        if not getattr(arguments, "packing", False):
            return None
        if arguments.capacity <= 0:
            raise InputError("capacity must be positive", expected="tokens a microbatch", found=arguments.capacity)
        return cls(arguments.capacity, arguments.strategy, arguments.oversize, arguments.coalesce_gradients)
