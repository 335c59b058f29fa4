"""The format of ``torch.distributed.checkpoint`` (DCP), which FSDP2 loads onto any mesh.

``.metadata`` is a pickle that names every tensor, its chunks, and for each chunk a file, an offset and a length; there
lies a whole ``.pt`` archive of that tensor. We write one chunk per tensor. Names are those of
``get_state_dict(model, optimizer)`` saved as ``{"model": ..., "optim": ...}``:

    model.<name>                         weights, frozen parameters and buffers; tied names point to the same bytes
    optim.state.<name>.<key>             exp_avg, exp_avg_sq, ..., step
    optim.param_groups.<i>.<setting>     hyperparameters, and the names of the parameters

Items are read by their paths in what was saved, which ``.metadata`` keeps beside the flat names: a weight lies at the
top or below ``model``; state below ``state`` and settings below ``param_groups``, of any one key of the top. All of it
may lie within one key more.

Chunks that are read are what ranks wrote: whole tensors, rows of one (FSDP2), columns (rows of what tensor parallelism
cut along another dim), or any other blocks. ``ullage.engines.fsdp`` leaves its sizes beside them, in
``ullage_layout.json``.
Source: ``torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py`` and ``_nested_dict.py`` of torch 2.13.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.core.inventory import Band, File, Fragments, Inventory, Merge, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.core.paths import hold_descriptions
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Payload, Target, archive, archive_like
from ullage.checkpoint.files.pickling import FunctionCall, Instance, TensorCopy, pickled
from ullage.checkpoint.files.torchfile import TorchFile, read_pickle, read_torch_file
from ullage.checkpoint.files.unpickling import Inert, Named, Size, TensorRef
from ullage.checkpoint.formats.entries import (
    assign_groups,
    cast_of,
    known_buffers,
    number,
    optimizer_groups,
    saved_number,
    states_of,
    text_file,
    weights_of,
)
from ullage.checkpoint.formats.locate import STATES, object_of, steps_taken
from ullage.checkpoint.formats.model_states import schedule_of
from ullage.checkpoint.zero.folder import collect_problems, record_table
from ullage.checkpoint.zero.modules import whole_tensor
from ullage.checkpoint.zero.states import RECOMPUTED, WEIGHTS_ONLY, Details
from ullage.core.errors import CheckpointError
from ullage.core.layout import Int64

#: A file is closed once it has this many bytes; a larger tensor still lies in one file.
MAX_FILE_BYTES = 4 << 30
#: Bytes of the description of one item: a tensor, or a setting of the optimizer.
_MAX_SETTING_BYTES = 16 << 20
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_ENTRIES = ("TensorStorageMetadata", "BytesStorageMetadata")
#: Entries of ``.metadata`` beside those of the items.
_CONSTANTS = {"storage_meta": None, "version": "1.0.0"}


#: The item that lists the names of buffers.
BUFFERS = ("ullage", "buffers")
#: Runs of neighbouring elements in one tensor, each of which is read by itself.
_MAX_RUNS = 1 << 22
#: The sizes of the axes of the run that wrote a folder, as ``ullage.engines.fsdp`` writes them.
LAYOUT = "ullage_layout.json"


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

    def add(self, paths: list[tuple[Any, ...]], value: Any) -> None:
        """One item under its paths, of which tied names have several: a :class:`TensorCopy`, a constant tensor, or any
        other value.
        """
        if isinstance(value, TensorCopy):
            kind = (value.tensor.shape, value.dtype)
            if kind not in self._laid_out:
                self._laid_out[kind] = archive("", value)
            made = archive_like(self._laid_out[kind], "", value, self._at)
        else:
            made = archive("", value, base=self._at, limit=_MAX_SETTING_BYTES)
        said = {"relative_path": self._name(), "offset": self._at, "length": made.num_bytes}
        where, shape = Instance(_FILES, "_StorageInfo", said), _shape_of(value)
        zeros = None if shape is None else _zeros(len(shape))
        for path in paths:
            flat = ".".join(map(str, path))
            self.paths[flat], self.entries[flat] = path, _entry_of(value)
            # ``index`` is the number of the chunk: a hint for torch, which compares name and offset only.
            said = {"fqn": flat, "offset": zeros, "index": None if shape is None else 0}
            self.storage.append((Instance(_METADATA, "MetadataIndex", said), where))
        self._payloads += made.payloads
        self._texts += made.texts
        self._at += made.num_bytes
        if self._at >= MAX_FILE_BYTES:
            self.close()

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
        content |= _CONSTANTS
        return text_file(".metadata", pickled(Instance(_METADATA, "Metadata", content)))


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return getattr(value.tensor if isinstance(value, TensorCopy) else value, "shape", None)


def _entry_of(value: Any) -> Instance:
    """The entry of an item in ``.metadata``, as torch writes it: a tensor in one chunk, or bytes."""
    shape = _shape_of(value)
    if shape is None:
        return Instance(_METADATA, "BytesStorageMetadata", {})
    chunk = Instance(_METADATA, "ChunkStorageMetadata", {"offsets": _zeros(len(shape)), "sizes": Size(shape)})
    content = {"properties": _properties(value.dtype), "size": Size(shape), "chunks": [chunk]}
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
        # A tied name is an entry of its own whose place is the owner's: the bytes are written once.
        aliases = tied.get(path[1], ()) if path[0] == "model" else ()
        writer.add([path, *(("model", alias) for alias in aliases)], value)
    writer.close()
    schedule = schedule_of(inventory) if optimizer else None
    states = None if schedule is None else states_text({"scheduler": schedule})
    return [*writer.targets, writer.metadata(), *([] if states is None else [text_file(STATES, states)])]


def states_text(states: dict[str, Any]) -> bytes | None:
    """The file of states beside model and optimizer; None where they are not plain data."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):  # JSON would write another key, without a word
            return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (str, int, float))

    return json.dumps(states).encode() if is_plain(states) else None


