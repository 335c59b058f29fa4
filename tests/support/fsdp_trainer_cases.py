"""What each rank does in the tests of the FSDP engine's Trainer; ``python -m tests.support.fsdp_trainer_cases JOBS``.

Jobs are those of ``fsdp_cases``. A plain Trainer runs on one process, the engine's on any number; both train the same
model on the same samples, so their losses can be compared, and each goes on from the other's checkpoint.
"""

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import fsdp_cases
from ullage.engines import fsdp
from ullage.training import RaggedCollator, Trainer, TrainingArguments

VOCAB, SEQUENCES = 61, 12
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def make_model(kind="llama", **options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **options}))


def make_samples(kind="llama", count=48):
    draw = np.random.default_rng(5)
    ids = [draw.integers(3, VOCAB, n).tolist() for n in draw.integers(1, 40, count)]
    return [{"input_ids": one, "labels": list(one)} for one in ids]


def arguments(folder, batch, **more):
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": batch, "max_steps": 10, "logging_steps": 1, "save_steps": 5, "learning_rate": 1e-2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "packing_capacity": 128, "warmup_steps": 2, "save_strategy": "steps", "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "cosine",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**fixed, **more})


def as_torchrun(rank, world):
    """Tell accelerate, which the parent of a forked process may have asked already, of this process's world."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.update({name: str(value) for name, value in told.items()} if world > 1 else {})
    AcceleratorState._reset_state(reset_partial_state=True)


def losses(trainer, name="loss"):
    return [row[name] for row in trainer.state.log_history if name in row]


def plain(rank, world, folder, kind="llama", resume=None, model=None, **more):
    """Our Trainer, or transformers' on padded rows, on one process."""
    made = make_model(kind, **(model or {}))
    trainer = Trainer(
        made, arguments(folder, SEQUENCES, **more), data_collator=RaggedCollator(), train_dataset=make_samples(kind)
    )
    trainer.train(resume_from_checkpoint=resume)
    return {"losses": losses(trainer), "norms": losses(trainer, "grad_norm")}


def engine(rank, world, folder, kind="llama", mesh=(1, 1, 1), resume=None, model=None, **more):
    """The engine's Trainer on any layout."""
    as_torchrun(rank, world)
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    made = make_model(kind, **(model or {}))
    trainer = fsdp.Trainer(
        made, arguments(folder, SEQUENCES // mesh[0], **more), train_dataset=make_samples(kind), topology=topology
    )
    trainer.train(resume_from_checkpoint=resume)
    return {"losses": losses(trainer), "norms": losses(trainer, "grad_norm")}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    fsdp_cases.run_jobs(globals(), json.loads(sys.argv[1]))
