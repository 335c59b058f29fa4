"""Tiny models, data and trainers of TRL's for tests; run by torchrun: ``trl_cases.py FOLDER '{case: [model, options]}'``.

Options are those of the configuration, and ``lengths``: words of each text, by rank where it is a dict.
"""

import os
from dataclasses import dataclass

import datasets
import torch
import torch.distributed as dist
import transformers as hf
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

import ullage
from tests.support.packing_script import zero
from tests.support.small_runs import STEADY, packed_steps, quiet, serve
from ullage.training import RaggedTrainerMixin, TrainingArguments

datasets.disable_progress_bars()

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Tokens of each text, the end of the sequence among them: at a capacity of 16, in the order of the data, the second
#: of two ranks has no sequence in the second microbatch of the first step. One token has no label.
LENGTHS = [16, 9, 15, 1, 7, 7, 2, 12, 16, 5, 11, 3]


def tokenizer():
    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(40)]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=own, **special)


def model(kind=hf.LlamaForCausalLM, seed=0, **options):
    torch.manual_seed(seed)
    return kind(hf.LlamaConfig(vocab_size=44, **SIZES, **SPECIAL, **options))


def mixtral():
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    experts["experts_implementation"] = "eager"  # the only one in float64
    return hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=44, num_key_value_heads=2, **experts, **SIZES, **SPECIAL))


def falcon_h1():
    """A hybrid of attention and scans, whose logits are multiplied."""
    torch.manual_seed(0)
    scan = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    more = {"mamba_chunk_size": 8, "head_dim": 8, "num_key_value_heads": 2, "lm_head_multiplier": 0.5}
    return hf.FalconH1ForCausalLM(hf.FalconH1Config(vocab_size=44, **scan, **more, **SIZES, **SPECIAL))


