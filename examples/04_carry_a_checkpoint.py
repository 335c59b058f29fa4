"""A DeepSpeed checkpoint of two ranks at ZeRO 2, looked at, converted, and continued at ZeRO 3.

    torchrun --standalone --nproc_per_node 2 examples/04_carry_a_checkpoint.py

The losses go on where they were. From the shell it is `ullage inspect`, `ullage convert` and `ullage verify`; the
Trainer of `ullage.training` does the conversion by itself.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist

import ullage.checkpoint
from ullage.training.deepspeed import init_distributed, load_universal


def engine_at(stage: int):
    """A small model under ZeRO; every call starts from the same weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 29), torch.nn.Tanh(), torch.nn.Linear(29, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(4, 12, generator=draw)
        loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / dist.get_world_size())
    return losses


init_distributed("gloo")  # as DeepSpeed's own, which compiles for two minutes first
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
folder = Path(str(folder[0]))

engine = engine_at(stage=2)
train(engine, range(5))
engine.save_checkpoint(str(folder), tag="global_step5")
uninterrupted = train(engine, range(5, 8))

if dist.get_rank() == 0:
    inventory = ullage.checkpoint.read(folder / "global_step5")  # no tensor data, no code of the file
    group = inventory.groups[0]
    print(f"{len(inventory.parameters)} parameters on {group.num_shards} shards, {group.padding} elements of padding")
    ullage.checkpoint.convert(folder / "global_step5", folder / "global_step5_universal")
    assert ullage.checkpoint.verify(folder / "global_step5", folder / "global_step5_universal") == []
dist.barrier()

other = engine_at(stage=3)
load_universal(other, folder)
continued = train(other, range(5, 8))
if dist.get_rank() == 0:
    print("ZeRO 2", " ".join(f"{loss:.6f}" for loss in uninterrupted))
    print("ZeRO 3", " ".join(f"{loss:.6f}" for loss in continued))
dist.destroy_process_group()
