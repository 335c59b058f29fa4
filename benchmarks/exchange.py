"""Moving a global batch: against a bare all-to-all of the same bytes, behind a training step, and for 10,000 ranks.

Three tables. The first runs ``exchange`` and a bare ``all_to_all_single`` of as many bytes in turn, on processes of
one machine over gloo, and divides the medians of the slowest rank's times. ``on the wire`` is its header and all-to-all
alone, without packing and unpacking. ``CPU`` is processor time of all ranks together. The second runs a training loop
whose step only sleeps, and asks what part of its time the iterator took. The third plans for many ranks in one process
and follows every sequence from the rank that holds it to the rank that runs it.

    python benchmarks/exchange.py                     # everything, about a minute
    python benchmarks/exchange.py --megabytes 64
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from machine import processor
from rich.console import Console
from rich.table import Table

import ullage
from ullage.datasets import MockSamples, mock_lengths
from ullage.exchange import Lengths, PackedIterator, exchange, gather_lengths, reroute, route, transfer
from ullage.planning.solver.compiled import compile_all
from ullage.ranks import Topology

CAPACITY = 8192
BYTES_PER_TOKEN = 8 + 8 + 4 + 8  # tokens, labels, loss mask, positions
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass
class Run:
    """One ``exchange`` beside one bare all-to-all: the slowest rank's seconds, and processor seconds of all ranks."""

    bare: float
    exchange: float
    wire: float
    bare_cpu: float
    exchange_cpu: float


class Ranks:
    """The part of a benchmark that runs on every process."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        self.rank, self.world = rank, world
        self.topology = Topology.from_groups(dp=dist.group.WORLD)

    def over_ranks(self, values: list[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=how)
        return tensor.tolist()


def exchange_rank(rank: int, world: int, port: int, megabytes: float, runs: int, out: str) -> None:
    ranks = Ranks(rank, world, port)
    mean = float(mock_lengths(n=4096).mean())
    count = round(megabytes * 1e6 / BYTES_PER_TOKEN / mean)
    data = MockSamples(n=count * world)
    samples = [{name: data[i][name] for name in FIELDS} for i in range(rank, len(data), world)]
    gathered = gather_lengths([len(sample["tokens"]) for sample in samples], ranks.topology)
    plan = ullage.plan(gathered.lengths, ranks=world, capacity=CAPACITY)
    sends, receives = _byte_counts(plan, gathered, rank)
    block = torch.randint(0, 255, (sum(sends),), dtype=torch.uint8)

    def bare() -> torch.Tensor:
        received = torch.empty(sum(receives), dtype=torch.uint8)
        dist.all_to_all_single(received, block, receives, sends)
        return received

    wire = _timed(reroute, "_agree"), _timed(transfer, "all_to_all_bytes")
    measured = []
    for _ in range(runs + 2):
        bare_time, bare_cpu = _measure(bare)
        for part in wire:
            part.clear()
        full_time, full_cpu = _measure(lambda: exchange(plan, samples, ranks.topology, gathered))
        slowest = ranks.over_ranks([bare_time, full_time, sum(map(sum, wire))], dist.ReduceOp.MAX)
        measured.append(Run(*slowest, *ranks.over_ranks([bare_cpu, full_cpu], dist.ReduceOp.SUM)))
    if rank == 0:
        report = {"bytes": sum(sends), "sequences": len(samples), "runs": [asdict(run) for run in measured[2:]]}
        Path(out).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def _byte_counts(plan: ullage.Plan, gathered: Lengths, rank: int) -> tuple[list[int], list[int]]:
    """Bytes that a rank sends to and receives from each, its own part included."""
    path = route(plan, gathered, rank)

    def sizes(ids: np.ndarray, cuts: np.ndarray) -> list[int]:
        return [int(plan.lengths[part].sum()) * BYTES_PER_TOKEN for part in np.split(ids, cuts[1:-1])]

    return sizes(path.sends, path.send_cuts), sizes(path.receives, path.receive_cuts)


def _measure(function: Callable[[], Any]) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    elapsed = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return elapsed


def _timed(module: Any, name: str) -> list[float]:
    """Wall seconds of every call of a function from now on."""
    function, seconds = getattr(module, name), []

    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(module, name, timed)
    return seconds


def prefetch_rank(rank: int, world: int, port: int, prefetch: int, steps: int, sleep: float, out: str) -> None:
    ranks = Ranks(rank, world, port)
    compile_all()  # or load: once per process, and not what is measured
    size = 32 * world
    data = MockSamples(n=size * (steps + 1))
    waited, slept = 0.0, 0.0
    with PackedIterator(
        data, ranks.topology, global_batch_size=size, capacity=CAPACITY, prefetch=prefetch, fields=FIELDS, shared=True
    ) as iterator:
        next(iterator)  # nothing was made ahead of the first
        dist.barrier()
        time.sleep(sleep)
        for _ in range(steps):
            start = time.perf_counter()
            next(iterator)
            between = time.perf_counter()
            time.sleep(sleep)
            waited += between - start
            slept += time.perf_counter() - between
        [worst] = ranks.over_ranks([waited / (waited + slept)], dist.ReduceOp.MAX)
    if rank == 0:
        Path(out).write_text(json.dumps(worst))
    dist.barrier()
    dist.destroy_process_group()


def many_ranks(ranks: int, per_rank: int) -> dict[str, float]:
    """Plan for ``ranks`` without processes, and follow every sequence. Fails if one is lost or comes twice."""
    lengths = mock_lengths(n=ranks * per_rank)
    gathered = Lengths(lengths, np.full(ranks, per_rank))
    compile_all()  # or load: once per process, and not what is measured
    tracemalloc.start()
    start = time.process_time()
    plan = ullage.plan(lengths, ranks=ranks, capacity=CAPACITY)
    planned = time.process_time() - start
    start = time.process_time()
    arrived = np.zeros(len(lengths), np.int64)
    sent = np.zeros(len(lengths), np.int64)
    for rank in range(ranks):
        topology = Topology.grid(rank, dp=ranks)
        path = route(plan, gathered, topology.dp.rank)
        np.add.at(arrived, path.receives, plan.lengths[path.receives])
        np.add.at(sent, path.sends, plan.lengths[path.sends])
    followed = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if not (np.array_equal(arrived, lengths) and np.array_equal(sent, lengths)):
        raise SystemExit(f"sequences were lost or repeated at {ranks} ranks")
    figures = plan.statistics()
    return {
        "ranks": ranks,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "microbatches": figures.num_microbatches,
        "critical_path": figures.critical_path,
        "plan_seconds": planned,
        "follow_seconds": followed,
        "peak_megabytes": peak / 1e6,
    }


def spawn(function: Callable[..., None], world: int, *arguments: Any) -> Any:
    """What rank 0 of ``world`` processes wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        mp.spawn(function, (world, port, *arguments, str(out)), nprocs=world)
        return json.loads(out.read_text())


