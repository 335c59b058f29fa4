"""T5 on packed pairs against each pair alone: outputs, loss and gradients in float64."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

import ullage
from ullage import RaggedBatch

pytestmark = pytest.mark.parity

SIZES = {"vocab_size": 53, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
PAIRS = [(5, 3), (9, 9), (5, 1), (1, 20), (30, 4), (9, 3), (5, 3)]


KINDS = {"t5": (T5Config, T5ForConditionalGeneration), "mt5": (MT5Config, MT5ForConditionalGeneration)}


def build(kind="t5"):
    torch.manual_seed(0)
    config, model = KINDS[kind]
    model = model(config(**SIZES)).double().eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_()
    return model


def pairs_of(sizes):
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(3, 53, (size,), generator=generator) for size in pair) for pair in sizes]


def packed(model, pairs, multiple=1):
    layout: Any = {} if multiple == 1 else {"pad_to_multiple_of": multiple}
    keywords = RaggedBatch.from_samples([{"input_ids": source} for source, _ in pairs], **layout).to_flattened()
    keywords["labels"] = torch.nested.nested_tensor([target for _, target in pairs], layout=torch.jagged)
    return model(**keywords)


def alone(model, pairs):
    outputs = [model(input_ids=source[None], labels=target[None], use_cache=False) for source, target in pairs]
    counts = torch.tensor([len(target) for _, target in pairs])
    loss = (torch.stack([each.loss for each in outputs]) * counts).sum() / counts.sum()
    return torch.cat([each.logits[0] for each in outputs]), loss


def assert_exact(model, pairs, multiple=1):
    other = copy.deepcopy(model)
    with ullage.pack_model(model) as handle:
        assert str(handle.way) == "mixers by lengths"
        found = packed(model, pairs, multiple)
        found.loss.backward()
    logits, loss = alone(other, pairs)
    loss.backward()
    assert (found.logits[0] - logits).abs().max() < 1e-10
    assert abs(float(found.loss.detach() - loss.detach())) < 1e-12
    parameters = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - parameters[name].grad).abs().max() < 1e-11, name


@pytest.mark.parametrize("kind", ["t5", "mt5"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_pairs_equal_each_pair_alone(kind, multiple):
    assert_exact(build(kind), pairs_of(PAIRS), multiple)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
def test_packed_pairs_of_any_lengths_equal_each_pair_alone(sizes):
    assert_exact(build(), pairs_of(sizes))


def test_other_heads_and_eager_attention_run_as_a_whole():
    model = build()
    model.set_attn_implementation("eager")
    with ullage.pack_model(model) as handle:
        assert str(handle.way) == "whole by lengths"
        found = packed(model, pairs_of(PAIRS)).logits[0]
    assert (found - alone(model, pairs_of(PAIRS))[0]).abs().max() < 1e-10
