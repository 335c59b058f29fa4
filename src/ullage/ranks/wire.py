"""Collectives of bytes, records and int64 that samples travel by: gloo on host tensors, NCCL on device tensors.

Every function counts by coordinates of an :class:`~ullage.ranks.topology.Axis` and translates to the ranks of its
group, so that any rank order works. A peer that dies surfaces as :class:`DistributedError` on the others, at once
where its connection breaks and after the group's timeout where it does not.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ullage.core.errors import UllageError
from ullage.core.layout import Int64
from ullage.ranks.groups import PeerLost
from ullage.ranks.topology import Axis

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: A record shorter than this travels in one collective, a longer one in two.
_HEADER_BYTES = 1024

# torch renames this collective; the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Per thread: an iterator's thread exchanges while the caller's may do so too.
_scratch = threading.local()


def dumps(record: Any) -> bytes:
    """A record as bytes: JSON, so that what another rank sends is data and nothing else."""
    return json.dumps(record, separators=(",", ":")).encode()


def device_of(group: ProcessGroup) -> torch.device:
    """The device on which tensors of this group's collectives must lie: the host if its backend takes host tensors."""
    backends = dist.get_backend_config(group)
    accelerator = torch.accelerator.current_accelerator()
    if "cpu:" in backends or backends == "gloo" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextmanager
def _peers(axis: Axis) -> Iterator[None]:
    """Turns what a backend raises when a peer is gone into an error that says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UllageError):
            raise
        raise PeerLost(
            "a collective failed, for example because another rank ended",
            where=f"{axis.name} axis of {axis.size} ranks",
            found=str(error).split(". ")[0] or type(error).__name__,
            hint="look for the first error among the logs of the other ranks",
        ) from error


def _gather(mine: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of each rank -> [size, n, ...] in the order of coordinates, on the host."""
    group = axis.require_group()
    with _peers(axis):
        mine = mine.to(device_of(group)).contiguous()
        out = mine.new_empty(axis.size * mine.shape[0], *mine.shape[1:])
        _all_gather(out, mine, group=group)
        out = out.view(axis.size, *mine.shape).cpu()
    # Gathered by rank in the group; returned by coordinate.
    return out[axis.order]


def gather_int64(values: Int64, axis: Axis) -> Int64:
    """``values`` [n] of each rank, the same n everywhere -> int64 [size, n]."""
    if axis.size == 1:
        return values[None].copy()
    return _gather(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)), axis).numpy()


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """The value of each rank, pickled, so between trusted ranks only: slower than records, for what is done once."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    with _peers(axis):
        dist.all_gather_object(values, value, group=axis.require_group())
    return [values[i] for i in axis.order]


def gather_records(record: bytes, axis: Axis) -> list[bytes]:
    """The record of each rank, of any lengths. One collective where all are short, two otherwise."""
    if axis.size == 1:
        return [record]
    # Blocks of one size for the all-gather: 8 bytes for the length of the record, then as much of it as fits. A
    # second collective carries the rest of the longest one.
    room = _HEADER_BYTES - 8
    heads = _gather(_framed(record, room), axis).numpy()
    lengths = heads[:, :8].copy().view(np.int64)[:, 0]
    bodies = heads[:, 8:]
    longest = int(lengths.max())
    if longest > room:
        rest = torch.from_numpy(_padded(record[room:], longest - room))
        bodies = np.concatenate([bodies, _gather(rest, axis).numpy()], axis=1)
    return [bodies[i, :n].tobytes() for i, n in enumerate(lengths.tolist())]


def broadcast_record(record: bytes | None, axis: Axis, source: int) -> bytes:
    """The record of the rank at coordinate ``source``, everywhere. One collective if it is short, two otherwise."""
    if axis.size == 1:
        return record or b""
    # Framed as in :func:`gather_records`. Other ranks learn from the frame whether a second part follows.
    room = _HEADER_BYTES - 8
    mine = record if axis.rank == source else None
    head = _broadcast(_framed(mine or b"", room), axis, source).numpy()
    length = int(head[:8].copy().view(np.int64)[0])
    body = head[8:]
    if length > room:
        rest = torch.from_numpy(_padded((mine or b"")[room:], length - room))
        body = np.concatenate([body, _broadcast(rest, axis, source).numpy()])
    return body[:length].tobytes()


def broadcast_bytes(payload: Tensor | None, num_bytes: int, axis: Axis, source: int) -> Tensor:
    """``num_bytes`` uint8 from the rank at coordinate ``source``, on the device of the group's collectives."""
    if axis.size == 1:
        assert payload is not None
        return payload
    mine = payload if axis.rank == source and payload is not None else torch.empty(num_bytes, dtype=torch.uint8)
    return _broadcast(mine, axis, source) if num_bytes else mine


