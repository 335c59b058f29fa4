"""Small models, data and settings of a Trainer and of TRL's trainers, by public names only.

A case is the name of what trains, and settings: those of its arguments, and ``model``, ``data``, ``lora``,
``collator``, ``resume`` (stop after so many steps, and go on in a new Trainer), ``worlds`` (numbers of processes;
else 1 and 2).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 44, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
#: Of every four sequences one fills most of a microbatch; one has a single token.
LENGTHS = [30, 9, 25, 1, 7, 17, 2, 12, 31, 5, 11, 3, 28, 14, 6, 19]
PACKED = {"packing_capacity": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, padded": ("Trainer", {}),
    "llama, packed": ("Trainer", PACKED),
    "llama, packed, next_fit": ("Trainer", {**PACKED, "packing_plan_strategy": "next_fit"}),
    "llama, packed, sequences weigh alike": ("Trainer", {**PACKED, "packing_loss_weighting": "sequence"}),
    "llama, packed, weights of a field": (
        "Trainer",
        {**PACKED, "packing_loss_weighting": "weight", "data": "weighted"},
    ),
    "llama, packed, truncated": ("Trainer", {"packing_capacity": 16, "packing_oversize": "truncate"}),
    "llama, packed, dropped": ("Trainer", {"packing_capacity": 16, "packing_oversize": "drop"}),
    "llama, packed, head whole": ("Trainer", {**PACKED, "packing_chunked_loss": False}),
    "llama, padded, accumulated": ("Trainer", {"gradient_accumulation_steps": 2}),
    "llama, packed, clipped": ("Trainer", {**PACKED, "max_grad_norm": 0.1}),
    "llama, packed, smoothed labels": ("Trainer", {**PACKED, "label_smoothing_factor": 0.1}),
    "llama, packed, recomputed": ("Trainer", {**PACKED, "activation_checkpointing": True}),
    "llama, packed, bf16": ("Trainer", {**PACKED, "bf16": True}),
    "llama, packed, labels masked": ("Trainer", {**PACKED, "data": "masked"}),
    "llama, packed, random order": ("Trainer", {**PACKED, "train_sampling_strategy": "random"}),
    "llama, packed, stream": ("Trainer", {**PACKED, "data": "stream"}),
    "llama, packed, resumed": ("Trainer", {**PACKED, "resume": 3}),
    "llama, packed, saved in the background, resumed": ("Trainer", {**PACKED, "resume": 3, "async_save": True}),
    "llama, packed, evaluated": ("Trainer", {**PACKED, "eval_strategy": "steps", "eval_steps": 4}),
    "llama, packed, ZeRO 1": ("Trainer", {**PACKED, "zero": 1}),
    "llama, packed, ZeRO 2": ("Trainer", {**PACKED, "zero": 2}),
    "llama, packed, ZeRO 2, reduced at once": ("Trainer", {**PACKED, "zero": 2, "packing_coalesce_gradients": False}),
    "llama, packed, ZeRO 3": ("Trainer", {**PACKED, "zero": 3}),
    "gemma2, packed": ("Trainer", {**PACKED, "model": "gemma2"}),
    "mixtral, packed": ("Trainer", {**PACKED, "model": "mixtral"}),
    "qwen3_next, packed": ("Trainer", {**PACKED, "model": "qwen3_next"}),
    "bert, tokens, packed": ("Trainer", {**PACKED, "model": "bert"}),
    "lstm, padded": ("Trainer", {"model": "lstm"}),
    "lstm, packed sequences": ("Trainer", {"model": "lstm", "collator": "packed"}),
    "lstm, packed": ("Trainer", {**PACKED, "model": "lstm"}),
    "mingru, packed": ("Trainer", {**PACKED, "model": "mingru"}),
    "gru, encoder-decoder": ("Seq2SeqTrainer", {"model": "seq2seq", "data": "pairs"}),
    "SFT, padded": ("SFT", {}),
    "SFT, packed": ("SFT", PACKED),
    "SFT, packed, LoRA": ("SFT", {**PACKED, "lora": True}),
    "DPO, packed": ("DPO", {"packing_capacity": 64}),
    "DPO, padded": ("DPO", {}),
    "KTO, packed": ("KTO", {"packing_capacity": 64}),
    "Reward, packed": ("Reward", {"packing_capacity": 64}),
    "GRPO, packed": ("GRPO", {"packing_capacity": 64}),
}


def make_model(name: str) -> Any:
    """A model of some thousand weights, from one seed."""
    import torch
    import transformers as hf

    import ullage.models as ours

    torch.manual_seed(0)
    if name == "gemma2":
        caps = {"sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.1, "head_dim": 8}
        config = hf.Gemma2Config(num_key_value_heads=2, query_pre_attn_scalar=8, **caps, **SIZES, **SPECIAL)
        return hf.Gemma2ForCausalLM(config)
    if name == "mixtral":
        experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_key_value_heads=2, **experts, **SIZES, **SPECIAL))
    if name == "qwen3_next":
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        more = {"linear_value_head_dim": 8, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
        more |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_key_value_heads": 2}
        layers = {"layer_types": ["linear_attention", "full_attention"]}
        return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**linear, **more, **layers, **SIZES, **SPECIAL))
    if name == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
        return hf.BertForTokenClassification(hf.BertConfig(num_labels=44, **quiet, **SIZES))
    if name == "seq2seq":
        config = ours.RecurrentEncoderDecoderConfig(cell="gru", vocab_size=44, hidden_size=16, **SPECIAL)
        return ours.RecurrentEncoderDecoder(config)
    if name in ("lstm", "gru", "mingru", "minlstm"):
        return ours.RecurrentForCausalLM(ours.RecurrentConfig(cell=name, vocab_size=44, hidden_size=16, **SPECIAL))
    kind = hf.LlamaForSequenceClassification if name == "reward" else hf.LlamaForCausalLM
    more = {"num_labels": 1} if name == "reward" else {}
    return kind(hf.LlamaConfig(num_key_value_heads=2, **more, **SIZES, **SPECIAL))


def rows(number: int = 64) -> list[dict[str, Any]]:
    """Tokenized samples, each its own labels."""
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(number)]
    ids = [[3 + (i * 7 + k * (i % 5 + 1)) % 40 for k in range(n)] for i, n in enumerate(lengths)]
    return [{"input_ids": each, "labels": list(each)} for each in ids]


def make_data(name: str) -> Any:
    """The samples of ``data=``: a list, or a stream."""
    if name == "weighted":
        return [{**row, "weight": 1.0 + i % 3} for i, row in enumerate(rows())]
    if name == "masked":
        return [
            {**row, "labels": [-100] * len(row["labels"]) if i % 5 < 2 else row["labels"]}
            for i, row in enumerate(rows())
        ]
    if name == "pairs":
        return [{"input_ids": row["input_ids"], "labels": row["input_ids"][::-1][:9]} for row in rows()]
    if name == "stream":
        import datasets

        return datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=4)
    return rows()


def text(i: int, words: int) -> str:
    """Words of the tokenizer."""
    return " ".join(f"w{(i * 7 + k * 3) % 40}" for k in range(words))


def make_tokenizer() -> Any:
    """A tokenizer of forty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(40)]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=own, **special)


