"""Experts: the files of their weights, and which expert-parallel rank holds which experts.

Two writers are known. DeepSpeed's own layers (``deepspeed.moe.layer.MoE``) name an expert by its number on its rank,
``...deepspeed_experts.0.<parameter>``; in files of weights the number is that among all experts. AutoEP stacks the
experts of a rank in one tensor, ``...experts.w1`` of shape [experts on the rank, ...]. Both save one file per layer and
expert, ``layer_{L}_expert_{E}_mp_rank_{MP}_model_states.pt``, with the weights (not the master weights) of expert E
among all; L counts the layers with experts of one model rank, in the order of its modules.

Experts are read under the names that no layout has a part in: numbers among all experts, and stacks of all of them.
Here is what the files of weights tell: the number of experts of each layer. How many ranks share them is told by the
optimizer files; ``expert_parts`` has the layout. Source: ``_save_moe_checkpoint`` of ``deepspeed/runtime/engine.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import RefusedFile, TorchFile, read_torch_file
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import File, Problem

if TYPE_CHECKING:
    from ullage.checkpoint.zero.folder import Folder
    from ullage.checkpoint.zero.shards import ModelFile

#: Groups: number of the layer, of the expert among all, of the model rank.
WEIGHTS = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
#: Written for experts without ZeRO, and by old versions with ZeRO, where it holds nothing.
OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
#: Of versions that did not number the layers: the experts of all layers in one file.
UNNUMBERED = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")
#: Groups: prefix of the layer's experts, number of the expert, name within it.
_NUMBERED = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d+)\.(.+)", re.DOTALL)


@dataclass
class ExpertFile:
    """The weights of one expert of one layer.

    Attributes:
        file: number of the file.
        name: of the file.
        layer: number among the layers with experts of its model rank.
        expert: number among all experts of the layer.
        model_rank: the rank among tensor- and pipeline-parallel ranks.
        tensors: by name.
        source: the file.
    """

    file: int
    name: str
    layer: int
    expert: int
    model_rank: int
    tensors: dict[str, TensorRef]
    source: TorchFile = field(repr=False)


@dataclass(frozen=True)
class Layer:
    """The experts of one layer.

    Attributes:
        prefix: of the names of their parameters, up to the number of the expert, or to the name of the stack.
        total: number of experts.
        stacked: whether the experts of a rank are one tensor (AutoEP).
        placed: by expert-parallel rank, the experts that it holds in its order, where a file says so; else empty, and
            the ranks hold equal shares in the order of the numbers.
        shapes: of the tensors of one expert, by the name within it, as the files of weights have them.
    """

    prefix: str
    total: int
    stacked: bool = False
    placed: tuple[tuple[int, ...], ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def held(self, ep: int, rank: int) -> tuple[int, ...]:
        """The experts that one of ``ep`` ranks holds, by their numbers among all, in the order of its own."""
        share = self.total // ep
        return self.placed[rank] if self.placed else tuple(range(rank * share, (rank + 1) * share))


def read_expert(folder: Path, index: int, file: File) -> tuple[ExpertFile, TorchFile] | None:
    """One file of an expert's weights; ``None`` for one of optimizer state that holds nothing.

    Raises ``CheckpointError``.
    """
    source = read_torch_file(folder / file.name)
    where = str(folder / file.name)
    if OPTIMIZER.fullmatch(file.name):
        if metadata.mapping(source.root, "the content", where).get("optimizer") is not None:
            raise RefusedFile(
                "optimizer state of experts without ZeRO is not supported",
                where=where,
                hint="train with ZeRO stage 1 or 2, whose optimizer files can be read",
            )
        return None
    match = WEIGHTS.fullmatch(file.name)
    assert match is not None
    held = metadata.mapping(source.root, "the weights of an expert", where)
    if "folding" in held:
        raise RefusedFile("AutoEP folded with tensor parallelism is not supported", where=where)
    tensors = metadata.tensors(held, "the weights of an expert", where)
    layer, expert, model_rank = (int(number) for number in match.groups())
    return ExpertFile(index, file.name, layer, expert, model_rank, tensors, source), source


def require_known(root: dict[str, Any], where: str) -> None:
    """Raise ``RefusedFile`` for model states with experts of a kind that is not read."""
    if "folding" in root:
        raise RefusedFile("AutoEP folded with tensor parallelism is not supported", where=where)
    if root.get("autoep_layers") and not root.get("ds_autoep_layers"):
        raise RefusedFile("AutoEP without its layers' description is not supported", where=where)
    counts = root.get("num_experts")
    if counts and not isinstance(counts, (list, tuple)):
        raise RefusedFile(
            "a mixture of experts of a version that does not number its layers is not supported",
            where=where,
            hint="load it with the version that wrote it, and save it with a newer one",
        )


def local_number(name: str) -> tuple[str, int, str] | None:
    """(prefix of the layer, number of the expert, name within the expert) of a parameter of DeepSpeed's layers."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def layer_of(name: str, layers: dict[str, Layer]) -> Layer | None:
    """The layer of which ``name`` is an expert's parameter, or a stack of them."""
    numbered = local_number(name)
    found = layers.get(numbered[0] if numbered else name.rpartition(".")[0])
    return found if found is None or found.stacked == (numbered is None) else None


