"""Training recurrent language models on sequences of unequal length: padded, packed, in buckets, and ullage.

For each cell, forward and backward of the same weights on the same batches, the ways interleaved, are divided by the
padded time measured beside them. The limit is what token counts set: padded elements ÷ real tokens. Lengths are
lognormal with the mean and spread asked for, cut to [2, max_length]; one more batch has equal lengths. *Kept* is the
memory that forward leaves for backward, by real token. Then all cells on sequences of 1,000 tokens, and the way from
flat values to a ``PackedSequence`` against pad and pack.

Padded, an LSTM or a GRU is torch's own layer; torch has no minGRU or minLSTM, so theirs is ours on padded rows.
Time is the process's CPU time for one thread (so a busy machine matters less), the wall's for more.

    python benchmarks/recurrent.py                             # four cells, a few minutes
    python benchmarks/recurrent.py --cell gru --seeds 9 --packed-seeds 0
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import ullage
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.models.cells import cell_class
from ullage.models.schedule import Schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, or by benchmarks.gpu

from benchmarks.machine import processor

VOCABULARY = 256
BUCKETS = 8
CELLS = ("lstm", "gru", "mingru", "minlstm")


@dataclass
class Measurement:
    """One batch: its lengths, the limit, and seconds of forward and backward by way."""

    name: str
    num_tokens: int
    longest: int
    limit: float
    seconds: dict[str, float]
    kept_bytes: dict[str, int]

    def over_padded(self, way: str) -> float:
        return self.seconds["padded"] / self.seconds[way]


class Rivals:
    """Four ways to train the same weights on the same sequences."""

    def __init__(self, model: RecurrentForCausalLM, lengths: np.ndarray, generator: torch.Generator) -> None:
        self.model = model  # the batch follows it to its device
        self.layer = torch_layer(_cell(model))
        ids = torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator)
        samples = [{"input_ids": part, "labels": part} for part in ids.split(lengths.tolist())]
        self.batch = ullage.RaggedBatch.from_samples(samples).to(model.device)
        self.lengths = torch.from_numpy(lengths)
        self.rows, self.labels = self._pad(range(len(lengths)))
        falling = np.argsort(-lengths, kind="stable")
        self.buckets = [self._pad(part) for part in np.array_split(falling, BUCKETS) if len(part)]
        self.counted = int((self.lengths - 1).sum())

    def _pad(self, members: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        parts = self.batch["input_ids"].split(self.lengths.tolist())
        rows = pad_sequence([parts[int(i)] for i in members], batch_first=True)
        labels = pad_sequence([parts[int(i)] for i in members], batch_first=True, padding_value=-100)
        return rows, labels[:, 1:].contiguous()

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(outputs)[:, :-1].reshape(-1, VOCABULARY)
        return nn.functional.cross_entropy(logits, labels.view(-1), reduction="sum") / self.counted

    def _dense(self, rows: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(rows)
        if self.layer is None:
            schedule = Schedule.dense(rows.shape[0], rows.shape[1], embedded.shape[2], "flat")
            return _cell(self.model)(embedded.flatten(0, 1), schedule)[0].unflatten(0, rows.shape)
        # Time first inside: what torch does by itself for batch_first.
        return self.layer(embedded.transpose(0, 1))[0].transpose(0, 1)

    def padded(self) -> Tensor:
        """Dense rows as long as the longest, embedding, head and masked loss on all of them."""
        loss = self._loss(self._dense(self.rows), self.labels)
        loss.backward()
        return loss

    def packed(self) -> Tensor:
        """``pack_padded_sequence`` and ``pad_packed_sequence`` around the layer."""
        embedded = self.model.model.embed_tokens(self.rows)
        packed = pack_padded_sequence(embedded, self.lengths, batch_first=True, enforce_sorted=False)
        assert self.layer is not None
        outputs, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        loss = self._loss(outputs, self.labels)
        loss.backward()
        return loss

    def bucketed(self) -> Tensor:
        """The batch sorted by length into buckets of as many sequences, each padded for itself."""
        total = torch.zeros((), device=self.rows.device)
        for rows, labels in self.buckets:
            loss = self._loss(self._dense(rows), labels)
            loss.backward()
            total += loss.detach()
        return total

    def ullage(self) -> Tensor:
        """The flat batch, as the model takes it."""
        loss = self.model(**self.batch.to_flattened()).loss
        loss.backward()
        return loss


def _cell(model: RecurrentForCausalLM) -> Any:
    return model.model.layers[0].cells[0]  # pyright: ignore


def torch_layer(cell: Any) -> nn.RNNBase | None:
    """Torch's own layer on the cell's weights; ``None`` if torch has none."""
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU}
    if getattr(cell, "kernel", None) not in kinds:
        return None
    layer = kinds[cell.kernel](cell.input_size, cell.hidden_size)
    for name, parameter in cell.named_parameters():
        setattr(layer, name, parameter)
    return layer


def kept_bytes(work: Callable[[], object]) -> int:
    """Bytes that forward keeps for backward, each buffer counted once, parameters included."""
    buffers: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        buffers[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(buffers.values())


def seconds(work: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """The shortest of ``repeats`` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


