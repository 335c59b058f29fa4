"""TRL's SFT and DPO on conversations with images, packed or as TRL pads them; run by torchrun.

``trl_pictures.py FOLDER '[[trainer, kind of model, options], ...]'``; options are those of the configuration,
``completions``: a prompt and a completion in each row of SFT, ``rows``: "mixed" without the step of text alone.
"""

import os

import datasets
import peft
import trl
from datasets import Dataset

from tests.support import picture_parts
from tests.support.small_runs import STEADY, packed_steps, quiet, serve
from tests.support.trl_cases import numbers
from ullage.training import trl as packed_trl

datasets.disable_progress_bars()
_ROLES = {"human": "user", "gpt": "assistant"}


def turns(row):
    """The messages of a row, whose images TRL puts before the first of the user's."""
    return [
        {"role": _ROLES[each["from"]], "content": each["value"].replace("<image>\n", "")}
        for each in row["conversations"]
    ]


def data(name, completions=False, rows=None):
    """Conversations in TRL's form, some of them without an image."""
    made = []
    for i, row in enumerate(picture_parts.ROWS[: 8 if rows == "mixed" else None]):
        messages, images = turns(row), row.get("images", [])
        if name == "DPO":
            rejected = [{"role": "assistant", "content": "no " * (1 + i % 4)}]
            spoken = {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}
        elif completions:
            spoken = {"prompt": messages[:-1], "completion": messages[-1:]}
        else:
            spoken = {"messages": messages}
        made.append({"images": images, **spoken})
    return Dataset.from_list(made)


def build(name, kind, folder, *, capacity=None, lora=False, completions=False, rows=None, **options):
    """A trainer ("SFT" or "DPO"), TRL's own without a ``capacity``."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    options = {
        **STEADY, "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 12, "max_steps": 5,
        "bf16": False, "activation_checkpointing": False, **options,
    }  # fmt: skip
    if capacity is not None:
        options["packing_capacity"] = capacity
    source, more = packed_trl if capacity is not None else trl, {}
    if lora:
        targets = {"target_modules": r".*(q_proj|qkv)", "init_lora_weights": False}
        more["peft_config"] = peft.LoraConfig(r=2, **targets)
    elif name == "DPO":
        more["ref_model"] = picture_parts.model(kind)
        for parameter in more["ref_model"].parameters():
            parameter.data *= 1.05
    rows = data(name, completions, rows)
    return getattr(source, f"{name}Trainer")(
        model=picture_parts.model(kind),
        args=quiet(folder, getattr(source, f"{name}Config"), **options),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=picture_parts.processor(kind, marked=True),
        **more,
    )


def run(name, kind, folder, **options):
    """What each step and the evaluation logged, and the sequences and kinds of items of each microbatch."""
    trainer = build(name, kind, folder, **options)
    steps = packed_steps(trainer) if "capacity" in options else []
    trainer.train()
    entries = [numbers(entry) for entry in trainer.state.log_history if "loss" in entry]
    return {
        "logged": entries,
        "eval": numbers(trainer.evaluate()),
        "sequences": [[len(each) for each in step.microbatches] for step in steps],
        "items": [[len(each.items) for each in step.microbatches] for step in steps],
    }


if __name__ == "__main__":
    serve(lambda folder, name, kind, **options: run(name, kind, folder, **options))
