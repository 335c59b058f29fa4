"""What comparing a checkpoint with its manifest adds to loading it, and what writing the manifest adds to saving.

    python benchmarks/manifest.py --gigabytes 2

A Llama of the given size of checkpoint (fp32 weights and AdamW's two moments) is saved by ``ullage.training.Trainer``
after one step. Loading is what that Trainer does on resuming: weights into the model, moments into the optimizer. Each
measurement is a fresh process whose start is left out; with and without the check take turns, with cold caches
(``posix_fadvise(DONTNEED)`` on every file) and with warm ones, and the medians are compared. The ratio is the time that
the check adds, over the time of loading without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HIDDEN = 1024


def make_trainer(folder: Path, layers: int, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from ullage.training import RaggedCollator, Trainer

    config = LlamaConfig(
        vocab_size=4096, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    arguments = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, **{"save_steps": 1, **options}
    )
    samples = [{"input_ids": list(range(3, 12))}] * 8
    collator: Any = RaggedCollator(labels_from="input_ids")
    return Trainer(LlamaForCausalLM(config), arguments, data_collator=collator, train_dataset=samples)


def layers_of(num_bytes: float) -> int:
    """Layers of a model of which weights and moments are about ``num_bytes``; one has 4·h² and 12·h² weights."""
    return max(1, round(num_bytes / 12 / (16 * HIDDEN**2)))


def chill(folder: Path) -> int:
    """Drops the files of ``folder`` from the cache; how many bytes they are."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(handle).st_size
            os.close(handle)
    return total


def load(folder: Path, layers: int, cold: bool, checked: bool) -> dict[str, float]:
    """Seconds of the check, and of all of loading."""
    from ullage.training.saving.damage import examine

    trainer = make_trainer(folder.parent, layers)
    trainer.create_optimizer_and_scheduler(1)
    chill(folder)
    if not cold:
        for path in folder.rglob("*"):
            if path.is_file():
                path.read_bytes()
    began = time.perf_counter()
    if checked:
        finding = examine(folder)
        assert finding.has_manifest
        assert not finding.damage
    after = time.perf_counter()
    trainer._load_from_checkpoint(str(folder))
    trainer._load_optimizer_and_scheduler(str(folder))
    return {"check": after - began, "seconds": time.perf_counter() - began}


def save(folder: Path, layers: int) -> dict[str, float]:
    """Seconds of a save after one step, and of the sums within it."""
    from ullage.training.saving import checkpoints as saving
    from ullage.training.saving import staging

    spent: dict[str, float] = {}
    mixin = saving.WholeCheckpointMixin
    summed, whole = staging.sum_share, mixin._save_checkpoint

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = time.perf_counter() - began

        return call

    staging.sum_share = timed("sums", summed)
    mixin._save_checkpoint = lambda self, *args: timed("seconds", whole)(self, *args)
    make_trainer(folder, layers).train()
    return spent


def in_a_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(work: Path, layers: int, repeats: int) -> dict[str, Any]:
    saved = in_a_process("save", work, layers)
    folder = work / "checkpoint-1"
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for cold in (1, 0):
            for checked in (0, 1):
                found = in_a_process("load", folder, layers, cold, checked)
                where = f"{'cold' if cold else 'warm'}, {'checked' if checked else 'unchecked'}"
                times.setdefault(where, []).append(found["seconds"])
    median = {where: statistics.median(found) for where, found in times.items()}
    ratios = {cache: median[f"{cache}, checked"] / median[f"{cache}, unchecked"] - 1 for cache in ("cold", "warm")}
    return {"num_bytes": chill(folder), "save": saved, "runs": times, "median": median, "added": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), layers_of(args.gigabytes * 1e9), args.repeats)
    print(f"a checkpoint of {found['num_bytes'] / 1e9:.2f} GB")
    for cache in ("cold", "warm"):
        without, with_ = (found["median"][f"{cache}, {kind}"] for kind in ("unchecked", "checked"))
        print(f"{cache} caches: load {without:.2f} s, checked {with_:.2f} s: {found['added'][cache]:+.1%}")
    sums, seconds = found["save"]["sums"], found["save"]["seconds"]
    print(f"save {seconds:.2f} s, of which the sums are {sums:.2f} s: {sums / seconds:.1%}")
    now = datetime.now(UTC)
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "torch": torch.__version__}
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / f"manifest-{now:%Y-%m-%d}.json"
    file.write_text(json.dumps({"date": now.isoformat(), "machine": machine, **found}, indent=1) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        part, where, *numbers = sys.argv[2:]
        done = {"save": save, "load": load}[part](Path(where), *map(int, numbers))  # type: ignore[operator]
        print(json.dumps(done))
    else:
        main()
