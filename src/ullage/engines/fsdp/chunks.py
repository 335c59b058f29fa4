"""Reading and writing of ``torch.distributed.checkpoint`` folders from the layouts that models have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ullage.core.errors import CheckpointError, listed


def load_chunks(state: dict[str, Any], folder: Path) -> None:
    """Fill ``state`` in place, of any layout. Collective. Raises ``CheckpointError`` on every rank."""
    with _quietly("read", folder):
        load(state, checkpoint_id=folder)


def save_chunks(state: dict[str, Any], folder: Path) -> None:
    """Write ``state`` into an empty folder. Collective. Raises ``CheckpointError`` on every rank."""
    with _quietly("written", folder):
        save(state, checkpoint_id=folder)


def require_names(folder: Path, wanted: dict[str, Any], names: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` unless each wanted item is in the folder, and of its size."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CheckpointError(
            "the checkpoint lacks what the model needs" if missing[0].startswith("model.") else
            "the checkpoint lacks what the optimizer needs",
            where=str(folder),
            expected=listed(missing, 1),
            found=f"{len(names)} other items",
        )  # fmt: skip
    for name, value in wanted.items():
        entry = names[name]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise CheckpointError(
                "a tensor of the checkpoint has another size",
                where=f"{folder}, {name}",
                expected=list(value.shape),
                found=list(entry.size),
                hint="continue with the model that it was made from",
            )


def writable(value: Any) -> Any:
    """The value in a layout that torch's checkpoint format can describe; a copy where it has to be moved.

    The format stores a rank's chunk as one offset and one size. Of a fused weight (q, k and v in one matrix) tp gives
    each rank several pieces (``_StridedShard`` as the placement over tp, the last mesh dim), so that weight is laid out
    in plain shards. FSDP2 uses ``_StridedShard`` too, over dp·cp, for its part of a tp shard; that lies in one piece.
    """
    if not isinstance(value, DTensor) or not isinstance(value.placements[-1], _StridedShard):
        return value
    plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in value.placements]
    return value.redistribute(placements=plain)


def copy_back(values: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Copy what was loaded beside the tensors into them."""
    with torch.no_grad():
        for name, value in loaded.items():
            held = values[name]
            # Read in place already.
            if value is held:
                continue
            if isinstance(held, DTensor):
                # Back into the cut that the model has; each rank writes its own part, so nothing is left to send.
                held._local_tensor.copy_(value.redistribute(placements=held.placements)._local_tensor)
            else:
                values[name] = value


def fill(value: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Copy this rank's part of a whole tensor into ``value``, of any layout.

    ``read``: gives the elements of the whole at one slice per dim. Collective where tp cuts a fused weight, which has
    to be laid out anew; elsewhere each rank reads what it holds, and nothing is sent.
    """
    with torch.no_grad():
        if not isinstance(value, DTensor):
            value.copy_(read(tuple(slice(0, size) for size in value.shape)))
            return
        plain = writable(value)
        sizes, offsets = compute_local_shape_and_global_offset(plain.shape, plain.device_mesh, plain.placements)
        # A rank may hold nothing of a small tensor.
        if plain._local_tensor.numel():
            plain._local_tensor.copy_(read(tuple(slice(at, at + size) for at, size in zip(offsets, sizes))))
        if plain is not value:
            value._local_tensor.copy_(plain.redistribute(placements=value.placements)._local_tensor)


@contextmanager
def _quietly(done: str, folder: Path) -> Iterator[None]:
    """Silence torch's warning that there is one process, and turn its error into ours.

    torch's ``CheckpointException`` is a ``BaseException``, which ``except Exception`` would let through.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as failed:
        # Of the ranks that failed the lowest is named, on all ranks the same.
        rank, (error, _) = next(iter(sorted(failed.failures.items(), key=lambda item: item[0])))
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the checkpoint could not be {done}", where=f"{folder}, rank {rank}", found=found
        ) from None
