"""Training under ``--fsdp``, packed, in float64; run by torchrun: ``fsdp_script.py FOLDER '{case: options}'``.

``kind``: one of ``MAKERS``. ``environ``: variables for this case. ``is_patched``: whether Trainers shard on CPUs. The other
options are those of the arguments.
"""

import os

import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, TrainerCallback
from transformers import Trainer as TheirTrainer

from tests.support import packing_script, trl_cases
from tests.support.small_runs import local_bytes, logged, quiet, serve
from ullage.core.errors import UllageError
from ullage.core.replacing import replaced
from ullage.training import RaggedCollator, Trainer

FSDP = {"fsdp": True}
#: What `accelerate launch --use_fsdp --fsdp_version 2` sets.
ENVIRON = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
#: Divisible by two and four, so that a rank holds exactly a half or a quarter.
PARTED = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
STEPS = 5


def arguments(folder, **options):
    world = int(os.environ.get("WORLD_SIZE", 1))
    if "replicas" in options:
        replicas = options.pop("replicas")
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=world // replicas)
    options = {
        "packing_capacity": 128, "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 3,
        "max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1, "optim": "adamw_torch", "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential", **options,
    }  # fmt: skip
    return quiet(folder, **options)


def llama(folder, model=None, **options):
    samples = packing_script.make_samples()
    return Trainer(
        (packing_script.make_model("llama", **PARTED) if model is None else model).double(),
        arguments(folder, **options),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=samples,
        eval_dataset=samples[:7],
    )


def lora(folder, **options):
    model = packing_script.make_model("llama", **PARTED)
    return llama(folder, get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])), **options)


def classifier(folder, per_token=True, **options):
    """A class per token or sequence, and a class of layers that holds the embeddings (BertEmbeddings)."""
    torch.manual_seed(0)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(num_labels=3, **quiet, **{**packing_script.SIZES, **PARTED, "num_hidden_layers": 1})
    kind = BertForTokenClassification if per_token else BertForSequenceClassification
    samples = [
        {**s, "labels": [token % 3 for token in s["input_ids"]] if per_token else i % 3}
        for i, s in enumerate(packing_script.make_samples())
    ]
    return Trainer(
        kind(config).double(),
        arguments(folder, **options),
        data_collator=RaggedCollator(per_sequence=() if per_token else ["labels"]),
        train_dataset=samples,
        eval_dataset=samples[:7],
    )


def sft(folder, **options):
    return trl_cases.make_sft("llama", folder, packing_capacity=16, packing_plan_strategy="next_fit", **options)


MAKERS = {"llama": llama, "lora": lora, "classifier": classifier, "sft": sft}


class Held(TrainerCallback):
    """Bytes of this rank after each step, and whether the model is sharded."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.found = local_bytes(model, optimizer)


def run(folder, kind="llama", resume=None, first=False, saved=None, environ=(), **options):
    """Losses, norms, bytes and an evaluation.

    ``resume``: of a checkpoint. ``first``: evaluate before training. ``saved``: a folder for the model.
    """
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        trainer = MAKERS[kind](folder, **options)
        held = Held()
        trainer.add_callback(held)
        result = {"first": trainer.evaluate()["eval_loss"] if first else None}
        trainer.train(resume_from_checkpoint=resume)
        losses, norms = zip(*logged(trainer), strict=True)
        if saved is not None:
            trainer.save_model(saved)
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
            result["sums"] = [float(p.detach().sum()) for p in whole]
        return {
            **result,
            "losses": list(losses),
            "norms": [float(norm) for norm in norms],
            "eval_loss": trainer.evaluate()["eval_loss"],
            "held": held.found,
            "sharded": isinstance(trainer.model, FSDPModule),
            "kept": sorted(name for name in ENVIRON if name in os.environ),
        }
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def run_case(folder, case, is_patched=True, **options):
    """``run`` in a folder of its own."""
    name = "create_accelerator_and_postprocess"
    make = getattr(TheirTrainer, name)
    with replaced(TheirTrainer, name, make if is_patched else make.__wrapped__):
        return run(f"{folder}/{case}", **options)


if __name__ == "__main__":
    serve(run_case, UllageError)
