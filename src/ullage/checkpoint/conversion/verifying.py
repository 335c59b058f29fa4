"""Verification of a converted checkpoint: every byte of every tensor, and every file that a loader reads.

Both sides are inventories, so the formats do not matter: the same elements are gathered from the fragments of each and
compared. Where the target keeps another dtype, the source is cast first, as the conversion did. All that the target
must hold beside tensors is laid out again from the source, and looked for in the target:

============  ======================================================================================================
universal     every state file's description, the steps, ``optimizer_state.pt``, the model states
safetensors   the indexes, what the headers say beside tensors, ``config.json`` and its like
dcp           ``.metadata`` and every item that it names
trainer       as safetensors, and ``optimizer.pt`` and ``scheduler.pt``
zero          every file, object by object
============  ======================================================================================================

A target that a conversion of ours made (``ullage.json`` says so) must hold all that we write. Of another's, such as
DeepSpeed's own converter, what only we write is not missed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.conversion.comparing import Pair, compare_pairs
from ullage.checkpoint.conversion.converting import default_workers
from ullage.checkpoint.core.inventory import File, Fragments, Inventory, Slice, Tensor
from ullage.checkpoint.core.numbers import FLOATS
from ullage.checkpoint.core.paths import hold_descriptions, let_go
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Target
from ullage.checkpoint.files.metadata import brief
from ullage.checkpoint.files.pickling import Constant, FunctionCall, Instance, TensorCopy, pickled
from ullage.checkpoint.files.torchfile import TorchFile, read_bytes, read_torch_file
from ullage.checkpoint.files.unpickling import Inert, Named, TensorRef
from ullage.checkpoint.formats import dcp, safetensors, trainer_folder
from ullage.checkpoint.formats.hub_names import hub_named
from ullage.checkpoint.formats.locate import COMPLETE
from ullage.checkpoint.formats.table import STAGES, read
from ullage.checkpoint.formats.universal import universal_targets
from ullage.checkpoint.formats.zero_shards import zero_targets
from ullage.checkpoint.zero.modules import whole_tensor
from ullage.core.errors import CheckpointError


def verify(
    source: str | Path | Inventory,
    target: str | Path | Inventory,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[Problem]:
    """List every difference between two checkpoints; ``[]`` when a loader of ``target`` gets what ``source`` holds.

    Args:
        source: the checkpoint that was converted: its folder or URL, as for :func:`ullage.checkpoint.read`, or an
            inventory.
        target: the converted checkpoint, likewise. It may be without optimizer state altogether (weights only), unless
            it was converted with it.
        workers: threads; by default two for each processor that this process may use, at most 8.
        progress: called as ``progress(done, total)``, in bytes, from any thread.
        storage_options: those of fsspec, for URLs.

    Compares every byte of every tensor, and the content of every file that a loader of the target's format reads:
    steps, hyperparameters, model states, indexes. Memory: two chunks of 2 MiB per thread. Raises ``CheckpointError``
    for a folder that is not a checkpoint.
    """
    ours = source if isinstance(source, Inventory) else read(source, storage_options=storage_options)
    theirs = target if isinstance(target, Inventory) else read(target, storage_options=storage_options)
    ours = hub_named(ours, theirs.format)
    # Without a whole tiling on both sides there is nothing sound to compare.
    problems = ours.problems() + theirs.problems()
    if problems:
        return problems
    found = _compare_files(ours, theirs)
    is_adapter = _options_of(theirs.folder).get("format") == "trainer" and trainer_folder.is_adapter(theirs.folder)
    pairs, more = _pairs(trainer_folder.adapter_of(ours) if is_adapter else ours, theirs)
    problems = found.problems + more
    return problems + compare_pairs(ours, found.inventory, pairs + found.pairs, workers or default_workers(), progress)


def _pairs(ours: Inventory, theirs: Inventory) -> tuple[list[Pair], list[Problem]]:
    """The tensors to compare, and problems for those that are missing, of another shape, or of another dtype."""
    pairs: list[Pair] = []
    problems: list[Problem] = []
    weights_only = not _has_optimizer(theirs)
    divided = any(tensor.group is not None for tensor in ours.tensors)
    for tensor in ours.tensors:
        if weights_only and tensor.kind == "parameter" and tensor.key != "fp32":
            continue
        other = _find(theirs, tensor, divided)
        if other is None:
            problems.append(Problem(f"{tensor.key} is missing in the target", parameter=tensor.name))
        elif other.shape != tensor.shape:
            problems.append(
                Problem(
                    f"{tensor.key} has another shape",
                    parameter=tensor.name,
                    expected=str(list(tensor.shape)),
                    found=str(list(other.shape)),
                )
            )
        elif other.dtype != tensor.dtype and not {other.dtype, tensor.dtype} <= set(FLOATS):
            problems.append(
                Problem(
                    f"{tensor.key} has another dtype", parameter=tensor.name, expected=tensor.dtype, found=other.dtype
                )
            )
        else:
            pairs.append((tensor, other, None))
    # What the target has beyond the source would be loaded too, so it is a difference.
    known = {tensor.name for tensor in ours.tensors} | set(ours.aliases)
    strange = sorted({tensor.name for tensor in theirs.tensors} - known)
    problems += [Problem("in the target, not in the source", parameter=name) for name in strange]
    return pairs, problems


def _find(theirs: Inventory, tensor: Tensor, divided: bool) -> Tensor | None:
    """The tensor of the target that holds this one.

    ``divided``: whether the source tells trained parameters from other weights. Where it does not, and of what has no
    elements, a target may call a weight what it must be there.
    """
    free = tensor.kind != "parameter" or (tensor.key == "fp32" and (not divided or not tensor.numel))
    for kind in (tensor.key, "frozen", "buffer", "fp32"):
        if (tensor.name, kind) in theirs and (kind == tensor.key or free):
            return theirs.tensor(tensor.name, kind)
    return None


# All that a loader reads beside the tensors


def _compare_files(ours: Inventory, theirs: Inventory) -> _FileComparison:
    """Compare all that a loader of ``theirs`` reads beside the tensors with what ``ours`` would be converted to."""
    found = _FileComparison(ours, theirs)
    # Two of one format, of which one was not made of the other, hold the same tensors and need not hold the same files.
    made_apart = ours.format == theirs.format and found.options.get("source") != str(ours.folder)
    try:
        if theirs.format == "universal" and not made_apart:
            found.universal()
        elif theirs.format in ("safetensors", "trainer"):
            if not trainer_folder.is_adapter(theirs.folder):
                found.safetensors()
            if found.options.get("format") == "trainer":
                found.trainer()
        elif theirs.format == "dcp":
            found.dcp()
        elif theirs.format == "zero" and not made_apart:
            found.zero()
    except CheckpointError as error:  # the source cannot be converted to this
        found.problems.append(Problem.of_error(error, error.where))
    finally:
        let_go(theirs.folder)
    return found


def _options_of(folder: Path) -> dict[str, Any]:
    """The options in ``ullage.json`` of a target; empty for a target that another tool wrote."""
    for place in (folder, folder.parent):  # Megatron-Core's checkpoint is a folder in the target
        try:
            said = json.loads((place / COMPLETE).read_bytes())
        except (OSError, ValueError):
            continue
        return said if isinstance(said, dict) else {}
    return {}


def _has_optimizer(theirs: Inventory) -> bool:
    """Whether a target holds optimizer state, or was converted with it."""
    held = any(t.kind == "parameter" and t.key != "fp32" for t in theirs.tensors)
    options = _options_of(theirs.folder)
    # A Trainer's folder has the state by number, in a file that is compared by itself.
    return held or bool(options.get("optimizer") and options.get("format") != "trainer")


def _text(value: object) -> str | None:
    return None if value is None else str(value)


class _FileComparison:
    """The files of a target, compared: ``problems`` are the differences, ``pairs`` the tensors still to compare."""

    def __init__(self, ours: Inventory, theirs: Inventory) -> None:
        self.ours, self.theirs, self.folder = ours, theirs, theirs.folder
        #: the folder that the names of a plan are relative to
        self.root = theirs.folder
        self.options = _options_of(theirs.folder)
        self.problems: list[Problem] = []
        self.pairs: list[Pair] = []
        self._files = list(theirs.files)

    @property
    def inventory(self) -> Inventory:
        """The target with all files that the pairs lie in."""
        return replace(self.theirs, files=tuple(self._files))

    def _file(self, name: str) -> int:
        size = (self.folder / name).stat().st_size
        self._files.append(File(name, size, "weights"))
        return len(self._files) - 1

    def _add(self, what: str, file: str, found: object = None, expected: object = None) -> None:
        self.problems.append(Problem(what, file, expected=_text(expected), found=_text(found)))

    def _is_there(self, name: str) -> bool:
        """Whether the target has a file; it is a problem where not."""
        there = (self.root / name).is_file()
        if not there:
            self._add("a file is missing in the target", name)
        return there

    def _archive(self, name: str) -> TorchFile | None:
        """The description of an archive; None, and a problem, where it cannot be read."""
        try:
            return read_torch_file(self.root / name)
        except CheckpointError as error:
            self._add(error.what, name, found=error.found)
            return None

    def _conclude(self, walk: _Walk, source: TorchFile | None, name: str, known: bool = False) -> None:
        # Three are enough to recognise the file; a file of another layout would give thousands.
        for line in walk.differences[:3]:
            self._add("the file holds something else", name, found=line)
        file = None
        for stream, ref, where in walk.tensors:
            # Tensors that the inventory of the target has are compared from there, and only once.
            if source is None or (known and where == "param"):
                continue
            file = self._file(name) if file is None else file
            try:
                made = whole_tensor(where or name, "value", ref, file, source)
            except CheckpointError as error:
                self._add(error.what, name, found=error.found)
                continue
            self.pairs.append((replace(stream.tensor, name=where or name, key="value"), made, name))

    # Universal

    def universal(self) -> None:
        """Every file of the plan: copies byte for byte, archives object by object."""
        plan = universal_targets(self.ours)
        self.problems += self.ours.optimizer_problems  # state that the plan has no place for
        hold_descriptions((self.folder / planned.name, 0, planned.num_bytes) for planned in plan)
        if not self.options:
            plan = [p for p in plan if (self.folder / p.name).is_file() or not self._is_ours_alone(p.name)]
        self._compare_plan(plan)

    def _compare_plan(self, plan: list[Target]) -> None:
        """Compare the files of a plan: copies and texts byte for byte, archives object by object."""
        for planned in plan:
            path = self.root / planned.name
            if not self._is_there(planned.name):
                continue
            if planned.copy_of is not None:
                self._copy(planned, path)
            elif planned.root is None:
                if not planned.payloads and path.read_bytes() != planned.texts[0][1]:
                    self._add("the file is not the source's", planned.name)
            elif (source := self._archive(planned.name)) is not None:
                if not self.options and isinstance(source.root, TensorRef) and isinstance(planned.root, dict):
                    continue  # DeepSpeed's at stage 3: the tensor alone, which the inventory has
                walk = _Walk(source, planned.stored)
                walk.compare(planned.root, source.root)
                self._conclude(walk, source, planned.name, known=planned.name.startswith("zero/"))

    def _is_ours_alone(self, name: str) -> bool:
        """Files that DeepSpeed's converter does not write: for the other stages, and steps at stage 3."""
        stage3 = self.ours.written_by.stage == 3
        return (
            name.endswith("step.pt")
            if stage3 and name.startswith("zero/")
            else name.startswith("mp_rank_" if stage3 else "zero_pp_rank_")
        )

    def _copy(self, planned: Target, path: Path) -> None:
        file, size = planned.copy_of or 0, path.stat().st_size
        if size != planned.num_bytes:
            self._add("a copied file has another size", planned.name, found=size, expected=planned.num_bytes)
            return
        # A copy is compared as one tensor of bytes, by the code that compares tensors.
        both = (_bytes_of(file, size), _bytes_of(self._file(planned.name), size))
        self.pairs.append((*both, planned.name))

    # ZeRO shards

    def zero(self) -> None:
        """Every file that a conversion of ours would write, object by object and element by element."""
        stage = STAGES.get(self.options.get("format", ""))
        if stage is None:
            return  # shards that DeepSpeed wrote are compared tensor by tensor
        options = {key: self.options.get(key) for key in ("ranks", "dtype")}
        targets = zero_targets(self.ours, stage=stage, optimizer=bool(self.options.get("optimizer")), **options)
        self._compare_plan(targets)

    # Safetensors

    def safetensors(self) -> None:
        """Indexes and headers agree with the files that are there; small files are the source's."""
        said = {"model": {"format": "pt", **safetensors.weights_header(self.ours)}}
        stems = {"model": "model"}
        if _has_optimizer(self.theirs) and self.theirs.format == "safetensors":
            said["optimizer"] = {"format": "pt", **safetensors.optimizer_header(self.ours)}
            stems["optimizer"] = "optimizer/optimizer"
        for which, stem in stems.items():
            self._compare_index(stem, said[which])
        self._compare_plan(safetensors.companions(self.ours))

    def _compare_index(self, stem: str, said: dict[str, str]) -> None:
        where: dict[str, str] = {}
        paths = sorted((self.folder / stem).parent.glob(f"{Path(stem).name}*.safetensors"))
        for path in paths:
            _, header, _ = safetensors.read_header(path)
            where |= {label: path.name for label in header if label != "__metadata__"}
            held = metadata.mapping(header.get("__metadata__"), "__metadata__", path.name)
            for key, value in said.items():
                if held.get(key) != value and (self.options or key == "format"):
                    self._add(
                        f"the header says something else of {key}",
                        path.name,
                        metadata.brief(held.get(key)),
                        value,
                    )
        index = self.folder / f"{stem}.safetensors.index.json"
        name = str(index.relative_to(self.folder))
        if not index.is_file():
            if self.options or len(paths) > 1:
                self._add("a file is missing in the target", name)
            return
        try:
            listed = json.loads(index.read_bytes())
        except (ValueError, RecursionError) as error:
            self._add("the index cannot be read", name, found=error)
            return
        if not isinstance(listed, dict) or listed.get("weight_map") != where:
            self._add("the index names other tensors or files than are there", name)
        elif self.options:
            total = sum(t.num_bytes for t in self.theirs.tensors if _is_state(t) == (stem != "model"))
            held = metadata.mapping(listed.get("metadata"), "metadata", name)
            wanted = {"total_size": total, **{k: v for k, v in said.items() if k != "format"}}
            if held != wanted:
                self._add("the index says something else", name, metadata.brief(held), metadata.brief(wanted))

    # A Trainer's folder

    def trainer(self) -> None:
        """The archives beside the weights, object by object, with the optimizer's tensors."""
        self._compare_plan([p for p in trainer_folder.trainer_targets(self.ours) if p.root is not None])

    # Distributed checkpoints

    def dcp(self) -> None:
        """Every item that the source gives is named, and is what it must be."""
        root, entries, places = dcp.read_metadata(self.folder)
        hold_descriptions((self.folder / p.file, p.offset, p.length) for each in places.values() for p in each)
        paths = metadata.mapping(root.get("planner_data"), "planner_data", ".metadata")
        if self.options:
            self._conclude(_walk(dcp.CONSTANTS, root.state, "the metadata"), None, ".metadata")
        # Settings may be there without any state tensor (SGD without momentum).
        has = _has_optimizer(self.theirs) or any(flat.startswith("optim.") for flat in entries)
        planned = dcp.items(self.ours, optimizer=has)
        owners = {path[1]: value for path, value in planned if path[0] == "model"}
        tied = [(("model", alias), owners[own]) for alias, own in self.ours.aliases.items() if own in owners]
        for path, value in [*planned, *tied]:
            flat = ".".join(map(str, path))
            entry = entries.get(flat)
            if entry is None:
                self._add(f"{flat} is missing in the target", ".metadata")
                continue
            if paths.get(flat) != path and (self.options or flat in paths):
                self._add(f"{flat} has another path", ".metadata", metadata.brief(paths.get(flat)), path)
            self._item(flat, path, value, entry, places.get(flat, []))

    def _item(self, flat: str, path: tuple[Any, ...], value: Any, entry: Any, places: list[dcp.Place]) -> None:
        self._compare_entry(flat, path, value, entry, places)
        if isinstance(value, TensorCopy) and path[1] not in self.ours.aliases:
            return  # among the tensors of the inventory
        if len(places) != 1:
            self._add(f"{flat} is in {len(places)} places", ".metadata", expected=1)
            return
        try:
            source = places[0].open(self.folder)
        except CheckpointError as error:
            self._add(f"{flat}: {error.what}", places[0].file, found=error.found)
            return
        walk = _Walk(source)
        if isinstance(value, TensorCopy) and isinstance(source.root, TensorRef):
            value = replace(value, dtype=source.root.dtype)  # perhaps cast
        walk.compare(value, source.root, flat)
        self._conclude(walk, source, places[0].file)

    def _compare_entry(self, flat: str, path: tuple[Any, ...], value: Any, entry: Any, places: list[dcp.Place]) -> None:
        """Compare the entry of an item in ``.metadata`` with the item, and a tensor's chunks with their places.

        Args:
            flat: name of the item, its path joined by dots.
            path: keys that lead to it in the state dict.
            value: what it must be.
            entry: its description in ``.metadata``.
            places: where ``.metadata`` says that it lies.
        """
        if isinstance(value, TensorCopy):
            keys = ("fp32", "frozen", "buffer") if path[0] == "model" else (value.tensor.key,)
            # The entry must have the dtype of the target, which may have been cast; the bytes are compared elsewhere.
            key = next((key for key in keys if (value.tensor.name, key) in self.theirs), None)
            value = value if key is None else replace(value, dtype=self.theirs.tensor(value.tensor.name, key).dtype)
        walk = _Walk(None)
        if self.options:
            walk.compare(dcp.entry_of(value), entry, flat)
            for place in places:
                planned = dcp.index_of(flat, value), dcp.storage_of(place.file, place.offset, place.length)
                walk.compare(planned, place.said, flat)
        elif isinstance(value, (TensorCopy, Constant)):
            shape = value.shape if isinstance(value, Constant) else value.tensor.shape
            walk.compare(tuple(shape), metadata.shape(entry.get("size"), f"size of {flat}", ".metadata"), flat)
        self._conclude(walk, None, ".metadata")
        what = f"chunks of {flat}"
        chunks = [
            tuple(metadata.integers(chunk.get("offsets"), what, ".metadata")) if isinstance(chunk, Inert) else ()
            for chunk in metadata.sequence(entry.get("chunks"), what, ".metadata")
        ]
        # torch's loader goes by the chunks, our reader by the places: a chunk without a place is seen only here.
        if chunks and sorted(chunks) != sorted(place.offsets for place in places):
            self._add(f"{flat} has chunks without a place", ".metadata")


