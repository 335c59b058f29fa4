"""Layers of experts, as the model states and the files of weights tell; what is wrong with these becomes problems."""

from __future__ import annotations

from dataclasses import replace

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import RefusedFile
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero.experts import ExpertFile, Layer, local_number
from ullage.checkpoint.zero.folder import Folder
from ullage.checkpoint.zero.shards import ModelFile


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
