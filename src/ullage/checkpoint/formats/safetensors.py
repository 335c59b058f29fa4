"""The safetensors format: a Hugging Face folder of ``model*.safetensors``, an index, and optionally optimizer state.

A safetensors file is 8 bytes of header length, a JSON header with dtype, shape and byte range of each tensor, and the
bytes. Weights are the master copies, cast if asked; tied names are left out, as the field does. The optimizer's state
goes to ``optimizer/``, under names ``<key>:<parameter>``, where no loader of weights looks for it.
Source: the format's description in the safetensors repository; ``transformers/modeling_utils.py`` for the index.

Weights in several files are named ``model-00001-of-00003.safetensors``, and ``model.safetensors.index.json`` says which
file holds which tensor. Either tells of a file that is not there, which the files that are there cannot.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ullage.checkpoint.core.inventory import File, Fragments, Inventory, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import ITEM_BYTES, SAFETENSORS
from ullage.checkpoint.core.paths import opened
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Payload, Target
from ullage.checkpoint.files.torchfile import as_checkpoint_error
from ullage.checkpoint.formats.entries import (
    assign_groups,
    cast_of,
    known_buffers,
    optimizer_groups,
    small_file_targets,
    states_of,
    text_file,
    weights_of,
)
from ullage.checkpoint.zero.folder import collect_problems
from ullage.checkpoint.zero.states import Details, kept_by_group
from ullage.core.errors import CheckpointError

#: Bytes of tensors in one file at most, unless one tensor is larger.
MAX_FILE_BYTES = 5 << 30
#: The safetensors library refuses headers beyond 100 MB, so a larger number is damage.
_MAX_HEADER_BYTES = 100 << 20

_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}
#: Small files that make a folder of weights a model; copied when they lie in the source folder or beside it.
_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip

#: Names of tensors by file, relative to the folder; None of a file that cannot be read.
Held = Mapping[str, "set[str] | None"]
_NUMBERED = re.compile(r"(?P<stem>.*[-_])(?P<number>\d{1,18})-of-(?P<count>\d{1,18})(?P<rest>.*)\.safetensors")
#: As for the header of a file: more is damage.
_MAX_INDEX_BYTES = 100 << 20
_COPY = "copy the file again from where it was saved"


def safetensors_targets(inventory: Inventory, *, dtype: str | None = None, optimizer: bool = False) -> list[Target]:
    """The files of the folder, without the tensors' bytes."""
    weights = [(t.name, t, cast_of(t, dtype)) for t in weights_of(inventory)]
    # An adapter stays one, which needs its configuration.
    adapter = (inventory.folder / "adapter_model.safetensors").is_file()
    targets = _files("adapter_model" if adapter else "model", weights, weights_header(inventory))
    targets += small_file_targets(inventory.folder, ["adapter_config.json"] if adapter else [])
    if optimizer:
        states = [(f"{t.key}:{t.name}", t, t.dtype) for t in states_of(inventory)]
        targets += _files("optimizer/optimizer", states, optimizer_header(inventory))
    return targets + companions(inventory)


def weights_targets(inventory: Inventory, stem: str, tensors: dict[str, Tensor]) -> list[Target]:
    """The files ``stem*.safetensors`` of these tensors, by the names that they are to have, and the index."""
    return _files(stem, [(name, t, t.dtype) for name, t in tensors.items()], weights_header(inventory))


def weights_header(inventory: Inventory) -> dict[str, str]:
    """Metadata in the header of a file of weights: the tied names, and which tensors are buffers."""
    said = {"aliases": json.dumps(inventory.aliases)} if inventory.aliases else {}
    buffers = known_buffers(inventory)
    return said | ({} if buffers is None else {"buffers": json.dumps(buffers)})


