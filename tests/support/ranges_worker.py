"""One rank of an engine that loads many checkpoints by ranges, one after another, each compared with what was written.

The checkpoints are of ``real_zero``: real DeepSpeed code wrote them, a value in every element that is known from its
name, and a sentinel in the padding.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tests.support import real_zero
from tests.support.processes import raised
from tests.support.real_zero import Recipe, Truth
from tests.support.zero_worker import Job, launch

LIST = "sources.json"


def write_sources(folder: Path, recipes: dict[str, Recipe]) -> dict[str, Truth]:
    """Write a checkpoint per recipe, each with other values; ``load_all`` takes ``folder``."""
    made = {name: replace(recipe, seed=seed) for seed, (name, recipe) in enumerate(recipes.items())}
    truths = {name: real_zero.write(folder / name, recipe) for name, recipe in made.items()}
    (folder / LIST).write_text(json.dumps({name: asdict(recipe) for name, recipe in made.items()}))
    return truths


def load_everywhere(folder: Path, results: Path, recipe: Recipe, world: int) -> dict[str, list[dict[str, Any]]]:
    """Load every checkpoint of ``folder`` into engines of ``recipe`` on ``world`` ranks; by name, the row of each rank."""
    what: dict[str, Any] = {"config": asdict(recipe), "module": __name__, "function": "load_all"}
    job = Job(results, world, recipe.stage, 0, load_from=folder, **what)
    found = launch(job, timeout=200)
    errors = [
        f"rank {rank}: {each['error']}\n{each['traceback']}" for rank, each in enumerate(found) if "error" in each
    ]
    assert not errors, errors[0]
    return {name: [each[name] for each in found] for name in found[0]}


def load_all(job: Job, rank: int) -> dict[str, dict[str, Any]]:
    """By checkpoint: bytes, and every difference from what was written."""
    from ullage.training.deepspeed.loading import load_ranges

    assert job.load_from is not None
    here = Recipe(**job.config)
    engine = make_engine(here)
    rows = {}
    for name, told in json.loads((job.load_from / LIST).read_text()).items():
        loaded = load_ranges(engine, job.load_from / name)
        rows[name] = {
            "share": loaded.share_bytes, "read": loaded.read_bytes, "compared": loaded.compared,
            "differences": differences(engine, here, Truth(job.load_from / name, Recipe(**told))),
            "iteration": loaded.client_state.get("iteration"),
        }  # fmt: skip
    return rows


def make_engine(recipe: Recipe) -> Any:
    """An engine of the recipe's stage, with other values than any checkpoint's."""
    import deepspeed

    model, groups = real_zero._build(replace(recipe, seed=99), 0)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    for buffer in model.buffers():
        buffer.fill_(7.0)
    for group in groups:
        group["weight_decay"] = 0.9
    return deepspeed.initialize(
        model=model, optimizer=real_zero._optimizer(recipe, groups), config=real_zero._config(recipe),
        dist_init_required=False,
    )[0]  # fmt: skip


def differences(engine: Any, recipe_here: Recipe, truth: Truth) -> list[str]:
    """Everything in the engine that is not what was written. Collective."""
    import deepspeed

    found = []

    def compare(name: str, value: torch.Tensor, expected: Any) -> None:
        if not torch.equal(value.cpu(), torch.from_numpy(expected.copy()).to(value.dtype)):
            found.append(name)

    recipe, inner = truth.recipe, engine.optimizer.optimizer
    held = {"bf16": torch.bfloat16, "bf16_optimizer": torch.bfloat16, "fp16": torch.float16}.get(recipe.dtype)
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            value = p.detach().clone()
        if name in recipe.frozen:  # saved in the dtype of the weights
            saved = torch.from_numpy(truth.frozen(name).copy()).to(held or torch.float32)
            compare(name, value, saved.float().numpy())
            continue
        compare(name, value, truth.tensor(name))
    # This rank's part, where it lies in memory: DeepSpeed's own mapping is not that of ``round_robin_gradients``.
    rank, names = torch.distributed.get_rank(), engine.optimizer.param_names
    for flat, fragments in real_zero._partitions(engine.optimizer, recipe_here, rank):
        for key in truth.keys:
            held_here = flat.data if key == "fp32" else inner.state[flat][key]
            expected = torch.zeros_like(held_here)
            for p, at, start, length in fragments:
                whole = torch.from_numpy(truth.tensor(names[p], key).copy()).reshape(-1)
                expected[at : at + length] = whole[start : start + length]
            if not torch.equal(held_here, expected):
                found.append(f"{key} of {[names[p] for p, *_ in fragments]} on rank {rank}")
    for name, buffer in engine.module.named_buffers():
        compare(name, buffer, truth.buffer(name))
    steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
    decays = [group["weight_decay"] for group in inner.param_groups]
    wanted = [*recipe.weight_decay, *[0.0] * len(recipe.groups)][: len(recipe.groups)]
    if steps - {float(real_zero.STEP)}:
        found.append(f"steps {steps}")
    if decays != wanted:
        found.append(f"weight decays {decays}, not {wanted}")
    if engine.global_steps != real_zero.STEP:
        found.append(f"global step {engine.global_steps}")
    return found


def try_damaged(folder: Path, results: Path, recipe: Recipe, world: int) -> list[dict[str, dict[str, Any]]]:
    """By rank and checkpoint of ``folder``: the error of loading it, and whether the engine is as it was."""
    what: dict[str, Any] = {"config": asdict(recipe), "module": __name__, "function": "load_damaged"}
    found = launch(Job(results, world, recipe.stage, 0, load_from=folder, **what), timeout=200)
    assert not any("error" in each for each in found), found
    return found


def load_damaged(job: Job, rank: int) -> dict[str, dict[str, Any]]:
    from ullage.training.deepspeed import load_checkpoint

    assert job.load_from is not None
    here = Recipe(**job.config)
    engine = make_engine(here)
    said = {}
    for place in sorted(p for p in job.load_from.iterdir() if p.is_dir()):
        flats = [flat for flat, _ in real_zero._partitions(engine.optimizer, here, rank)]
        before = [flat.detach().clone() for flat in flats]
        error = raised(load_checkpoint, engine, place) or ""
        same = all(torch.equal(a, b) for a, b in zip(before, flats, strict=True))
        said[place.name] = {"error": error, "untouched": same}
    return said
