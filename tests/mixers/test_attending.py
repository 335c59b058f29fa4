"""Attention by lengths: T5, BART and others, packed, against each sequence or pair alone."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

import ullage
from maintenance.tiny import tiny_model
from tests.support.own_models import alone as logits_alone
from tests.support.own_models import packed_row
from ullage import RaggedBatch
from ullage.mixers.packed_model import call_equally_often

pytestmark = pytest.mark.parity

SIZES = {"vocab_size": 53, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
PAIRS = [(5, 3), (9, 9), (5, 1), (1, 20), (30, 4), (9, 3), (5, 3)]


KINDS = {"t5": (T5Config, T5ForConditionalGeneration), "mt5": (MT5Config, MT5ForConditionalGeneration)}


def build(kind="t5", attention="sdpa"):
    torch.manual_seed(0)
    config, model = KINDS[kind]
    model = model(config(**SIZES)).double().eval()
    model.set_attn_implementation(attention)
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
        assert handle.way.kind in ("native", "mixers")
        found = packed(model, pairs, multiple)
        found.loss.backward()
    logits, loss = alone(other, pairs)
    loss.backward()
    assert (found.logits[0] - logits).abs().max() < 1e-10
    assert abs(float(found.loss.detach() - loss.detach())) < 1e-12
    parameters = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or (parameter.grad - parameters[name].grad).abs().max() < 1e-11, name


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "attention"), [("t5", "sdpa"), ("t5", "eager"), ("mt5", "sdpa")])
@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_pairs_equal_each_pair_alone(kind, attention, multiple):
    assert_exact(build(kind, attention), pairs_of(PAIRS), multiple)


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
def test_packed_pairs_of_any_lengths_equal_each_pair_alone(sizes):
    assert_exact(build(), pairs_of(sizes))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["bart", "blenderbot", "m2m_100", "marian", "mbart", "mvp", "umt5"])
def test_packed_pairs_of_barts_kin_equal_each_pair_alone_under_checkpointing(kind):
    """mBART starts a target with its last token, M2M-100 counts no padding, UMT5 has a bias in each layer."""
    model = tiny_model(kind, "seq2seq").double()
    model.activation_checkpointing_enable()
    assert_exact(quiet(model), pairs_of([(7, 3), (9, 9), (7, 1), (1, 20), (30, 4), (7, 3)]), 8)


def test_sources_without_targets_run_as_a_whole():
    model = tiny_model("bart", "seq2seq")
    expected = logits_alone(model)
    with ullage.pack_model(model):
        assert (model(**packed_row(labelled=False)).logits[0] - expected).abs().max() < 1e-5


def quiet(model):
    """A model in training mode without noise."""
    for module in model.train().modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    return model


#: Written-out attention, positions of a model's own, methods, ALiBi, relative biases, windows and chosen keys shorter
#: than the sequences, attention both ways.
ONE_ROW = {
    "bart": "causal", "bloom": "causal", "deepseek_v32": "causal", "falcon": "causal", "gpt_neo": "causal",
    "inkling_text": "causal", "inkling2_text": "causal", "megatron-bert": "masked", "mpt": "causal", "openai-gpt": "causal",
    "roformer": "masked", "stablelm": "causal", "xglm": "causal",
}  # fmt: skip
#: One-token sequences among them, and together more tokens than the tables of positions have.
LENGTHS = (70, 1, 3, 30, 3, 60, 1, 60, 60)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ONE_ROW)
def test_sequences_get_what_they_get_alone_under_checkpointing(name):
    model = quiet(tiny_model(name, ONE_ROW[name]))
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()
    expected = logits_alone(model, LENGTHS)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    parameters = [each for each in model.parameters() if each.requires_grad]
    wanted = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    with ullage.pack_model(model) as packed:
        assert packed.way.kind in ("native", "mixers")
        logits = model(**packed_row(LENGTHS, labelled=False)).logits[0]
        found = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    assert (logits - expected).abs().max() < 1e-6 * expected.abs().max()
    largest = max(each.abs().max() for each in wanted if each is not None)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() < 1e-5 * largest


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return made


@pytest.mark.parametrize("name", ["bloom", "gptj", "megatron-bert", "mvp", "whisper"])
def test_no_mask_of_the_row_is_made(name):
    model = tiny_model(name, "causal")
    lengths = (20,) * 120
    with ullage.pack_model(model), Largest() as largest, torch.no_grad():
        model(**packed_row(lengths, labelled=False))
    assert largest.elements < sum(lengths) ** 2 / 4


def unlike(name):
    """Models that differ from others of their type by a switch."""
    if name == "falcon":
        model = tiny_model("falcon", "causal")
        model.config.alibi = True
    elif name == "mvp":
        model = tiny_model("mvp", "causal")
        model.config.use_prompt = True
    else:  # frequencies that change with the longest sequence of a row
        model = tiny_model("stablelm", "causal")
        model.model.rotary_emb.rope_type, model.model.rotary_emb.original_max_seq_len = "dynamic", 16
    return model


@pytest.mark.parametrize("name", ["falcon", "mvp", "stablelm"])
def test_what_is_unlike_its_kind_is_exact_too(name):
    model = unlike(name)
    lengths = (14, 3, 7, 1)
    with torch.no_grad():
        expected = logits_alone(model, lengths)
        with ullage.pack_model(model):
            found = model(**packed_row(lengths, labelled=False)).logits[0]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "kind", "is_equal"), [
    ("bart", "seq2seq", True),
    ("gptj", "causal", True),
    ("stablelm", "causal", True),
    ("megatron-bert", "masked", False),  # padding would be seen
    ("deepseek_v32", "causal", False),  # padding would change which of equal scores is chosen
])  # fmt: skip
def test_layers_are_called_equally_often_where_padding_changes_nothing(name, kind, is_equal):
    model = tiny_model(name, kind)
    ullage.pack_model(model)
    assert call_equally_often(model) is is_equal
