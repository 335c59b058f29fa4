"""A universal checkpoint seen from a DeepSpeed engine: where it is, what of it the engine needs, and whether it fits.

What DeepSpeed calls things is gathered here: the groups of trained parameters have another name in each of its
optimizers, and the files another name at stage 3. Shapes are read without running code from the files; only values
are read by ``torch.load``, by the loader that DeepSpeed's own code is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ullage.checkpoint.files.torchfile import read_torch_file
from ullage.errors import CheckpointError
from ullage.training.expert_names import ExpertNames, expert_names

_LATEST = "latest_universal"


def prefers_universal(folder: str | Path) -> bool:
    """Whether ``folder`` has a universal checkpoint and none of DeepSpeed's own that is of a later step.

    Steps are those in the tags that ``latest_universal`` and ``latest`` name, such as ``global_step400``; where one of
    them tells no step, the universal checkpoint is preferred, because somebody made it on purpose.
    """
    universal, native = Path(folder) / _LATEST, Path(folder) / "latest"
    if not universal.is_file() or not native.is_file():
        return universal.is_file()
    ours, theirs = _step_of(universal.read_text()), _step_of(native.read_text())
    return ours is None or theirs is None or theirs <= ours


def universal_at(folder: str | Path, tag: str | None = None) -> tuple[Path, str]:
    """The parent and the tag of the universal checkpoint at ``folder``. Raises ``CheckpointError`` if there is none."""
    folder = Path(folder)
    if tag is None:
        if (folder / _LATEST).is_file():
            tag = (folder / _LATEST).read_text().strip()
        elif (folder / "zero").is_dir():
            folder, tag = folder.resolve().parent, folder.resolve().name
        else:
            raise CheckpointError(
                "no universal checkpoint",
                where=str(folder),
                expected=f"a file {_LATEST} or a folder zero",
                found="DeepSpeed's own checkpoint" if (folder / "latest").is_file() else "neither",
                hint="make one with: ullage convert SOURCE TARGET --to universal",
            )
    if not (folder / tag / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError("the universal checkpoint is incomplete", where=f"{folder / tag}/zero/optimizer_state.pt")
    return folder, tag


def problems_of(engine: Any, checkpoint: Path, strict: bool) -> list[str]:
    """Everything in ``checkpoint`` that does not fit ``engine``; the same list on every rank. Reads no tensor data."""
    zero, problems = engine.optimizer, []
    names = expert_names(engine)
    saved = saved_groups(zero, _describe(checkpoint / "zero" / "optimizer_state.pt"))
    if saved is None:
        problems.append("zero/optimizer_state.pt is not for this stage; convert the original with ullage convert")
    elif len(saved) != len(zero.optimizer.param_groups):
        problems.append(f"{len(saved)} parameter groups in the checkpoint, {len(zero.optimizer.param_groups)} here")
    trained = [names.of(name) for name in trained_names(zero)]
    shapes = {names.of(name): _shape(p) for name, p in engine.module.named_parameters(remove_duplicate=False)}
    for name in trained:
        problems += _tensor_problem(checkpoint / "zero" / name / "fp32.pt", name, shapes[name], engine)
    if strict:
        here = {path.name for path in (checkpoint / "zero").iterdir() if path.is_dir()}
        others = dict(untrained(engine))
        problems += [
            f"{name}: in the checkpoint, not in the model"
            for name in sorted(here - {*shapes, *others, *names.elsewhere})
        ]
        states = model_states(engine, checkpoint, _describe)
        for name, target in others.items():
            value = model_value(states, name, target, checkpoint, _describe)
            if value is None:
                problems.append(f"{name}: not in the checkpoint")
            elif name in names.rows:
                problems += _stack_problem(name, value, target, names)
            elif tuple(value.shape) != tuple(_shape(target)):
                problems.append(f"{name}: {list(value.shape)} in the checkpoint, {list(_shape(target))} here")
    return problems


def _tensor_problem(path: Path, name: str, shape: torch.Size, engine: Any) -> list[str]:
    if not path.is_file():
        return [f"{name}: not in the checkpoint"]
    held = _describe(path)
    # DeepSpeed's own converter writes bare flat tensors for stage 3, otherwise dicts that hold the tensor in its shape
    # under "param". The loaders of stages 1 and 2 need the dict.
    if not isinstance(held, dict):  # by DeepSpeed's converter, flat
        if not is_stage3(engine.optimizer):
            return [f"{name}: written for stage 3 only, without its shape; convert the original with ullage convert"]
        held, shape = {"param": held}, torch.Size([shape.numel()])
    # Tensors that the loader cuts for tensor or expert parallelism, or pads (vocabulary), need not have the shape here.
    whole = engine.mpu is None and not held.get("vocab_tensor") and not held.get("is_expert_param")
    if whole and tuple(held["param"].shape) != tuple(shape):
        return [f"{name}: {list(held['param'].shape)} in the checkpoint, {list(shape)} here"]
    return []


def _stack_problem(name: str, value: Any, target: torch.Tensor, names: ExpertNames) -> list[str]:
    """The problem of a stack of experts that is not trained, if the rows of this rank cannot be taken from it."""
    rows, here, there = names.rows[name], list(_shape(target)), list(value.shape)
    if there[1:] == here[1:] and there and there[0] > max(rows, default=-1):
        return []
    return [f"{name}: {there} in the checkpoint, rows {rows[:1]} to {rows[-1:]} of {here} here"]


def untrained(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that no optimizer group holds, and the buffers a state dict holds, by their names in a checkpoint."""
    trained, names = set(trained_names(engine.optimizer)), expert_names(engine)
    yield from ((names.of(name), p) for name, p in engine.module.named_parameters() if name not in trained)
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield names.of(f"{prefix}.{name}" if prefix else name), buffer


