"""Reading and writing of ``torch.distributed.checkpoint`` folders from the layouts that models have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ullage.core.errors import CheckpointError, listed

_SAME = "continue with the model, and the kind of optimizer, that it was made from"


def load_chunks(state: dict[str, Any], folder: Path) -> None:
    """Fill ``state`` in place, of any layout. Collective. Raises ``CheckpointError`` on every rank."""
    with _quietly("read", folder):
        load(state, checkpoint_id=folder)


def save_chunks(state: dict[str, Any], folder: Path) -> None:
    """Write ``state`` into an empty folder. Collective. Raises ``CheckpointError`` on every rank."""
    with _quietly("written", folder):
        save(state, checkpoint_id=folder)


def require_names(folder: Path, wanted: dict[str, Any], held: dict[str, Any], hint: str = _SAME) -> None:
    """Raise ``CheckpointError`` unless each wanted item is in the folder, and of its size.

    ``held``: what the folder has by name: a shape, or an entry of torch's metadata, which has a ``size`` if a tensor.
    """
    missing = [name for name in wanted if name not in held]
    if missing:
        what = "optimizer" if missing[0].startswith("optim.") else "model"
        raise CheckpointError(
            f"the checkpoint lacks what the {what} needs",
            where=str(folder),
            expected=listed(missing, 1),
            found=f"{len(held)} other items",
            hint=hint,
        )
    for name, value in wanted.items():
        size = held[name] if isinstance(held[name], tuple) else getattr(held[name], "size", None)
        if isinstance(value, Tensor) and size is not None and tuple(size) != tuple(value.shape):
            raise CheckpointError(
                "a tensor of the checkpoint has another size",
                where=f"{folder}, {name}",
                expected=list(value.shape),
                found=list(size),
                hint=_SAME,
            )


def require_known(folder: Path, held: Iterable[str], known: Container[str]) -> None:
    """Raise ``CheckpointError`` for a weight in the folder that the model has not."""
    left = [name for name in held if name not in known]
    if left:
        raise CheckpointError(
            "the checkpoint is of a larger model", where=str(folder), found=listed(left, 1), hint=_SAME
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
