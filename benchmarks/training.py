"""Training a Hugging Face transformer on sequences of unequal length: padded, flattened, TRL's packing, and ullage.

One run trains the same weights on the same sequences in each way, under the trainer that each way comes with, and
counts real tokens a second of whole optimizer steps. The limit is what FLOPs allow: those of the padded batches over
those of the real tokens (linear·Σlength + quadratic·Σlength², ``TransformerCost.from_config``). Time is the process's
CPU time on a CPU, the wall's on a GPU. A second table, under torchrun, trains on lengths with giants and compares steps
a second with those of the same Trainer planning in arrival order, against the ratio that the plans predict.

    python benchmarks/training.py
    torchrun --nproc_per_node 2 benchmarks/training.py --giants
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import ullage
import ullage.attention  # registers attn_implementation="ullage"
from ullage.planning import TransformerCost
from ullage.training import RaggedCollator, Trainer, TrainingArguments

VOCABULARY = 512
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Samples = list[dict[str, list[int]]]


def make_config(hidden: int) -> transformers.LlamaConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 2}
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
    return transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16384, **sizes, **heads, **SPECIAL)


def lognormal(number: int, mean: float, longest: int, seed: int) -> np.ndarray:
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, number)
    return np.clip(draws, 2, longest).astype(np.int64)


def make_samples(lengths: np.ndarray, seed: int) -> Samples:
    generator = np.random.default_rng(seed)
    return [{"input_ids": generator.integers(3, VOCABULARY, int(n)).tolist()} for n in lengths]


class Clock(transformers.TrainerCallback):
    """Seconds of each step, the first of which is not counted."""

    def __init__(self, on_cpu: bool) -> None:
        self.now = time.process_time if on_cpu else time.perf_counter
        self.steps: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append(self.now() - self.start)


def train(
    trainer_class: Any, attention: str, samples: Any, collator: Any, batch: int, hidden: int, **options: Any
) -> Clock:
    """Trains one epoch in order and returns what each step took."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    config = make_config(hidden)
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(
        config, torch_dtype=torch.bfloat16 if on_gpu else torch.float32
    )
    kind = TrainingArguments if trainer_class is Trainer else transformers.TrainingArguments
    clock = Clock(on_cpu=not on_gpu and options.pop("cpu_time", True))
    with tempfile.TemporaryDirectory() as folder:
        order = options.pop("train_sampling_strategy", "sequential")
        arguments = kind(
            folder, num_train_epochs=1, per_device_train_batch_size=batch, train_sampling_strategy=order,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=not on_gpu,
            remove_unused_columns=False, **options,
        )  # fmt: skip
        trainer = trainer_class(model, arguments, train_dataset=samples, data_collator=collator, callbacks=[clock])
        trainer.train()
    return clock


def pad(samples: Samples) -> dict[str, torch.Tensor]:
    batch = RaggedCollator(labels_from="input_ids")(samples)
    assert isinstance(batch, ullage.RaggedBatch)
    return batch.to_padded()


def trl_rows(samples: Samples, capacity: int) -> list[dict[str, Any]] | None:
    """TRL's best-fit-decreasing rows, with the positions by which its padding-free collator keeps sequences apart."""
    try:
        from datasets import Dataset
        from trl import pack_dataset
    except ImportError:
        return None
    rows = pack_dataset(
        Dataset.from_list(samples), seq_length=capacity, strategy="bfd", map_kwargs={"batch_size": None}
    )
    return [dict(row) for row in rows]


