"""What a save costs the training loop, waited for and in the background (``async_save=True``).

    python benchmarks/saving.py                      # a Llama of 46 M parameters, plain and ZeRO 2 on two processes
    python benchmarks/saving.py --layers 1 --repeats 1

A Llama is trained by ``ullage.training.Trainer`` with a checkpoint after every ``--every`` steps, both ways in turn,
each run in fresh processes. The *stall* of a save is the time that the loop spends in it: all of ``_save_checkpoint``,
and what it waits for the save before. The first save of a run is told apart: it also gets the memory of the copy. So
that nothing is hidden, the whole runs are compared too: *slowdown* is the wall time of the steps between two saves
over that of a run without saves, since the writer takes processor time from steps on a machine without idle cores. The
ratio counts, not the seconds: both ways write the same bytes to the same disk minutes apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machine import processor

HIDDEN = 768
WAYS = ("none", "waited", "async")
#: Processes, and the stage of ZeRO, 0 without.
CASES = {"plain": (1, 0), "zero2": (2, 2)}


def make_trainer(folder: Path, layers: int, steps: int, way: str, every: int, stage: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ullage.training import RaggedCollator, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=4096, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    options: dict[str, Any] = {"save_strategy": "no"} if way == "none" else {"save_steps": every, "save_total_limit": 1}
    if stage:
        auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        options["deepspeed"] = {
            "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, **dict.fromkeys(auto, "auto"),
        }  # fmt: skip
    arguments = TrainingArguments(
        str(folder), max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=steps,
        per_device_train_batch_size=1, async_save=way == "async", **options,
    )  # fmt: skip
    samples = [{"input_ids": [3 + (i * j) % 4000 for j in range(24)]} for i in range(4 * steps)]
    collator: Any = RaggedCollator(labels_from="input_ids")
    torch.manual_seed(0)
    return Trainer(LlamaForCausalLM(config), arguments, data_collator=collator, train_dataset=samples)


def run(folder: Path, layers: int, saves: int, way: str, every: int, stage: int) -> dict[str, Any]:
    """Seconds of each save, of the wait at the end, and of the steps after the first save."""
    from ullage.training.saving.checkpoints import WholeCheckpointMixin

    stalls: list[tuple[float, float]] = []
    save = WholeCheckpointMixin._save_checkpoint

    def timed(self: Any, *args: Any) -> None:
        began = time.perf_counter()
        save(self, *args)
        stalls.append((began, time.perf_counter()))

    WholeCheckpointMixin._save_checkpoint = timed
    steps = every * (saves + 1)  # the last save is waited for at the end, which is no stall between steps
    trainer = make_trainer(folder, layers, steps, way, every, stage)
    marks: list[float] = []
    step = trainer.training_step

    def marked(*args: Any, **kwargs: Any) -> Any:
        marks.append(time.perf_counter())
        return step(*args, **kwargs)

    trainer.training_step = marked
    trainer.train()
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
    # From the step after the first interval to the last one: each interval but the first has one save before it.
    wall = marks[-1] - marks[every]
    return {"stalls": [end - began for began, end in stalls][:saves], "wall": wall, "parameters": parameters}


def in_processes(folder: Path, processes: int, *arguments: object) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, __file__, "--part", str(folder), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-6000:])
    return json.loads((folder / "result.json").read_text())


def measure(work: Path, name: str, processes: int, stage: int, args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    num_bytes = 0
    for repeat in range(args.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=work) as place:
                folder = Path(place)
                runs[way].append(in_processes(folder, processes, args.layers, args.saves, way, args.every, stage))
                if way == "waited":
                    files = [path for path in folder.glob("checkpoint-*/**/*") if path.is_file()]
                    num_bytes = sum(path.stat().st_size for path in files)
            print(f"{name}, {way}, {repeat + 1} of {args.repeats}: {runs[way][-1]}", flush=True)
    stall = {way: statistics.median(s for each in runs[way] for s in each["stalls"][1:]) for way in WAYS[1:]}
    first = {way: statistics.median(each["stalls"][0] for each in runs[way]) for way in WAYS[1:]}
    wall = {way: statistics.median(each["wall"] for each in runs[way]) for way in WAYS}
    return {
        "name": name,
        "parameters": runs["none"][0]["parameters"],
        "num_bytes": num_bytes,
        "median_stall": stall,
        "median_first_stall": first,
        "ratio": stall["async"] / stall["waited"],
        "ratio_first": first["async"] / first["waited"],
        "slowdown": {way: wall[way] / wall["none"] for way in WAYS[1:]},
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5, help="of the model, 7.7 M parameters each beside 6.3 M")
    parser.add_argument("--saves", type=int, default=3, help="saves that count in each run")
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--case", choices=CASES, help="one of them; default: all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        cases = [args.case] if args.case else list(CASES)
        found = [measure(Path(work), case, *CASES[case], args) for case in cases]
    for case in found:
        stall = case["median_stall"]
        print(
            f"{case['name']}: {case['parameters'] / 1e6:.0f} M parameters, {case['num_bytes'] / 1e9:.2f} GB: waited "
            f"{stall['waited']:.3f} s a save, async {stall['async']:.3f} s: {case['ratio']:.1%} "
            f"(first {case['ratio_first']:.1%}); run {case['slowdown']['waited']:.2f} and "
            f"{case['slowdown']['async']:.2f} times one without saves"
        )
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "machine": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "every": args.every,
        "results": found,
    }
    path = args.results / f"saving-{args.case or 'all'}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        place, numbers = Path(sys.argv[2]), sys.argv[3:]
        layers, saves, way, every, stage = numbers
        result = run(place, int(layers), int(saves), way, int(every), int(stage))
        if os.environ.get("RANK", "0") == "0":
            (place / "result.json").write_text(json.dumps(result))
    else:
        main()
