"""Tensors that no optimizer holds: frozen parameters and buffers; and tied names of stored parameters.

Stages 1 and 2 save the whole module in the model states of data-parallel rank 0; stage 3 saves buffers there, and of
each frozen parameter one fragment in the model states of every rank, ceil(numel / W) elements each. A pipeline module
saves its layers in files of their own, under the names that its parameters have within the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ullage.checkpoint.core.inventory import Fragments, Merge, Slice, Tensor
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import TorchFile, read_torch_file
from ullage.checkpoint.files.unpickling import Inert, TensorRef
from ullage.checkpoint.zero import shards
from ullage.checkpoint.zero.folder import Folder, collect_problems, record_table
from ullage.checkpoint.zero.parallel import Joining, Stages
from ullage.checkpoint.zero.partitions import stage3_group

#: Groups: key of a tied layer, name of a tensor within it.
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
Kind = Literal["parameter", "frozen", "buffer"]


def frozen_and_buffers(
    joining: Joining, world: int, trained: Mapping[str, Tensor | None], others: Iterable[tuple[int, Tensor]] = ()
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Frozen parameters and buffers, joined over tensor-parallel ranks; a buffer is taken from the first.

    Args:
        joining: joins slices; its folder gets the problems and notes.
        world: number of data-parallel ranks.
        trained: by name the parameters that an optimizer holds; None for one that could not be joined.
        others: tensors of other files, each with its model rank.

    Returns the tensors, and pairs that must be equal: frozen parameters that two pipeline stages hold, and the trained
    parameters of tied layers with the copies in the layers' files.
    """
    folder, held = joining.folder, list[tuple[int, Tensor]]()
    stage3 = any(s.stage == 3 for s in folder.shards.values())
    for (model_rank, dp_rank), model in sorted(folder.models.items()):
        if dp_rank:
            continue
        found = _of_module(folder, model, trained)
        if stage3:
            # At stage 3 only buffers are whole in the module; frozen parameters are put together from their fragments.
            found = {k: v for k, v in found.items() if v.kind == "buffer"} | _frozen3(folder, model_rank, world)
        held += [(model_rank, tensor) for tensor in found.values()]
    frozen: Stages = {}
    whole: dict[str, Tensor] = {}
    layers, copies = _of_layers(joining, trained)
    for model_rank, tensor in [*held, *layers, *others]:
        strided = tensor.merge.kind == "strided"
        if tensor.kind == "buffer" or (joining.tp == 1 and tensor.name not in whole and strided):
            whole.setdefault(tensor.name, tensor)
        elif strided:
            folder.add_problem("a slice of a frozen parameter is not contiguous", parameter=tensor.name)
        else:
            parts, rank = joining.stage_of(frozen, tensor.name, "frozen", model_rank)
            parts[rank] = replace(tensor.slices[0], model_rank=model_rank), tensor.dtype, None
    tensors, twins = joining.join(frozen, "frozen")
    return [*tensors, *whole.values()], [*copies, *twins]


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


