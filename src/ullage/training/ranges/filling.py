"""Reading of the planned ranges into the tensors of an engine, through one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ullage.checkpoint import Inventory, Tensor
from ullage.checkpoint.numbers import Bytes
from ullage.checkpoint.reading import CHUNK_BYTES, Sources, Tally, row_elements, stream
from ullage.errors import CheckpointError
from ullage.training.ranges.places import masters
from ullage.training.ranges.plan import RangePlan, Read


class Filler:
    """The open files, buffers and a record of what was read."""

    def __init__(self, sources: Sources, tally: Tally, inventory: Inventory) -> None:
        self.sources, self.tally = sources, tally
        self._buffers = [np.empty(CHUNK_BYTES, np.uint8)]
        self._twins: dict[tuple[str, str], list[Tensor]] = {}
        for first, other in inventory.twins:
            self._twins.setdefault((first.name, first.key), []).append(other)

    @torch.no_grad()
    def fill(self, target: torch.Tensor, reads: Iterable[Read]) -> None:
        """Copy the elements of ``reads`` into ``target``, flat, in its dtype.

        Raises ``CheckpointError`` where pipeline stages hold different values of one parameter.
        """
        for read in reads:
            dtype, row, at = getattr(torch, read.tensor.dtype), row_elements(read.tensor), read.at
            # Rows that tensor parallelism has cut are read whole, so what is asked for may lie inside the first one.
            low, stop = read.start // row * row, read.start + read.length
            high = min(-(-stop // row) * row, read.tensor.numel)
            for chunk in self._chunks(read.tensor, low, high):
                values = torch.from_numpy(chunk).view(dtype)
                begin, end = max(read.start - low, 0), min(len(values), stop - low)
                if begin < end:
                    target.narrow(0, at, end - begin).copy_(values[begin:end])
                    at += end - begin
                low += len(values)

    def _chunks(self, tensor: Tensor, low: int, high: int) -> Iterator[Bytes]:
        """The bytes of elements ``[low, high)``, equal in every stage of a pipeline that holds the tensor."""
        held = [tensor, *self._twins.get((tensor.name, tensor.key), [])]
        while len(self._buffers) < len(held):
            self._buffers.append(np.empty(CHUNK_BYTES, np.uint8))
        streams = [stream(self.sources, t, low, high, b, self.tally) for t, b in zip(held, self._buffers)]
        for chunk, *others in zip(*streams, strict=True):
            if not all(np.array_equal(chunk, other) for other in others):
                raise CheckpointError(
                    "pipeline stages hold different values of one parameter",
                    where=f"parameter {tensor.name} ({tensor.key})",
                    hint="a tied weight that has drifted apart, or two parameters of one name",
                )
            yield chunk


def fill_optimizer(filler: Filler, zero: Any, plan: RangePlan) -> dict[int, dict[str, torch.Tensor]]:
    """Read masters and states; padding becomes zero. Returns the states by flat tensor."""
    states: dict[int, dict[str, torch.Tensor]] = {}
    for flat, master in enumerate(masters(zero)):
        states[flat] = {}
        for (number, key), reads in plan.flats.items():
            if number != flat:
                continue
            target = master.data
            if key != "fp32":
                target = states[flat][key] = _state(zero, plan, master, key)
            target.zero_()
            filler.fill(target, reads)
    return states


def _state(zero: Any, plan: RangePlan, master: torch.Tensor, key: str) -> torch.Tensor:
    """The tensor for a state: the one that is there, or a new one."""
    there = zero.optimizer.state[master].get(key) if master in zero.optimizer.state else None
    if torch.is_tensor(there) and there.shape == master.shape:
        return there
    # As ``Optimizer.load_state_dict``: a state saved in the dtype of its weights gets the dtype of the weights here.
    saved = plan.dtypes.get(key)
    alike = saved is None or saved == plan.dtypes.get("fp32")
    return torch.zeros_like(master.data, dtype=master.dtype if alike else getattr(torch, saved or "float32"))


def fill_untrained(filler: Filler, plan: RangePlan) -> None:
    """Read frozen parameters and buffers: at stage 3 this rank's partition, otherwise the whole."""
    for target, read in plan.untrained:
        own: Any = target
        held = own.ds_tensor.data if hasattr(target, "ds_id") else target.data
        if held.is_contiguous():
            filler.fill(held.view(-1), [read])
        else:
            whole = torch.empty(held.numel(), dtype=held.dtype)
            filler.fill(whole, [read])
            held.copy_(whole.view(held.shape))
