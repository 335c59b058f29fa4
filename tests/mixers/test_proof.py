"""The proof: a few sequences alone and as one packed row, without a trace on the model."""

import copy
import random

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import ullage
from tests.support import verify_script
from tests.support.own_models import LEAKING
from ullage.mixers import SequencesMeet, pack_model
from ullage.mixers.at_rest import at_rest
from ullage.mixers.packed_model import put_in, take_out, ways_of
from ullage.mixers.proof import largest, limits_of, prove
from ullage.mixers.trial import trial_of
from ullage.mixers.ways import Way, own_attention

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTHS = (5, 33, 2, 17, 5)


def ids(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=draw) for length in LENGTHS]


def causal():
    return [{"input_ids": each, "labels": each} for each in ids()]


def llama(**options):
    torch.manual_seed(1)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, **options}))


class Within(nn.Module):
    """Another module, and what is done to its output in training, and to gradients."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, hidden):
        return self.change(self, self.inner(hidden))


class MeanGradient(torch.autograd.Function):
    """Nothing going forward; a mean over the row going backward."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * gradient.mean(1, keepdim=True)


def with_change(change, place="mlp"):
    model = llama()
    layer = model.model.layers[1]
    setattr(layer, place, Within(getattr(layer, place), change))
    return model


def in_training(module, hidden):
    return hidden + 1e-2 * hidden.mean(1, keepdim=True) if module.training else hidden


def late(module, hidden):
    before = nn.functional.pad(hidden, (0, 0, 30, -30)) if hidden.shape[1] > 30 else torch.zeros_like(hidden)
    return hidden + 0.1 * before


def proved(model, samples, way=None, **options):
    put_in(model, way or ways_of(model)[0])
    try:
        return prove(model, trial_of(model, samples), **options)
    finally:
        take_out(model)


T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MIXTRAL = {**SIZES, "num_key_value_heads": 4, "num_local_experts": 4}
BY_SEQUENCE = [{"input_ids": each, "labels": int(each[0]) % 3} for each in ids()]
PAIRS = [{"input_ids": each, "labels": each[: 2 + place]} for place, each in enumerate(ids())]
MODELS = {
    "decoder": (lambda: llama(attention_dropout=0.5), causal()),
    "bfloat16": (lambda: llama().bfloat16(), causal()),
    "float64": (lambda: llama().double(), causal()),
    "head by sequence": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=3)), BY_SEQUENCE),
    "encoder-decoder": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), PAIRS),
    "experts": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MIXTRAL, output_router_logits=True)), causal()),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_keep_sequences_apart_are_proved(name):
    torch.manual_seed(0)
    make, samples = MODELS[name]
    model = make()
    found = proved(model, samples)
    assert found.passed, found.problem()
    assert {each.kind for each in found.differences} == {"outputs", "gradients", "loss"}
    assert not found.weak
    assert found.tokens <= 3 * sum(found.lengths) + min(found.lengths)
    assert found.left_out == (["the balance of experts, a mean over all tokens"] if name == "experts" else [])


LEAKS = {
    "only in training": (in_training, "model.layers.1.mlp (Within)"),
    "only going backward": (lambda _, hidden: MeanGradient.apply(hidden), None),
    "only from the 30th token on": (late, "model.layers.1.mlp (Within)"),
}


@pytest.mark.regression
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_where_it_is(name):
    change, module = LEAKS[name]
    found = proved(with_change(change), causal(), Way("native"))
    assert found.problem() is not None
    assert found.module == module
    assert not found.weak


def test_what_happens_in_training_alone_is_not_seen_without_it():
    assert proved(with_change(in_training), causal(), Way("native"), training=False).passed


def test_a_model_that_differs_from_itself_gives_a_weak_proof():
    def noise(module, hidden):
        return hidden + 1e-5 * torch.randn_like(hidden)

    found = proved(with_change(noise), causal(), Way("native"))
    assert found.weak
    assert found.passed
    leaking = with_change(lambda module, hidden: noise(module, hidden) + 3 * hidden.mean(1, keepdim=True))
    assert not proved(leaking, causal(), Way("native")).passed


def one_token(module, hidden):
    """What rounding does to a token between two experts: in a long row the first gets another."""
    other = torch.zeros_like(hidden)
    other[:, 0] = hidden[:, 0].flip(-1) if hidden.shape[1] > max(LENGTHS) else 0
    return hidden + 3 * other


