"""What one rank of a real DeepSpeed run does, for tests that save at one size and stage and resume at another.

Ranks are forked from a server that has imported DeepSpeed once, so that eight ranks cost eight forks and not eight
imports. They talk over gloo on the loopback. Every rank of a run gets the same ``Job`` and leaves ``<rank>.pt`` in
``job.results``.
"""

import datetime
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import processes

GLOBAL_BATCH = 24
FEATURES = 6


@dataclass(frozen=True)
class Job:
    """One run: build, perhaps load, take steps, perhaps save in between."""

    results: Path
    world: int
    stage: int
    seed: int
    first_step: int = 0
    num_steps: int = 5
    save_after: int | None = None
    save_to: Path | None = None
    load_from: Path | None = None
    loader: str = "load_universal"
    precision: str = "fp32"
    optimizer: str = "adamw"
    width: int = 23
    config: dict[str, Any] = field(default_factory=dict)
    #: what a rank runs: ``function(job, rank)`` of ``module``
    module: str = __name__
    function: str = "run"


class Net(nn.Module):
    """Two groups of weights, a frozen parameter, a batch norm whose running statistics enter the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)
        self.leave = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.enter(x))
        hidden = torch.tanh(self.middle(hidden)) * self.scale
        return ((self.leave(hidden).squeeze(-1) - y).float() ** 2).mean()


def build(job: Job) -> nn.Module:
    """The model from ``job.seed``, its batch norm calibrated on data of that seed and then fixed."""
    torch.manual_seed(job.seed)
    model = Net(job.width)
    with torch.no_grad():
        for _ in range(3):
            model.norm(model.enter(torch.randn(64, FEATURES) * (1 + job.seed)))
    model.norm.eval()
    return model.bfloat16() if job.precision == "bf16" else model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights with weight decay; biases and the norm without, and at another rate."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if job.optimizer == "adamw":
        return torch.optim.AdamW(groups(model))
    if job.optimizer == "sgd":
        return torch.optim.SGD(groups(model))
    if job.optimizer == "momentum":
        return torch.optim.SGD(groups(model), momentum=0.9)
    raise ValueError(job.optimizer)


def base_config(job: Job, **zero: Any) -> dict[str, Any]:
    """What every run asks of DeepSpeed; ``zero``: its ``zero_optimization``, beside the stage."""
    made: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": GLOBAL_BATCH // job.world,
        "zero_optimization": {"stage": job.stage, **zero}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
    }  # fmt: skip
    return made | {"bf16": {"enabled": True}} if job.precision.startswith("bf16") else made


def config(job: Job) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 30, **job.config.get("zero_optimization", {})}
    return base_config(job, **zero) | {k: v for k, v in job.config.items() if k != "zero_optimization"}


def data(step: int, job: Job, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the global batch of ``step``, the same batch at every world size."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator)
    y = torch.sin(x.sum(-1)) + 0.1 * torch.randn(GLOBAL_BATCH, generator=generator)
    rows = slice(rank * GLOBAL_BATCH // job.world, (rank + 1) * GLOBAL_BATCH // job.world)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    return x[rows].to(dtype), y[rows].to(dtype)


def whole_state(engine: Any, p: torch.Tensor, key: str) -> torch.Tensor | None:
    """State ``key`` of ``p`` in its shape, from the inner optimizer's flat buffers; None where its group has none.

    DeepSpeed's ``safe_get_full_optimizer_state`` is no help at stages 1 and 2: it links states before the first step,
    when a torch optimizer has none yet. Collective over the data-parallel ranks.
    """
    zero = engine.optimizer
    if hasattr(p, "ds_id"):
        try:
            return zero.get_full_hp_param(p, optim_state_key=key).clone()
        except KeyError:  # the group's, and so on every rank
            return None
    whole, there = torch.zeros(p.numel()), torch.zeros(1)
    if getattr(p, "_hp_mapping", None) is not None:  # a rank may hold no element of a parameter
        flat = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
        held = zero.optimizer.state[flat[p._hp_mapping.param_group_index]].get(key)
        if held is not None:
            there += 1
            hp, lp = p._hp_mapping.hp_fragment_address, p._hp_mapping.lp_fragment_address
            whole[lp.start : lp.start + lp.numel] = held[hp.start : hp.start + hp.numel]
    # Not every rank has a part of the parameter, so presence is agreed on as the values are.
    torch.distributed.all_reduce(whole, group=zero.dp_process_group)
    torch.distributed.all_reduce(there, group=zero.dp_process_group)
    return whole.view(p.shape) if there else None


def state_of(engine: Any) -> dict[str, Any]:
    """Everything that resuming must bring back, gathered through DeepSpeed's own debugging interface. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    state: dict[str, Any] = {"param": {}, "optim": {}, "frozen": {}, "module": {}}
    inner = engine.optimizer.optimizer
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            state["module"][name] = p.detach().clone()
        if not p.requires_grad:
            state["frozen"][name] = state["module"][name]
            continue
        state["param"][name] = safe_get_full_fp32_param(p).clone()
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if any(key in s for s in inner.state.values()):
                state["optim"][f"{name}/{key}"] = whole_state(engine, p, key)
    state["buffers"] = {name: b.clone() for name, b in engine.module.named_buffers()}
    state["steps"] = [float(s["step"]) for s in inner.state.values() if "step" in s]
    state["hyper"] = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
    state["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    state["scheduler"] = engine.lr_scheduler.state_dict()["last_epoch"]
    return state


def run(job: Job, rank: int) -> dict[str, Any]:
    import deepspeed

    model = build(job)
    optimizer = make_optimizer(job, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    made = config(job)
    if job.load_from is not None and job.loader == "load_checkpoint":
        made["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=made, dist_init_required=False
    )
    engine.module.norm.eval()
    out: dict[str, Any] = {}
    if job.load_from is not None:
        if job.loader == "load_universal":
            from ullage.training.deepspeed import load_universal

            load_universal(engine, job.load_from)
        elif job.loader == "load_ranges":  # what deepspeed.load_checkpoint of ours calls, with its figures
            from ullage.training.deepspeed.loading import load_ranges

            loaded = load_ranges(engine, job.load_from)
            out["ranges"] = (loaded.share_bytes, loaded.read_bytes, loaded.compared)
            out["client_state"] = loaded.client_state
        else:
            engine.load_checkpoint(str(job.load_from))
        out["loaded"] = state_of(engine)

    def loss_of(step: int) -> torch.Tensor:
        return engine(*data(step, job, rank))

    return out | take_steps(engine, job, loss_of, state_of, client_state={"note": "kept"})


def take_steps(engine: Any, job: Job, loss_of: Callable, held_by: Callable, **saving: Any) -> dict[str, Any]:
    """The job's steps: their losses, and what ``held_by`` found where the engine was saved."""
    out: dict[str, Any] = {"losses": []}
    for step in range(job.first_step, job.first_step + job.num_steps):
        loss = loss_of(step)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        out["losses"].append(float(mean) / job.world)
        if job.save_after is not None and step + 1 == job.save_after:
            out["saved"] = held_by(engine)
            engine.save_checkpoint(str(job.save_to), tag=f"global_step{step + 1}", **saving)
    return out


def rank_main(rank: int, job: Job) -> None:
    """One rank: always leaves a result, of its error too, so that a failing test can show it."""
    torch.set_num_threads(1)
    from ullage.training.deepspeed import init_distributed

    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=job.world, timeout=datetime.timedelta(seconds=60)
    )
    init_distributed("gloo")
    try:
        result = import_module(job.module).__dict__[job.function](job, rank)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    torch.save(result, job.results / f"{rank}.pt")
    if "error" not in result:
        torch.distributed.barrier()
    os._exit(0)  # no teardown: a rank that failed must not wait for the others


def launch(job: Job, timeout: float = 240) -> list[dict[str, Any]]:
    """Runs ``job`` on ``job.world`` processes; results in rank order. Raises ``RuntimeError`` if a rank left none."""
    job.results.mkdir(parents=True, exist_ok=True)
    log = job.results / "log"
    ranks = processes.start(rank_main, job.world, job, loads=("torch", "training"), output=log, store="rank")
    try:
        ranks.wait(timeout)
    except TimeoutError:
        ranks.end()
    files = [job.results / f"{rank}.pt" for rank in range(job.world)]
    missing = [rank for rank, path in enumerate(files) if not path.exists()]
    if missing:
        raise RuntimeError(f"ranks {missing} of {job} left no result:\n{log.read_text()[-4000:]}")
    return [torch.load(path, weights_only=False) for path in files]
