"""Small runs of TRL's preference trainers under the mixin: packed or as TRL pads, alone or as a script per rank."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import LlamaForSequenceClassification

from tests.support.packing_script import zero
from tests.support.small_runs import packed_steps, quiet, serve
from tests.support.trl_cases import model, numbers, text, tokenizer
from ullage.training import RaggedTrainerMixin, TrainingArguments


def words_of(i, most):
    """A spread of lengths: mostly short, a few long."""
    return 1 + (most if i % 7 == 3 else (i * 5) % (most // 3))


def pairs(number, most=20):
    words = [(text(i + 1, words_of(i, most)), text(i + 2, words_of(i + 4, most))) for i in range(number)]
    rows = [
        {"prompt": text(i, 1 + i % 4), "chosen": f" {one}", "rejected": f" {other}"}
        for i, (one, other) in enumerate(words)
    ]
    return Dataset.from_list(rows)


def rewarded(number, most=20):
    sides = ("chosen", "rejected")
    rows = [{side: row["prompt"] + row[side] for side in sides} for row in pairs(number, most)]
    return Dataset.from_list([{**row, "margin": i % 3 / 4} for i, row in enumerate(rows)])


def unpaired(number, most=20):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(number, most)]
    return Dataset.from_list([{**row, "label": i % 3 != 1} for i, row in enumerate(rows)])


def reward(completions, **_):
    """More for words of a certain kind, so that the rollouts of a prompt differ."""
    return [float(sum(ord(letter) for letter in completion) % 7) for completion in completions]


def case(name, number):
    """A trainer of TRL's, its configuration, its data, and the models it needs."""
    import trl

    if name == "DPO":
        data, more = pairs(number), {"model": model(), "ref_model": model(seed=1)}
    elif name == "Reward":
        data, more = rewarded(number), {"model": model(LlamaForSequenceClassification, num_labels=1)}
    elif name == "GRPO":
        data = Dataset.from_list([{"prompt": text(i, 1 + (i * 5) % 9)} for i in range(number)])
        more = {"model": model(), "reward_funcs": reward}
    else:
        data, more = unpaired(number), {"model": model(), "ref_model": model(seed=1)}
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), data, more


def build(name, folder, *, capacity=None, lora=False, stage=0, **options):
    """A trainer of ``name`` ("DPO", "KTO", "Reward" or "GRPO") under the mixin; packed where it has a ``capacity``.

    ``stage``: of ZeRO.
    """
    kind, config, data, more = case(name, 24)
    if lora:
        more["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        more["ref_model"] = None
    if name == "GRPO":
        # Its reference is read from where the model came from.
        place = Path(folder) / f"model{os.environ.get('RANK', 0)}"
        # By hand, because save_pretrained leaves it to the first process.
        more["model"].config.architectures = ["LlamaForCausalLM"]
        more["model"].config.save_pretrained(place)
        save_file(more["model"].state_dict(), place / "model.safetensors", {"format": "pt"})
        more["model"] = type(more["model"]).from_pretrained(place)
        options = {"num_generations": 4, "max_completion_length": 12, "beta": 0.1, "num_iterations": 2, **options}
    world = int(os.environ.get("WORLD_SIZE", 1))
    both = dataclass(type(f"Both{config.__name__}", (config, TrainingArguments), {}))
    mixed = type(f"Ragged{kind.__name__}", (RaggedTrainerMixin, kind), {})
    settings = {
        "max_steps": 3, "per_device_train_batch_size": 12 // world, "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2, "bf16": False, "activation_checkpointing": False, "packing_capacity": capacity,
        "max_grad_norm": 1e9, "deepspeed": zero(stage) if stage else None, **options,
    }  # fmt: skip
    if name != "GRPO":
        settings.setdefault("train_sampling_strategy", "sequential")
    torch.manual_seed(0)
    return mixed(
        args=quiet(folder, both, **settings),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        **more,
    )


def outcome(trainer, *, evaluates=True):
    """What a run logs by step, its evaluation, and the weights after it."""
    steps = packed_steps(trainer) if trainer._packer.options is not None else []
    trainer.train()
    logged = [numbers(entry) for entry in trainer.state.log_history if "loss" in entry]
    weights = sum(float(each.detach().double().square().sum()) for each in trainer.model.parameters())
    return {
        "logged": logged,
        "eval": numbers(trainer.evaluate()) if evaluates else {},
        "weights": math.sqrt(weights),
        "microbatches": [[len(each) for each in step.microbatches] for step in steps],
    }


if __name__ == "__main__":
    serve(lambda folder, name, **options: outcome(build(name, Path(folder, name), **options)))