def items(
    inventory: Inventory, *, dtype: str | None = None, optimizer: bool = True
) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of everything in the checkpoint; values as ``archive`` takes them. Tied names are left out.

    Raises ``CheckpointError`` for a setting of the optimizer that cannot be written.
    """
    found: list[tuple[tuple[Any, ...], Any]] = [
        (("model", tensor.name), TensorCopy(tensor, cast_of(tensor, dtype))) for tensor in weights_of(inventory)
    ]
    buffers = known_buffers(inventory)
    # torch keeps buffers and frozen parameters alike; a loader of the model does not ask for this item.
    found += [] if buffers is None else [(BUFFERS, buffers)]
    return found + _optimizer_items(inventory) if optimizer else found


def _optimizer_items(inventory: Inventory) -> list[tuple[tuple[Any, ...], Any]]:
    found: list[tuple[tuple[Any, ...], Any]] = [
        (("optim", "state", t.name, t.key), TensorCopy(t, t.dtype)) for t in states_of(inventory)
    ]
    for index, group in enumerate(optimizer_groups(inventory)):
        for name in group.stepped:
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
        places.setdefault(name, []).append(Place(file, offset, length, offsets))
    return root, entries, places


def _paths(root: Inert, entries: dict[str, Inert]) -> dict[str, tuple[Any, ...]]:
    """The path of each item in what was saved; at the top where the planner has kept none. Without a key around all."""
    kept = root.get("planner_data")
    kept = kept if isinstance(kept, dict) else {}
    paths: dict[str, tuple[Any, ...]] = dict.fromkeys(entries, ())
    for flat in entries:
        path = kept.get(flat)
        is_path = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        paths[flat] = tuple(path or ()) if is_path else (flat,)
    around = {path[0] for path in paths.values()} if all(len(path) > 1 for path in paths.values()) else set()
    if len(around) == 1 and "model" not in around and "model" in {path[1] for path in paths.values()}:
        return {flat: path[1:] for flat, path in paths.items()}
    return paths


def _is(value: Any, module: str, name: str) -> bool:
    return isinstance(value, Inert) and (value.module, value.name) == (module, name)


def read_dcp(folder: Path) -> Inventory:
    """The inventory of a DCP folder. Raises ``CheckpointError`` for one that is not of this format.

    Tensors may be cut along any dims.
    """
    reading = _DcpReading(folder)
    aliases = reading.aliases()
    for name, flat in reading.weights.items():
        if name not in aliases:
            reading.add_tensor(flat, name, "fp32")
    for flat, (name, key) in reading.states.items():
        reading.add_state(flat, name, key)
    details = reading.details()
    return Inventory(
        folder, "dcp", _written_by(folder), reading.files,
        tuple(assign_groups(reading.tensors, reading.group_of, reading.buffers or ())),
        steps={group: value for group, (value, _) in details.steps.items()}, aliases=aliases,
        notes=tuple(reading.notes), read_problems=tuple(reading.problems), records=reading.records,
        optimizer_problems=tuple(reading.left_out), details=details,
    )  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """A chunk of a tensor: where it lies, its shape, and its first index along each dim of the whole."""

    file: int
    at: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str
    alone: Tensor


class _DcpReading:
    """A folder of names as ``get_state_dict`` gives them.

    ``problems`` gets what is wrong; ``weights``: name -> flat name; ``states``: flat name -> (parameter, key);
    ``left_out``: state that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root, self.entries, self.places = read_metadata(folder)
        hold_descriptions((folder / p.file, p.offset, p.length) for each in self.places.values() for p in each)
        self.problems: list[Problem] = []
        self._files: dict[str, int] = {}
        self._records: dict[int, list[Int64]] = {}
        self.tensors: list[Tensor] = []
        self.weights: dict[str, str] = {}
        self.states: dict[str, tuple[str, str]] = {}
        self.left_out: list[Problem] = []
        self.notes: list[str] = []
        self._setting_of: dict[str, tuple[int, str]] = {}
        self._sort(_paths(root, self.entries))
        #: by group: numbers of the state beside the step
        self.numbers: dict[int, dict[str, Any]] = {}
        self._steps: dict[str, tuple[Any, str | None]] = {}
        self.settings = self._settings()
        name = ".".join(BUFFERS)
        self.buffers = self.value(name, lambda source: metadata.names(source.root, name, str(folder)))
        names = [group.get("params") for group in self.settings]
        self.group_of = {
            name: index for index, listed in enumerate(names) if isinstance(listed, list) for name in listed
        }

    @property
    def files(self) -> tuple[File, ...]:
        """The files that hold tensors."""
        return tuple(File(name, (self.folder / name).stat().st_size, "weights") for name in self._files)

    @property
    def records(self) -> dict[int, Int64]:
        """The records of each file, by offset; names that are tied share an archive."""
        tables = {file: np.unique(np.concatenate(parts), axis=0) for file, parts in self._records.items()}
        return {file: table[np.argsort(table[:, 0], kind="stable")] for file, table in tables.items()}

    def shape_of(self, flat: str) -> tuple[int, ...]:
        """The shape of a tensor, all chunks. Raises ``CheckpointError``."""
        where = str(self.folder / ".metadata")
        return metadata.shape(self.entries[flat].get("size"), f"size of {flat[:80]}", where)

    def chunks(self, flat: str, name: str, key: str) -> list[Chunk]:
        """The chunks of a tensor that can be read."""
        found: list[Chunk] = []
        for place in self.places.get(flat, []):
            with collect_problems(self.problems, place.file, parameter=flat):
                found.append(self._chunk(name, key, place, self.shape_of(flat)))
        return found

    def _chunk(self, name: str, key: str, place: Place, shape: tuple[int, ...]) -> Chunk:
        source = place.open(self.folder)
        file = self._files.setdefault(place.file, len(self._files))
        ref, offsets = source.root, place.offsets
        if not isinstance(ref, TensorRef) or len(ref.shape) != len(shape) or len(offsets) != len(shape):
            found = list(ref.shape) if isinstance(ref, TensorRef) else None
            raise CheckpointError("a chunk that is no part of its tensor", expected=list(shape), found=found)
        whole = whole_tensor(name, key, ref, file, source, "parameter")
        self._records.setdefault(file, []).append(record_table(source))
        return Chunk(file, source.place(ref), tuple(ref.shape), offsets, ref.dtype, whole)

    def value(self, flat: str, read: Callable[[TorchFile], Any]) -> Any:
        """What ``read`` makes of an item that is in one place; None where it is not there, or cannot be read."""
        for place in self.places.get(flat, [])[:1]:
            with collect_problems(self.problems, place.file, parameter=flat):
                return read(place.open(self.folder))
        return None

    def _sort(self, paths: dict[str, tuple[Any, ...]]) -> None:
        """What each item is, by its path; what is neither weight nor state of a named parameter is left out."""
        optimizers = {path[0] for path in paths.values() if len(path) > 2 and path[1] in ("state", "param_groups")}
        others: dict[str, bool] = {}
        for flat, path in paths.items():
            is_tensor, (top, *rest) = self.entries[flat].name == "TensorStorageMetadata", path
            if not rest or (top == "model" and top not in optimizers):
                name = ".".join(map(str, rest)) or flat
                if is_tensor and self.weights.setdefault(name, flat) != flat:
                    what, found = "two tensors of one name", f"{self.weights[name]} and {flat}"
                    self.problems.append(Problem(what, ".metadata", parameter=name, found=found))
            elif optimizers == {top} and len(rest) == 3 and rest[0] == "param_groups" and type(rest[1]) is int:
                self._setting_of[flat] = rest[1], str(rest[2])
            elif optimizers == {top} and len(rest) > 2 and rest[0] == "state" and type(rest[1]) is str:
                self.states[flat] = rest[1], ".".join(map(str, rest[2:]))
            elif path != BUFFERS:
                others[str(top)] = others.get(str(top), False) or is_tensor
        # ``optimizer.state_dict()`` numbers parameters: whose state it is stands nowhere.
        for flat in [flat for flat, (name, _) in self.states.items() if name not in self.weights]:
            others[str(paths[flat][0])] = True
            del self.states[flat]
        listed = ", ".join(others)
        if not self.weights:
            what, expected = "no weights in a distributed checkpoint", "tensors at the top, or below model"
            hint = 'save {"model": ..., "optim": ...} as get_state_dict gives them'
            found = ", ".join({str(path[0]): None for path in paths.values()}) or "nothing"
            self.problems.append(Problem(what, ".metadata", expected=expected, found=found, hint=hint))
        elif others:
            self.notes.append(f"left out of .metadata: {listed}")
        if any(others.values()):
            what = "tensors that are neither weights nor the state of one optimizer by name of its parameters"
            expected = "state below optim, as get_state_dict gives it"
            self.left_out.append(Problem(what, ".metadata", expected=expected, found=listed, hint=WEIGHTS_ONLY))

    def add_state(self, flat: str, name: str, key: str) -> None:
        """Read the state of a parameter: a tensor, a step, or another number."""
        if key == "step" or self.entries[flat].name != "TensorStorageMetadata":
            number, dtype = self.value(flat, lambda source: saved_number(source.root, source)) or (None, None)
            if number is not None and key == "step":
                self._steps[name] = number, dtype
            elif number is not None and key not in RECOMPUTED:
                kept = self.numbers.setdefault(self.group_of.get(name, 0), {}).setdefault(key, number)
                if repr(kept) != repr(number):
                    what = f"optimizer state {key} is a number that differs between parameters of one group"
                    self.left_out.append(Problem(what, parameter=name, found=f"{number}, and {kept} of another"))
        else:
            self.add_tensor(flat, name, key)

    def add_tensor(self, flat: str, name: str, key: str) -> None:
        """Read a tensor."""
        shape, chunks = self.shape_of(flat), self.chunks(flat, name, key)
        with collect_problems(self.problems, parameter=flat):
            self.tensors.append(join_chunks(name, key, shape, chunks))

    def _settings(self) -> list[dict[str, Any]]:
        """Hyperparameters by group, with the names of its parameters."""
        found: dict[int, dict[str, Any]] = {}
        for flat, (index, setting) in self._setting_of.items():
            is_value = self.entries[flat].name == "BytesStorageMetadata"
            source = self.value(flat, lambda each: each) if is_value else None
            if source is not None:
                found.setdefault(index, {})[setting] = source.root
        return [found[index] for index in sorted(found)]

    def aliases(self) -> dict[str, str]:
        """Tied names -> the name that is stored, of names whose places are the same."""
        owners: dict[Any, str] = {}
        found: dict[str, str] = {}
        named = [name for name, flat in self.weights.items() if self.places.get(flat)]
        # Of two names, the one that the optimizer knows.
        for name in sorted(named, key=lambda name: name not in self.group_of):
            places = sorted((p.file, p.offset, p.length) for p in self.places[self.weights[name]])
            owner = owners.setdefault(tuple(places), name)
            if owner != name:
                found[name] = owner
        return found

    def details(self) -> Details:
        """What the folder says beside tensors; a group whose parameters are at several steps is a problem."""
        steps: dict[int, tuple[Any, str | None]] = {}
        for name, step in self._steps.items():
            first = steps.setdefault(self.group_of.get(name, 0), step)
            if first != step:
                found = f"{step[0]}, and {first[0]} of another"
                self.problems.append(Problem("parameters of one group are at two steps", parameter=name, found=found))
        names = [list(metadata.sequence(group.get("params"), "params", ".metadata")) for group in self.settings]
        named = all(isinstance(name, str) for listed in names for name in listed)
        return Details(
            {}, {}, steps, self.settings, names=names if named else None, numbers=self.numbers,
            buffers_known=self.buffers is not None, global_step=steps_taken(self.folder),
        )  # fmt: skip


