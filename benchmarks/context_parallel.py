"""One packed row over 1, 2, 4 ranks: tokens per second, memory and bytes as context parallel grows.

Trains a small llama (forward and backward) on one row that a single sequence fills half of, on as many processes as
there are ranks. On a CPU ``tokens/s`` divides the row by the processor seconds of the busiest rank, which is what a
machine with a core a rank would give, whatever else this one does; on CUDA by wall seconds. ``scaling`` is against cp 1
in the same run, ``MB`` what the busiest rank held beyond its model and its tokens, ``sent MB`` what a rank sends to
others in one layer's forward, computed.

    python benchmarks/context_parallel.py                  # about two minutes
    python benchmarks/context_parallel.py --tokens 16384 --sizes 1,2,4,8
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage
from ullage import Layout, RaggedBatch
from ullage.attention import context_parallel, shard_batch
from ullage.attention.ulysses import Slices
from ullage.ranks import Axis

HEADS, KEY_HEADS, DIM, LAYERS = 8, 2, 32, 2


def row_of(tokens: int) -> list[int]:
    """One sequence of half the row, the rest lognormal."""
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, tokens).astype(int).clip(1, tokens // 8)
    rest = lengths[np.cumsum(lengths) <= tokens - tokens // 2].tolist()
    return [tokens // 2, *rest, tokens - tokens // 2 - sum(rest)]


def train(rank: int, world: int, folder: str, tokens: int, runs: int) -> None:
    """One rank: writes processor and wall seconds of each run, and the bytes it held beyond its model."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HEADS * DIM,
        intermediate_size=3 * HEADS * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=tokens,
    )
    dtype = torch.bfloat16 if on_cuda else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ullage", dtype=dtype).to(device)
    ids = [torch.randint(1024, (length,)) for length in row_of(tokens)]
    batch = RaggedBatch.from_samples([{"input_ids": row, "labels": row} for row in ids]).to(device)
    before, seconds = held(device), []
    for _ in range(runs + 1):
        keywords = shard_batch(batch, Axis.world())
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        with context_parallel(Axis.world()):
            model(**keywords).loss.backward()
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
        model.zero_grad(set_to_none=True)
    record = {"seconds": seconds[1:], "bytes": held(device) - before, "cuda": on_cuda}
    Path(folder, f"{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def held(device: torch.device) -> int:
    """The most bytes this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(world: int, tokens: int, runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # Forked: each size has fresh processes, whose peak is their own, without loading everything again.
        start_processes(train, (world, folder, tokens, runs), nprocs=world, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    clock = 1 if ranks[0]["cuda"] else 0
    busiest = statistics.median(max(rank["seconds"][run][clock] for rank in ranks) for run in range(runs))
    return {
        "cp": world,
        "tokens_per_second": tokens / busiest,
        "megabytes": max(rank["bytes"] for rank in ranks) / 1e6,
        "sent_megabytes": max(sent(Slices(Layout(row_of(tokens)), world, rank)) for rank in range(world))
        * (2 if ranks[0]["cuda"] else 4)
        / 1e6,
        "device": "cuda" if ranks[0]["cuda"] else "cpu",
    }


def sent(slices: Slices) -> int:
    """Elements that a rank sends to others in one layer's forward."""
    size, own = slices.size, slices.lengths[slices.rank]
    back = slices.layout.size - own
    keys = math.lcm(KEY_HEADS, size)
    return (own * (size - 1) * (HEADS + 2 * keys) + back * HEADS) * DIM // size


def main(
    tokens: int = 8192,
    sizes: str = "1,2,4",
    runs: int = 3,
    out: Path = Path(__file__).parent / "results",
) -> None:
    console = Console(width=110)
    trained = [measure(size, tokens, runs) for size in map(int, sizes.split(","))]
    alone = trained[0]["tokens_per_second"]
    table = Table("cp", "tokens/s", "scaling", "MB", "sent MB", title=f"{tokens} tokens")
    for row in trained:
        speed = row["tokens_per_second"]
        table.add_row(
            str(row["cp"]),
            f"{speed:,.0f}",
            f"{speed / alone:.2f}",
            f"{row['megabytes']:.0f}",
            f"{row['sent_megabytes'] if row['cp'] > 1 else 0:.1f}",
        )
    console.print(table)
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {"tokens": tokens, "runs": runs, "heads": HEADS, "key_heads": KEY_HEADS, "layers": LAYERS},
        "training": trained,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"context_parallel_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
