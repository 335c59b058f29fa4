"""Tensors that no optimizer holds: frozen parameters and buffers; and tied names of stored parameters.

Stages 1 and 2 save the whole module in the model states of data-parallel rank 0; stage 3 saves buffers there, and of
each frozen parameter one fragment in the model states of every rank, ceil(numel / W) elements each. A pipeline module
saves its layers in files of their own, under the names that its parameters have within the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
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

Kind = Literal["parameter", "frozen", "buffer"]


def frozen_and_buffers(
    joining: Joining, world: int, trained: set[str], others: Iterable[tuple[int, Tensor]] = ()
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Frozen parameters and buffers, joined over tensor-parallel ranks; a buffer is taken from the first.

    Args:
        joining: joins slices; its folder gets the problems and notes.
        world: number of data-parallel ranks.
        trained: names of the parameters that an optimizer holds.
        others: tensors of other files, each with its model rank.

    Returns the tensors, and the pairs of frozen parameters that two pipeline stages hold.
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
    for model_rank, tensor in [*held, *_of_layers(folder, trained), *others]:
        strided = tensor.merge.kind == "strided"
        if tensor.kind == "buffer" or (joining.tp == 1 and tensor.name not in whole and strided):
            whole.setdefault(tensor.name, tensor)
        elif strided:
            folder.add_problem("a slice of a frozen parameter is not contiguous", parameter=tensor.name)
        else:
            parts, rank = joining.stage_of(frozen, tensor.name, "frozen", model_rank)
            parts[rank] = replace(tensor.slices[0], model_rank=model_rank), tensor.dtype, None
    tensors, twins = joining.join(frozen, "frozen")
    return [*tensors, *whole.values()], twins


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


def _of_module(folder: Folder, model: shards.ModelFile, trained: set[str]) -> dict[str, Tensor]:
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
        with collect_problems(folder.problems, file.name):
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
    return found
