"""Ranks with images beside ranks with text alone: what a step of each gives. Imports no pytest."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from maintenance.pictures import picture_samples, takes_clips
from maintenance.tiny import tiny_model
from ullage import RaggedBatch, pack_model
from ullage.mixers import call_equally_often, run_towers_always
from ullage.training.deepspeed import init_distributed


def steps(rank, world, model_types):
    """By type: loss and gradient norm of a step in one process, under DDP, and under ZeRO 2 and 3."""
    os.environ["LOCAL_RANK"] = str(rank)  # which torchrun would set
    init_distributed("gloo")
    return {
        each: [alone(each), ddp(each, rank), *(zero(each, rank, stage) for stage in (2, 3))] for each in model_types
    }


def packed(model_type):
    """A packed model whose rows all run its towers, and the rows of two ranks: with images, and of text alone."""
    model = tiny_model(model_type, "image").train()
    clips = takes_clips(model)
    samples = [
        picture_samples(model, seed=1, images=(1, 3), videos=(1, 0) if clips else None),
        picture_samples(model, seed=2, images=(0, 0)),
    ]
    pack_model(model)
    assert run_towers_always(model, ("image", "video") if clips else ("image",))
    assert call_equally_often(model)
    return model, [RaggedBatch.from_samples(each).to_flattened() for each in samples]


def alone(model_type):
    model, rows = packed(model_type)
    run_towers_always(model, ())
    loss = sum(model(**row).loss for row in rows) / 2
    loss.backward()
    return float(loss.detach()), norm(model)


def norm(model):
    return float(sum((each.grad.double() ** 2).sum() for each in model.parameters() if each.grad is not None) ** 0.5)


def mean(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def ddp(model_type, rank):
    model, rows = packed(model_type)
    # Some layers of towers are used by no model: the last ones of LLaVA's, the pooling of SigLIP.
    model(**rows[0]).loss.backward()
    for parameter in model.parameters():
        parameter.requires_grad = parameter.grad is not None
    model.zero_grad()
    loss = (wrapped := DistributedDataParallel(model))(**rows[rank]).loss
    loss.backward()
    return mean(loss), norm(wrapped)


def zero(model_type, rank, stage):
    import deepspeed

    model, rows = packed(model_type)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 1e9}
    config["zero_allow_untested_optimizer"] = True
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    loss = engine(**rows[rank]).loss
    engine.backward(loss)
    engine.step()
    return mean(loss), float(engine.get_global_grad_norm())
