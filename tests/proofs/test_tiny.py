"""Tiny models of transformers' text types: what they hold, what their seed fixes, and which types are refused."""

import pytest
import torch
from transformers import PreTrainedConfig

from maintenance.tiny import KINDS, MISSING, MOST_PARAMETERS, CannotBuild, model_types, tiny_config, tiny_model
from ullage.core.errors import InputError

FAMILIES = [("llama", "causal"), ("qwen3_next", "causal"), ("bert", "masked"), ("t5", "seq2seq")]


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(0))


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """``config`` and every configuration inside it."""
    parts = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(nested for part in parts for nested in _configs(part))]


@pytest.mark.parametrize(("model_type", "kind"), FAMILIES)
def test_a_tiny_model_runs_on_ids_and_has_no_constant_parameter(model_type: str, kind: str) -> None:
    model = tiny_model(model_type, kind)
    more = {"decoder_input_ids": _ids(2, 5)} if kind == "seq2seq" else {}
    with torch.no_grad():
        logits = model(input_ids=_ids(2, 9), **more).logits
    assert logits.shape == (2, 5 if more else 9, model.config.vocab_size)
    assert logits.isfinite().all()
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.numel() < 4 or parameter.min() < parameter.max(), name


def test_the_seed_fixes_the_parameters_and_the_random_state_of_the_caller_stays() -> None:
    before = torch.get_rng_state()
    first, same = tiny_model("llama", "causal").state_dict(), tiny_model("llama", "causal").state_dict()
    other = tiny_model("llama", "causal", seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.slow
def test_all_types_but_a_few_can_be_built() -> None:
    refused = set()
    for kind in KINDS:
        for model_type in model_types(kind):
            try:
                tiny_model(model_type, kind)
            except CannotBuild:
                refused.add((kind, model_type))
    # These have an image encoder of the package timm, or need scipy.
    optional = {("image", name) for name in ("fast_vlm", "gemma3n", "inkling_mm_model", "perception_lm")}
    assert refused - optional - {("causal", "gemma3n")} == set(MISSING)


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_5", "bart", "t5gemma", "encoder-decoder"])
def test_special_ids_are_in_the_vocabulary_and_nothing_is_dropped(model_type: str) -> None:
    special = 0
    for config in _configs(tiny_config(model_type)):
        for name, value in vars(config).items():
            if name.endswith("_token_id") and value is not None:
                special += 1
                assert 0 <= value < getattr(config, "vocab_size", 128), name
            if "drop" in name and isinstance(value, (int, float)):
                assert not value, name
    assert special


@pytest.mark.parametrize(("model_type", "entry", "kinds"), [
    ("qwen3_next", "layer_types", ["linear_attention", "full_attention"]),
    ("gemma3_text", "layer_types", ["sliding_attention", "full_attention"]),
    ("nemotron_h", "layers_block_type", ["linear_attention", "moe", "full_attention", "mlp"]),
    ("deepseek_v32", "mlp_layer_types", ["dense", "sparse"]),
])  # fmt: skip
def test_a_hybrid_keeps_one_layer_of_each_kind(model_type: str, entry: str, kinds: list[str]) -> None:
    config = tiny_config(model_type)
    assert getattr(config, entry) == kinds
    assert config.num_hidden_layers == len(kinds)


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "cohere2"])
def test_a_causal_head_sees_no_later_token_and_earlier_ones(model_type: str) -> None:
    model, ids = tiny_model(model_type, "causal"), _ids(1, 9)
    later, earlier = ids.clone(), ids.clone()
    later[0, -1], earlier[0, 0] = 101, 101
    with torch.no_grad():
        alone, after, before = (model(input_ids=row).logits for row in (ids, later, earlier))
    torch.testing.assert_close(after[:, :-1], alone[:, :-1], rtol=0, atol=1e-5)
    # A window of four tokens over two layers reaches three tokens on.
    assert (before[:, 3] - alone[:, 3]).abs().max() > 1e-2


def test_unknown_types_and_kinds_are_refused_by_name() -> None:
    with pytest.raises(
        InputError, match="no such kind of model: expected 'causal' or 'masked' or 'seq2seq' or 'image', found 'x'"
    ):
        model_types("x")
    with pytest.raises(InputError, match="no such text model type in the installed transformers: found 'lama'"):
        tiny_config("lama")
    with pytest.raises(InputError, match="no such masked model type in the installed transformers: found 'llama'"):
        tiny_model("llama", "masked")


def test_a_type_that_needs_more_than_text_is_refused_with_what_it_needs() -> None:
    with pytest.raises(CannotBuild, match=r"'voxtral_realtime'\. Every forward needs audio \(input_features\)"):
        tiny_model("voxtral_realtime", "seq2seq")