def collate_trl(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token for row in rows for token in row["input_ids"]])[None]
    positions = torch.tensor([t for row in rows for n in row["seq_lengths"] for t in range(n)])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def measure(lengths: np.ndarray, batch: int, capacity: int, hidden: int, seed: int) -> dict[str, Any]:
    samples = make_samples(lengths, seed)
    flatten = transformers.DataCollatorWithFlattening()
    ways: dict[str, Callable[[], Clock]] = {
        "padded, sdpa": lambda: train(transformers.Trainer, "sdpa", samples, pad, batch, hidden),
        "transformers' flattening, sdpa": lambda: train(transformers.Trainer, "sdpa", samples, flatten, batch, hidden),
        "ullage": lambda: train(
            Trainer,
            "ullage",
            samples,
            RaggedCollator(labels_from="input_ids"),
            batch,
            hidden,
            packing_capacity=capacity,
        ),
    }
    counted: list[int] = []  # tokens of each batch: the sampler shuffles, so they are not those of the other ways

    def pad_and_count(rows: Samples) -> dict[str, torch.Tensor]:
        counted.append(sum(len(row["input_ids"]) for row in rows))
        return pad(rows)

    rebalanced = "transformers' batch_rebalance, padded, sdpa"
    ways[rebalanced] = lambda: train(
        transformers.Trainer, "sdpa", samples, pad_and_count, batch // 4, hidden, gradient_accumulation_steps=4,
        train_sampling_strategy="batch_rebalance",
    )  # fmt: skip
    groups = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    row = max(int(lengths.max()), int(lengths.sum()) // len(groups))  # TRL's rows as large as the other ways' steps
    rows = trl_rows(samples, row)
    if rows is not None:
        ways["TRL packing (bfd), sdpa"] = lambda: train(transformers.Trainer, "sdpa", rows, collate_trl, 1, hidden)
    cost = TransformerCost.from_config(make_config(hidden))
    padded = sum(cost.flops(len(g) * int(g.max()), len(g) * int(g.max()) ** 2) for g in groups[1:])
    real = sum(cost.flops(int(g.sum()), int((g**2).sum())) for g in groups[1:])
    tokens = {name: sum(int(g.sum()) for g in groups[1:]) for name in ways}
    if rows is not None:
        tokens["TRL packing (bfd), sdpa"] = sum(len(row["input_ids"]) for row in rows[1:])
    seconds = {name: sum(run().steps[1:]) for name, run in ways.items()}
    tokens[rebalanced] = sum(counted[4 : 4 * len(groups)])
    rates = {name: tokens[name] / seconds[name] for name in ways}
    return {"tokens_per_second": rates, "limit": padded / real, "num_tokens": int(lengths.sum())}


def _with_a_giant(number: int, seed: int) -> np.ndarray:
    """Short sequences and one that costs as much as many of them, in any order."""
    lengths = np.append(lognormal(number - 1, 200, 800, seed), 3000)
    return np.random.default_rng(seed).permutation(lengths)


def giants(steps: int, hidden: int, repeats: int) -> dict[str, Any]:
    """Steps a second of balanced over arrival order, measured and as the plans predict it."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    batch = 8
    lengths = np.concatenate([_with_a_giant(batch * world, seed) for seed in range(steps)])
    samples = make_samples(lengths, 0)
    cost = TransformerCost.from_config(make_config(hidden))
    predicted = {}
    for strategy in ("balanced", "next_fit"):
        dearest = []
        for s in range(1, steps):
            group = lengths[s * batch * world : (s + 1) * batch * world]
            # Accelerate deals consecutive batches to ranks, so a global batch is consecutive sequences.
            p = ullage.plan(group, ranks=world, capacity=4096, cost=cost, strategy=strategy, sync="step")
            dearest.append(
                max(
                    sum(float(np.sum(cost(p.lengths[p.members(m, r)]))) for m in range(p.num_microbatches))
                    for r in range(world)
                )
            )
        predicted[strategy] = sum(dearest)
    seconds: dict[str, list[float]] = {"balanced": [], "next_fit": []}
    for _ in range(repeats):
        for strategy in seconds:
            clock = train(
                Trainer, "ullage", samples, RaggedCollator(labels_from="input_ids"), batch, hidden,
                packing_capacity=4096, packing_plan_strategy=strategy, cpu_time=False,
            )  # fmt: skip
            seconds[strategy].append(sum(clock.steps[1:]))
    ratios = [slow / fast for slow, fast in zip(seconds["next_fit"], seconds["balanced"])]
    return {
        "measured": statistics.median(ratios),
        "predicted": predicted["next_fit"] / predicted["balanced"],
        "processes": world,
        "seconds": seconds,
    }


def main(
    seeds: Annotated[int, typer.Option(help="How many draws of lengths.")] = 3,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of each way; the first is not counted.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 64.")] = 256,
    mean: Annotated[float, typer.Option(help="Mean length in tokens.")] = 256,
    with_giants: Annotated[bool, typer.Option("--giants", help="Only the table of giants; under torchrun.")] = False,
) -> None:
    """Prints the tables and writes dated JSON beside this file."""
    console = Console()
    hardware = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} thread(s)"
    )
    result: dict[str, Any] = {"date": str(date.today()), "hardware": hardware, "python": platform.python_version()}
    result |= {"torch": torch.__version__, "transformers": transformers.__version__, "ullage": ullage.__version__}
    if with_giants:
        result["giants"] = found = giants(steps, hidden, seeds)
        if int(os.environ.get("RANK", 0)) != 0:
            return
        console.print(
            f"{found['processes']} processes, lengths with giants: balanced over next_fit "
            f"{found['measured']:.2f} steps a second; the plans predict {found['predicted']:.2f}"
        )
    else:
        runs = [
            measure(lognormal(batch * steps, mean, 16 * int(mean), s), batch, 16384, hidden, s) for s in range(seeds)
        ]
        result["runs"] = runs
        table = Table(
            "way", "real tokens/s", "over padded", "of what FLOPs allow", title=f"median of {seeds} draws, {hardware}"
        )
        for name in runs[0]["tokens_per_second"]:
            rates = [run["tokens_per_second"][name] for run in runs]
            ratio = [run["tokens_per_second"][name] / run["tokens_per_second"]["padded, sdpa"] for run in runs]
            share = [r / run["limit"] for r, run in zip(ratio, runs)]
            row = (statistics.median(rates), statistics.median(ratio), statistics.median(share))
            table.add_row(name, f"{row[0]:,.0f}", f"{row[1]:.2f}", f"{row[2]:.2f}")
        console.print(table)
    kind = "giants" if with_giants else "ways"
    target = Path(__file__).parent / "results" / f"training_{kind}_{result['date']}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
