"""The format of ``torch.distributed.checkpoint`` (DCP), which FSDP2 loads onto any mesh.

``.metadata`` is a pickle that names every tensor, its chunks, and for each chunk a file, an offset and a length; there
lies a whole ``.pt`` archive of that tensor. We write one chunk per tensor. Names are those of
``get_state_dict(model, optimizer)`` saved as ``{"model": ..., "optim": ...}``:

    model.<name>                         weights, frozen parameters and buffers; tied names point to the same bytes
    optim.state.<name>.<key>             exp_avg, exp_avg_sq, ..., step
    optim.param_groups.<i>.<setting>     hyperparameters, and the names of the parameters

Source: ``torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py`` and ``_nested_dict.py`` of torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Payload, Target, archive, archive_like
from ullage.checkpoint.files.pickling import FunctionCall, Instance, TensorCopy, pickled
from ullage.checkpoint.files.torchfile import TorchFile, read_pickle, read_torch_file
from ullage.checkpoint.files.unpickling import Inert, Named, Size
from ullage.checkpoint.formats.optimizer_groups import known_buffers, optimizer_groups
from ullage.checkpoint.formats.safetensors import cast_of
from ullage.checkpoint.formats.universal import number
from ullage.checkpoint.inventory import Inventory
from ullage.errors import CheckpointError

#: A file is closed once it has this many bytes; a larger tensor still lies in one file.
MAX_FILE_BYTES = 4 << 30
#: Bytes of the description of one item: a tensor, or a setting of the optimizer.
_MAX_SETTING_BYTES = 16 << 20
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_ENTRIES = ("TensorStorageMetadata", "BytesStorageMetadata")
#: Entries of ``.metadata`` beside those of the items.
CONSTANTS = {"storage_meta": None, "version": "1.0.0"}


#: The item that lists the names of buffers.
BUFFERS = ("ullage", "buffers")


class ItemWriter:
    """Archives laid end to end in files, with the entries of ``.metadata`` for each."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.entries: dict[str, Any] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        self.storage: list[tuple[Instance, Instance]] = []
        self._laid_out: dict[tuple[tuple[int, ...], str], Target] = {}
        self._at = 0
        self._payloads: list[Payload] = []
        self._texts: list[tuple[int, bytes]] = []

    def add(self, path: tuple[Any, ...], value: Any) -> Instance:
        """One item: a :class:`TensorCopy`, a constant tensor, or any other value. Returns where it lies."""
        where = self._laid(value)
        self.book(path, value, where)
        return where

    def add_chunks(self, flat: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], TensorCopy]]) -> None:
        """One tensor in several chunks, each with its first index along each dim."""
        self.paths[flat] = (flat,)
        for index, (offsets, copy) in enumerate(chunks):
            said = {"fqn": flat, "offset": Size(offsets), "index": index}
            self.storage.append((Instance(_METADATA, "MetadataIndex", said), self._laid(copy)))
        placed = [(offsets, copy.tensor.shape) for offsets, copy in chunks]
        self.entries[flat] = _tensor_entry(chunks[0][1].dtype, shape, placed)

    def _laid(self, value: Any) -> Instance:
        """The place of an item, laid after all others."""
        if isinstance(value, TensorCopy):
            kind = (value.tensor.shape, value.dtype)
            if kind not in self._laid_out:
                self._laid_out[kind] = archive("", value)
            made = archive_like(self._laid_out[kind], "", value, value, self._at)
        else:
            made = archive("", value, base=self._at, limit=_MAX_SETTING_BYTES)
        where = storage_of(self._name(), self._at, made.num_bytes)
        self._payloads += made.payloads
        self._texts += made.texts
        self._at += made.num_bytes
        if self._at >= MAX_FILE_BYTES:
            self.close()
        return where

    def book(self, path: tuple[Any, ...], value: Any, where: Instance) -> None:
        """Enter an item into ``.metadata``."""
        flat = ".".join(map(str, path))
        self.paths[flat] = path
        self.entries[flat] = entry_of(value)
        self.storage.append((index_of(flat, value), where))

    def _name(self) -> str:
        # torch names files by rank and number: ours are those of as many ranks, one file each.
        return f"__{len(self.targets)}_0.distcp"

    def close(self) -> None:
        """End the current file."""
        if self._texts:
            self.targets.append(Target(self._name(), self._at, tuple(self._payloads), tuple(self._texts)))
        self._at, self._payloads, self._texts = 0, [], []

    def metadata(self) -> Target:
        """The file ``.metadata`` for all items added."""
        content = {"state_dict_metadata": self.entries, "planner_data": self.paths, "storage_data": dict(self.storage)}
        content |= CONSTANTS
        text = pickled(Instance(_METADATA, "Metadata", content))
        return Target(".metadata", len(text), texts=((0, text),))


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return getattr(value.tensor if isinstance(value, TensorCopy) else value, "shape", None)


