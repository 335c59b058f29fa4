"""A rank that saves optimizers whose state differs by group or has numbers in it, and loads them at every stage."""

from typing import Any

import torch

from tests.support.zero_worker import Job, Net, config, data


def engine(job: Job, stage: int, seed: int, numbers: bool = False) -> Any:
    """An engine of SGD with momentum in one of its two groups; with ``numbers`` of NAdam, whose state has some."""
    import deepspeed

    torch.manual_seed(seed)
    model = Net(job.width)
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": weights[:2], "momentum": 0.9}, {"params": weights[2:], "momentum": 0.0}]
    settings = config(job) | {"zero_optimization": {"stage": stage}}
    plain = [{"params": group["params"]} for group in groups]
    optimizer = torch.optim.NAdam(plain, lr=1e-2) if numbers else torch.optim.SGD(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def losses(made: Any, job: Job, rank: int, steps: range) -> list[float]:
    found = []
    for step in steps:
        loss = made(*data(step, job, rank))
        made.backward(loss)
        made.step()
        found.append(round(loss.item(), 5))
    return found


def load_each(job: Job, rank: int) -> dict[str, Any]:
    """By pair of stages: the next losses after loading, and those of the run that went on."""
    import torch.distributed as dist

    from ullage import checkpoint
    from ullage.training.deepspeed import load_checkpoint

    found = {}
    for stage in (1, 3):
        first = engine(job, stage, 1)
        losses(first, job, rank, range(3))
        first.save_checkpoint(f"{job.results}/{stage}", tag="global_step3")
        wanted = losses(first, job, rank, range(3, 6))
        for other in (1, 2, 3):
            second = engine(job, other, 9)
            load_checkpoint(second, f"{job.results}/{stage}")
            found[f"{stage} to {other}"] = (losses(second, job, rank, range(3, 6)), wanted)
    first, folder = engine(job, 2, 1, numbers=True), f"{job.results}/nadam"
    losses(first, job, rank, range(3))
    first.save_checkpoint(folder, tag="global_step3")
    wanted = losses(first, job, rank, range(3, 6))
    for format in ("universal", "dcp", "trainer"):
        if rank == 0:
            checkpoint.convert(folder, f"{job.results}/{format}", format=format)
        dist.barrier()
        second = engine(job, 3, 9, numbers=True)
        load_checkpoint(second, f"{job.results}/{format}")
        found[f"nadam, {format}"] = (losses(second, job, rank, range(3, 6)), wanted)
    return found
