"""Which kernel runs a layer, and why not a faster one."""

import copy

import pytest
import torch

from maintenance.tiny import tiny_config, tiny_model
from ullage import InputError, pack_model
from ullage.attention import explain
from ullage.attention.varlen import BENT, BY_LENGTHS, FLEX, VARLEN

HALF = {"device": "cuda", "dtype": torch.bfloat16}


def packed(name, kind="causal", **changes):
    config = copy.deepcopy(tiny_config(name))
    for key, value in changes.items():
        setattr(config, key, value)
    model = tiny_model(name, kind) if not changes else type(tiny_model(name, kind))(config)
    pack_model(model, verify=False)
    return model


@pytest.mark.parametrize(("name", "asked", "kernel", "why"), [
    ("llama", {}, BY_LENGTHS, None),
    ("llama", HALF, VARLEN, None),
    ("llama", {"device": "cuda"}, FLEX, "float16 and bfloat16 alone"),
    ("llama", {"device": "cuda", "dtype": torch.float64}, BY_LENGTHS, "float16, bfloat16 and float32 alone"),
    ("gemma2", HALF, FLEX, BENT),
    ("gemma2", {"device": "cuda"}, FLEX, BENT),
    ("gpt_oss", HALF, FLEX, BENT),
    ("qwen3_next", HALF, VARLEN, None),
])  # fmt: skip
def test_the_kernel_of_a_layer_and_why_not_a_faster_one(name, asked, kernel, why):
    found = explain(packed(name), **asked)
    assert {(each.kernel, each.why) for each in found} == {(kernel, why)}
    assert found.total() == (1 if name == "qwen3_next" else 2)


def test_layers_that_differ_are_told_apart_and_printed():
    model = packed("gemma2")
    state, modes = torch.random.get_rng_state(), [module.training for module in model.modules()]
    found = explain(model, **HALF)
    assert [each.scores for each in found] == ["causal, window 4, softcap 50", "causal, softcap 50"]
    assert {each.path for each in found} == {"model.layers.*.self_attn"}
    assert {each.heads for each in found} == {"4 of 16, 2 of keys"}
    title, header, *lines = repr(found).splitlines()
    assert title == f"Gemma2ForCausalLM on cuda, bfloat16, torch {torch.__version__}"
    assert header.split()[:2] == ["calls", "layers"]
    assert [line.split()[0] for line in lines] == ["1", "1"]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_dropout_and_autocast_count():
    model = packed("llama", attention_dropout=0.25).train()
    (found,) = explain(model, **HALF)
    assert (found.kernel, found.why, found.scores) == (BY_LENGTHS, "attention dropout", "causal, dropout 0.25")
    (found,) = explain(model.eval(), **HALF)
    assert found.kernel == VARLEN
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = explain(model, device="cuda")
    assert found.kernel == VARLEN


def test_a_model_without_our_attention_says_so_and_one_that_does_not_run_is_named():
    assert "no layer calls ullage's attention" in repr(explain(packed("t5", "seq2seq")))
    with pytest.raises(InputError, match="does not run a packed row"):
        explain(packed("llama"), {"input_ids": torch.tensor([[10**6]])})