def _of_module(folder: Folder, model: shards.ModelFile, trained: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    tied = folder.aliases
    for name, value in (model.module or {}).items():
        if not isinstance(value, TensorRef):
            _note_other_value(folder, name, value, model.name)
        elif isinstance(name, str) and name not in trained and (name not in tied or name in model.buffer_names):
            kind = "buffer" if name in model.buffer_names else "frozen"
            with collect_problems(folder.problems, model.name, model.dp_rank, name):
                found[name] = whole_tensor(name, kind, value, model.file, model.source, kind)
    return found


def _note_other_value(folder: Folder, name: Any, value: Any, file: str) -> None:
    """Record a value of the module that is not a plain tensor: a tensor of another kind is a problem, others a note."""
    is_tensor = isinstance(value, Inert) and value.module.startswith("torch._") and value.name.startswith("_rebuild")
    if is_tensor:
        kind = value.name.removeprefix("_rebuild_")
        folder.add_problem("a tensor of an unsupported kind", file=file, parameter=str(name), found=kind)
    elif value is not None:
        folder.notes.append(f"{name} is not a tensor ({metadata.brief(value)}); it is kept with the model states only")


def note_left_out_parameters(folder: Folder) -> None:
    """Note that frozen parameters were left out when the checkpoint was saved."""
    if all(shard.stage < 2 for shard in folder.shards.values()):
        return
    for model in folder.models.values():
        if model.dp_rank == 0 and model.frozen_shapes is None and "frozen_param_shapes" in model.root:
            folder.notes.append(
                "frozen parameters were left out when this was saved (exclude_frozen_parameters); what is converted "
                "is without them too"
            )


def _frozen3(folder: Folder, model_rank: int, world: int) -> dict[str, Tensor]:
    """Frozen parameters of stage 3, from the fragments in the model states of every rank."""
    lead = folder.models[model_rank, 0]
    found: dict[str, Tensor] = {}
    for name, shape in (lead.frozen_shapes or {}).items():
        pieces = stage3_group(0, model_rank, {name: shape}, world).pieces
        rows: list[tuple[int, int, int, int]] = []
        dtypes: list[str] = []
        for rank, start, length in zip(pieces.shard.tolist(), pieces.item_start.tolist(), pieces.length.tolist()):
            model = folder.models.get((model_rank, rank))
            ref = model.frozen_fragments.get(name) if model else None
            if model is None or ref is None or ref.numel < length or not ref.contiguous:
                what = "a fragment of a frozen parameter is missing or too short"
                file = model.name if model else f"zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_model_states.pt"
                folder.add_problem(what, file=file, rank=rank, parameter=name)
                continue
            dtypes.append(ref.dtype)
            rows.append((model.file, model.source.place(ref), start, length))
        if len(set(dtypes)) > 1:
            what = "fragments of a frozen parameter are of several dtypes"
            folder.add_problem(what, parameter=name, found=", ".join(sorted(set(dtypes))))
        own = lead.frozen_fragments.get(name)
        dtype = dtypes[0] if dtypes else own.dtype if own else "float32"
        fragments = Fragments.of(rows)
        found[name] = Tensor(name, "frozen", shape, dtype, "frozen", (Slice(model_rank, shape, fragments),))
    return found


def _of_layers(
    joining: Joining, trained: Mapping[str, Tensor | None]
) -> tuple[list[tuple[int, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Frozen parameters and buffers of a pipeline module: tensors of its layer files that no group trains.

    With each a model rank, as if every layer were a stage. Then pairs of a tied parameter and its copy in a file.
    """
    folder, tp = joining.folder, joining.tp
    buffers = {name for model in folder.models.values() for name in model.buffer_names}
    # Files are named for the number of a layer; parameters and buffers of a tied one for its key: by key, their names,
    # with the shapes of slices of what is trained.
    groups = [group for model in folder.models.values() for group in model.param_shapes or []]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    numbered = {_layer_of(name) for name in {*shapes, *buffers}}
    tied: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for name in sorted({*shapes, *buffers}):
        if match := _TIED.fullmatch(name):
            tied.setdefault(match[1], {})[match[2]] = shapes.get(name)
    found: list[tuple[int, Tensor]] = []
    copies: Stages = {}
    there: set[tuple[int, int]] = set()
    for index, file in enumerate(folder.files):
        match = shards.LAYER.fullmatch(file.name)
        if match is None:
            continue
        layer, rank = int(match[1]), int(match["mp"] or 0)
        there.add((layer, rank))
        with collect_problems(folder.problems, file.name):
            source = read_torch_file(folder.path / file.name)
            folder.records[index] = record_table(source)
            root = metadata.mapping(source.root, "a layer", str(folder.path / file.name))
            sizes = {local: tuple(ref.shape) for local, ref in root.items() if isinstance(ref, TensorRef)}
            # What has nothing under its number is frozen, or a tied layer with tensors like these; its copies prove it.
            common = {} if layer in numbered else {key: own.keys() & sizes.keys() for key, own in tied.items()}
            keys = [k for k, names in common.items() if names and all(tied[k][n] in (None, sizes[n]) for n in names)]
            prefix = f"tied_modules.{keys[0]}" if keys else f"{layer}"
            for local, value in root.items():
                name = f"{prefix}.{local}"
                if not isinstance(value, TensorRef):
                    _note_other_value(folder, name, value, file.name)
                elif name in trained and len(keys) == 1 and value.contiguous:
                    own = whole_tensor(name, "fp32", value, index, source)
                    parts, _ = joining.stage_of(copies, name, f"fp32 in layer {layer}", rank)
                    parts[rank] = own.slices[0], own.dtype, None
                elif name not in trained and local not in trained:
                    kind = "buffer" if name in buffers else "frozen"
                    found.append((layer * tp + rank, whole_tensor(name, kind, value, index, source, kind)))
    _require_layers(joining, there, buffers - {tensor.name for _, tensor in found})
    return found, [(whole, copy) for copy in joining.join(copies)[0] if (whole := trained[copy.name]) is not None]


def _layer_of(name: str) -> int | None:
    """Number of the layer of a pipeline module that a parameter is in; None for one of a tied layer."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else None


def _require_layers(joining: Joining, there: set[tuple[int, int]], lost: set[str]) -> None:
    """Find what is missing beside the layer files ``there`` (layer, tensor-parallel rank); ``lost``: unread buffers."""
    folder, tp = joining.folder, joining.tp
    pipeline = [model for model in folder.models.values() if model.module is None]
    wanted = {(layer, rank) for layer, _ in there for rank in range(tp)}
    for model in pipeline:
        names = {*model.buffer_names, *(name for group in model.param_shapes or [] for name in group)}
        wanted |= {(layer, model.model_rank % tp) for name in names if (layer := _layer_of(name)) is not None}
    for layer, rank in sorted(wanted - there):
        name = f"layer_{layer:02d}{f'-model_{rank:02d}' if tp > 1 else ''}-model_states.pt"
        folder.add_problem("the file of a layer is missing", file=name, hint="copy the folder from where it was saved")
    if gaps := sorted(set(range(max(wanted, default=(0, 0))[0])) - {layer for layer, _ in wanted}) if pipeline else []:
        folder.notes.append(
            f"layers {gaps[:20]} of the pipeline have no file: right for functions and tied layers; of a layer of "
            "frozen weights alone, nothing else would tell"
        )
    if pipeline and (tied := sorted(name for name in lost if _layer_of(name) is None)):
        folder.notes.append(f"buffers of tied layers that no layer's file has are left out: {tied[:20]}")
