"""Attention in both directions on packed rows: encoders against the same encoders on one sequence after another."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

import ullage
from ullage import InputError, RaggedBatch
from ullage.attention import context_parallel_problem, packing_problem, supports_packing
from ullage.mixers import is_packed

pytestmark = pytest.mark.parity

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 300, "type_vocab_size": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
#: Windows of 8 to each side, so that the longer sequences are cut into blocks.
MODERN = {"local_attention": 16, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {"bert": {}, "modernbert": MODERN, "roberta": {}}
LENGTHS = (1, 7, 33, 2, 20, 7, 7, 150, 1)


def build(name, auto: Any = AutoModelForMaskedLM, implementation="ullage", **more):
    torch.manual_seed(1)
    known = AutoConfig.for_model(name).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = AutoConfig.for_model(name, **{**sizes, **MODELS[name], **more})
    return auto.from_config(config, attn_implementation=implementation, dtype=torch.float64).eval()


def samples_of(lengths):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 97, (length,), generator=generator)} for length in lengths]


def compared(model, samples, **layout):
    """Logits and gradients of a packed row, and of its sequences alone by sdpa."""
    batch = RaggedBatch.from_samples(samples, **layout)
    found = model(**batch.to_flattened()).logits[0]
    starts = torch.as_tensor(batch.to_flattened()["cu_seq_lens_q"]).tolist()
    found = torch.cat([found[start : start + len(each["input_ids"])] for start, each in zip(starts, samples)])
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    expected = torch.cat([alone(input_ids=each["input_ids"][None]).logits[0] for each in samples])
    direction = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(5))
    gradients = []
    for each, outputs in ((model, found), (alone, expected)):
        each.zero_grad()
        (outputs * direction).sum().backward()
        parameters = dict(each.named_parameters())
        gradients.append({name: part.grad for name, part in parameters.items() if part.grad is not None})
    return SimpleNamespace(found=found, expected=expected, ours=gradients[0], theirs=gradients[1])


def assert_same(result):
    assert (result.found - result.expected).abs().max() < 1e-10
    assert result.ours.keys() == result.theirs.keys()
    for name, gradient in result.theirs.items():
        assert (result.ours[name] - gradient).abs().max() < 1e-9 * gradient.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_reads_the_lengths_by_itself(name):
    model = build(name)
    assert supports_packing(model)
    assert_same(compared(model, samples_of(LENGTHS)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_packed_encoder_is_native_and_sees_no_padding(name, multiple):
    model = build(name, implementation="sdpa")
    packed = ullage.pack_model(model)
    assert str(packed.way) == "native"
    layout = {} if multiple == 1 else {"pad_to_multiple_of": multiple}
    assert_same(compared(model, samples_of(LENGTHS), **layout))
    packed.undo()
    assert not is_packed(model)
    assert model.config._attn_implementation == "sdpa"


def test_padding_behind_a_sequence_is_refused_without_pack_model():
    model = build("bert")
    for lengths in ((3, 16), (1, 8)):
        batch = RaggedBatch.from_samples(samples_of(lengths), pad_to_multiple_of=8)
        with pytest.raises(InputError, match="a sequence is padded, and an attention in both directions"):
            model(**batch.to_flattened())


def test_padding_tokens_within_a_sequence_do_not_count_in_roberta():
    model = build("roberta", implementation="sdpa")
    samples = samples_of((9, 12))
    samples[0]["input_ids"][4:6] = 1
    with ullage.pack_model(model):
        assert_same(compared(model, samples))


def test_heads_that_look_for_the_first_token_are_refused():
    for auto in (AutoModel, AutoModelForSequenceClassification):
        assert "first token" in (packing_problem(build("bert", auto)) or "")
    # Run by lengths they are exact.
    model = build("bert", AutoModelForSequenceClassification, "sdpa")
    samples = samples_of((5, 9, 5))
    expected = torch.cat([model(input_ids=each["input_ids"][None]).logits for each in samples])
    with ullage.pack_model(model) as packed:
        assert str(packed.way) == "whole by lengths"
        found = model(**RaggedBatch.from_samples(samples).to_flattened()).logits
    assert (found - expected).abs().max() < 1e-10


def test_rows_over_ranks_and_a_mask_of_the_other_direction_are_refused():
    model = build("bert")
    assert "both directions" in (context_parallel_problem(model) or "")
    for layer in model.bert.encoder.layer:  # one of two, then both
        layer.attention.self.is_causal = True
        with pytest.raises(InputError, match="the model's own attention pattern cannot be packed"):
            model(**RaggedBatch.from_samples(samples_of((5, 9))).to_flattened())
