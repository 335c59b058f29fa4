"""Tensors of experts that no optimizer holds, and second names of routers."""

from __future__ import annotations

import re
from dataclasses import replace

from ullage.checkpoint.files import metadata
from ullage.checkpoint.inventory import Fragments, Slice, Tensor
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero.experts import local_number
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.modules import Kind, whole_tensor
from ullage.checkpoint.zero.shards import ModelFile
from ullage.errors import CheckpointError


def untrained(folder: Folder, trained: set[str]) -> list[tuple[int, Tensor]]:
    """Tensors of the files of experts that no optimizer holds, each with its model rank."""
    buffers = {(n[0], n[2]) for m in folder.models.values() for n in map(local_number, m.buffer_names) if n}
    found: list[tuple[int, Tensor]] = []
    stacks: dict[tuple[int, str], dict[int, Tensor]] = {}
    for _, held in sorted(folder.experts.items()):
        for name, ref in held.tensors.items():
            numbered = local_number(name)
            stack = name.rpartition(".")[0]
            if (name if numbered else stack) in trained:
                continue
            kind: Kind = "buffer" if numbered and (numbered[0], numbered[2]) in buffers else "frozen"
            try:
                made = whole_tensor(name, kind, ref, held.file, held.source, kind)
            except CheckpointError as error:
                folder.problems.append(Problem.of_error(error, held.name, parameter=name))
                continue
            if numbered:
                found.append((held.model_rank, made))
            else:
                stacks.setdefault((held.model_rank, stack), {})[held.expert] = made
    return found + [(rank, _stack(name, parts)) for (rank, name), parts in stacks.items()]


def _stack(name: str, parts: dict[int, Tensor]) -> Tensor:
    """One tensor of the experts' own, by their numbers."""
    first = next(iter(parts.values()))
    rows = [part.slices[0].fragments.moved(expert * first.numel) for expert, part in parts.items()]
    shape = (len(parts), *first.shape)
    whole = Slice(first.slices[0].model_rank, shape, Fragments.join(rows))
    return replace(first, name=name, shape=shape, slices=(whole,))


def router_copies(model: ModelFile) -> dict[str, str]:
    """Second names that AutoEP gives its routers: the name -> the one that the optimizer knows.

    A router is a module under two names, one of them that of the module that it took the place of.
    """
    trained = {name for group in model.param_shapes or [] for name in group}
    module = model.module or {}
    found: dict[str, str] = {}
    for given in metadata.sequence(model.root.get("ds_autoep_layers"), "ds_autoep_layers", model.name):
        (path,) = metadata.names(
            [metadata.mapping(given, "a layer", model.name).get("module_path")], "path", model.name
        )
        under = re.compile(re.escape(path) + r"\.\w+\.(.+)", re.DOTALL)
        for name in module:
            match = under.fullmatch(name) if isinstance(name, str) and name not in trained else None
            owner = f"{path}.router.{match[1]}" if match else name
            if owner != name and owner in module:
                found[name] = owner
    return found
