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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import RefusedFile, TorchFile, read_torch_file
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.inventory import File

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
