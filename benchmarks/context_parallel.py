"""One packed row over 1, 2, 4 ranks: tokens per second, memory and bytes as context parallel grows, and equal work.

The first table trains a small llama (forward and backward) on one row that a single sequence fills half of, on as many
processes as there are ranks. On a CPU ``tokens/s`` divides the row by the processor seconds of the busiest rank, which
is what a machine with a core a rank would give, whatever else this one does; on CUDA by wall seconds. ``scaling`` is
against cp 1 in the same run, ``MB`` what the busiest rank held beyond its model and its tokens, ``sent MB`` what a
rank sends to others in one layer's forward, computed. The second table is pure: work of the busiest rank over the mean,
on drawn rows of 65,536 tokens, the worst of five draws; ``needed`` counts the pairs that the causal mask leaves,
``computed`` those that the calls on a CPU compute.

    python benchmarks/context_parallel.py                  # about three minutes
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
from collections.abc import Iterator
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
from ullage.attention.gathered import blocks, in_blocks
from ullage.attention.slices import Slices
from ullage.ranks import Axis

HEADS, KEY_HEADS, DIM, LAYERS = 8, 2, 32, 2
WAYS = (("ulysses", "contiguous"), ("gather", "zigzag"), ("gather", "contiguous"))


def row_of(tokens: int) -> list[int]:
    """One sequence of half the row, the rest lognormal."""
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, tokens).astype(int).clip(1, tokens // 8)
    rest = lengths[np.cumsum(lengths) <= tokens - tokens // 2].tolist()
    return [tokens // 2, *rest, tokens - tokens // 2 - sum(rest)]


def train(rank: int, world: int, folder: str, tokens: int, way: tuple[str, str], runs: int) -> None:
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
    method, order = way
    before, seconds = held(device), []
    for _ in range(runs + 1):
        keywords = shard_batch(batch, Axis.world(), order=order)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        with context_parallel(Axis.world(), method=method):
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


def measure(world: int, tokens: int, way: tuple[str, str], runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # Forked: each way has fresh processes, whose peak is their own, without loading everything again.
        start_processes(train, (world, folder, tokens, way, runs), nprocs=world, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    clock = 1 if ranks[0]["cuda"] else 0
    busiest = statistics.median(max(rank["seconds"][run][clock] for rank in ranks) for run in range(runs))
    return {
        "cp": world,
        "method": way[0],
        "order": way[1],
        "tokens_per_second": tokens / busiest,
        "megabytes": max(rank["bytes"] for rank in ranks) / 1e6,
        "sent_megabytes": max(
            sent(Slices.of(Layout(row_of(tokens)), world, rank, way[1]), way[0]) for rank in range(world)
        )
        * (2 if ranks[0]["cuda"] else 4)
        / 1e6,
        "device": "cuda" if ranks[0]["cuda"] else "cpu",
    }


def sent(slices: Slices, method: str) -> int:
    """Elements that a rank sends to others in one layer's forward."""
    size, rank = slices.size, slices.rank
    if method == "ulysses":
        back = slices.layout.size - slices.lengths[rank]
        keys = math.lcm(KEY_HEADS, size)
        return (slices.lengths[rank] * (size - 1) * (HEADS + 2 * keys) + back * HEADS) * DIM // size
    mine = np.zeros(slices.layout.size, bool)
    mine[slices.index] = True
    rows = sum(int(mine[slices.needs(other)].sum()) for other in range(size) if other != rank)
    return rows * 2 * KEY_HEADS * DIM


def draws(tokens: int = 65_536) -> Iterator[tuple[str, list[int]]]:
    random = np.random.default_rng(0)
    for _ in range(5):
        for name in ("lognormal", "pareto"):
            lengths = random.lognormal(6, 1.5, 4000) if name == "lognormal" else 256 * (1 + random.pareto(1.0, 4000))
            lengths = lengths.astype(int).clip(1, tokens)
            yield name, lengths[np.cumsum(lengths) <= tokens].tolist() or [tokens]


def computed_pairs(slices: Slices, window: int | None = None) -> int:
    """Number of pairs of a query and a key that this rank computes without the varlen kernel, masked ones included.

    A call that is causal from its first key counts as half: kernels skip what it hides.
    """
    total = 0
    pieces = slices.runs(slices.rank, window)
    if window is not None:
        pieces = in_blocks(pieces, window)
    for queries, keys in zip(pieces.queries.tolist(), pieces.keys.tolist()):
        if queries == keys and (window is None or keys <= window):
            total += queries * (queries + 1) // 2
            continue
        total += sum((end - begin) * (keys - queries + end) for begin, end in blocks(queries, keys, window))
    return total


def imbalance(size: int) -> list[dict[str, Any]]:
    """Busiest rank over the mean for each distribution and order, the worst of the draws."""
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for name, lengths in draws():
        for order in ("zigzag", "contiguous"):
            row = [Slices.of(Layout(lengths), size, rank, order) for rank in range(size)]
            needed = [slices.runs(slices.rank).pairs() for slices in row]
            computed = [computed_pairs(slices) for slices in row]
            found = worst.setdefault((name, order), {"needed": 1.0, "computed": 1.0, "computed over needed": 1.0})
            for kind, pairs in (("needed", needed), ("computed", computed)):
                found[kind] = max(found[kind], max(pairs) * size / sum(pairs))
            found["computed over needed"] = max(found["computed over needed"], sum(computed) / sum(needed))
    return [{"cp": size, "lengths": name, "order": order, **found} for (name, order), found in worst.items()]


def main(
    tokens: int = 8192,
    sizes: str = "1,2,4",
    runs: int = 3,
    out: Path = Path(__file__).parent / "results",
) -> None:
    console = Console(width=110)
    trained = []
    for size in map(int, sizes.split(",")):
        trained += [measure(size, tokens, way, runs) for way in (WAYS if size > 1 else WAYS[:1])]
    alone = trained[0]["tokens_per_second"]
    table = Table("cp", "method", "slices", "tokens/s", "scaling", "MB", "sent MB", title=f"{tokens} tokens")
    for row in trained:
        speed = row["tokens_per_second"]
        table.add_row(
            str(row["cp"]),
            row["method"] if row["cp"] > 1 else "",
            row["order"] if row["cp"] > 1 else "",
            f"{speed:,.0f}",
            f"{speed / alone:.2f}",
            f"{row['megabytes']:.0f}",
            f"{row['sent_megabytes'] if row['cp'] > 1 else 0:.1f}",
        )
    console.print(table)
    shares = [row for size in (2, 4, 8) for row in imbalance(size)]
    table = Table(
        "cp", "lengths", "slices", "needed", "computed", "computed / needed", title="busiest rank over the mean"
    )
    for row in shares:
        figures = (f"{row[kind]:.4f}" for kind in ("needed", "computed", "computed over needed"))
        table.add_row(str(row["cp"]), row["lengths"], row["order"], *figures)
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
        "imbalance": shares,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"context_parallel_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