def _broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    group = axis.require_group()
    with _peers(axis):
        tensor = tensor.to(device_of(group)).contiguous()
        dist.broadcast(tensor, src=axis.ranks[source], group=group)
        # A header is read on the host at once; a payload stays where the collective left it.
        return tensor.cpu() if tensor.numel() <= _HEADER_BYTES else tensor


def all_to_all_bytes(payload: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
    """ONE all-to-all of a uint8 buffer: block *i* goes to coordinate *i*, and back comes one block from each.

    ``sends``, ``receives`` [size]: bytes of each block, 0 allowed, in the order of coordinates; ``payload`` holds its
    blocks in the order that :func:`block_order` gives, and so does the result, which lives in this thread's scratch
    memory until its next all-to-all.
    """
    if axis.size == 1:
        return payload
    # torch splits by rank in the group, while sizes are given by coordinate.
    group, order = axis.require_group(), block_order(axis)
    with _peers(axis):
        payload = payload.to(device_of(group))
        out = scratch("received", sum(receives), payload.device)
        dist.all_to_all_single(out, payload, [receives[i] for i in order], [sends[i] for i in order], group=group)
    return out


def scratch(name: str, num_bytes: int, device: torch.device) -> Tensor:
    """``num_bytes`` uint8 of this thread's own, the same memory at every call: fresh pages cost more than the copy."""
    held: Tensor | None = getattr(_scratch, name, None)
    if held is None or held.numel() < num_bytes or held.device != device:
        # Batches differ a little from step to step; an eighth more than the largest so far is seldom outgrown.
        held = torch.empty(num_bytes + num_bytes // 8, dtype=torch.uint8, device=device)
        setattr(_scratch, name, held)
    return held[:num_bytes]


def block_order(axis: Axis) -> list[int]:
    """The coordinates in the order of the group's own ranks: how the blocks of an all-to-all lie in memory."""
    return sorted(range(axis.size), key=axis.order.__getitem__)


def settle(axis: Axis) -> None:
    """Wait until every rank along the axis has come this far, or is gone.

    A process that ends closes its connections, and what it sent last may be lost with them. So before ranks part, at
    the end or in an error that all of them know, nobody leaves until everybody knows.
    """
    if axis.size > 1:
        with suppress(PeerLost):
            gather_int64(np.zeros(1, np.int64), axis)


@contextmanager
def settling(*axes: Axis) -> Iterator[None]:
    """:func:`settle` before an error leaves that every rank along the axes raises."""
    try:
        yield
    except PeerLost:
        raise
    except BaseException:  # an interrupt too: the others meet here and would wait for this rank
        for axis in axes:
            settle(axis)
        raise


def _framed(record: bytes, room: int) -> Tensor:
    head = np.zeros(room + 8, np.uint8)
    head[:8] = np.frombuffer(np.int64(len(record)).tobytes(), np.uint8)
    part = record[:room]
    head[8 : 8 + len(part)] = np.frombuffer(part, np.uint8)
    return torch.from_numpy(head)


def _padded(data: bytes, size: int) -> np.ndarray:
    out = np.zeros(size, np.uint8)
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return out
