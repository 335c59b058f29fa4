"""Tiny models of transformers' text types: what they hold, what their seed fixes, and which types are refused."""

import pytest
import torch

from maintenance.tiny import KINDS, MISSING, MOST_PARAMETERS, CannotBuild, model_types, tiny_model

FAMILIES = [("llama", "causal"), ("qwen3_next", "causal"), ("bert", "masked"), ("t5", "seq2seq")]


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(0))


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