def is_expert(name: str, layers: dict[str, Layer]) -> bool:
    """Whether a parameter is an expert's, also of a layer of which no file of weights is there."""
    return local_number(name) is not None or layer_of(name, layers) is not None


def layers_of(folder: Folder, model: ModelFile, tp: int) -> dict[str, Layer]:
    """The layers with experts of one model rank, by prefix; what is wrong with their files becomes problems.

    Args:
        folder: the files read; gets the problems.
        model: the model states of the model rank.
        tp: number of tensor-parallel ranks, each of which must have a file of each expert.
    """
    counts = metadata.integers(model.root.get("num_experts"), "num_experts", model.name)
    mine = {(f.layer, f.expert): f for f in folder.experts.values() if f.model_rank == model.model_rank}
    stacks = _stacks(model)
    if counts and tp > 1 and _spread(folder, model.model_rank, tp):
        raise RefusedFile(
            "experts that are divided among tensor-parallel ranks are not supported",
            where=str(folder.path),
            expected=f"a file of each expert from each of {tp} tensor-parallel ranks",
            hint="train with enable_expert_tensor_parallelism, or with tensor parallelism 1",
        )
    found: dict[str, Layer] = {}
    for number, total in enumerate(counts):
        files = [mine.get((number, expert)) for expert in range(total)]
        _report_missing(folder, model, number, files)
        there = [f for f in files if f is not None]
        prefixes = {p for f in there for p in _prefixes(folder, f)}
        if len(prefixes) > 1:
            what = "the files of one layer's experts name several layers"
            folder.problems.append(Problem(what, f"layer_{number}_expert_*", found=", ".join(sorted(prefixes)[:3])))
        for prefix in sorted(prefixes)[:1]:
            if prefix in found:
                folder.problems.append(Problem("two layers of experts have one name", parameter=prefix))
            shapes = {within(n): tuple(t.shape) for f in there[:1] for n, t in f.tensors.items()}
            found[prefix] = replace(stacks.get(prefix, Layer(prefix, total)), shapes=shapes)
            if found[prefix].total != total:
                what = "the number of experts disagrees with ds_autoep_layers"
                said = str(found[prefix].total)
                folder.problems.append(Problem(what, model.name, parameter=prefix, expected=str(total), found=said))
        _compare_shapes(folder, there)
    extra = sorted(f.name for (number, e), f in mine.items() if number >= len(counts) or e >= counts[number])
    if extra:
        folder.problems.append(Problem("an expert that the model states do not know", extra[0], found=str(len(extra))))
    return found


def _spread(folder: Folder, model_rank: int, tp: int) -> bool:
    """Whether experts have files of some tensor-parallel ranks only, each expert of as many."""
    stage = model_rank // tp
    ranks: dict[tuple[int, int], set[int]] = {}
    for held in folder.experts.values():
        if held.model_rank // tp == stage:
            ranks.setdefault((held.layer, held.expert), set()).add(held.model_rank % tp)
    sizes = {len(held) for held in ranks.values()}
    return len(sizes) == 1 and sizes != {tp}


