"""Training a recurrent language model on sequences of unequal length: padded, packed, in buckets, and ullage.

One run measures forward and backward of the same weights four ways on the same batches, interleaved, and divides by
the padded time measured beside it. The limit is what token counts set: padded elements ÷ real tokens. Lengths are
lognormal with the mean and spread asked for, cut to [2, max_length]. A last table takes flat values to a
``PackedSequence``, against pad and pack.

Time is the process's CPU time for one thread (so a busy machine matters less), the wall's for more.

    python benchmarks/recurrent.py                      # all seeds, about five minutes
    python benchmarks/recurrent.py --seeds 2 --no-packed
"""

from __future__ import annotations

import functools
import json
import platform
import statistics
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

VOCABULARY = 256
BUCKETS = 8


@dataclass
class Measurement:
    """One batch: its lengths, the limit, and seconds of forward and backward by way."""

    name: str
    num_tokens: int
    longest: int
    limit: float
    seconds: dict[str, float]

    def over_padded(self, way: str) -> float:
        return self.seconds["padded"] / self.seconds[way]


class Rivals:
    """Four ways to train the same weights on the same sequences."""

    def __init__(self, model: RecurrentForCausalLM, lengths: np.ndarray, generator: torch.Generator) -> None:
        self.model = model
        ids = torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator)
        samples = [{"input_ids": part, "labels": part} for part in ids.split(lengths.tolist())]
        self.batch = ullage.RaggedBatch.from_samples(samples)
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
        # Time first inside: what torch does by itself for batch_first.
        outputs, _ = _rnn(self.model)(self.model.model.embed_tokens(rows).transpose(0, 1))
        return outputs.transpose(0, 1)

    def padded(self) -> Tensor:
        """Dense rows as long as the longest, embedding, head and masked loss on all of them."""
        loss = self._loss(self._dense(self.rows), self.labels)
        loss.backward()
        return loss

    def packed(self) -> Tensor:
        """``pack_padded_sequence`` and ``pad_packed_sequence`` around the layer."""
        embedded = self.model.model.embed_tokens(self.rows)
        packed = pack_padded_sequence(embedded, self.lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(_rnn(self.model)(packed)[0], batch_first=True)
        loss = self._loss(outputs, self.labels)
        loss.backward()
        return loss

    def bucketed(self) -> Tensor:
        """The batch sorted by length into buckets of as many sequences, each padded for itself."""
        total = torch.zeros(())
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


def _rnn(model: RecurrentForCausalLM) -> Callable[[Any], Any]:
    """Torch's own layer on the model's weights."""
    cell: Any = model.model.layers[0].cells[0]  # pyright: ignore
    return functools.partial(cell.kernel.forward, cell)


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
    losses = [float(work().detach()) for work in (rivals.padded, rivals.ullage, rivals.bucketed)]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise RuntimeError(f"the ways disagree: losses {losses}")
    times = {"padded": float("inf"), "buckets": float("inf"), "ullage": float("inf")}
    for _ in range(repeats):
        for way, work in (("padded", rivals.padded), ("buckets", rivals.bucketed), ("ullage", rivals.ullage)):
            times[way] = min(times[way], seconds(work, 2 if way == "ullage" else 1, clock))
    if packed:
        times["packed"] = seconds(rivals.packed, 1, clock)
    lengths = rivals.lengths
    limit = len(lengths) * int(lengths.max()) / int(lengths.sum())
    return Measurement(name, int(lengths.sum()), int(lengths.max()), limit, times)


def conversions(lengths: np.ndarray, hidden: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds from flat values [T, hidden] to a ``PackedSequence``, by one index and by pad and pack."""
    values = torch.randn(int(lengths.sum()), hidden)
    batch = ullage.RaggedBatch({"values": values}, ullage.Layout(lengths))
    host = torch.tensor(lengths)

    def pad_and_pack() -> object:
        rows = pad_sequence(values.split(host.tolist()), batch_first=True)
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


def show(console: Console, measurements: list[Measurement], equal: Measurement) -> None:
    """The table: times padded by way, and what part of the limit ullage reaches."""
    table = Table(title="forward and backward, times as fast as padded")
    for column in ("lengths", "tokens", "longest", "limit", "packed", "buckets", "ullage", "of limit", "× packed"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for m in [*measurements, equal]:
        ours, packed = m.over_padded("ullage"), m.seconds.get("packed")
        table.add_row(
            *(m.name, f"{m.num_tokens:,}", f"{m.longest:,}", f"{m.limit:.2f}"),
            f"{m.over_padded('packed'):.2f}" if packed else "–",
            *(f"{m.over_padded('buckets'):.2f}", f"{ours:.2f}", f"{ours / m.limit:.2f}"),
            f"{packed / m.seconds['ullage']:.1f}" if packed else "–",
        )
    console.print(table)


def main(
    cell: str = "lstm",
    hidden: int = 256,
    batch: int = 64,
    mean: float = 128.0,
    sigma: float = 1.0,
    max_length: int = 2048,
    seeds: int = 7,
    repeats: int = 2,
    threads: int = 1,
    packed: bool = True,
    output: Path = Path(__file__).parent / "results",
) -> None:
    """Measures, prints the tables and writes them to OUTPUT as JSON with date, hardware and versions."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    console = Console(width=110)
    torch.manual_seed(0)
    config = RecurrentConfig(cell=cell, vocab_size=VOCABULARY, hidden_size=hidden)
    model = RecurrentForCausalLM(config).train()
    generator = torch.Generator().manual_seed(0)
    measurements = []
    for seed in range(seeds):
        lengths = _lognormal(seed, batch, mean, sigma, max_length)
        measurements.append(measure(f"seed {seed}", Rivals(model, lengths, generator), repeats, packed, clock))
    same = np.full(batch, round(mean))
    equal = measure("all equal", Rivals(model, same, generator), 2 * repeats, packed, clock)
    moved = conversions(_lognormal(0, batch, mean, sigma, max_length), hidden, repeats, clock)
    show(console, measurements, equal)

    part = statistics.median(m.over_padded("ullage") / m.limit for m in measurements)
    summary = {"median part of the limit": part, "equal lengths, against padded": equal.over_padded("ullage")}
    if packed:
        for name, chosen in (
            ("against packed, longest >= 1024, least", [m for m in measurements if m.longest >= 1024]),
            ("against packed, longest < 1024, least", [m for m in measurements if m.longest < 1024]),
        ):
            if chosen:
                summary[name] = min(m.seconds["packed"] / m.seconds["ullage"] for m in chosen)
    summary["flat to PackedSequence, against pad and pack"] = moved["pad and pack"] / moved["one index"]
    for name, figure in summary.items():
        console.print(f"{name:<48} {figure:6.2f}")

    output.mkdir(parents=True, exist_ok=True)
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": _processor(), "threads": threads},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            "cell": cell,
            "hidden": hidden,
            "batch": batch,
            "mean": mean,
            "sigma": sigma,
            "clock": clock.__name__,
        },
        "summary": summary,
        "measurements": [asdict(m) for m in [*measurements, equal]],
        "conversion_seconds": moved,
    }
    path = output / f"recurrent_{cell}_{record['date']}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    typer.run(main)
