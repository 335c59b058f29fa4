"""A Hugging Face folder: ``model*.safetensors`` with an index, and optionally the optimizer's state beside it.

A safetensors file is 8 bytes of header length, a JSON header with dtype, shape and byte range of each tensor, and the
bytes. Weights are the master copies, cast if asked; tied names are left out, as the field does. The optimizer's state
goes to ``optimizer/``, under names ``<key>:<parameter>``, where no loader of weights looks for it.
Source: the format's description in the safetensors repository; ``transformers/modeling_utils.py`` for the index.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ullage.checkpoint.archive import Payload, Target
from ullage.checkpoint.inventory import File, Fragments, Inventory, Problem, Slice, Tensor, Topology
from ullage.checkpoint.torchfile import ITEM_BYTES, TensorRef
from ullage.errors import CheckpointError, InputError

MAX_FILE_BYTES = 5 << 30
FLOATS = ("float64", "float32", "float16", "bfloat16")

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
#: Small files that make a folder of weights a model; copied when they lie in the source folder or beside it.
_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip


def cast_of(tensor: Tensor, dtype: str | None) -> str:
    """The dtype that a weight is written in. Raises ``InputError`` for a dtype that weights cannot be cast to."""
    if dtype is None:
        return tensor.dtype
    dtype = dtype.removeprefix("torch.")
    if dtype not in FLOATS[1:]:
        raise InputError("cannot cast weights to this dtype", expected=" or ".join(FLOATS[1:]), found=dtype)
    return dtype if tensor.dtype in FLOATS else tensor.dtype


def plan(inventory: Inventory, *, dtype: str | None = None, optimizer: bool = False) -> list[Target]:
    """The files of the folder, without the tensors' bytes."""
    weights = [(t.name, t, cast_of(t, dtype)) for t in inventory.tensors if t.kind != "parameter" or t.key == "fp32"]
    tied = {"aliases": json.dumps(inventory.aliases)} if inventory.aliases else {}
    targets = _files("model", weights, tied)
    if optimizer:
        states = [
            (f"{t.key}:{t.name}", t, t.dtype) for t in inventory.tensors if t.kind == "parameter" and t.key != "fp32"
        ]
        steps = {str(group): step for group, step in inventory.steps.items() if isinstance(step, (int, float))}
        targets += _files("optimizer/optimizer", states, {"steps": json.dumps(steps)})
    for name in _COMPANIONS:
        for folder in (inventory.folder, inventory.folder.parent):
            if (folder / name).is_file():
                text = (folder / name).read_bytes()
                targets.append(Target(name, len(text), texts=((0, text),)))
                break
    return targets


def _files(stem: str, named: list[tuple[str, Tensor, str]], metadata: dict[str, str]) -> list[Target]:
    shards: list[list[tuple[str, Tensor, str]]] = [[]]
    held = 0
    for entry in named:
        size = entry[1].numel * ITEM_BYTES[entry[2]]
        if held and held + size > MAX_FILE_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += size
    targets, where = [], {}
    for number, shard in enumerate(shards, 1):
        many = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{many}.safetensors"
        targets.append(_file(name, shard, metadata))
        where |= {label: name.rpartition("/")[2] for label, _, _ in shard}
    total = sum(t.numel * ITEM_BYTES[d] for _, t, d in named)
    index = json.dumps({"metadata": {"total_size": total, **metadata}, "weight_map": where}, indent=2).encode() + b"\n"
    targets.append(Target(f"{stem}.safetensors.index.json", len(index), texts=((0, index),)))
    return targets


def _file(name: str, shard: list[tuple[str, Tensor, str]], metadata: dict[str, str]) -> Target:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for label, tensor, dtype in shard:
        size = tensor.numel * ITEM_BYTES[dtype]
        header[label] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    payloads = tuple(Payload(tensor, start + header[label]["data_offsets"][0], dtype) for label, tensor, dtype in shard)
    return Target(name, start + at, payloads, ((0, struct.pack("<Q", len(text)) + text),))


def read_safetensors(folder: Path) -> Inventory:
    """The inventory of a folder of safetensors. Raises ``CheckpointError`` for a file that is none."""
    files: list[File] = []
    tensors: list[Tensor] = []
    problems: list[Problem] = []
    for path in [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("optimizer/*.safetensors"))]:
        size = path.stat().st_size
        name = str(path.relative_to(folder))
        try:
            start, header = _header(path, size)
        except (ValueError, CheckpointError) as error:
            problems.append(Problem("truncated, corrupted, or not safetensors", name, found=str(error)[:200]))
            continue
        for label, entry in header.items():
            if label == "__metadata__":
                continue
            key, _, parameter = label.partition(":") if name.startswith("optimizer/") else ("fp32", "", label)
            ref = TensorRef("", _DTYPES[entry["dtype"]], 0, tuple(entry["shape"]), True)
            low, high = entry["data_offsets"]
            if high - low != ref.num_bytes or start + high > size:
                problems.append(Problem("a tensor lies outside its file", name, parameter=parameter))
                continue
            row = [] if not ref.numel else [ref.numel]
            part = Fragments.of([len(files)] * len(row), [start + low] * len(row), [0] * len(row), row)
            tensors.append(Tensor(parameter, key, ref.shape, ref.dtype, "parameter", (Slice(0, ref.shape, part),)))
        files.append(File(name, size, "weights"))
    return Inventory(folder, "safetensors", Topology(), tuple(files), tuple(tensors), problems=tuple(problems))


def _header(path: Path, size: int) -> tuple[int, dict[str, Any]]:
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, 100 << 20):
            raise CheckpointError("not safetensors", where=str(path), found=f"a header of {length} bytes in {size}")
        return 8 + length, json.loads(stream.read(length))