def model_value(
    states: dict[str, Any], name: str, target: torch.Tensor, checkpoint: Path, read: Callable[[Path], Any]
) -> Any:
    """The saved value of a tensor that is not trained, from the model states or its own folder; ``None`` if absent.

    Args:
        states: the model states that this rank reads.
        name: of the tensor.
        target: the tensor to load into; its shape tells an empty entry from a real one.
        checkpoint: the tag's folder.
        read: reads a file: its contents, or only their shapes.
    """
    # Stage 3 leaves tensors of no elements in the model states for what it shards, so a name alone proves nothing.
    value = states["module"].get(name)
    if value is not None and math.prod(value.shape) == _shape(target).numel():
        return value
    own = checkpoint / "zero" / name / "fp32.pt"
    if own.is_file():
        held = read(own)
        return held["param"] if isinstance(held, dict) else held
    return value if value is not None and math.prod(value.shape) else None


def is_stage3(zero: Any) -> bool:
    return hasattr(zero, "fp16_partitioned_groups_flat")


def groups_name(zero: Any) -> str:
    """Attribute of the trained parameters by group: BF16_Optimizer, stages 1 and 2, stage 3 (by sub-group)."""
    names = ("bf16_groups", "bit16_groups", "fp16_groups")
    return next((name for name in names if hasattr(zero, name)), "")


def trained_names(zero: Any) -> list[str]:
    return [zero.param_names[p] for group in getattr(zero, groups_name(zero)) for p in group]


def _shape(p: torch.Tensor) -> torch.Size:
    return getattr(p, "ds_shape", p.shape)


def _describe(path: Path) -> Any:
    """Contents of a file, with the shapes of its tensors and without their data; runs no code from it."""
    return read_torch_file(path).root


def read_file(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def saved_groups(zero: Any, saved: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Hyperparameters by group, from where the loader of this stage looks; ``None`` if it would find nothing."""
    if not is_stage3(zero):
        return saved.get("param_groups")
    # The stage 3 loader indexes ['optimizer_state_dict']['state'][0]['step'] without looking first.
    inner = saved.get("optimizer_state_dict") or {}
    return inner.get("param_groups") if "step" in inner.get("state", {}).get(0, {}) else None


def model_files(engine: Any, checkpoint: Path) -> list[str]:
    """The model states of data-parallel rank 0 by model-parallel rank, by the name of this stage or of the others."""
    names = ["mp_rank_*_model_states.pt", "zero_pp_rank_0_mp_rank_*_model_states.pt"]
    if is_stage3(engine.optimizer):
        names.reverse()
    return next((found for name in names if (found := sorted(map(str, checkpoint.glob(name))))), [])


def model_states(engine: Any, checkpoint: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    """The model states that the loader reads on this rank. Raises ``CheckpointError`` if there are none."""
    files = model_files(engine, checkpoint)
    if not files:
        raise CheckpointError("the universal checkpoint has no model states", where=str(checkpoint))
    # The same choice as in engine._load_checkpoint: neighbouring ranks share a file where there are fewer files.
    return read(Path(files[engine.checkpoint_mp_rank * len(files) // engine.mp_world_size]))


def _step_of(tag: str) -> int | None:
    found = re.search(r"step_?(\d+)", tag)
    return int(found[1]) if found else None
