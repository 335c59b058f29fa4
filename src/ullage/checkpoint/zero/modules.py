"""Tensors that no optimizer holds: frozen parameters and buffers; and tied names of stored parameters.

Stages 1 and 2 save the whole module in the model states of data-parallel rank 0; stage 3 saves buffers there, and of
each frozen parameter one fragment in the model states of every rank, ceil(numel / W) elements each. A pipeline module
saves its layers in files of their own, under the names that its parameters have within the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import RefusedFile, TorchFile, read_torch_file
from ullage.checkpoint.files.unpickling import Inert, TensorRef
from ullage.checkpoint.inventory import Fragments, Merge, Slice, Tensor
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero import shards
from ullage.checkpoint.zero.folder import Folder, record_table
from ullage.checkpoint.zero.parallel import Patterns, Stages, join_stages
from ullage.errors import CheckpointError
from ullage.layout import Layout

Kind = Literal["parameter", "frozen", "buffer"]


def aliases_of(folder: Folder) -> dict[str, str]:
    """Tied names -> the name that is stored."""
    return {alias: owner for model in folder.models.values() for alias, owner in model.aliases.items()}


def frozen_and_buffers(
    folder: Folder,
    world: int,
    tp: int,
    patterns: Patterns,
    trained: set[str],
    others: Iterable[tuple[int, Tensor]] = (),
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Frozen parameters and buffers, joined over tensor-parallel ranks; a buffer is taken from the first.

    Args:
        folder: the files read; gets the problems and notes.
        world: number of data-parallel ranks.
        tp: number of tensor-parallel ranks.
        patterns: how the slices of a name join.
        trained: names of the parameters that an optimizer holds.
        others: tensors of other files, each with its model rank.

    Returns the tensors, and the pairs of frozen parameters that two pipeline stages hold.
    """
    tied = aliases_of(folder)
    stage3 = any(s.stage == 3 for s in folder.shards.values())
    frozen: Stages = {}
    whole: dict[str, Tensor] = {}
    for (model_rank, dp_rank), model in sorted(folder.models.items()):
        if dp_rank:
            continue
        found = _of_module(folder, model, trained, tied)
        if stage3:
            # At stage 3 only buffers are whole in the module; frozen parameters are put together from their fragments.
            found = {k: v for k, v in found.items() if v.kind == "buffer"} | _frozen3(folder, model_rank, world)
        for tensor in found.values():
            _sort_in(folder, tensor, frozen, whole, model_rank, tp)
    for tp_rank, tensor in _of_layers(folder, trained):
        _sort_in(folder, tensor, frozen, whole, tp_rank, tp)
    for model_rank, tensor in others:
        _sort_in(folder, tensor, frozen, whole, model_rank, tp)
    tensors, twins = join_stages(folder, frozen, patterns, tp, "frozen")
    return [*tensors, *whole.values()], twins