def join_chunks(name: str, key: str, shape: tuple[int, ...], chunks: list[Chunk]) -> Tensor:
    """The tensor of its chunks. Raises ``CheckpointError`` where they do not fit together."""
    # What is not contiguous cannot be a fragment: such a chunk is read only where it is the only one.
    strided = [chunk for chunk in chunks if chunk.alone.merge.kind == "strided"]
    if strided and len(chunks) == 1 and chunks[0].shape == shape:
        return strided[0].alone
    if strided or len({chunk.dtype for chunk in chunks}) > 1:
        raise CheckpointError("chunks that do not fit together")
    dtype = chunks[0].dtype if chunks else "float32"
    cut = {dim for chunk in chunks for dim in range(1, len(shape)) if chunk.shape[dim] != shape[dim]}
    dim = min(cut, default=0)
    columns = sorted({(chunk.offsets[dim], chunk.shape[dim]) for chunk in chunks if cut})
    if len(cut) != 1 or sum(width for _, width in columns) != shape[dim]:  # no columns: some overlap, or differ in rows
        return Tensor(name, key, shape, dtype, "parameter", (Slice(0, shape, _blocks(chunks, shape)),))
    # Blocks side by side along one dim: those of one place there make a slice, whose rows are fragments.
    slices, bands = [], []
    for k, (at, width) in enumerate(columns):
        column = [chunk for chunk in chunks if (chunk.offsets[dim], chunk.shape[dim]) == (at, width)]
        narrow = (*shape[:dim], width, *shape[dim + 1 :])
        slices.append(Slice(k, narrow, _blocks(column, narrow)))
        bands.append(Band(k, 0, at, width))
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    merge = Merge("columns", outer, shape[dim], inner, tuple(bands))
    return Tensor(name, key, shape, dtype, "parameter", tuple(slices), merge)