def _is_state(tensor: Tensor) -> bool:
    return tensor.kind == "parameter" and tensor.key != "fp32"


def _walk(planned: Any, found: Any, where: str) -> _Walk:
    walk = _Walk(None)
    walk.compare(planned, found, where)
    return walk


def _bytes_of(file: int, size: int) -> Tensor:
    """A file as a tensor of bytes, without a name."""
    return Tensor("", "bytes", (size,), "uint8", "buffer", (Slice(0, (size,), Fragments.one(file, 0, size)),))


# Objects, walked side by side. One side is planned (``archive``): its tensors are streams, constants, or references
# into files of the source. The other was read from a file. Tensors of both are paired, to be compared later.


@dataclass
class _Walk:
    """One comparison. Entries that the file holds beyond the planned ones are ignored.

    Attributes:
        source: the file that was read; None where no tensor has to be read.
        stored: turns a reference of the planned side into a tensor to copy.
        differences: lines that say where and how.
        tensors: tensors of both sides, of one shape and dtype, and their path; their bytes are still to be compared.
    """

    source: TorchFile | None
    stored: Callable[[TensorRef], TensorCopy] | None = None
    differences: list[str] = field(default_factory=list)
    tensors: list[tuple[TensorCopy, TensorRef, str]] = field(default_factory=list)

    def compare(self, planned: Any, found: Any, where: str = "") -> None:
        """Collect every difference between ``planned`` and ``found``; ``where`` is the path to them, for the lines."""
        if isinstance(planned, TensorRef) and self.stored is not None:
            planned = self.stored(planned)
        if isinstance(planned, (TensorCopy, Constant)):
            self._tensor(planned, found, where)
        elif isinstance(planned, dict):
            self._mapping(planned, found, where)
        elif isinstance(planned, (list, tuple)):
            if not isinstance(found, list if isinstance(planned, list) else tuple) or len(planned) != len(found):
                self._differ(planned, found, where)
                return
            for i, (a, b) in enumerate(zip(planned, found)):
                self.compare(a, b, f"{where}[{i}]")
        elif isinstance(planned, (Inert, Instance, FunctionCall)):
            self._object(planned, found, where)
        elif isinstance(planned, Named) or callable(planned):
            if planned != found:
                self._differ(planned, found, where)
        elif isinstance(planned, (set, frozenset)):
            # Sets have no order to walk in; their pickles are ordered, and equal for equal sets.
            kind = set if isinstance(planned, set) else frozenset
            if not isinstance(found, kind) or pickled(planned) != pickled(found):
                self._differ(planned, found, where)
        # Plain values: of one type (True is not 1), and equal, or both NaN.
        elif type(planned) is not type(found) or (planned != found and not (planned != planned and found != found)):
            self._differ(planned, found, where)

    def _differ(self, planned: Any, found: Any, where: str) -> None:
        self.differences.append(f"{where or 'the content'}: {brief(found)} instead of {brief(planned)}")

    def _mapping(self, planned: dict[Any, Any], found: Any, where: str) -> None:
        if not isinstance(found, dict):
            self._differ(planned, found, where)
            return
        for key, value in planned.items():
            inner = f"{where}.{key}" if where else str(key)
            # A key that is a stand-in (an object that is not imported) is found by its content, not by its identity.
            if not isinstance(key, (str, int, float, bool, tuple)):
                key = next((k for k in found if _same(key, k)), None)
            if key not in found:
                self.differences.append(f"{inner} is missing")
            else:
                self.compare(value, found[key], inner)

    def _object(self, planned: Inert | Instance | FunctionCall, found: Any, where: str) -> None:
        same_class = isinstance(found, Inert) and (found.module, found.name) == (planned.module, planned.name)
        if not isinstance(found, Inert) or not same_class:
            self._differ(planned, found, where)
            return
        if isinstance(planned, (Inert, FunctionCall)):
            self.compare(tuple(planned.args), tuple(found.args), f"{where}()")
        if isinstance(planned, Inert):
            self.compare(list(planned.items), list(found.items), f"{where}[]")
        if not isinstance(planned, FunctionCall):
            self.compare(planned.state, found.state, where)

    def _tensor(self, planned: TensorCopy | Constant, found: Any, where: str) -> None:
        shape = tuple(planned.shape if isinstance(planned, Constant) else planned.tensor.shape)
        if not isinstance(found, TensorRef):
            self._differ(f"a tensor of {list(shape)}", found, where)
        elif (found.dtype, tuple(found.shape)) != (planned.dtype, shape):
            given = f"{found.dtype} {list(found.shape)}"
            self.differences.append(f"{where or 'the tensor'}: {given} instead of {planned.dtype} {list(shape)}")
        elif isinstance(planned, TensorCopy):
            self.tensors.append((planned, found, where))
        else:
            try:
                same = self.source is not None and found.contiguous and read_bytes(self.source, found) == planned.data
            except CheckpointError as error:
                self.differences.append(f"{where or 'the tensor'}: {error.what}")
                return
            if not same:
                self.differences.append(f"{where or 'the tensor'}: another value")


def _same(planned: Any, found: Any) -> bool:
    walk = _Walk(None)
    walk.compare(planned, found)
    return not walk.differences and not walk.tensors