def _sort_in(
    folder: Folder, tensor: Tensor, frozen: Stages, whole: dict[str, Tensor], model_rank: int, tp: int
) -> None:
    """Add a model rank's tensor to the slices that are to be joined, or to the tensors that are whole already.

    Args:
        folder: gets the problem of a slice that cannot be joined.
        tensor: what the model rank holds.
        frozen: the slices, by name, pipeline stage and tensor-parallel rank.
        whole: the tensors that need no joining, by name.
        model_rank: pipeline stage · ``tp`` + tensor-parallel rank.
        tp: number of tensor-parallel ranks.
    """
    if tensor.kind == "buffer" or (tp == 1 and tensor.name not in whole and tensor.merge.kind == "strided"):
        whole.setdefault(tensor.name, tensor)
    elif tensor.merge.kind == "strided":
        folder.problems.append(Problem("a slice of a frozen parameter is not contiguous", parameter=tensor.name))
    else:
        part = replace(tensor.slices[0], model_rank=model_rank)
        parts = frozen.setdefault((tensor.name, "frozen"), {}).setdefault(model_rank // tp, {})
        parts[model_rank % tp] = (part, tensor.dtype, None)


def whole_tensor(name: str, key: str, ref: TensorRef, file: int, source: TorchFile, kind: Kind = "buffer") -> Tensor:
    """A tensor that lies whole in one file.

    Args:
        name: of the parameter or buffer.
        key: the state of it, as in :class:`Tensor`.
        ref: the tensor as its file describes it.
        file: number of the file in the inventory.
        source: the file.
        kind: as in :class:`Tensor`.

    Raises ``CheckpointError`` when the tensor reaches beyond its storage.
    """
    place, shape = source.place(ref), tuple(ref.shape)
    # Of a tensor that is not contiguous, the stretch of the storage that it spans is the fragment.
    numel, merge = (ref.numel, Merge()) if ref.contiguous else (ref.span, Merge("strided", strides=ref.strides))
    part = Slice(0, shape if ref.contiguous else (numel,), Fragments.one(file, place, numel))
    return Tensor(name, key, shape, ref.dtype, kind, (part,), merge)


def _of_module(folder: Folder, model: shards.ModelFile, trained: set[str], tied: dict[str, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in (model.module or {}).items():
        if not isinstance(value, TensorRef):
            _note_other_value(folder, name, value, model.name)
            continue
        if not isinstance(name, str) or name in trained or (name in tied and name not in model.buffer_names):
            continue
        kind = "buffer" if name in model.buffer_names else "frozen"
        try:
            found[name] = whole_tensor(name, kind, value, model.file, model.source, kind)
        except CheckpointError as error:
            folder.problems.append(Problem.of_error(error, model.name, model.dp_rank, name))
    return found


def _note_other_value(folder: Folder, name: Any, value: Any, file: str) -> None:
    """Record a value of the module that is not a plain tensor: a tensor of another kind is a problem, others a note."""
    is_tensor = isinstance(value, Inert) and value.module.startswith("torch._") and value.name.startswith("_rebuild")
    if is_tensor:
        kind = value.name.removeprefix("_rebuild_")
        folder.problems.append(Problem("a tensor of an unsupported kind", file, parameter=str(name), found=kind))
    elif value is not None:
        folder.notes.append(f"{name} is not a tensor ({metadata.brief(value)}); it is kept with the model states only")


def note_left_out_parameters(folder: Folder) -> None:
    """Note that frozen parameters were left out when the checkpoint was saved."""
    for model in folder.models.values():
        stages = {s.stage for s in folder.shards.values()}
        if (
            model.dp_rank == 0
            and model.frozen_shapes is None
            and "frozen_param_shapes" in model.root
            and max(stages) > 1
        ):
            folder.notes.append(
                "frozen parameters were left out when this was saved (exclude_frozen_parameters); what is converted "
                "is without them too"
            )


def _frozen3(folder: Folder, model_rank: int, world: int) -> dict[str, Tensor]:
    """Frozen parameters of stage 3, from the fragments in the model states of every rank."""
    lead = folder.models[model_rank, 0]
    found: dict[str, Tensor] = {}
    for name, shape in (lead.frozen_shapes or {}).items():
        numel = int(np.prod(shape, dtype=np.int64))
        # The cut of stage 3: W parts of ceil(numel / W), of which the last may be shorter or empty.
        pieces = Layout([numel]).pieces(np.arange(world + 1) * -(-numel // world))
        rows: list[tuple[int, int, int, int]] = []
        dtypes: list[str] = []
        for rank, start, length in zip(pieces.shard.tolist(), pieces.item_start.tolist(), pieces.length.tolist()):
            model = folder.models.get((model_rank, rank))
            ref = model.frozen_fragments.get(name) if model else None
            if model is None or ref is None or ref.numel < length or not ref.contiguous:
                folder.problems.append(
                    Problem(
                        "a fragment of a frozen parameter is missing or too short",
                        model.name if model else f"zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_model_states.pt",
                        rank,
                        parameter=name,
                    )
                )
                continue
            dtypes.append(ref.dtype)
            rows.append((model.file, model.source.place(ref), start, length))
        if len(set(dtypes)) > 1:
            kinds = ", ".join(sorted(set(dtypes)))
            folder.problems.append(
                Problem("fragments of a frozen parameter are of several dtypes", parameter=name, found=kinds)
            )
        own = lead.frozen_fragments.get(name)
        dtype = dtypes[0] if dtypes else own.dtype if own else "float32"
        fragments = Fragments.of(rows)
        found[name] = Tensor(name, "frozen", shape, dtype, "frozen", (Slice(model_rank, shape, fragments),))
    return found


def _of_layers(folder: Folder, trained: set[str]) -> list[tuple[int, Tensor]]:
    """Frozen parameters and buffers of a pipeline module: tensors of its layer files that no group trains.

    With each the tensor-parallel rank of its file.
    """
    buffers = {name for model in folder.models.values() for name in model.buffer_names}
    found: list[tuple[int, Tensor]] = []
    for index, file in enumerate(folder.files):
        match = shards.LAYER.fullmatch(file.name)
        if match is None:
            continue
        try:
            source = read_torch_file(folder.path / file.name)
            folder.records[index] = record_table(source)
            root = metadata.mapping(source.root, "a layer", str(folder.path / file.name))
            for local, value in root.items():
                name = f"{int(match[1])}.{local}"
                # A layer file has the name within the layer, the optimizer that within the pipeline module, where tied
                # layers appear under ``tied_modules``.
                known = (
                    name in trained
                    or local in trained
                    or any(t.endswith(f".{local}") and "tied_modules" in t for t in trained)
                )
                if not isinstance(value, TensorRef):
                    _note_other_value(folder, name, value, file.name)
                elif not known:
                    kind = "buffer" if name in buffers else "frozen"
                    found.append((int(match[2]), whole_tensor(name, kind, value, index, source, kind)))
        except RefusedFile:
            raise
        except CheckpointError as error:
            folder.problems.append(Problem.of_error(error, file.name))
    return found