def _blocks(chunks: list[Chunk], shape: tuple[int, ...]) -> Fragments:
    """Blocks cut along any dims, each run of neighbouring elements a fragment. Raises ``CheckpointError``."""
    strides = np.array([math.prod(shape[dim + 1 :]) for dim in range(len(shape))], np.int64)
    tables: list[Int64] = []
    held = 0
    for chunk in chunks:
        # Of the dims behind ``last`` the block has all indices, so its elements are neighbours from there on.
        last = max((dim for dim in range(1, len(shape)) if chunk.shape[dim] != shape[dim]), default=0)
        run, count = math.prod(chunk.shape[last:]), math.prod(chunk.shape[:last])
        held += count
        if held > _MAX_RUNS:
            raise CheckpointError("a tensor that is cut into too many pieces", expected=f"at most {_MAX_RUNS}")
        if not run * count:
            continue
        index = np.indices(chunk.shape[:last], np.int64).reshape(last, count)
        first = np.array(chunk.offsets[: last + 1], np.int64) @ strides[: last + 1]
        starts = first + (strides[:last, None] * index).sum(0)
        offsets = chunk.at + np.arange(count) * run * ITEM_BYTES[chunk.dtype]
        tables.append(np.column_stack((np.full(count, chunk.file), offsets, starts, np.full(count, run))))
    return Fragments.of(np.concatenate(tables) if tables else [])


def _written_by(folder: Path) -> WrittenBy:
    """The sizes of the run that wrote the folder; one of each where it does not tell."""
    told = object_of(folder, LAYOUT)
    try:
        sizes = {name: int(told[name]) for name in ("dp", "cp", "tp")}
    except (ValueError, KeyError, TypeError):
        return WrittenBy()
    replicas = int(told.get("dp_replicate", 1))
    words = ["FSDP2"] + [f"{word} {n}" for word, n in (("cp", sizes["cp"]), ("dp_replicate", replicas)) if n > 1]
    # cp shares out parameters as dp does, and has no column of its own.
    return WrittenBy(None, ", ".join(words), sizes["dp"] * sizes["cp"], sizes["tp"])