def trl_data(kind: str) -> Any:
    """What each of TRL's trainers reads."""
    from datasets import Dataset

    words = [1 + (20 if i % 7 == 3 else (i * 5) % 6) for i in range(96)]
    made = []
    for i, n in enumerate(words):
        prompt, good, bad = text(i, 1 + i % 4), " " + text(i + 1, n), " " + text(i + 2, words[i - 4])
        made.append(
            {
                "SFT": {"text": prompt + good},
                "DPO": {"prompt": prompt, "chosen": good, "rejected": bad},
                "KTO": {"prompt": prompt, "completion": good, "label": i % 3 != 1},
                "Reward": {"chosen": prompt + good, "rejected": prompt + bad},
                "GRPO": {"prompt": prompt},
            }[kind]
        )
    return Dataset.from_list(made)


def reward(completions: list[str], **_: Any) -> list[float]:
    """More for words of a certain kind, so that the rollouts of a prompt differ."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration, with the optimizer of torch."""
    sizes = {"stage": stage, "stage3_param_persistence_threshold": 0}
    more = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {"zero_optimization": sizes, "train_micro_batch_size_per_gpu": "auto", **more,
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}  # fmt: skip


def make_trainer(kind: str, settings: dict[str, Any], folder: Path) -> Any:
    """A trainer whose step is of eight samples over all ranks, and that logs each of its eight steps."""
    import torch

    import ullage.training as training

    options = dict(settings)
    model, data = options.pop("model", "llama"), options.pop("data", "rows")
    lora, stage, collator = (options.pop(name, None) for name in ("lora", "zero", "collator"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    accumulated = options.get("gradient_accumulation_steps", 1)
    settled = {
        "max_steps": 8, "per_device_train_batch_size": 8 // world // accumulated, "per_device_eval_batch_size": 4,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 1,
        "learning_rate": 1e-2, "bf16": False, "lr_scheduler_type": "linear", "activation_checkpointing": False,
        "optim": "adamw_torch", "deepspeed": zero(stage) if stage else None,
    }  # fmt: skip
    if kind != "GRPO":
        settled["train_sampling_strategy"] = "sequential"
    settled |= options
    torch.manual_seed(0)
    if kind in ("Trainer", "Seq2SeqTrainer"):
        prefix = kind.removesuffix("Trainer")
        arguments = getattr(training, f"{prefix}TrainingArguments")(str(folder), **settled)
        more = {"data_collator": training.PackedSequenceCollator()} if collator else {}
        return getattr(training, kind)(
            make_model(model), arguments, train_dataset=make_data(data), eval_dataset=rows(12), **more
        )
    return _of_trl(kind, settled, folder, lora)


def _of_trl(kind: str, settled: dict[str, Any], folder: Path, lora: bool | None) -> Any:
    from ullage.training import trl

    more: dict[str, Any] = {"model": make_model("reward" if kind == "Reward" else "llama")}
    if kind in ("DPO", "KTO"):
        more["ref_model"] = make_model("llama")
    if kind == "GRPO":
        more["reward_funcs"] = reward
        settled |= {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    arguments = getattr(trl, f"{kind}Config")(str(folder), **settled)
    data = trl_data(kind)
    return getattr(trl, f"{kind}Trainer")(
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=make_tokenizer(),
        **more,
    )
