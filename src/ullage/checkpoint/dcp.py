"""``torch.distributed.checkpoint``: what FSDP2 loads onto any mesh.

``.metadata`` is a pickle that names every tensor, its chunks, and for each chunk a file, an offset and a length; there
lies a whole ``.pt`` archive of that tensor. We write one chunk a tensor. Names are those of
``get_state_dict(model, optimizer)`` saved as ``{"model": ..., "optim": ...}``:

    model.<name>                         weights, frozen parameters and buffers; tied names point to the same bytes
    optim.state.<name>.<key>             exp_avg, exp_avg_sq, ..., step
    optim.param_groups.<i>.<setting>     hyperparameters, and the names of the parameters

Source: ``torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py`` and ``_nested_dict.py`` of torch 2.13.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ullage.checkpoint.archive import Call, Instance, Payload, Stream, Target, archive, dumps
from ullage.checkpoint.inventory import File, Fragments, Inventory, Problem, Slice, Tensor, Topology
from ullage.checkpoint.safetensors import cast_of
from ullage.checkpoint.torchfile import Inert, Named, Size, TensorRef, read_pickle, read_torch_file
from ullage.checkpoint.universal import number
from ullage.errors import CheckpointError

MAX_FILE_BYTES = 4 << 30
_METADATA = "torch.distributed.checkpoint.metadata"


class _Writer:
    """Lays archives end to end in files, and keeps the books of ``.metadata``."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.entries: dict[str, Any] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        self.storage: list[tuple[Instance, Instance]] = []
        self._at = 0
        self._payloads: list[Payload] = []
        self._texts: list[tuple[int, bytes]] = []

    def add(self, path: tuple[Any, ...], value: Any) -> Instance:
        """One item: a :class:`Stream`, a constant tensor, or any other value. Returns where it lies."""
        made = archive("", value, base=self._at)
        where = Instance(
            "torch.distributed.checkpoint.filesystem",
            "_StorageInfo",
            {"relative_path": self._name(), "offset": self._at, "length": made.num_bytes},
        )
        self._payloads += made.payloads
        self._texts += made.texts
        self._at += made.num_bytes
        self.book(path, value, where)
        if self._at >= MAX_FILE_BYTES:
            self.close()
        return where

    def book(self, path: tuple[Any, ...], value: Any, where: Instance) -> None:
        """Enters an item into the books."""
        flat = ".".join(map(str, path))
        shape = getattr(value.tensor if isinstance(value, Stream) else value, "shape", None)
        self.paths[flat] = path
        if shape is None:
            self.entries[flat] = Instance(_METADATA, "BytesStorageMetadata", {})
            index = {"fqn": flat, "offset": None, "index": None}
        else:
            zeros, size = Size([0] * len(shape)), Size(shape)
            chunk = Instance(_METADATA, "ChunkStorageMetadata", {"offsets": zeros, "sizes": size})
            memory = Call(_METADATA, "_MEM_FORMAT_ENCODING", (0,))
            layout = Call("torch.serialization", "_get_layout", ("torch.strided",))
            properties = (Named("torch", value.dtype), layout, False, memory, False)
            self.entries[flat] = Instance(
                _METADATA,
                "TensorStorageMetadata",
                {"properties": Instance(_METADATA, "TensorProperties", properties), "size": size, "chunks": [chunk]},
            )
            index = {"fqn": flat, "offset": zeros, "index": 0}
        self.storage.append((Instance(_METADATA, "MetadataIndex", index), where))

    def _name(self) -> str:
        return f"__{len(self.targets)}_0.distcp"

    def close(self) -> None:
        if self._texts:
            self.targets.append(Target(self._name(), self._at, tuple(self._payloads), tuple(self._texts)))
        self._at, self._payloads, self._texts = 0, [], []

    def metadata(self) -> Target:
        content = {
            "state_dict_metadata": self.entries,
            "planner_data": self.paths,
            "storage_data": dict(self.storage),
            "storage_meta": None,
            "version": "1.0.0",
        }
        text = dumps(Instance(_METADATA, "Metadata", content))
        return Target(".metadata", len(text), texts=((0, text),))


