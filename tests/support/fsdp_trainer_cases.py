"""What each rank does in the tests of a sharded model under our Trainer.

Jobs are those of ``fsdp_cases``. A plain model trains on one process, a sharded one on any number, on the same samples,
so their losses can be compared, and each goes on from the other's checkpoint.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

from tests.support import fsdp_cases
from tests.support.rank_memory import local_bytes
from ullage.engines import fsdp
from ullage.training import RaggedCollator, Trainer, TrainingArguments

VOCAB, SEQUENCES = 61, 12
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def make_model(kind="llama", **options):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **HEADS, "num_labels": 3, "classifier_dropout": 0.0, **options})
    if kind == "lora":
        made = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, parameter in made.named_parameters():  # which begins at zero
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return made
    if kind == "sequence":
        return LlamaForSequenceClassification(config)
    if kind == "token":
        return LlamaForTokenClassification(config)
    return LlamaForCausalLM(config)


def make_samples(kind="llama", count=48):
    draw = np.random.default_rng(5)
    ids = [draw.integers(3, VOCAB, n).tolist() for n in draw.integers(1, 40, count)]
    if kind == "sequence":
        return [{"input_ids": one, "label": sum(one) % 3} for one in ids]
    if kind == "token":
        return [{"input_ids": one, "labels": [-100 if i % 5 == 0 else i % 3 for i in one]} for one in ids]
    if kind == "answers":
        return [{"input_ids": one, "labels": [-100] * (len(one) // 2) + one[len(one) // 2 :]} for one in ids]
    return [{"input_ids": one, "labels": list(one)} for one in ids]


def arguments(folder, batch, **more):
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": batch, "max_steps": 10, "logging_steps": 1, "save_steps": 5, "learning_rate": 1e-2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "packing_capacity": 128, "warmup_steps": 2, "save_strategy": "steps", "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "cosine",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**fixed, **more})


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


def engine(rank, world, folder, kind="llama", mesh=(1, 1, 1), resume=None, model=None, replicate=1, **more):
    """Our Trainer of a model that is sharded, on any layout."""
    fsdp_cases.as_torchrun(rank, world)
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    made = fsdp.parallelize(make_model(kind, **(model or {})), topology, dp_replicate=replicate)
    held_out = make_samples(kind, 10) if "eval_strategy" in more else None
    trainer = Trainer(
        made, arguments(folder, SEQUENCES // mesh[0], **more), data_collator=RaggedCollator(),
        train_dataset=make_samples(kind), eval_dataset=held_out,
        compute_metrics=metrics if held_out and mesh[1] == 1 else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    found = {"losses": losses(trainer), "norms": losses(trainer, "grad_norm")}
    if held_out is not None:
        found |= {"evaluated": [losses(trainer, f"eval_{name}") for name in ("loss", "accuracy", "samples")]}
        found |= {"best": str(trainer.state.best_model_checkpoint), "now": trainer.evaluate()["eval_loss"]}
    held = local_bytes(trainer.model, trainer.optimizer)
    trainer.save_model()
    return {**found, "parameters": held.parameters, "moments": held.moments}


def metrics(prediction):
    """Which class is the largest, of sequences or of the tokens that have one, and the number of samples."""
    labels = prediction.label_ids
    right = prediction.predictions.argmax(-1) == labels
    return {"accuracy": float(right[labels != -100].mean()), "samples": len(labels)}


def build(rank, world, folder, mesh=(1, 1, 1), how="full", model=None, replicate=1, offload=False):
    """A model made in one of the ways, its losses, a digest of every tensor, and the bytes that this rank held of it."""
    fsdp_cases.as_torchrun(rank, world)
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    torch.manual_seed(7)
    with torch.device("cpu" if how == "full" or (how == "first" and rank == 0) else "meta"):
        made = LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **(model or {})}))
    before = sum(p.numel() * p.element_size() for p in made.parameters() if not p.is_meta)
    given: dict[str, Any] = {"weights": folder} if how == "weights" else {}
    made = fsdp.parallelize(made, topology, dp_replicate=replicate, cpu_offload=offload, **given)
    after = local_bytes(made).parameters
    if how == "full" and world == 1:
        made.save_pretrained(folder)
    whole = {**fsdp_cases.whole_state(made, torch.optim.SGD(made.parameters())), **dict(made.named_buffers())}
    bits = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(whole.items())))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    trainer = fsdp_cases.make_trainer(made, topology, optimizer, max_steps=2)
    trainer.train()
    return {"losses": losses(trainer), "bits": bits.hexdigest(), "count": len(whole), "before": before, "after": after}
