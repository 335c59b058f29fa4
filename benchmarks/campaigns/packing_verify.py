"""The proof before the first packed step: its seconds and its memory, beside a run without it.

A model with random weights trains some packed steps on sequences of drawn lengths, each time in a process of its own,
with the proof and without. Compared are the CPU seconds of the proof with those of a step, the peak of the process's
memory after the first step, and the losses, which must be the same to the last bit.

    python benchmarks/campaigns/packing_verify.py                   # Llama 256x4, and one of 0.5 billion parameters
    python benchmarks/campaigns/packing_verify.py --models small
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import ullage
from ullage.training import RaggedCollator, Trainer, TrainingArguments

ROOT = Path(__file__).resolve().parents[2]

#: Sizes of the models, and tokens of a row. The second is as Qwen2.5-0.5B: 24 layers, 151,936 words, tied.
MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "sizes": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4},
        "heads": {"num_attention_heads": 4},
        "capacity": 1024,
        "batch": 8,
        "steps": 3,
    },
    "large": {
        "sizes": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
        "heads": {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "capacity": 128,
        "batch": 2,
        "steps": 1,
    },
}


class Clock(transformers.TrainerCallback):
    """CPU seconds of each step, and the peak of the process's memory at the end of the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun, self.peak = 0.0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self.begun)
        if not self.peak:
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(name: str, verify: bool, folder: str) -> dict[str, Any]:
    """Train in this process, and tell what it took."""
    made = MODELS[name]
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**made["sizes"], **made["heads"]))
    capacity, draw = made["capacity"], torch.Generator().manual_seed(1)
    lengths = (torch.randn(64, generator=draw) * 0.8).exp().mul(capacity / 10).int().clamp(4, capacity // 2)
    words = made["sizes"]["vocab_size"]
    samples: Any = [{"input_ids": torch.randint(0, words, (int(n),), generator=draw).tolist()} for n in lengths]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    trainer = Trainer(
        model,
        TrainingArguments(
            folder, packing_capacity=capacity, packing_verify=verify,
            per_device_train_batch_size=made["batch"], max_steps=made["steps"],
            optim="sgd", learning_rate=1e-3, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
            use_cpu=True,
        ),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=samples,
    )  # fmt: skip
    clock = Clock()
    trainer.add_callback(clock)
    # Without the proof this call does nothing.
    proof, own, taken = trainer._packer.proof, trainer._packer.proof.before_step, []

    def timed(*arguments: Any) -> None:
        begun = time.process_time()
        own(*arguments)
        taken.append((time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))

    proof.before_step = timed  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train()
    found = proof.found
    return {
        "model": name,
        "verify": verify,
        "parameters": sum(each.numel() for each in model.parameters()),
        "capacity": capacity,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "cpu_seconds_of_steps": clock.seconds,
        "cpu_seconds_of_proof": taken[0][0],
        "peak_bytes_before": before,
        "peak_bytes_after_proof": taken[0][1],
        "peak_bytes_after_first_step": clock.peak,
        "proof": None
        if found is None
        else {
            "seconds": found.seconds,
            "tokens": found.tokens,
            "lengths": found.lengths,
            "largest": {each.name: each.value for each in found.differences},
        },
    }


def main(
    models: str = "small,large",
    only: str = "",
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print, and write dated JSON. Exit status 1 if the proof changed a loss or found a difference."""
    if only:  # one run, in a process of its own
        name, verify = only.split(",")
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run(name, verify == "with", folder)), flush=True)
        return
    console, runs = Console(width=120), []
    for name in models.split(","):
        for which in ("with", "without"):
            command = [sys.executable, str(Path(__file__)), "--only", f"{name},{which}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    table = Table("model", "proof", "CPU s of proof", "of steps", "peak GiB", "losses")
    for each in runs:
        steps = " ".join(f"{value:.1f}" for value in each["cpu_seconds_of_steps"])
        peak = f"{each['peak_bytes_after_first_step'] / 2**30:.2f}"
        losses = " ".join(f"{value:.5f}" for value in each["losses"])
        table.add_row(each["model"], str(each["verify"]), f"{each['cpu_seconds_of_proof']:.2f}", steps, peak, losses)
    console.print(table)
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    same = [first["losses"] == second["losses"] for first, second in pairs]
    record = {
        "date": date.today().isoformat(),
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "settings": {"models": MODELS},
        "summary": {"losses equal": same},
        "runs": runs,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"packing_verify_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path.name}")
    if not all(same):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
