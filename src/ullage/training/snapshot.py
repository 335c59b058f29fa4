"""Snapshot of the large files of a checkpoint: what is to be written, copied to host memory as it is at this moment.

The writers of transformers, accelerate, peft and DeepSpeed all end in two calls: ``torch.save``, and the
``serialize_file`` of safetensors. Within :meth:`Snapshot.taking` these copy instead of writing. An object is pickled at
once, and the bytes of its storages are copied, which is 10 to 40 times faster than writing them; :meth:`Snapshot.write`
then writes the same records by the same libraries, so the files are those of a save that waits, byte for byte. Small
texts, and files of other kinds, are written at once, as ever.

Source: ``_save`` and ``_open_zipfile_writer`` of torch 2.13 ``serialization.py``; ``save_file`` of safetensors 0.8
``torch.py``. Where a version calls neither, its files are written at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ullage.checkpoint.numbers import SAFETENSORS

#: Bytes of one mapping, at least: so many that small tensors share it.
_SLAB_BYTES = 64 << 20
#: Where each copy begins, so that it may be of any dtype.
_ALIGNMENT = 64
#: torch's dtypes by the names in safetensors' headers. Packed ones, which have no name there, are not copied.
_DTYPES = {name: getattr(torch, dtype) for dtype, name in SAFETENSORS.items()}


class HostMemory:
    """Host memory that is kept for the next snapshot: fresh pages cost ten times as much as the copy into them."""

    def __init__(self) -> None:
        # Each with the bytes of it that are taken.
        self._slabs: list[tuple[mmap.mmap, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, taken or not."""
        return sum(len(slab) for slab, _ in self._slabs)

    def copy_of(self, source: Tensor) -> Tensor:
        """The bytes ``source`` [n], uint8 on the host, in memory that is held until :meth:`give_back`."""
        size = source.numel()
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        # Saves of one run copy the same tensors in the same order, so the first slab with room is the one of last time.
        at = next((i for i, (slab, taken) in enumerate(self._slabs) if taken + room <= len(slab)), None)
        if at is None:
            slab = mmap.mmap(-1, max(room, _SLAB_BYTES))
            with contextlib.suppress(OSError, AttributeError):  # fewer and larger pages, where there are any
                slab.madvise(mmap.MADV_HUGEPAGE)
            self._slabs.append((slab, 0))
            at = len(self._slabs) - 1
        slab, taken = self._slabs[at]
        self._slabs[at] = slab, taken + room
        copy = torch.frombuffer(slab, dtype=torch.uint8, count=size, offset=taken)
        return copy.copy_(source)

    def give_back(self) -> None:
        """All memory is free to be copied into again."""
        self._slabs = [(slab, 0) for slab, _ in self._slabs]


class Snapshot:
    """Files as they are to be written.

    Args:
        memory: of the copies; taken until :meth:`write` has returned.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._files: list[tuple[Path, Callable[[], None]]] = []

    @contextlib.contextmanager
    def taking(self, place: Path) -> Iterator[None]:
        """Within it, what this thread saves below ``place`` by torch or safetensors is copied and not written.

        An empty file stands for it; one that is removed meanwhile is not written later. Waits for the device.
        """
        below, thread = os.path.abspath(place) + os.sep, threading.get_ident()
        serialization: Any = torch.serialization
        library: Any = safetensors.torch
        open_archive, serialize = serialization._open_zipfile_writer, library.serialize_file

        def is_ours(path: Any) -> bool:
            named = isinstance(path, (str, os.PathLike)) and threading.get_ident() == thread
            return named and os.path.abspath(os.fspath(path)).startswith(below)

        def archive(path: Any) -> Any:
            return _Archive(self, Path(path), open_archive) if is_ours(path) else open_archive(path)

        def tensors(flat: dict[str, Any], path: Any, metadata: Any = None) -> None:
            copies = self._copied(flat) if is_ours(path) else None
            if copies is None:
                serialize(flat, path, metadata=metadata)
                return
            self.add(Path(path), lambda: safetensors.torch.save_file(copies, path, metadata))

        serialization._open_zipfile_writer, library.serialize_file = archive, tensors
        try:
            yield
        finally:
            serialization._open_zipfile_writer, library.serialize_file = open_archive, serialize

    def add(self, path: Path, write: Callable[[], None]) -> None:
        """Have ``write`` called later for the file ``path``."""
        path.touch()
        self._files.append((path, write))

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage of the same bytes."""
        view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # pyright: ignore
        return self._memory.copy_of(view).untyped_storage()

    def write(self) -> None:
        """Write the files, in the order in which they were saved, and let go of the copies."""
        try:
            for path, write in self._files:
                if path.exists():
                    write()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of the copies, written or not."""
        self._files.clear()
        self._memory.give_back()

    def _copied(self, flat: dict[str, Any]) -> dict[str, Tensor] | None:
        """Copies of the tensors that safetensors' specifications point to; None where there is one of another kind."""
        copies = {}
        for name, spec in flat.items():
            dtype = _DTYPES.get(getattr(spec, "dtype", ""))
            if dtype is None:
                return None
            source = torch.empty(0, dtype=torch.uint8)
            if spec.data_len:
                source = torch.frombuffer(
                    (ctypes.c_uint8 * spec.data_len).from_address(spec.data_ptr), dtype=torch.uint8
                )
            copies[name] = self._memory.copy_of(source).view(dtype).view(list(spec.shape))
        return copies


class _Archive:
    """Stands for torch's writer of an archive: the records are kept for the snapshot."""

    def __init__(self, snapshot: Snapshot, path: Path, open_archive: Callable[[str], Any]) -> None:
        self._snapshot, self._path, self._open = snapshot, path, open_archive
        self._records: list[tuple[str, Any, int]] = []

    def __enter__(self) -> _Archive:
        return self

    def write_record(self, name: str, data: Any, size: int) -> None:
        copied = self._snapshot.copy_of(data) if isinstance(data, torch.UntypedStorage) else data
        self._records.append((name, copied, size))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._snapshot.add(self._path, self._write)

    def _write(self) -> None:
        with self._open(str(self._path)) as archive:
            for name, data, size in self._records:
                archive.write_record(name, data, size)
        self._records.clear()
