"""Packed training on one process or several; run by torchrun. ``packing_script.py FOLDER '[[model, stage, options], ...]'``."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer, TrainingArguments

VOCAB = 61
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
#: Of every four sequences three fill most of a microbatch: two ranks get two microbatches, one of the four empty.
LENGTHS = [100, 99, 97, 20, 88, 20, 100, 95, 90, 19, 99, 98, 96, 100, 21, 93, 97, 95, 99, 22]


def make_model(name):
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES, **SPECIAL))
    if name == "mixtral":
        experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
        return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, **experts, **SIZES, **SPECIAL))
    return RecurrentForCausalLM(RecurrentConfig(vocab_size=VOCAB, hidden_size=32, **SPECIAL))


def make_samples(lengths=LENGTHS):
    return [{"input_ids": [(i + k * (i % 7 + 1)) % VOCAB for k in range(n)]} for i, n in enumerate(lengths)]


def zero(stage):
    sharding = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    return {
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **sizes,
    }


def make_trainer(name, folder, stage=0, samples=None, **options):
    world = int(os.environ.get("WORLD_SIZE", 1))
    options = {
        "packing_capacity": 128, "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 3,
        "max_steps": 5, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch",
        "train_sampling_strategy": "sequential", "deepspeed": zero(stage) if stage else None, **options,
    }  # fmt: skip
    samples = make_samples() if samples is None else samples
    return Trainer(
        make_model(name),
        TrainingArguments(folder, **options),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=samples,
        eval_dataset=make_samples(LENGTHS[:7]),
    )


def run(name, folder, stage=0, **options):
    trainer = make_trainer(name, folder, stage, **options)
    real, planned, pack = [], [], trainer._pack

    def counting(batch):
        packed = pack(batch)
        real.append(sum(len(microbatch) > 0 for microbatch in packed.microbatches))
        planned.append(packed.plan.num_microbatches)
        return packed

    trainer._pack = counting
    trainer.train()
    metrics = trainer.evaluate()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "eval_loss": metrics["eval_loss"],
        "real": real,
        "planned": planned,
        "watched": sorted(logged[0]),
        "flos": trainer.state.total_flos,
    }


def main():
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    results = [run(name, folder, stage, **options) for name, stage, options in cases]
    with open(os.path.join(folder, f"results{os.environ.get('RANK', 0)}.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
