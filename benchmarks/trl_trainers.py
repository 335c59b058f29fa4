"""TRL's trainers on chats of unequal length: padded, padding-free, packed by TRL, and packed by ullage.

Every way trains the same model on the same sequences for one epoch, so the work is equal; what differs is how much is
computed beside it. The figure is real tokens per second of CPU time after the first step, which is left out with all
that happens before it. The ways are interleaved, and the best of the repeats counts. TRL's two padding-free ways run
with sdpa, as on any machine without flash attention: it keeps the sequences apart by a mask over the whole row.

Lengths: the workload *chat* (lognormal, σ 1.2) scaled so that its median is 600 of 4,096 longest, cut to the longest.

    python benchmarks/trl_trainers.py                       # a quarter of an hour on one thread
    python benchmarks/trl_trainers.py --longest 256 --sequences 64 --repeats 1
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl
import typer
from machine import processor
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

import ullage
from ullage.datasets import WORKLOADS
from ullage.training import trl as packed

VOCABULARY = 2048


@dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
        longest: tokens of a sequence, at most.
        sequences: in the epoch.
        batch: sequences per step.
        capacity: tokens of a row that TRL packs, and of a microbatch of ours.
        hidden: of the model.
        layers: of the model.
    """

    longest: int
    sequences: int
    batch: int
    capacity: int
    hidden: int
    layers: int