def optimizer_header(inventory: Inventory) -> dict[str, str]:
    """Metadata in the header of a file of optimizer state: by group, the step, other numbers, and its settings."""
    steps = {str(group): step for group, step in inventory.steps.items() if isinstance(step, (int, float))}
    said = {"steps": json.dumps(steps)}
    numbers = {
        str(group): {key: value for key, value in held.items() if isinstance(value, (bool, int, float, str))}
        for group, held in kept_by_group(Details.of(inventory)).items()
    }
    said |= {"numbers": json.dumps(numbers)} if numbers else {}
    groups = [
        {
            "names": list(group.names),
            "step_dtype": group.step_dtype,
            "settings": {key: _as_json(value) for key, value in group.settings.items() if _is_plain(value)},
        }
        for group in optimizer_groups(inventory)
    ]
    return said | ({"param_groups": json.dumps(groups)} if groups else {})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _as_json(value: Any) -> Any:
    """A plain setting as JSON, which has no tuples: ``{"tuple": [...]}`` stands for one."""
    if isinstance(value, (list, tuple)):
        items = [_as_json(item) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    return value


def _from_json(value: Any) -> Any:
    """The setting that :func:`_as_json` wrote."""
    if isinstance(value, dict):
        return tuple(map(_from_json, metadata.sequence(value.get("tuple"), "a setting", "param_groups")))
    return [_from_json(item) for item in value] if isinstance(value, list) else value


def companions(inventory: Inventory) -> list[Target]:
    """Small files beside the weights, as they lie in the source folder or beside it."""
    return small_file_targets(inventory.folder, _COMPANIONS)


def _files(stem: str, named: list[tuple[str, Tensor, str]], metadata: dict[str, str]) -> list[Target]:
    """The files of these (label, tensor, dtype), each up to :data:`MAX_FILE_BYTES`, and the index."""
    shards: list[list[tuple[str, Tensor, str]]] = [[]]
    held = total = 0
    for entry in named:
        size = entry[1].numel * ITEM_BYTES[entry[2]]
        # A tensor that is larger than the limit gets a file for itself.
        if held and held + size > MAX_FILE_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += size
        total += size
    targets, where = [], {}
    for number, shard in enumerate(shards, 1):
        many = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{many}.safetensors"
        targets.append(_file(name, shard, metadata))
        # The index names files relative to itself.
        where |= {label: name.rpartition("/")[2] for label, _, _ in shard}
    index = json.dumps({"metadata": {"total_size": total, **metadata}, "weight_map": where}, indent=2).encode() + b"\n"
    return [*targets, text_file(f"{stem}.safetensors.index.json", index)]


def _file(name: str, shard: list[tuple[str, Tensor, str]], metadata: dict[str, str]) -> Target:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at, starts = 0, list[int]()
    for label, tensor, dtype in shard:
        if dtype not in SAFETENSORS:
            raise CheckpointError(
                "safetensors has no name for this dtype", where=label, found=dtype, hint="convert it with --to dcp"
            )
        starts.append(at)
        at += tensor.numel * ITEM_BYTES[dtype]
        entry = {"dtype": SAFETENSORS[dtype], "shape": list(tensor.shape), "data_offsets": [starts[-1], at]}
        header[label] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces after the JSON are allowed; with them the data begin at a multiple of 8, as in files of the library.
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    payloads = tuple(Payload(tensor, first + start, dtype) for (_, tensor, dtype), start in zip(shard, starts))
    return Target(name, first + at, payloads, ((0, struct.pack("<Q", len(text)) + text),))


def read_safetensors(folder: Path) -> Inventory:
    """The inventory of a folder of safetensors. Raises ``CheckpointError`` for a folder that cannot be read."""
    files: list[File] = []
    tensors: dict[tuple[str, str], Tensor] = {}
    problems: list[Problem] = []
    said: dict[str, Any] = {}
    labels: dict[str, set[str] | None] = {}
    for path in weight_files(folder):
        name = str(path.relative_to(folder))
        labels[name] = None
        try:
            start, header, size = read_header(path)
            held = header.pop("__metadata__", None)
            made = [_tensor(label, entry, len(files), name, start, size) for label, entry in header.items()]
        except CheckpointError as error:
            problems.append(Problem.of_error(error, name, parameter=error.where))
            continue
        labels[name] = set(header)
        # Loaders refuse a file of which any byte belongs to no tensor, or to two.
        ranges = sorted((int(t.slices[0].fragments.offset[0]), t.num_bytes) for t in made if t.numel)
        ends = [start, *(at + length for at, length in ranges)]
        if [at for at, _ in ranges] != ends[:-1] or ends[-1] != size:
            expected = f"{ends[-1]} bytes"
            problems.append(Problem("the tensors do not fill their file", name, expected=expected, found=f"{size}"))
        for tensor in made:
            if (tensor.name, tensor.key) in tensors:
                problems.append(Problem("two files hold one tensor", name, parameter=tensor.name))
            tensors[tensor.name, tensor.key] = tensor
        files.append(File(name, size, "weights"))
        said |= held if isinstance(held, dict) else {}
    missing, notes = missing_parts(folder, labels)
    for name in _again(folder, labels, tensors):
        notes.append(f"{name} holds the model once more, by other names, and is passed over: no index names it")
        for label in labels[name] or ():
            del tensors[label, "fp32"]
    if (folder / "optimizer.bin").is_file():
        notes.append("optimizer.bin is not read: state by number, as accelerate saves it; the weights alone are")
    problems += missing
    details, aliases, buffers = Details(buffers_known=False), dict[str, str](), set[str]()
    with collect_problems(problems):
        details, aliases, buffers = _details(said, set(tensors))
    group_of = {name: index for index, names in enumerate(details.names or []) for name in names}
    return Inventory(
        folder, "safetensors", WrittenBy(), tuple(files),
        tuple(assign_groups(tensors.values(), group_of, buffers)),
        steps={group: value for group, (value, _) in details.steps.items()}, aliases=aliases,
        notes=tuple(notes), read_problems=tuple(problems), details=details,
    )  # fmt: skip


def _details(said: dict[str, Any], held: set[tuple[str, str]]) -> tuple[Details, dict[str, str], set[str]]:
    """What headers say beside tensors: groups, steps and numbers; tied names; buffers. Raises ``CheckpointError``."""
    where = "the metadata of the headers"
    aliases = metadata.shared_params(_parse(said, "aliases", {}), where)
    steps, numbers = (metadata.mapping(_parse(said, key, {}), key, where) for key in ("steps", "numbers"))
    given = metadata.sequence(_parse(said, "param_groups", []), "param_groups", where)
    groups = [metadata.mapping(group, "param_groups", where) for group in given]
    names = [metadata.names(group.get("names"), "names of param_groups", where) for group in groups]
    buffers = set(metadata.names(_parse(said, "buffers", []), "buffers", where))
    strange = sorted(name for listed in names for name in listed if (name, "fp32") not in held)
    if strange:
        raise metadata.malformed("param_groups", where, "names of weights", strange[0])
    found = Details(names=names, buffers_known="buffers" in said)
    for index, group in enumerate(groups):
        settings = metadata.mapping(group.get("settings"), "settings", where)
        found.param_groups.append({key: _from_json(value) for key, value in settings.items()})
        step, dtype = steps.get(str(index)), group.get("step_dtype")
        if isinstance(step, (int, float)):
            found.steps[index] = step, dtype if isinstance(dtype, str) else None
        if str(index) in numbers:
            found.numbers[index] = metadata.mapping(numbers[str(index)], "numbers", where)
    return found, aliases, buffers


def _parse(said: dict[str, Any], key: str, default: Any) -> Any:
    """An entry of a header's metadata, which is JSON in a string. Raises ``CheckpointError``."""
    if key not in said:
        return default
    try:
        return json.loads(said[key])
    except (ValueError, RecursionError, TypeError):
        raise metadata.malformed(key, "the metadata of the headers", "JSON", said[key]) from None


def weight_files(folder: Path) -> list[Path]:
    """The files of weights, then those of optimizer state."""
    return [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("optimizer/*.safetensors"))]


