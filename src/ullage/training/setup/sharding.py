"""Models that somebody has sharded before a Trainer gets them, and what the Trainer asks of whoever did.

``ullage.engines.fsdp.parallelize`` leaves a :class:`Sharding` on the model that it returns. The Trainer then wraps and
moves nothing: ranks of one place in dp draw the same batches, steps are planned over dp, and gradients, the optimizer
and checkpoints are left to the object.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.ranks import Topology

if TYPE_CHECKING:
    from transformers import TrainingArguments

#: Of a model: its :class:`Sharding`.
ATTRIBUTE = "_ullage_sharding"


class Sharding(Protocol):
    """A model's distribution over ranks, as a Trainer uses it. Methods are collective over the world unless they say.

    Attributes:
        topology: the ranks, of which those along cp and tp share their batches.
        ranks_of_batch: for each place in dp the global ranks that draw its batches.
        averaged_over: the ranks whose gradients are averaged, by which a loss is multiplied beforehand.
    """

    topology: Topology
    ranks_of_batch: list[list[int]]
    averaged_over: int

    def require_trainable(self, arguments: Any) -> None:
        """Raise ``InputError`` for arguments of a Trainer that such a model is not trained by. Not collective."""
        ...

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model's forward runs. Not collective."""
        ...

    def keywords(self, batch: RaggedBatch) -> dict[str, Any] | None:
        """This rank's slice of a packed row, as keywords of the model; None where ranks hold whole rows.

        Not collective.
        """
        ...

    def whole_loss(self, loss: Tensor) -> Tensor:
        """The loss of a row, of which each rank has computed that of its slice."""
        ...

    def deferred(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Within it gradients of a backward pass stay where they are. Not collective."""
        ...

    def clip(self, model: Any, max_norm: float | None) -> Tensor:
        """The norm of all gradients together, which are scaled down to ``max_norm`` if it is given."""
        ...

    def require_optimizer(self, model: Any, optimizer: Any) -> None:
        """Make an optimizer fit for parameters of several meshes. Not collective.

        Raises ``InputError`` for one that was made of other parameters.
        """
        ...

    def whole_weights(self, model: Any) -> dict[str, Tensor]:
        """All weights by name on rank 0; the others have none."""
        ...

    def save(self, checkpoint: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        """Write the model, and the optimizer's state with the schedule, into a checkpoint of the Trainer's."""
        ...

    def load(self, checkpoint: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        """Fill them from a checkpoint of the Trainer's, which was compared with its manifest already."""
        ...


def sharding_of(model: Any) -> Sharding | None:
    """The distribution that somebody has left on a model; None for others."""
    return getattr(model, ATTRIBUTE, None)


def data_ranks(model: nn.Module | None, args: TrainingArguments) -> tuple[int, int]:
    """This rank's place among those that draw different batches, and their number.

    ``model``: the one that is trained, which may be sharded; ``args``: of its Trainer.
    """
    sharding = sharding_of(model)
    if sharding is None:
        return args.process_index, args.world_size
    return sharding.topology.dp.rank, sharding.topology.dp.size


def require_trainable(model: Any, arguments: Any, options: Any) -> None:
    """Raise ``InputError`` for arguments by which a sharded model is not trained; other models pass.

    ``options``: those of packing, None without it.
    """
    sharding = sharding_of(model)
    if sharding is None:
        return
    sharding.require_trainable(arguments)
    if options is None:
        raise InputError(
            "a model that parallelize has sharded is trained on packed steps",
            where="TrainingArguments.packing_capacity",
            expected="a number of tokens",
            found=None,
        )
