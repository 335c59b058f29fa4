"""Models of other kinds than decoders, trained packed and padded; run by torchrun: ``packed_models.py FOLDER CASES``.

``CASES``: a list of ``[family, stage, packed]``; the losses and gradient norms of each go to ``results<rank>.json``.
"""

import copy
import os

import torch
import transformers as hf

from tests.support.packing_script import zero
from tests.support.small_runs import STEADY, losses, packed_steps, quiet, serve
from ullage.training import (
    RaggedCollator,
    Seq2SeqCollator,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

VOCAB = 61
CAPACITY = 24
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
#: Samples of each step: of one token, as long as the capacity, and one alone, which leaves a rank without any.
STEPS = ((5, 24, 1, 9), (1, 1, 1, 1), (24, 24, 24, 23), (7, 3, 24, 12), (2, 16, 8, 24), (11,))
ATTENDED = {name: value for name, value in GROUPED.items() if name != "num_hidden_layers"}
#: By family: the model's class and its configuration's, by name since each loads slowly, and the options of that.
FAMILIES = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {
        "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "num_experts_per_tok": 2,
        **GROUPED}),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", {
        "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, **ATTENDED}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1,
        "chunk_size": 8, **IDS}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {
        "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0,
        **GROUPED}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 4, "query_pre_attn_scalar": 8, **GROUPED}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {
        "attention_chunk_size": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
        **GROUPED}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {
        "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2, **SIZES}),
    "bert": ("BertForSequenceClassification", "BertConfig", {"num_labels": 3, **QUIET, **SIZES}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "dropout_rate": 0.0, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **IDS,
        "decoder_start_token_id": 0}),
}  # fmt: skip
#: Models whose heads take other labels. The head of the last looks for the last token that is not padding, which is no 0.
HEADS = {
    "bert_values": ("BertForSequenceClassification", "BertConfig", {
        "num_labels": 3, "problem_type": "regression", **QUIET, **SIZES}),
    "bert_several": FAMILIES["bert"],
    "bert_tokens": ("BertForTokenClassification", "BertConfig", {"num_labels": 3, **QUIET, **SIZES}),
    "bert_answers": ("BertForQuestionAnswering", "BertConfig", {**QUIET, **SIZES}),
    "llama_answers": ("LlamaForQuestionAnswering", "LlamaConfig", GROUPED),
    "llama_last": ("LlamaForSequenceClassification", "LlamaConfig", {"num_labels": 3, **GROUPED, "pad_token_id": 2}),
}  # fmt: skip


@torch.no_grad()
def make_model(family):
    """A model of a family; what starts at one constant is drawn anew, so that no path is closed."""
    torch.manual_seed(0)
    kind, config, options = {**FAMILIES, **HEADS}[family]
    model = getattr(hf, kind)(getattr(hf, config)(**copy.deepcopy(options)))
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all():  # left as allocated
            parameter.normal_(0.0, 0.1)
        elif bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _labels(family, k, ids, generator):
    """The labels of sample ``k``, as the family's head takes them."""
    if family in ("bert", "llama_last"):
        return {"labels": k % 3}
    if family == "bert_values":
        return {"labels": torch.tensor([0.1 * k, 1.0, -0.5])}
    if family == "bert_several":
        return {"labels": torch.tensor([1.0, k % 2, 0.0])}
    if family.endswith("_answers"):
        return {"start_positions": len(ids) // 2, "end_positions": len(ids) - 1}
    if family == "bert_tokens":
        return {"labels": ids % 3}
    if family == "modernbert":
        return {"labels": ids.masked_fill(torch.rand(len(ids), generator=generator) > 0.5, -100)}
    return {"labels": ids}


def make_samples(family, steps=STEPS):
    """The samples of each step, with labels."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for k, length in enumerate(length for step in steps for length in step):
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        # Source and target fill the capacity together.
        source = max(1, length - length // 3 - 1) if family == "t5" else length
        labels = ids[source:] if length > source else ids
        samples.append({"input_ids": ids[:source], **_labels(family, k, labels, generator)})
    return samples


def make_trainer(family, folder, *, packed, stage=0, model=None, steps=STEPS[:5], **options):
    world = int(os.environ.get("WORLD_SIZE", 1))
    is_pair = family == "t5"
    by_sequence = ("labels",) if family in ("bert_values", "bert_several") else ()
    arguments = TrainingArguments
    if is_pair:
        arguments = Seq2SeqTrainingArguments
        options = {"predict_with_generate": True, "generation_max_length": 6, **options}
    options = {
        **STEADY, "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 3, "max_steps": len(steps),
        "optim": "sgd",
        "packing_plan_strategy": "next_fit", "packing_capacity": (CAPACITY + 2 * is_pair) if packed else None,
        "deepspeed": zero(stage) if stage else None, "dataloader_drop_last": False, **options,
    }  # fmt: skip
    return (Seq2SeqTrainer if is_pair else Trainer)(
        make_model(family) if model is None else model,
        quiet(folder, arguments, **options),
        data_collator=Seq2SeqCollator() if is_pair else RaggedCollator(per_sequence=by_sequence),
        train_dataset=make_samples(family, steps),
        eval_dataset=make_samples(family, STEPS[:1]),
    )


def run(family, folder, stage=0, packed=True, **options):
    """Losses and gradient norms of each step, what evaluation found, and the tokens of each packed microbatch."""
    trainer = make_trainer(family, folder, packed=packed, stage=stage, **options)
    steps = packed_steps(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": losses(trainer),
        "norms": [entry["grad_norm"] for entry in logged],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "real": [[microbatch.numel() for microbatch in step.microbatches] for step in steps],
        "padding": [entry["padding_computed"] for entry in logged],
    }


def largest_difference(found, expected):
    """The largest relative difference of losses, gradient norms and the loss of evaluation."""
    pairs = [(a, b) for name in ("losses", "norms") for a, b in zip(found[name], expected[name], strict=True)]
    pairs.append((found["eval_loss"], expected["eval_loss"]))
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


if __name__ == "__main__":
    serve(lambda folder, family, stage, packed: run(family, folder, stage, packed))