def _tensor(label: str, entry: Any, file: int, name: str, start: int, size: int) -> Tensor:
    """A tensor as the header of its file says. Raises ``CheckpointError``.

    Args:
        label: its name in the header; in ``optimizer/``, ``<key>:<parameter>``.
        entry: dtype, shape and byte range.
        file: number of the file in the inventory.
        name: of the file, relative to the folder.
        start: byte of the file at which the data begin, to which the range is relative.
        size: bytes of the file.
    """
    key, _, parameter = label.partition(":") if name.startswith("optimizer/") else ("fp32", "", label)
    entry = metadata.mapping(entry, "a tensor's entry", label)
    dtype = _DTYPES.get(entry.get("dtype") if isinstance(entry.get("dtype"), str) else "")
    if dtype is None:
        raise CheckpointError("a tensor of an unknown dtype", where=label, found=metadata.brief(entry.get("dtype")))
    shape = metadata.shape(entry.get("shape"), "the shape", label)
    offsets = metadata.integers(entry.get("data_offsets"), "data_offsets", label)
    numel = math.prod(shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != numel * ITEM_BYTES[dtype] or start + offsets[1] > size:
        raise CheckpointError("a tensor lies outside its file", where=label, found=f"{offsets[:2]} in {size} bytes")
    part = Fragments.one(file, start + offsets[0], numel)
    return Tensor(parameter, key, shape, dtype, "parameter", (Slice(0, shape, part),))


def read_header(path: Path) -> tuple[int, dict[str, Any], int]:
    """(where the data begin, the header, bytes of the file). Raises ``CheckpointError``."""
    with as_checkpoint_error(str(path)), opened(path) as file:
        size = file.size
        length = int.from_bytes(file.pread(8, 0), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            found = f"a header of {length} bytes in {size}"
            raise CheckpointError("truncated, corrupted, or not safetensors", where=str(path), found=found)
        text = file.pread(length, 8)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            found = f"{type(error).__name__}: {str(error)[:100]}"
            raise CheckpointError("truncated, corrupted, or not safetensors", where=str(path), found=found) from None
    return 8 + length, metadata.mapping(header, "the header", str(path)), size


def missing_parts(folder: Path, held: Held) -> tuple[list[Problem], list[str]]:
    """(problems, notes): files and tensors that an index or the names of other files promise, and that are not there.

    ``held``: of all files of weights and of optimizer state.
    """
    problems = list(_find_missing_numbers(held))
    notes: list[str] = []
    for pattern in ("*.safetensors.index*.json", "optimizer/*.safetensors.index*.json"):
        for path in sorted(folder.glob(pattern)):
            name = str(path.relative_to(folder))
            with collect_problems(problems, name):
                more, said = _compare_listed(name, _weight_map(path), held)
                problems += more
                notes += said
    return problems, notes


def _find_missing_numbers(held: Iterable[str]) -> Iterable[Problem]:
    """A problem for each set of numbered files of which some are missing, or have a number that the set has not."""
    sets: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in held:
        found = _NUMBERED.fullmatch(name)
        if found:
            stem, number, count, rest = found.group("stem", "number", "count", "rest")
            sets.setdefault((stem, rest, int(count)), {})[int(number)] = name
    for (_, _, count), files in sets.items():
        # Some writers count from 0.
        first = 0 if 0 in files else 1
        within = [number for number in files if first <= number < first + count]
        if len(within) < len(files):
            name = files[max(files)]
            yield Problem(
                "the file has a number beyond those of its set", name, expected=f"at most {count}", hint=_COPY
            )
        if len(within) < count:
            # The first number that no file has; the count is not to be walked through, since it can be anything.
            gap = next(number for number in range(first, first + len(within) + 1) if number not in files)
            yield Problem(
                f"file {gap} of {count} is missing",
                next(iter(files.values())),
                expected=f"{count} files, which its name says",
                found=f"{len(within)}",
                hint=_COPY,
            )


def _again(folder: Path, held: Held, tensors: Mapping[tuple[str, str], Tensor]) -> list[str]:
    """The file that no index names and that has a tensor of each shape of those that an index names, as Mistral's."""
    named: set[str] = set()
    for path in folder.glob("*.safetensors.index*.json"):
        with suppress(CheckpointError):  # which is a problem of its own
            named |= set(_weight_map(path).values())

    def shapes(files: Iterable[str]) -> list[tuple[int, ...]]:
        return sorted(tensors[label, "fp32"].shape for file in files for label in held[file] or ())

    there = [name for name in held if "/" not in name]
    listed = shapes(name for name in there if name in named)
    return [name for name in there if name not in named and listed and shapes([name]) == listed]


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor. Raises ``CheckpointError`` for a file that is not an index."""
    with as_checkpoint_error(str(path)), opened(path) as stream:
        if stream.size > _MAX_INDEX_BYTES:
            raise CheckpointError("not an index of safetensors", where=str(path), found=f"{stream.size} bytes")
        try:
            content: Any = json.loads(stream.pread(stream.size, 0))
        except (ValueError, RecursionError) as error:
            found = f"{type(error).__name__}: {str(error)[:100]}"
            raise CheckpointError("not an index of safetensors", where=str(path), found=found, hint=_COPY) from None
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise metadata.malformed("weight_map", str(path), "a file by the name of each tensor", listed)
    metadata.names(list(listed.values()), "weight_map", str(path))
    return listed


def _compare_listed(name: str, listed: dict[str, str], held: Held) -> tuple[list[Problem], list[str]]:
    """Problems and notes of what an index says and its files do not hold.

    Args:
        name: of the index, relative to the folder.
        listed: the file of each tensor, relative to the index.
        held: as for :func:`missing_parts`.
    """
    folder = name.rpartition("/")[0]
    by_file: dict[str, list[str]] = {}
    for tensor, file in listed.items():
        by_file.setdefault(file, []).append(tensor)
    files = {file: f"{folder}/{file}" if folder else file for file in by_file}
    # A model that was saved in one file over one in several keeps the old index; loaders take the one file.
    single = name.partition(".safetensors.index")[0] + ".safetensors"
    if single in held and single not in files.values() and not any(file in held for file in files.values()):
        return [], [f"{name} names {len(files)} files that are not there, and is passed over beside {single}"]
    problems: list[Problem] = []
    for file, tensors in by_file.items():
        place, more = files[file], f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        there = held.get(place)
        lost = [] if there is None else [tensor for tensor in tensors if tensor not in there]
        if PurePosixPath(file).name != file or file in ("", ".."):
            what = "the index names a file that is none of the folder"
            problems.append(Problem(what, name, parameter=tensors[0], found=metadata.brief(file), hint=_COPY))
        elif place not in held:
            what = "a file that the index names is missing"
            problems.append(Problem(what, place, parameter=f"{tensors[0]}{more}", hint=_COPY))
        elif lost:
            what = "the index names a tensor that its file does not hold"
            found = f"{len(lost)} such tensors" if len(lost) > 1 else None
            problems.append(Problem(what, place, parameter=lost[0], found=found, hint=_COPY))
    beyond = [t for place in files.values() for t in sorted(held.get(place) or ()) if t not in listed]
    if not beyond:
        return problems, []
    return problems, [f"{name} does not list {len(beyond)} of the tensors in its files, such as {beyond[0][:200]}"]
