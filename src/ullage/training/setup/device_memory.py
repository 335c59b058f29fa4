"""Memory of the device that a rank trains on: what its process holds, its peak within a block, and what is free.

On CUDA it is the memory of tensors, by torch's allocator. On a CPU it is the process's resident memory, whose peak
Linux forgets on request (``/proc/self/clear_refs``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from pathlib import Path

import torch

from ullage.core.errors import InputError

#: Share of what is free that is left alone unless ``packing_memory`` is given.
_KEPT = 0.1
_UNITS = {"b": 1, "": 1} | {
    f"{letter}{end}": base**power for power, letter in enumerate("kmgt", 1) for end, base in (("ib", 1024), ("b", 1000))
}
_PROCESS = Path("/proc/self")


def num_bytes(size: int | str) -> int:
    """Bytes of a size such as ``20GiB``, ``500 MB`` or ``1e9``. Raises ``InputError`` for anything else.

    >>> num_bytes("1.5KiB"), num_bytes("2 GB"), num_bytes(7)
    (1536, 2000000000, 7)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?i?B?)\s*", str(size), re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS or not float(match[1]) > 0:
        raise InputError("not a size of memory", where="packing_memory", expected="bytes, or such as 20GiB", found=size)
    return int(float(match[1]) * _UNITS[match[2].lower()])


class DeviceMemory:
    """Peak memory of blocks on one device. Raises ``InputError`` where a peak cannot be measured.

    ``ground``: bytes held when :meth:`settle` was called, above which blocks are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ground = 0
        if device.type == "cuda":
            return
        try:
            self._forget_peak()
        except OSError as error:
            raise InputError(
                "a capacity cannot be found where the peak of memory cannot be measured",
                where="TrainingArguments.packing_capacity",
                expected="a number; 'auto' needs CUDA, or Linux",
                found=f"{device.type}: {error}",
            ) from None

    def begin(self) -> None:
        """Begin a block."""
        self._give_back()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._forget_peak()

    def settle(self) -> None:
        """Measure from here: what is held now stays."""
        gc.collect()
        self._give_back()
        self.ground = self.in_use()

    def peak(self) -> int:
        """Bytes at the peak of the block above the ground."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.ground
        return _status("VmHWM") - self.ground

    def in_use(self) -> int:
        """Bytes that this process holds now."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else _status("VmRSS")

    def limit(self, given: int | str | None) -> int:
        """Bytes that this process may hold: those given, or what it holds and nine tenths of its share of the rest."""
        if given is not None:
            return num_bytes(given)
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            # What the allocator keeps without a tensor in it is free as well.
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        else:
            free = free_host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return self.in_use() + int(free * (1 - _KEPT))

    def _give_back(self) -> None:
        """Give pages that the C library keeps for later back to the kernel, where it can."""
        if self.device.type == "cpu":
            with contextlib.suppress(AttributeError, OSError):
                ctypes.CDLL(None).malloc_trim(0)

    @staticmethod
    def _forget_peak() -> None:
        (_PROCESS / "clear_refs").write_text("5")


def _status(name: str) -> int:
    """Bytes of an entry of the kernel's account of this process."""
    text = (_PROCESS / "status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def free_host_memory() -> int:
    """Bytes of memory free on this host, or in the container that this process runs in."""
    import psutil  # which accelerate brings

    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free
