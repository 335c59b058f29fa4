"""A training loop of one's own on packed rows: under DDP or FSDP2 the losses and gradient norms of one process.

    python examples/14_loop_on_ranks.py
    torchrun --standalone --nproc_per_node 2 examples/14_loop_on_ranks.py
    torchrun --standalone --nproc_per_node 2 examples/14_loop_on_ranks.py --fsdp

docs/loop.md has each loop by itself, and says why it is as it is. On a machine with GPUs this one runs on them.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ullage
from ullage.datasets import byte_tokenizer, docstrings, tokenize
from ullage.exchange import PackedIterator
from ullage.ranks import Topology

parser = argparse.ArgumentParser(description="A loop on packed rows, under DDP or FSDP2.")
parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP; under torchrun")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--global_batch_size", type=int, default=16, help="sequences of a step, over all ranks")
parser.add_argument("--capacity", type=int, default=1024, help="tokens a rank holds in a microbatch")
chosen = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
topology = Topology.single()
if "WORLD_SIZE" in os.environ:  # started by torchrun
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    topology = Topology.from_device_mesh(mesh)
ranks = topology.dp.size


def build():
    """The model, with the same weights on every rank: packed first, then wrapped or sharded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)).to(device)
    ullage.pack_model(model)
    if chosen.fsdp:
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model) if ranks > 1 else model


def add_over_ranks(number):
    if ranks > 1:
        dist.all_reduce(number)
    return number


def gradients_meet(model, last):
    """Around a microbatch: gradients stay on their rank, but in the backward of the last one."""
    if chosen.fsdp:
        model.set_requires_gradient_sync(last)
    return nullcontext() if last or chosen.fsdp or ranks == 1 else model.no_sync()


def train_step(model, step):
    """Forward and backward of a step; returns its loss. Its gradients are those of one process."""
    # A rank without sequences in a microbatch runs one token that counts nowhere: all ranks make the same calls.
    rows = [(batch if len(batch) else batch.placeholder()).to_flattened() for batch in step.microbatches]
    # Labels that count, over all microbatches and all ranks: what the loss of the step is divided by.
    counted = add_over_ranks(torch.stack([(row["labels"] != -100).sum() for row in rows]).sum())
    loss = torch.zeros((), device=device)
    for number, row in enumerate(rows, start=1):
        with gradients_meet(model, number == len(rows)):
            part = model(**row, num_items_in_batch=counted).loss
            (part * ranks).backward()  # DDP and FSDP2 divide the sum over ranks by their number
        loss += part.detach()
    return add_over_ranks(loss)


def main():
    samples = tokenize(docstrings()[:400], byte_tokenizer(), max_length=512)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # of the parameters as they are sharded
    given = {"global_batch_size": chosen.global_batch_size, "capacity": chosen.capacity, "device": device}
    with PackedIterator(samples, topology, **given) as steps:
        for number, step in enumerate(steps, start=1):
            loss = train_step(model, step)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if chosen.fsdp else norm
            optimizer.step()
            optimizer.zero_grad()
            if topology.dp.rank == 0:
                print(f"step {number}: loss {float(loss):.4f}, gradient norm {float(norm):.4f}", flush=True)
            if number == chosen.steps:
                break


if __name__ == "__main__":
    main()