def _stacks(model: ModelFile) -> dict[str, Layer]:
    """The layers that AutoEP describes, by prefix. Raises ``CheckpointError``."""
    entry, found = "ds_autoep_layers", {}
    for given in metadata.sequence(model.root.get(entry), entry, model.name):
        said = metadata.mapping(given, entry, model.name)
        (prefix,) = metadata.names([said.get("expert_key_prefix")], entry, model.name)
        total = metadata.integer(said.get("num_experts"), entry, model.name, 1)
        placement = metadata.mapping(said.get("expert_placement"), entry, model.name)
        placed: dict[int, tuple[int, ...]] = {}
        for rank in metadata.sequence(placement.get("ranks"), entry, model.name):
            held = metadata.mapping(rank, entry, model.name)
            which = metadata.integers(held.get("experts"), entry, model.name)
            placed[metadata.integer(held.get("rank"), entry, model.name)] = tuple(which)
        every = sorted(expert for held in placed.values() for expert in held)
        if placed and (sorted(placed) != list(range(len(placed))) or every != list(range(total))):
            raise RefusedFile(
                "AutoEP with an expert on several ranks, or on none, is not supported",
                where=f"{model.name}, {prefix}",
                expected=f"each of {total} experts on one rank",
            )
        # Ranks of unequal shares have other shapes than those that the model states of one rank tell.
        if len({len(held) for held in placed.values()}) > 1:
            raise RefusedFile("AutoEP with unequal shares of experts is not supported", where=f"{model.name}, {prefix}")
        found[prefix] = Layer(prefix, total, True, tuple(placed[rank] for rank in sorted(placed)))
    return found


def _report_missing(folder: Folder, model: ModelFile, number: int, files: list[ExpertFile | None]) -> None:
    bad = {problem.file for problem in folder.problems}
    for expert, held in enumerate(files):
        name = f"layer_{number}_expert_{expert}_mp_rank_{model.model_rank:02d}_model_states.pt"
        # A file that is there and cannot be read is a problem already.
        if held is None and name not in bad:
            folder.problems.append(
                Problem(
                    "the file of an expert is missing",
                    name,
                    expected=f"{len(files)} experts, as {model.name} says",
                    found=f"{sum(f is not None for f in files)}",
                    hint="copy the folder again from where it was saved",
                )
            )


def _prefixes(folder: Folder, held: ExpertFile) -> set[str]:
    """The layers that the names in a file are of; a name of another expert becomes a problem."""
    found: set[str] = set()
    for name in held.tensors:
        numbered = local_number(name)
        stem, _, last = name.rpartition(".")
        prefix, number = numbered[:2] if numbered else (stem.rpartition(".")[0], last)
        if str(number) != str(held.expert):
            what = "the file of an expert holds another one"
            folder.problems.append(Problem(what, held.name, parameter=name, expected=f"expert {held.expert}"))
        found.add(prefix)
    return found


def within(name: str) -> str:
    """The name of a tensor within its expert."""
    numbered = local_number(name)
    return numbered[2] if numbered else name.rpartition(".")[0].rpartition(".")[2]


def _compare_shapes(folder: Folder, files: list[ExpertFile]) -> None:
    """Find experts whose tensors differ from those of the layer's first expert in name, shape or dtype."""
    if not files:
        return
    lead, *others = ({within(n): (tuple(t.shape), t.dtype) for n, t in f.tensors.items()} for f in files)
    for held, found in zip(files[1:], others):
        for name in sorted(lead.keys() | found.keys()):
            if lead.get(name) != found.get(name):
                shapes = [f"{list(s[0])} {s[1]}" if s else "none" for s in (lead.get(name), found.get(name))]
                folder.problems.append(
                    Problem(
                        "the experts of a layer differ in shape",
                        held.name,
                        parameter=name,
                        expected=f"{shapes[0]}, as in {files[0].name}",
                        found=shapes[1],
                    )
                )
                break