def test_a_token_that_rounding_sends_to_another_expert_is_no_leak_below_float32():
    def experts(change, dtype):
        torch.manual_seed(0)
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**MIXTRAL)).to(dtype)
        layer = model.model.layers[1]
        layer.mlp = Within(layer.mlp, change)
        return model

    assert proved(experts(one_token, torch.bfloat16), causal(), Way("native")).passed
    assert not proved(experts(one_token, torch.float32), causal(), Way("native")).passed
    everywhere = experts(lambda _, hidden: hidden + 30 * hidden.mean(1, keepdim=True), torch.bfloat16)
    found = proved(everywhere, causal(), Way("native"))
    assert found.module == "model.layers.1.mlp (Within)"


class Counting(nn.Module):
    """A norm with statistics, a counter and numbers of its own that are drawn."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, hidden):
        self.calls += 1
        random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * hidden.mean((0, 1)))
        return self.inner(hidden)


def random_states():
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002  the one that must be left alone
    return random.getstate(), numpy, torch.get_rng_state().tolist()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_proof_leaves_no_trace(reentrant):
    model = llama(attention_dropout=0.5)
    part = model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.model.layers[1].eval()
    function = model.model.layers[0]._gradient_checkpointing_func
    called = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    weights, modes = copy.deepcopy(model.state_dict()), [each.training for each in model.modules()]
    states = random_states()
    assert proved(model, causal()).passed
    assert (part.calls, called) == (0, [])
    assert all(each.grad is None for each in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [each.training for each in model.modules()] == modes
    assert model.model.layers[0]._gradient_checkpointing_func is function
    assert model.model.layers[0].self_attn.attention_dropout == model.config.attention_dropout == 0.5
    assert random_states() == states


def test_nothing_is_dropped_at_rest():
    drops = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5))
    rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    rows, query = torch.randn(3, 7, 4), torch.randn(1, 2, 5, 4)
    with at_rest(nn.ModuleList([drops, rnn]), training=True):
        assert torch.equal(drops(rows), rows)
        assert torch.equal(rnn(rows)[0], rnn(rows)[0])
        assert torch.equal(nn.functional.dropout(rows, 0.9, training=True), rows)
        attend = nn.functional.scaled_dot_product_attention
        assert torch.equal(attend(query, query, query, dropout_p=0.9), attend(query, query, query, None, 0.9))
    assert drops[0].p == rnn.dropout == 0.5
    assert not torch.equal(nn.functional.dropout(rows, 0.9, training=True), rows)


def test_alone_a_model_has_the_attention_that_it_came_with():
    model = llama(attn_implementation="eager")
    with pack_model(model):
        assert model.config._attn_implementation == "ullage"
        with own_attention(model):
            assert model.config._attn_implementation == "eager"
        assert model.config._attn_implementation == "ullage"


def test_differences_count_what_is_not_finite():
    one = torch.ones(3)
    assert largest([one, 2 * one], [one, 2 * one]) == 0
    assert largest([one, 3 * one], [one, 2 * one]) == 0.5
    assert largest([one, one * torch.nan], [one, one]) == float("inf")
    assert largest([one], [torch.ones(4)]) == float("inf")
    assert limits_of(torch.float64).outputs < limits_of(torch.float32).outputs < limits_of(torch.bfloat16).outputs


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("name", LEAKING)
def test_models_that_leaked_are_packed_in_a_way_that_does_not(name):
    torch.manual_seed(0)
    make, kind = LEAKING[name]
    model = make()
    labels = {"lstm before a tagging head": lambda each: each % 4}.get(name, lambda each: each)
    samples = [{"input_ids": each, "labels": labels(each)} for each in ids()]
    assert not proved(model, samples, Way("native")).passed
    with pack_model(model, verify=samples) as packed:
        assert packed.way.kind == kind
        assert prove(model, trial_of(model, samples)).passed


def test_without_a_way_the_first_module_is_named():
    model = llama()
    verify_script.put_meeting(model)
    place = r"model\.layers\.1\.mlp \(Meeting\)"
    with pytest.raises(SequencesMeet, match=rf"whole by lengths: .*, first in {place}"):
        pack_model(model, verify=causal())
    assert not ullage.mixers.is_packed(model)


def test_what_looks_at_a_whole_call_takes_one_sequence_at_a_time():
    model = llama()
    model.model.norm = Within(model.model.norm, lambda _, hidden: hidden + hidden.mean((0, 1)))
    with pack_model(model, verify=causal()) as packed:
        assert packed.way.paths == ("model.norm",)
        assert prove(model, trial_of(model, causal())).passed


def test_an_unknown_part_that_works_on_tokens_keeps_the_native_way():
    model = with_change(lambda _, hidden: 2 * hidden)
    assert str(pack_model(copy.deepcopy(model)).way) == "native"
    assert str(pack_model(model, verify=causal()).way) == "native"
