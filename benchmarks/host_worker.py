"""A run that is started again and again on whatever ranks there are, and writes down which sequences each step took.

    torchrun ... benchmarks/host_worker.py FOLDER LAYOUT FORM STEPS

Layout: ddp, zero1, zero2, zero3, fsdp2. Form: packed, padded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SAMPLES, BATCH, SAVE_STEPS, WIDTH = 160, 12, 5, 30


def samples() -> list[dict[str, list[int]]]:
    """Sequences of unequal length; the first two tokens are the number of each."""
    found = []
    for number in range(SAMPLES):
        body = [30 + (number * 7 + k * k) % 60 for k in range(number * 13 % 37)]
        found.append({"input_ids": [number // WIDTH, number % WIDTH, *body]})
    return found


def numbers_of(batch: dict[str, Any]) -> list[int]:
    """The sequences that a call of the model has, by their first two tokens."""
    import torch

    ids, places = batch["input_ids"], batch.get("position_ids")
    if places is not None and ids.shape[0] == 1:
        starts = torch.nonzero(places[0] == 0).flatten().tolist()
        edges = [*starts[1:], ids.shape[1]]
        rows = [ids[0, start:stop] for start, stop in zip(starts, edges, strict=True)]
    else:
        rows = [row[mask.bool()] for row, mask in zip(ids, batch["attention_mask"], strict=True)]
    # What a rank without sequences runs has one token.
    return [int(row[0]) * WIDTH + int(row[1]) for row in rows if len(row) > 1]


def main(folder: str, layout: str, form: str, steps: str) -> None:
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

    from tests.support.fsdp_on_cpus import shard_on_cpus
    from ullage.engines import fsdp
    from ullage.ranks import lost
    from ullage.training import RaggedCollator, StopOnSignal, Trainer, TrainingArguments

    torch.set_num_threads(1)
    lost.ABOVE_LONGEST = float(os.environ.get("ABOVE_LONGEST", "30"))
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=96, pad_token_id=0, attn_implementation="ullage", **sizes))
    more: dict[str, Any] = {}
    if layout.startswith("zero") and ranks > 1:
        more["deepspeed"] = {
            "zero_optimization": {"stage": int(layout[-1])},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
        }
    if layout == "fsdp2" and form == "packed":
        model = fsdp.parallelize(model, fsdp.make_topology())
    elif layout == "fsdp2":
        shard_on_cpus()
        more |= {
            "fsdp": "full_shard",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    arguments = TrainingArguments(
        folder,
        packing_capacity=128 if form == "packed" else None,
        packing_global_batch_size=BATCH,
        packing_verify=False,  # which would show the model other sequences first
        per_device_train_batch_size=4,
        max_steps=int(steps),
        save_steps=SAVE_STEPS,
        save_total_limit=3,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    trainer: Any = Trainer(model, arguments, RaggedCollator(labels_from="input_ids"), samples())
    told = Path(folder, f"sequences-{os.environ.get('HOST', 0)}-{rank}.jsonl")
    taken: list[int] = []
    attempt = [time.time()]

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                dist.broadcast_object_list(attempt, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            line = {"attempt": attempt[0], "ranks": ranks, "rank": rank, "step": state.global_step, "sequences": taken}
            with contextlib.suppress(OSError), told.open("a") as file:
                file.write(json.dumps(line) + "\n")
            taken.clear()
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))

    model.register_forward_pre_hook(lambda module, args, kwargs: taken.extend(numbers_of(kwargs)), with_kwargs=True)
    for callback in (Steps(),):
        trainer.add_callback(callback)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with StopOnSignal(trainer) as stop:  # torchrun's, when a host comes back
        trainer.train(resume_from_checkpoint="auto")
    sys.exit(stop.exit_status)


if __name__ == "__main__":
    main(*sys.argv[1:])