def gemma2():
    """Sliding windows, and caps on attention scores and logits that are low enough to be felt."""
    torch.manual_seed(0)
    caps = {"sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.1}
    more = {"head_dim": 8, "num_key_value_heads": 2, "query_pre_attn_scalar": 8}
    return hf.Gemma2ForCausalLM(
        hf.Gemma2Config(vocab_size=44, **{**SIZES, "num_hidden_layers": 2}, **SPECIAL, **caps, **more)
    )


MODELS = {"llama": model, "mixtral": mixtral, "falcon_h1": falcon_h1, "gemma2": gemma2}


def text(i, words):
    return " ".join(f"w{(i * 7 + k * 3) % 40}" for k in range(words))


def ids(lengths=LENGTHS, labelled=lambda i: True):
    """Tokenized rows of the given lengths; those for which ``labelled`` is false have no label that counts."""
    rows = [[3 + (i * 7 + k * (i % 5 + 1)) % 40 for k in range(n)] for i, n in enumerate(lengths)]
    return Dataset.from_list(
        [{"input_ids": row, "labels": row if labelled(i) else [-100] * len(row)} for i, row in enumerate(rows)]
    )


def make_sft(name, folder, data=None, mixed=True, more=None, stage=0, lora=False, **options):
    """An SFT trainer in float64 on tokenized rows, with the mixin and its arguments or as TRL has it.

    ``stage``: of ZeRO, in float32. ``lora``: train adapters of the attention, and the head.
    """
    import trl

    @dataclass
    class Arguments(trl.SFTConfig, TrainingArguments):
        pass

    class Ragged(RaggedTrainerMixin, trl.SFTTrainer):
        pass

    world = int(os.environ.get("WORLD_SIZE", 1))
    options = {
        **STEADY, "max_steps": 3, "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 12,
        "bf16": False, "activation_checkpointing": False, **options,
    }  # fmt: skip
    if stage:
        options["deepspeed"] = zero(stage)
    if lora:
        targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
        more = {**(more or {}), "peft_config": LoraConfig(r=2, init_lora_weights=False, **targets)}
    data = ids() if data is None else data
    config, kind = (Arguments, Ragged) if mixed else (trl.SFTConfig, trl.SFTTrainer)
    torch.manual_seed(0)
    return kind(
        MODELS[name]().to(torch.float32 if stage else torch.float64),
        quiet(folder, config, **options),
        train_dataset=data,
        eval_dataset=data,
        **{"processing_class": tokenizer(), **(more or {})},
    )


def numbers(entry):
    """What does not depend on the clock, and is not only ours."""
    other = ("runtime", "per_second", "padding_", "preparation", "step_time", "capacity_unused", "imbalance", "flops")
    other += ("plan_seconds", "exchange_seconds", "wait_seconds")
    return {name: value for name, value in entry.items() if not any(word in name for word in other)}


def outcome(trainer):
    """The log of each step, and the metrics of an evaluation."""
    trainer.train()
    logged = [numbers(entry) for entry in trainer.state.log_history if "loss" in entry]
    return logged, numbers(trainer.evaluate())


class Gradients(hf.TrainerCallback):
    """Those of the first step, before they are clipped."""

    def __init__(self):
        self.first = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.first is None:
            self.first = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def by_hand(name, microbatches):
    """Gradients and the experts' loss of a step, each a sum over the microbatches of all ranks, written out.

    The labels' losses are divided by their number in the step; each microbatch's experts' loss, a mean over its tokens,
    is weighed by its share of the step's labels, as the whole of what a microbatch's loss is.
    """
    packed, real = MODELS[name]().double().train(), [each for each in microbatches if len(each)]
    ullage.pack_model(packed)
    rows = [each.to_flattened() for each in real]
    count = over_ranks(sum(int((row["labels"] != -100).sum()) for row in rows))
    whole = 0.0
    for row in rows:
        outputs = packed(**{key: value for key, value in row.items() if key != "labels"})
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[0, :-1], row["labels"][0, 1:], reduction="sum", ignore_index=-100
        )
        experts = outputs.aux_loss * int((row["labels"] != -100).sum()) / count
        whole += float(experts.detach())
        (losses / count + packed.config.router_aux_loss_coef * experts).backward()
    return {
        name: over_ranks(p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in packed.named_parameters()
    }, over_ranks(whole)


def over_ranks(number):
    """The sum over all ranks, of a number or a tensor."""
    tensor = torch.as_tensor(number, dtype=torch.float64).clone()
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor if isinstance(number, torch.Tensor) else tensor.item()


def run(name, folder, own=False, hand=False, **options):
    """Train packed; the logs, the evaluation, and how many sequences each microbatch of each step had on this rank.

    ``own``: the second rank appends a metric that no table has. ``hand``: the first step's gradients against
    :func:`by_hand`, as the largest difference.
    """
    trainer = make_sft(name, folder, **options)
    steps, gradients = packed_steps(trainer), Gradients()
    if hand:
        trainer.add_callback(gradients)
    if own:
        compute = trainer._loss_rule.compute

        def computing(*args):
            if trainer.args.process_index:
                trainer._metrics["train"]["own"].append(float(args[2]["position_ids"].shape[1]))
            return compute(*args)

        trainer._loss_rule.compute = computing
    logged, evaluated = outcome(trainer)
    steps = [step.microbatches for step in steps]
    sequences = [[len(microbatch) for microbatch in step] for step in steps]
    weights = sum(float(parameter.detach().abs().sum()) for parameter in trainer.model.parameters())
    tokens = [[microbatch.numel() for microbatch in step] for step in steps]
    result = {"tokens": tokens, "logged": logged, "evaluated": evaluated, "sequences": sequences, "weights": weights}
    if hand:
        expected, result["experts"] = by_hand(name, steps[0])
        assert expected.keys() == gradients.first.keys()
        result["apart"] = max(float((gradients.first[key] - expected[key]).abs().max()) for key in expected)
        result["largest"] = max(float(gradient.abs().max()) for gradient in expected.values())
    return result


if __name__ == "__main__":
    serve(lambda folder, name, **options: run(name, folder, **options))