def index_of(flat: str, value: Any) -> Instance:
    """The key under which ``.metadata`` lists the place of an item of one chunk."""
    shape = _shape_of(value)
    # ``index`` is the number of the chunk: a hint for torch, which compares name and offset only.
    zeros = None if shape is None else _zeros(len(shape))
    said = {"fqn": flat, "offset": zeros, "index": None if shape is None else 0}
    return Instance(_METADATA, "MetadataIndex", said)


def storage_of(file: str, offset: int, length: int) -> Instance:
    """A place as ``.metadata`` writes it."""
    return Instance(_FILES, "_StorageInfo", {"relative_path": file, "offset": offset, "length": length})


def entry_of(value: Any) -> Instance:
    """The entry of an item in ``.metadata``, as torch writes it: a tensor in one chunk, or bytes."""
    shape = _shape_of(value)
    if shape is None:
        return Instance(_METADATA, "BytesStorageMetadata", {})
    return _tensor_entry(value.dtype, shape, [(_zeros(len(shape)), shape)])


def _tensor_entry(
    dtype: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Instance:
    """The entry of a tensor of these chunks, each (first index, shape)."""
    listed = [
        Instance(_METADATA, "ChunkStorageMetadata", {"offsets": Size(offsets), "sizes": Size(sizes)})
        for offsets, sizes in chunks
    ]
    content = {"properties": _properties(dtype), "size": Size(shape), "chunks": listed}
    return Instance(_METADATA, "TensorStorageMetadata", content)


@lru_cache
def _zeros(dims: int) -> Size:
    return Size([0] * dims)


@lru_cache
def _properties(dtype: str) -> Instance:
    memory = FunctionCall(_METADATA, "_MEM_FORMAT_ENCODING", (0,))
    layout = FunctionCall("torch.serialization", "_get_layout", ("torch.strided",))
    return Instance(_METADATA, "TensorProperties", (Named("torch", dtype), layout, False, memory, False))


def dcp_targets(inventory: Inventory, *, dtype: str | None = None, optimizer: bool = True) -> list[Target]:
    """The files of the checkpoint, without the tensors' bytes."""
    writer = ItemWriter()
    tied: dict[str, list[str]] = {}
    for alias, owner in inventory.aliases.items():
        tied.setdefault(owner, []).append(alias)
    for path, value in items(inventory, dtype=dtype, optimizer=optimizer):
        where = writer.add(path, value)
        # A tied name is an entry of its own whose place is the owner's: the bytes are written once.
        for alias in tied.get(path[1], ()) if path[0] == "model" else ():
            writer.book(("model", alias), value, where)
    writer.close()
    return [*writer.targets, writer.metadata()]


def items(
    inventory: Inventory, *, dtype: str | None = None, optimizer: bool = True
) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of everything in the checkpoint; values as ``archive`` takes them. Tied names are left out.

    Raises ``CheckpointError`` for a setting of the optimizer that cannot be written.
    """
    # The master weights, and what no optimizer holds; the other keys are optimizer state.
    weights = [t for t in inventory.tensors if t.kind != "parameter" or t.key == "fp32"]
    found: list[tuple[tuple[Any, ...], Any]] = [
        (("model", tensor.name), TensorCopy(tensor, cast_of(tensor, dtype))) for tensor in weights
    ]
    buffers = known_buffers(inventory)
    # torch keeps buffers and frozen parameters alike; a loader of the model does not ask for this item.
    found += [] if buffers is None else [(BUFFERS, buffers)]
    return found + _optimizer_items(inventory) if optimizer else found


def _optimizer_items(inventory: Inventory) -> list[tuple[tuple[Any, ...], Any]]:
    trained = [t for t in inventory.tensors if t.kind == "parameter"]
    found: list[tuple[tuple[Any, ...], Any]] = [
        (("optim", "state", t.name, t.key), TensorCopy(t, t.dtype)) for t in trained if t.key != "fp32"
    ]
    for index, group in enumerate(optimizer_groups(inventory)):
        for name in group.names:
            if isinstance(group.step, (int, float)):
                found.append((("optim", "state", name, "step"), number(group.step, group.step_dtype or "float32")))
            found += [(("optim", "state", name, key), other) for key, other in group.kept.items()]
        found += [(("optim", "param_groups", index, key), value) for key, value in group.settings.items()]
        # ``get_state_dict`` names the parameters of a group instead of numbering them.
        found.append((("optim", "param_groups", index, "params"), list(group.names)))
    return found


@dataclass(frozen=True)
class Place:
    """The place of one item, or of one chunk of it: an archive of ``length`` bytes at ``offset`` of ``file``."""

    file: str
    offset: int
    length: int
    #: of a tensor's chunk: its first index along each dim
    offsets: tuple[int, ...]
    #: what ``.metadata`` says: of which item this is the place, and the place
    said: tuple[Any, Any] = (None, None)

    def open(self, folder: Path) -> TorchFile:
        """Read the description in the archive. Raises ``CheckpointError``."""
        return read_torch_file(folder / self.file, self.offset, self.length)


def read_metadata(folder: Path) -> tuple[Inert, dict[str, Inert], dict[str, list[Place]]]:
    """``.metadata``, and its entries and places by flat name. Raises ``CheckpointError``."""
    where = str(folder / ".metadata")
    root = read_pickle(folder / ".metadata")
    if not _is(root, _METADATA, "Metadata") or not isinstance(root.get("storage_data"), dict):
        raise CheckpointError("not the metadata of a distributed checkpoint", where=where)
    entries = metadata.mapping(root.get("state_dict_metadata"), "state_dict_metadata", where)
    for flat, entry in entries.items():
        if not isinstance(flat, str) or not any(_is(entry, _METADATA, kind) for kind in _ENTRIES):
            raise metadata.malformed("state_dict_metadata", where, "descriptions by name", entry)
    places: dict[str, list[Place]] = {}
    for index, info in root.get("storage_data").items():
        if not (_is(index, _METADATA, "MetadataIndex") and _is(info, _FILES, "_StorageInfo")):
            raise metadata.malformed("storage_data", where, "places by name", info)
        (name,) = metadata.names([index.get("fqn")], "storage_data", where)
        (file,) = metadata.names([info.get("relative_path")], "relative_path", where)
        # A name in the file must not lead out of the folder.
        if not file or Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
            raise metadata.malformed("relative_path", where, "a file of the folder", file)
        offset, length = (metadata.integer(info.get(k), k, where) for k in ("offset", "length"))
        offsets = tuple(metadata.integers(index.get("offset"), "offset", where))
        places.setdefault(name, []).append(Place(file, offset, length, offsets, (index, info)))
    return root, entries, places


def _is(value: Any, module: str, name: str) -> bool:
    return isinstance(value, Inert) and (value.module, value.name) == (module, name)
