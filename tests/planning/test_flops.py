"""``TransformerCost.from_config`` and ``MultimodalCost.from_config`` against what torch counts while the model runs; attention as matrix products."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from maintenance.pictures import picture_samples
from maintenance.tiny import tiny_model
from ullage import InputError, MultimodalCost, RaggedBatch, TransformerCost
from ullage.mixers.items import alone_form
from ullage.training.batches.amounts import amounts_of

pytestmark = pytest.mark.parity

_SMALL = {
    "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 67,
}  # fmt: skip
_KEYS = {"num_key_value_heads": 2}
CONFIGS = {
    "llama": (transformers.LlamaConfig, _SMALL | _KEYS),
    "llama, wide heads": (transformers.LlamaConfig, _SMALL | _KEYS | {"head_dim": 20}),
    "mistral": (transformers.MistralConfig, _SMALL | _KEYS | {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, _SMALL | _KEYS),
    "qwen3": (transformers.Qwen3Config, _SMALL | _KEYS | {"head_dim": 16}),
    "gemma": (transformers.GemmaConfig, _SMALL | _KEYS | {"head_dim": 8}),
    "phi": (transformers.PhiConfig, _SMALL),
    "gpt_neox": (transformers.GPTNeoXConfig, _SMALL),
    "gpt2": (transformers.GPT2Config, {"n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 67}),
    "opt": (transformers.OPTConfig, {"hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
                                     "vocab_size": 67, "word_embed_proj_dim": 48}),
    "mixtral": (transformers.MixtralConfig, _SMALL | _KEYS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [[1], [7], [19, 5, 33]])
def test_forward_flops_are_exact(name: str, lengths: list[int]) -> None:
    kind, fields = CONFIGS[name]
    config = kind(**fields)
    config._attn_implementation = "eager"
    if name == "mixtral":
        config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    counted = 0
    for length in lengths:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros((1, length), dtype=torch.long), use_cache=False)
        counted += counter.get_total_flops()
    cost = TransformerCost.from_config(config)
    assert cost.flops(sum(lengths), sum(length**2 for length in lengths)) == counted
    assert TransformerCost.from_config(config.to_dict()) == cost


def test_training_takes_three_times_as_many() -> None:
    config = transformers.LlamaConfig(**_SMALL)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros((1, 11), dtype=torch.long), use_cache=False).logits.sum().backward()
    assert 3 * TransformerCost.from_config(config).flops(11, 121) == counter.get_total_flops()


def test_a_config_without_a_formula_is_refused() -> None:
    with pytest.raises(InputError, match=r"lacks a field.*hidden_size or n_embd or d_model"):
        TransformerCost.from_config({})
    with pytest.raises(InputError, match=r"mixture of experts.*deepseek_v3"):
        TransformerCost.from_config(transformers.DeepseekV3Config())


@pytest.mark.matrix
@pytest.mark.parametrize(("model_type", "apart"), [
    *((name, 0.0) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "idefics3", "smolvlm")),
    *((name, 0.0) for name in ("paligemma", "mistral3")),
    # Beside the patches a class token, and a head over them, which real images of hundreds of patches make small;
    # linear attention, which has no formula.
    *((name, 0.04) for name in ("llava", "internvl", "qwen3_5")),
    ("gemma3", 0.08),
])  # fmt: skip
def test_forward_flops_of_tower_and_text(model_type: str, apart: float) -> None:
    model = tiny_model(model_type, "image")
    model.set_attn_implementation("eager")
    # Images of many patches, larger than a window; Pixtral's attention is computed over all images of a call at once.
    (sample,) = picture_samples(model, images=(1 if model_type == "mistral3" else 2,), sizes=((16, 12), (8, 20)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**alone_form(model, sample), use_cache=False)
    batch = RaggedBatch.from_samples([sample])
    found = MultimodalCost.from_config(model.config)(batch.layout.lengths, amounts_of(batch, model.config))
    assert found[0] == pytest.approx(counter.get_total_flops(), rel=apart or 1e-12)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("model_type", "apart"), [("gemma4_text", 0.0), ("gemma4_unified_text", 0.0), ("gemma3n_text", 0.15)]
)
def test_flops_of_layers_that_differ_are_added_up(model_type: str, apart: float) -> None:
    """Gemma 4 has heads of two sizes, Gemma 3n a list of MLP sizes and low-rank detours, which have no formula."""
    model = tiny_model(model_type, "causal")
    model.set_attn_implementation("eager")
    if model_type == "gemma3n_text":
        model.config.intermediate_size = [96, 64, 32, 96]
        model = type(model)(model.config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, 40), dtype=torch.long), use_cache=False)
    cost = TransformerCost.from_config(model.config)
    assert cost.flops(40, 1600) == pytest.approx(counter.get_total_flops(), rel=apart or 1e-12)
    assert TransformerCost.from_config(model.config.to_dict()) == cost