def _ratio(runs: list[dict[str, float]], over: str, under: str) -> float:
    return statistics.median(run[over] for run in runs) / statistics.median(run[under] for run in runs)


def main(
    world: int = 4,
    megabytes: float = 16,
    runs: int = 20,
    steps: int = 25,
    sleep: float = 0.2,
    ranks: list[int] = [768, 10_000],  # noqa: B006 (typer reads the default)
    per_rank: int = 8,
    out: Path = Path(__file__).parent / "results",
) -> None:
    """Measure, print three tables, and write them as dated JSON."""
    console = Console(width=110)
    moved = spawn(exchange_rank, world, megabytes, runs)
    console.print(_exchange_table(world, moved))
    lost = {prefetch: spawn(prefetch_rank, world, prefetch, steps, sleep) for prefetch in (0, 1)}
    table = Table("prefetch", "lost to the iterator", title=f"{steps} steps that sleep {1000 * sleep:.0f} ms")
    for prefetch, part in lost.items():
        table.add_row(str(prefetch), f"{part:.2%}")
    console.print(table)
    many = [many_ranks(count, per_rank) for count in ranks]
    console.print(_ranks_table(many))
    summary = {
        "exchange over bare": _ratio(moved["runs"], "exchange", "bare"),
        "on the wire over bare": _ratio(moved["runs"], "wire", "bare"),
        "exchange over bare, CPU": _ratio(moved["runs"], "exchange_cpu", "bare_cpu"),
        "lost without prefetch": lost[0],
        "lost with prefetch": lost[1],
    }
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "versions": {"ullage": ullage.__version__, "torch": torch.__version__},
        "settings": {"world": world, "megabytes": megabytes, "runs": runs, "steps": steps, "sleep": sleep},
        "summary": summary,
        "exchange": moved,
        "many ranks": many,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"exchange_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path.name}")


def _exchange_table(world: int, moved: dict[str, Any]) -> Table:
    title = f"{world} processes, {moved['bytes'] / 1e6:.1f} MB and {moved['sequences']} sequences a rank"
    table = Table("", "median ms", "against bare", title=title)
    for name, over, under in (
        ("bare all_to_all_single", "bare", "bare"),
        ("exchange", "exchange", "bare"),
        ("of it on the wire", "wire", "bare"),
        ("bare, CPU", "bare_cpu", "bare_cpu"),
        ("exchange, CPU", "exchange_cpu", "bare_cpu"),
    ):
        median = statistics.median(run[over] for run in moved["runs"])
        table.add_row(name, f"{1000 * median:.1f}", f"{_ratio(moved['runs'], over, under):.2f}")
    return table


def _ranks_table(many: list[dict[str, float]]) -> Table:
    table = Table("ranks", "sequences", "microbatches", "critical path", "plan s", "follow s", "peak MB")
    for row in many:
        table.add_row(
            f"{row['ranks']:,}",
            f"{row['sequences']:,}",
            f"{row['microbatches']}",
            f"{row['critical_path']:.4f}",
            f"{row['plan_seconds']:.2f}",
            f"{row['follow_seconds']:.2f}",
            f"{row['peak_megabytes']:.0f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
