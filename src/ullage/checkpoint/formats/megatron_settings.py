"""What ``common.pt`` of a Megatron-Core checkpoint says of the optimizer's groups and of the run that wrote it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.torchfile import TorchFile, as_number
from ullage.checkpoint.files.unpickling import Inert
from ullage.checkpoint.inventory import Tensor, WrittenBy
from ullage.checkpoint.problem import Problem


def settings_of(saved: Any, source: TorchFile) -> list[tuple[dict[str, Any], int | float | bool | None]]:
    """(hyperparameters, step) of each parameter group, of a plain, mixed-precision or distributed optimizer."""
    if not isinstance(saved, dict):
        return []
    if saved and all(isinstance(key, int) for key in saved):  # several optimizers, chained
        return [group for key in sorted(saved) for group in settings_of(saved[key], source)]
    if isinstance(saved.get("optimizer"), dict):
        saved = saved["optimizer"]
    state = metadata.mapping(saved.get("state"), "the optimizer's state", source.path)
    common = as_number(state.get("common_step"), source)
    found = []
    for group in metadata.sequence(saved.get("param_groups"), "param_groups", source.path):
        settings = metadata.mapping(group, "param_groups", source.path)
        step = as_number(settings.get("step"), source)
        found.append(
            ({k: v for k, v in settings.items() if k not in ("step", "params")}, common if step is None else step)
        )
    return found


def grouped(tensors: list[Tensor], groups: list[Any]) -> tuple[list[Tensor], list[Problem]]:
    """The tensors with their groups. Megatron-Core saves no names: it decays all but biases and what has one dim."""
    decays = [i for i, (group, _) in enumerate(groups) if group.get("wd_mult", group.get("pre_wd_mult", 1.0))]
    others = [i for i in range(len(groups)) if i not in decays]
    if not groups or len(decays) > 1 or len(others) > 1:
        what = "which parameter belongs to which group of the optimizer is not in the files"
        expected = "one group with weight decay, and one without"
        found = f"{len(decays)} and {len(others)}"
        hint = "convert the weights only, with --weights-only"
        return tensors, [Problem(what, "common.pt", expected=expected, found=found, hint=hint)]

    def group_of(tensor: Tensor) -> int:
        plain = tensor.name.endswith(".bias") or len(tensor.shape) == 1
        return (others or decays)[0] if plain else (decays or others)[0]

    return [replace(t, group=group_of(t) if t.kind == "parameter" else None) for t in tensors], []


def written_by(args: Any, where: str) -> WrittenBy:
    """The sizes of the run that wrote the folder; one of each where ``args`` do not tell."""
    names = ("data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    given = [args.get(name) if isinstance(args, Inert) else None for name in names]
    sizes = [1 if value is None else metadata.integer(value, f"args.{n}", where, 1) for n, value in zip(names, given)]
    dp, tp, pp = sizes
    return WrittenBy(None, "Megatron-Core", dp, tp, pp)
