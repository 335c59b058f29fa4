"""Training on conversations with images, padded or packed, on one process or several; run by torchrun.

``picture_script.py FOLDER '[[kind, options], ...]'``; options are those of the arguments, and ``stage`` of ZeRO,
``trains``: what of the model is trained.
"""

import json
import os
import sys

import peft
import torch
import transformers as hf
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.support import picture_parts
from tests.support.packing_script import leave, zero
from tests.support.small_runs import packed_steps
from ullage.core.columns import fill_value, is_media
from ullage.datasets.picture_chats import PictureEncoder
from ullage.training import RaggedCollator, Trainer, TrainingArguments


class PaddedCollator:
    """What transformers' own Trainer takes: rows padded by hand, images end to end."""

    def __init__(self, processor):
        self.encoder = PictureEncoder(processor)

    def __call__(self, rows):
        samples = [self.encoder.encode(row, "row") for row in rows]
        width = max(len(sample["input_ids"]) for sample in samples)
        fields = {"attention_mask": [torch.ones_like(sample["input_ids"]) for sample in samples]}
        for name in dict.fromkeys(name for sample in samples for name in sample):
            fields[name] = [sample[name] for sample in samples if name in sample]
        return {
            name: torch.cat(values)
            if is_media(name)
            else torch.stack(
                [
                    torch.cat([value, value.new_full((width - len(value),), fill_value(name, value.dtype))])
                    for value in values
                ]
            )
            for name, values in fields.items()
        }


def tower_of(model):
    """The names of the parameters of the part that sees."""
    return [name for name, _ in model.named_parameters() if "visual" in name or "vision_tower" in name]


def prepared(model, trains):
    """The model with a part of it trained: "all", "text" (a frozen tower), or "adapters" in its layers."""
    if trains == "text":
        for name in tower_of(model):
            model.get_parameter(name).requires_grad = False
    if trains.startswith("adapters"):
        where = {"adapters of text": r".*language_model.*q_proj", "adapters of the tower": r".*(vis).*(qkv|q_proj)"}
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=where[trains], init_lora_weights=False))
    return model


def make_trainer(kind, folder, *, packed=True, stage=0, trains="all", rows=None, **options):
    world = int(os.environ.get("WORLD_SIZE", 1))
    options = {
        "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 12, "max_steps": 5,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch", "train_sampling_strategy": "sequential",
        "ddp_timeout": 120, "deepspeed": zero(stage) if stage else None, "max_grad_norm": 1.0, **options,
    }  # fmt: skip
    unset_hf_deepspeed_config()  # of the case before
    model = prepared(picture_parts.model(kind), trains)  # before the arguments: under ZeRO 3 others would be drawn
    # ZeRO updates what has no gradient as if it were zero: then no step is of text alone.
    processor, rows = picture_parts.processor(kind), picture_parts.ROWS[: 8 if rows == "mixed" else None]
    if packed:
        collator, arguments = RaggedCollator(processor=processor), {"packing_capacity": 96, **options}
        chosen, made = Trainer, TrainingArguments(str(folder), **arguments)
    else:
        collator, chosen = PaddedCollator(processor), hf.Trainer
        made = hf.TrainingArguments(str(folder), remove_unused_columns=False, **options)
    return chosen(model, made, data_collator=collator, train_dataset=rows, eval_dataset=rows)


def run(kind, folder, *, resume=None, **options):
    trainer = make_trainer(kind, folder, **options)
    steps = packed_steps(trainer) if isinstance(trainer, Trainer) else []
    trainer.train(resume_from_checkpoint=resume)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in entries],
        "norms": [float(entry["grad_norm"]) for entry in entries],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "images": [len(microbatch.items) for step in steps for microbatch in step.microbatches],
    }


if __name__ == "__main__":
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    leave(folder, [run(kind, folder, **options) for kind, options in cases])