def measure(name: str, rivals: Rivals, repeats: int, packed: bool, clock: Callable[[], float]) -> Measurement:
    """All ways on one batch, after one warm-up of ullage and of padded that also shows that their losses agree."""
    kept = {"padded": kept_bytes(rivals.padded), "ullage": kept_bytes(rivals.ullage)}
    losses = [float(work().detach()) for work in (rivals.padded, rivals.ullage, rivals.bucketed)]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise RuntimeError(f"the ways disagree: losses {losses}")
    times = {"padded": float("inf"), "buckets": float("inf"), "ullage": float("inf")}
    for _ in range(repeats):
        for way, work in (("padded", rivals.padded), ("buckets", rivals.bucketed), ("ullage", rivals.ullage)):
            times[way] = min(times[way], seconds(work, 2 if way == "ullage" else 1, clock))
    if packed and rivals.layer is not None:
        times["packed"] = seconds(rivals.packed, 1, clock)
    lengths = rivals.lengths
    limit = len(lengths) * int(lengths.max()) / int(lengths.sum())
    return Measurement(name, int(lengths.sum()), int(lengths.max()), limit, times, kept)


def conversions(lengths: np.ndarray, hidden: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds from flat values [T, hidden] to a ``PackedSequence``, by one index and by pad and pack."""
    values = torch.randn(int(lengths.sum()), hidden)
    batch = ullage.RaggedBatch({"values": values}, ullage.Layout(lengths))
    host = torch.tensor(lengths)

    def pad_and_pack() -> object:
        rows = pad_sequence(list(values.split(host.tolist())), batch_first=True)
        return pack_padded_sequence(rows, host, batch_first=True, enforce_sorted=False)

    def one_index() -> object:
        return batch.to_packed_sequence("values")

    one_index(), pad_and_pack()
    return {
        "one index": seconds(one_index, 5 * repeats, clock),
        "pad and pack": seconds(pad_and_pack, 5 * repeats, clock),
    }


def _lognormal(seed: int, batch: int, mean: float, sigma: float, longest: int) -> np.ndarray:
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, batch)
    return np.clip(draws, 2, longest).astype(np.int64)


def long_sequences(cells: Sequence[str], hidden: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of forward and backward over 8 sequences of 1,000 tokens, by cell; GRU is always among them."""
    times: dict[str, float] = {}
    values = torch.randn(8 * 1000, hidden, requires_grad=True)
    runs: dict[str, Callable[[], object]] = {}
    for name in dict.fromkeys(["gru", *cells]):
        cell = cell_class(name)(hidden, hidden)
        schedule = Schedule.dense(8, 1000, hidden, cell.run_order(values.device))
        runs[name] = lambda cell=cell, schedule=schedule: cell(values, schedule)[0].sum().backward()
    layer = nn.GRU(hidden, hidden)
    runs["torch.nn.GRU"] = lambda: layer(values.view(1000, 8, hidden))[0].sum().backward()
    for run in runs.values():
        run()
    for _ in range(2 * repeats):
        for name, run in runs.items():
            times[name] = min(times.get(name, float("inf")), seconds(run, 1, clock))
    return times


def show(console: Console, cell: str, measurements: list[Measurement]) -> None:
    """The table: times padded by way, what part of the limit ullage reaches, and what it keeps."""
    table = Table(title=f"{cell}: forward and backward, times as fast as padded")
    names = ("lengths", "tokens", "longest", "limit", "packed", "buckets", "ullage", "of limit", "× packed", "kept kB")
    for column in (*names, "padded kB"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for m in measurements:
        ours, packed = m.over_padded("ullage"), m.seconds.get("packed")
        table.add_row(
            *(m.name, f"{m.num_tokens:,}", f"{m.longest:,}", f"{m.limit:.2f}"),
            f"{m.over_padded('packed'):.2f}" if packed else "–",
            *(f"{m.over_padded('buckets'):.2f}", f"{ours:.2f}", f"{ours / m.limit:.2f}"),
            f"{packed / m.seconds['ullage']:.1f}" if packed else "–",
            *(f"{m.kept_bytes[way] / m.num_tokens / 1024:.1f}" for way in ("ullage", "padded")),
        )
    console.print(table)


def summary_of(measurements: list[Measurement], equal: Measurement) -> dict[str, float]:
    """What is claimed of a cell."""
    per_token = [m.kept_bytes["ullage"] / m.num_tokens for m in measurements]
    summary = {
        "median part of the limit": statistics.median(m.over_padded("ullage") / m.limit for m in measurements),
        "equal lengths, against padded": equal.over_padded("ullage"),
        "kept by a real token, most over least": max(per_token) / min(per_token),
        "kept, part of padded, times the limit, median": statistics.median(
            m.kept_bytes["ullage"] / m.kept_bytes["padded"] * m.limit for m in measurements
        ),
    }
    against = [m.seconds["packed"] / m.seconds["ullage"] for m in measurements if "packed" in m.seconds]
    if against:
        summary["against packed, least"] = min(against)
    return summary


def main(
    cell: list[str] = list(CELLS),  # noqa: B006  typer's way to repeat an option
    hidden: int = 256,
    batch: int = 64,
    mean: float = 128.0,
    sigma: float = 1.0,
    max_length: int = 2048,
    seeds: int = 5,
    repeats: int = 2,
    threads: int = 1,
    packed_seeds: int = 1,
    output: Path = Path(__file__).parent / "results",
) -> None:
    """Measures, prints the tables and writes them to OUTPUT as JSON with date, hardware and versions."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    console = Console(width=120)
    results: dict[str, Any] = {}
    for name in cell:
        torch.manual_seed(0)
        model = RecurrentForCausalLM(RecurrentConfig(cell=name, vocab_size=VOCABULARY, hidden_size=hidden)).train()
        generator = torch.Generator().manual_seed(0)
        measurements = []
        for seed in range(seeds):
            rivals = Rivals(model, _lognormal(seed, batch, mean, sigma, max_length), generator)
            measurements.append(measure(f"seed {seed}", rivals, repeats, seed < packed_seeds, clock))
        same = Rivals(model, np.full(batch, round(mean)), generator)
        equal = measure("all equal", same, 2 * repeats, packed_seeds > 0, clock)
        show(console, name, [*measurements, equal])
        summary = summary_of(measurements, equal)
        for claim, figure in summary.items():
            console.print(f"{name:<8} {claim:<48} {figure:6.2f}")
        results[name] = {"summary": summary, "measurements": [asdict(m) for m in [*measurements, equal]]}

    long = long_sequences(cell, hidden, repeats, clock)
    for name, taken in long.items():
        console.print(f"8 × 1,000 tokens  {name:<14} {1000 * taken:8.1f} ms, {long['gru'] / taken:5.2f} × gru")
    moved = conversions(_lognormal(0, batch, mean, sigma, max_length), hidden, repeats, clock)
    ratio = moved["pad and pack"] / moved["one index"]
    console.print(f"flat to PackedSequence, against pad and pack {ratio:.2f}")

    output.mkdir(parents=True, exist_ok=True)
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "threads": threads},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            "hidden": hidden,
            "batch": batch,
            "mean": mean,
            "sigma": sigma,
            "clock": clock.__name__,
        },
        "cells": results,
        "long_sequence_seconds": long,
        "conversion_seconds": moved,
    }
    path = output / f"recurrent_{record['date']}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
