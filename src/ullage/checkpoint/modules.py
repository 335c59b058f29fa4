"""What no optimizer holds: frozen parameters, buffers, and names that are another name for a stored parameter.

Stages 1 and 2 save the whole module in the model states of data-parallel rank 0; stage 3 saves buffers there, and of
each frozen parameter one fragment in the model states of every rank, ceil(numel / W) elements each. A pipeline module
saves its layers in files of their own, under the names that its parameters have within the layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ullage.checkpoint import shards
from ullage.checkpoint.folder import Folder
from ullage.checkpoint.inventory import Fragments, Problem, Slice, Tensor
from ullage.checkpoint.parallel import Patterns, join
from ullage.checkpoint.torchfile import ITEM_BYTES, TensorRef, TorchFile, read_torch_file
from ullage.errors import CheckpointError
from ullage.layout import Layout


def aliases(folder: Folder) -> dict[str, str]:
    """Tied names -> the name that is stored."""
    found: dict[str, str] = {}
    for model in folder.models.values():
        shared = model.root.get("shared_params")
        if isinstance(shared, dict):
            found.update({str(a): str(b) for a, b in shared.items()})
        elif isinstance(shared, (list, tuple)):
            found.update({str(a): str(b) for a, b in shared})
    return found


def frozen_and_buffers(folder: Folder, world: int, tp: int, patterns: Patterns, trained: set[str]) -> list[Tensor]:
    """Frozen parameters and buffers, joined over tensor-parallel ranks; a buffer is taken from the first."""
    tied = aliases(folder)
    parts: dict[tuple[str, str], dict[int, tuple[Slice, str]]] = {}
    for (model_rank, dp_rank), model in sorted(folder.models.items()):
        if dp_rank:
            continue
        stage3 = any(s.stage == 3 for s in folder.shards.values())
        found = _of_module(folder, model, trained, tied)
        if stage3:
            found = {k: v for k, v in found.items() if k[1] == "buffer"} | _frozen3(folder, model_rank, world)
        for key, value in found.items():
            parts.setdefault(key, {}).setdefault(model_rank % tp, value)
    for key, value in _of_layers(folder, trained).items():
        parts.setdefault(key, {}).setdefault(0, value)
    tensors = []
    for (name, kind), by_rank in parts.items():
        part, dtype = by_rank[min(by_rank)]
        if kind == "buffer" or len(by_rank) < tp or tp == 1:
            tensors.append(Tensor(name, kind, part.shape, dtype, kind, (part,)))  # pyright: ignore[reportArgumentType]
            continue
        try:
            whole = join(name, [by_rank[t][0] for t in range(tp)], patterns, ITEM_BYTES[dtype])
        except CheckpointError as error:
            folder.problems.append(Problem(error.what, parameter=name, found=str(error.found)))
            continue
        tensors.append(
            Tensor(name, "frozen", whole.shape, dtype, "frozen", whole.slices, whole.merge, None, whole.extra)
        )
    return tensors


def one_fragment(name: str, key: str, ref: TensorRef, file: int, offset: int) -> Tensor:
    """A tensor that lies whole in one file."""
    place = [offset] if ref.numel else []
    fragments = Fragments.of([file] * len(place), place, [0] * len(place), [ref.numel] * len(place))
    return Tensor(name, key, tuple(ref.shape), ref.dtype, "buffer", (Slice(0, tuple(ref.shape), fragments),))


def _slice(source: TorchFile, file: int, model_rank: int, ref: TensorRef, shape: tuple[int, ...]) -> Slice:
    place = [] if not ref.numel else [source.place(ref)]
    some = [1] * len(place)
    fragments = Fragments.of([file for _ in some], place, [0 for _ in some], [ref.numel for _ in some])
    return Slice(model_rank, tuple(shape), fragments)


def _of_module(
    folder: Folder, model: shards.Model, trained: set[str], tied: dict[str, str]
) -> dict[tuple[str, str], tuple[Slice, str]]:
    module = model.root.get("module")
    if not isinstance(module, dict):
        return {}
    buffers = set(model.root.get("buffer_names") or ())
    found = {}
    for name, ref in module.items():
        if not isinstance(ref, TensorRef) or name in trained or (name in tied and name not in buffers):
            continue
        kind = "buffer" if name in buffers else "frozen"
        try:
            part = _slice(model.source, model.file, model.model_rank, ref, ref.shape)
        except CheckpointError as error:
            folder.problems.append(Problem(error.what, model.name, model.dp_rank, parameter=name, hint=error.hint))
            continue
        found[name, kind] = (part, ref.dtype)
    return found


def _frozen3(folder: Folder, model_rank: int, world: int) -> dict[tuple[str, str], tuple[Slice, str]]:
    """Frozen parameters of stage 3, from the fragments in the model states of every rank."""
    lead = folder.models[model_rank, 0]
    shapes = lead.root.get("frozen_param_shapes") or {}
    found = {}
    for name, shape in shapes.items():
        shape = tuple(int(d) for d in shape)
        numel = int(np.prod(shape, dtype=np.int64))
        pieces = Layout([numel]).pieces(np.arange(world + 1) * -(-numel // world))
        rows, dtype = [], "float32"
        for rank, start, length in zip(pieces.shard.tolist(), pieces.item_start.tolist(), pieces.length.tolist()):
            model = folder.models.get((model_rank, rank))
            ref = (model.root.get("frozen_param_fragments") or {}).get(name) if model else None
            if not isinstance(ref, TensorRef) or model is None or ref.numel < length:
                folder.problems.append(
                    Problem(
                        "a fragment of a frozen parameter is missing or too short",
                        model.name if model else f"zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_model_states.pt",
                        rank,
                        parameter=name,
                    )
                )
                continue
            dtype = ref.dtype
            rows.append((model.file, model.source.place(ref), start, length))
        fragments = Fragments.of(*(zip(*rows) if rows else ([], [], [], [])))
        found[name, "frozen"] = (Slice(model_rank, shape, fragments), dtype)
    return found


def _of_layers(folder: Folder, trained: set[str]) -> dict[tuple[str, str], tuple[Slice, str]]:
    """Frozen parameters and buffers of a pipeline module: what its layer files hold and no group trains."""
    buffers: set[str] = set()
    for model in folder.models.values():
        buffers |= set(model.root.get("buffer_names") or ())
    found: dict[tuple[str, str], tuple[Slice, str]] = {}
    for index, file in enumerate(folder.files):
        match = shards.LAYER.fullmatch(file.name)
        if match is None or int(match[2]):
            continue
        try:
            source = read_torch_file(folder.path / file.name)
        except CheckpointError as error:
            if "refused" in error.what:
                raise
            folder.problems.append(Problem(error.what, file.name, found=str(error.found), hint=error.hint))
            continue
        root: Any = source.root
        for local, ref in root.items() if isinstance(root, dict) else ():
            name = f"{int(match[1])}.{local}"
            known = (
                name in trained
                or local in trained
                or any(t.endswith(f".{local}") and "tied_modules" in t for t in trained)
            )
            if isinstance(ref, TensorRef) and not known:
                kind = "buffer" if name in buffers else "frozen"
                found[name, kind] = (_slice(source, index, 0, ref, ref.shape), ref.dtype)
    return found