class Clock(TrainerCallback):
    """CPU seconds and real tokens from the end of the first step to the end of the last."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._begun = trainer, (0.0, 0)
        self.seconds, self.tokens = 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = (time.process_time(), self._trainer._total_train_tokens)
        if state.global_step == 1:
            self._begun = now
        self.seconds, self.tokens = now[0] - self._begun[0], now[1] - self._begun[1]


def draw(sizes: Sizes) -> np.ndarray:
    """Lengths in tokens, int64 [sequences]."""
    return np.clip(WORKLOADS["chat"](sizes.sequences, 0) * sizes.longest // 4096, 2, sizes.longest)


def token_sequences(sizes: Sizes) -> datasets.Dataset:
    """Sequences of random tokens, all of which count."""
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, VOCABULARY, n).tolist() for n in draw(sizes)]
    return datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


def draw_pairs(sizes: Sizes) -> np.ndarray:
    """Lengths of chosen and rejected answers with their prompt, int64 [sequences / 2, 2]."""
    return draw(sizes)[: sizes.sequences // 2 * 2].clip(min=4).reshape(-1, 2)


def preferences(sizes: Sizes) -> datasets.Dataset:
    """Pairs of random answers to random prompts of a third of the shorter one; TRL adds an end to each."""
    generator = np.random.default_rng(0)

    def words(number: int) -> str:
        return " ".join(f"w{token}" for token in generator.integers(3, VOCABULARY, number))

    rows = []
    for chosen, rejected in draw_pairs(sizes).tolist():
        prompt = max(1, min(chosen, rejected) // 3)
        answers = {"chosen": words(chosen - prompt - 1), "rejected": words(rejected - prompt - 1)}
        rows.append({"prompt": words(prompt), **{name: " " + answer for name, answer in answers.items()}})
    return datasets.Dataset.from_list(rows)


def model(sizes: Sizes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": sizes.hidden // 32, "num_key_value_heads": max(1, sizes.hidden // 64)}
    shape = {"hidden_size": sizes.hidden, "intermediate_size": 4 * sizes.hidden, "num_hidden_layers": sizes.layers}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    longest = max(sizes.longest, sizes.capacity)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=longest, **shape, **heads, **special)
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word per token."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{token}": token for token in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def rows_of_step(sizes: Sizes) -> int:
    """Rows that TRL packs per step, so that its steps are as large as those of the other ways."""
    return max(1, round(int(draw(sizes).sum()) * sizes.batch / sizes.sequences / sizes.capacity))


#: Ways of each kind of trainer: the package that has it, and the arguments that differ.
WAYS: Mapping[str, Mapping[str, tuple[Any, Callable[[Sizes], dict[str, Any]]]]] = {
    "SFT": {
        "padded": (trl, lambda sizes: {"per_device_train_batch_size": sizes.batch}),
        "TRL padding-free": (trl, lambda sizes: {"per_device_train_batch_size": sizes.batch, "padding_free": True}),
        "TRL packing (bfd)": (
            trl,
            lambda sizes: {
                "per_device_train_batch_size": rows_of_step(sizes),
                "packing": True,
                "max_length": sizes.capacity,
            },
        ),
        "ullage": (
            packed,
            lambda sizes: {"per_device_train_batch_size": sizes.batch, "packing_capacity": sizes.capacity},
        ),
    },
    # A batch has as many sequences as one of SFT: half as many pairs.
    "DPO": {
        "padded": (trl, lambda sizes: {"per_device_train_batch_size": sizes.batch // 2}),
        "ullage": (
            packed,
            lambda sizes: {"per_device_train_batch_size": sizes.batch // 2, "packing_capacity": sizes.capacity},
        ),
    },
}
#: The data of each kind, and the lengths of their rows, a batch after the other.
DATA: Mapping[str, Callable[[Sizes], datasets.Dataset]] = {"SFT": token_sequences, "DPO": preferences}
LENGTHS: Mapping[str, Callable[[Sizes], np.ndarray]] = {"SFT": draw, "DPO": lambda sizes: draw_pairs(sizes).reshape(-1)}


@dataclass(frozen=True)
class Measurement:
    """One run: CPU seconds and real tokens after the first step, and the loss of the epoch."""

    seconds: float
    tokens: int
    loss: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def measure(kind: str, way: str, sizes: Sizes) -> Measurement:
    """One epoch."""
    package, options = WAYS[kind][way]
    arguments = {
        "num_train_epochs": 1, "max_length": None, "report_to": [], "use_cpu": True, "bf16": False,
        "activation_checkpointing": False, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "dataloader_pin_memory": False, **options(sizes),
    }  # fmt: skip
    reference = {"ref_model": model(sizes)} if kind == "DPO" else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = getattr(package, f"{kind}Trainer")(
            model(sizes),
            **reference,
            args=getattr(package, f"{kind}Config")(folder, **arguments),
            train_dataset=DATA[kind](sizes),
            processing_class=tokenizer(),
        )
        clock = Clock(trainer)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    return Measurement(clock.seconds, clock.tokens, loss)


def show(console: Console, kind: str, sizes: Sizes, best: Mapping[str, Measurement]) -> None:
    """The table of one kind of trainer."""
    lengths = LENGTHS[kind](sizes)
    batches = [lengths[k : k + sizes.batch] for k in range(0, len(lengths), sizes.batch)]
    allowed = sum(len(each) * int(each.max()) for each in batches) / int(lengths.sum())
    console.print(f"{kind}: {len(lengths)} sequences, {lengths.sum():,} tokens; padded to batches {allowed:.2f} times")
    table = Table(title=f"{kind}Trainer: real tokens per second of CPU time")
    for column in ("way", "tokens/s", "times padded", "loss of the epoch"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, found in best.items():
        times = found.speed / best["padded"].speed
        table.add_row(way, f"{found.speed:,.0f}", f"{times:.2f}", f"{found.loss:.4f}")
    console.print(table)


def main(
    longest: int = 512,
    sequences: int = 128,
    batch: int = 16,
    capacity: int = 1024,
    hidden: int = 128,
    layers: int = 2,
    repeats: int = 2,
    label: str = "",
    output: Path = Path(__file__).parent / "results",
) -> None:
    """Measures all ways, prints a table per kind of trainer and writes it to OUTPUT as JSON."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    console, sizes = Console(width=100), Sizes(longest, sequences, batch, capacity, hidden, layers)
    results: dict[str, Any] = {}
    for kind, ways in WAYS.items():
        found: dict[str, list[Measurement]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way in ways:
                found[way].append(measure(kind, way, sizes))
        best = {way: max(runs, key=lambda each: each.speed) for way, runs in found.items()}
        show(console, kind, sizes, best)
        results[kind] = {way: [asdict(each) | {"speed": each.speed} for each in runs] for way, runs in found.items()}
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"trl_trainers_{date.today().isoformat()}{label and '_' + label}.json"
    path.write_text(json.dumps(_record(sizes, results), indent=2) + "\n")
    console.print(f"written to {path}")


def _record(sizes: Sizes, results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "threads": 1},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "settings": {**asdict(sizes), "vocabulary": VOCABULARY, "clock": "process_time"},
        "trainers": results,
    }


if __name__ == "__main__":
    typer.run(main)