def plan(inventory: Inventory, *, dtype: str | None = None, optimizer: bool = True) -> list[Target]:
    """The files of the checkpoint, without the tensors' bytes."""
    writer = _Writer()
    weights = {t.name: t for t in inventory.tensors if t.kind != "parameter" or t.key == "fp32"}
    tied: dict[str, list[str]] = {}
    for alias, owner in inventory.aliases.items():
        tied.setdefault(owner, []).append(alias)
    for name, tensor in weights.items():
        stream = Stream(tensor, cast_of(tensor, dtype))
        where = writer.add(("model", name), stream)
        for alias in tied.get(name, ()):
            writer.book(("model", alias), stream, where)
    if optimizer:
        _add_optimizer(writer, inventory)
    writer.close()
    return [*writer.targets, writer.metadata()]


def _add_optimizer(writer: _Writer, inventory: Inventory) -> None:
    trained = [t for t in inventory.tensors if t.kind == "parameter"]
    for tensor in trained:
        if tensor.key != "fp32":
            writer.add(("optim", "state", tensor.name, tensor.key), Stream(tensor, tensor.dtype))
    steps = getattr(inventory.details, "steps", {})
    names: dict[int, list[str]] = {}
    for tensor in trained:
        if tensor.key != "fp32":
            continue
        names.setdefault(tensor.group or 0, []).append(tensor.name)
        value, saved = steps.get(tensor.group, (None, None))
        if isinstance(value, (int, float)):
            writer.add(("optim", "state", tensor.name, "step"), number(value, saved or "float32"))
    for index, group in enumerate(getattr(inventory.details, "param_groups", [])):
        for setting, value in group.items():
            if setting != "params" and not isinstance(value, TensorRef):
                writer.add(("optim", "param_groups", index, setting), value)
        writer.add(("optim", "param_groups", index, "params"), names.get(index, []))


def read_dcp(folder: Path) -> Inventory:
    """The inventory of a DCP folder whose tensors are whole or cut along dim 0. Raises ``CheckpointError``."""
    root = read_pickle(folder / ".metadata")
    if not isinstance(root, Inert) or not isinstance(root.get("storage_data"), dict):
        raise CheckpointError("not the metadata of a distributed checkpoint", where=str(folder / ".metadata"))
    places: dict[str, list[tuple[tuple[int, ...], Inert]]] = {}
    for index, info in root.get("storage_data").items():
        places.setdefault(index.get("fqn"), []).append((tuple(index.get("offset") or ()), info))
    files: dict[str, int] = {}
    tensors: list[Tensor] = []
    problems: list[Problem] = []
    for flat, entry in root.get("state_dict_metadata").items():
        name_key = _parameter(flat)
        if entry.name != "TensorStorageMetadata" or name_key is None:
            continue
        shape = tuple(int(d) for d in entry.get("size"))
        rows, dtype = [], "float32"
        for offsets, info in places.get(flat, []):
            relative = info.get("relative_path")
            file = files.setdefault(relative, len(files))
            source = read_torch_file(folder / relative, info.get("offset"), info.get("length"))
            ref = source.root
            if not isinstance(ref, TensorRef) or any(offsets[1:]) or ref.shape[1:] != shape[1:]:
                problems.append(Problem("a chunk that is not whole rows", relative, parameter=flat))
                continue
            dtype = ref.dtype
            if ref.numel:
                first = (offsets[0] if offsets else 0) * math.prod(shape[1:])
                rows.append((file, source.place(ref), first, ref.numel))
        fragments = Fragments.of(*(zip(*rows) if rows else ([], [], [], [])))
        tensors.append(Tensor(*name_key, shape, dtype, "parameter", (Slice(0, shape, fragments),)))
    listed = tuple(File(name, (folder / name).stat().st_size, "weights") for name in files)
    return Inventory(folder, "dcp", Topology(), listed, tuple(tensors), problems=tuple(problems))


def _parameter(flat: str) -> tuple[str, str] | None:
    """(parameter, key) of an item's name; None for a step or a setting."""
    if flat.startswith("optim.state."):
        name, _, key = flat.removeprefix("optim.state.").rpartition(".")
        return None if key == "step" else (name, key)
    if flat.startswith("optim."):
        return None
    return flat.removeprefix("model."), "fp32"
