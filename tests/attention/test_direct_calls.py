"""Models called by themselves under attn_implementation="ullage": a packed call is exact or raises, whoever calls."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaModel, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from benchmarks.campaigns.direct_calls import FAMILIES, UNSEEN, build, calls, direct_calls, leaks
from tests.attention import test_attention as attention
from ullage import InputError, RaggedBatch
from ullage.attention import require_packing, supports_packing
from ullage.attention.packed_call import packed_mask

pytestmark = pytest.mark.parity

#: What leaked, one family per mechanism, and families that are exact.
NAMED = ("bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "minimax", "nemotron_h", "recurrent_gemma")
NAMED += ("distilbert", "modernbert", "gpt2", "llama", "nemotron", "roberta-causal")
PADDED = ("padded right", "padded left")
MEET = "would let packed sequences see each other"
RESTART = "position_ids restart within a row, but no cu_seq_lens_q"


def flattened(lengths, **more):
    return {**RaggedBatch.from_samples(attention.samples_of(lengths)).to_flattened(), **more}


def alone(model, keywords):
    cuts = keywords["cu_seq_lens_q"].tolist()
    parts = [keywords["input_ids"][:, a:b] for a, b in itertools.pairwise(cuts)]
    return torch.cat([model(input_ids=part).logits[0] for part in parts])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in NAMED)) for each in FAMILIES if each not in UNSEEN],
)
def test_a_direct_packed_call_is_exact_or_raises_and_a_padded_one_is_as_ever(family):
    found = direct_calls(family)
    assert leaks(found) == []
    for name in PADDED:
        assert found[name]["verdict"] == "exact" or "does not honour the keyword" in found[name]["error"], found[name]
    packs = supports_packing(build(family, "ullage"))
    assert found["lengths"]["verdict"] == ("exact" if packs else "raises"), found["lengths"]


@pytest.mark.parametrize(("family", "call", "words"), [
    ("bamba", "lengths", f"{MEET}: packed, the sequences of BambaForCausalLM do not get what they get alone"),
    ("lfm2", "lengths", f"{MEET}: packed, the sequences of Lfm2ForCausalLM do not"),
    ("minimax", "lengths", f"{MEET}: packed, the sequences of MiniMaxForCausalLM do not"),
    ("nemotron", "lengths", "was given to the model, but did not reach its attention .NemotronAttent"),
    ("gpt2", "lengths without positions", "cu_seq_lens_q came without position_ids.*to_flattened"),
    ("roberta-causal", "lengths", r"RobertaEmbeddings\) counts positions from 1, and a packed row from 0"),
    ("modernbert", "positions", RESTART),
    ("distilbert", "positions without a cache", RESTART),
    ("recurrent_gemma", "positions", RESTART),
    ("llama", "positions beside a mask of ones", RESTART),
])  # fmt: skip
def test_a_refused_call_names_why(family, call, words):
    with pytest.raises(InputError, match=words):
        build(family, "ullage")(**calls()[call])


@pytest.mark.parametrize("call", ["lengths", "positions"])
def test_a_model_inside_a_module_of_ones_own_is_refused_too(call):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("granitemoehybrid", "ullage")

        def forward(self, ids, batch):
            return self.inner(ids, None, batch.pop("position_ids"), **batch)  # by place, not by name

    keywords = calls()[call]
    with pytest.raises(InputError, match=r"do not get what they get alone|restart within a row"):
        Own()(keywords.pop("input_ids"), keywords)


def test_what_was_found_out_about_a_model_is_not_believed_of_another_around_it():
    inner = attention.build("llama").model
    keywords = flattened((4, 9))
    del keywords["labels"]
    expected = inner(**keywords).last_hidden_state

    class Convolved(PreTrainedModel):
        def __init__(self, inner: LlamaModel):
            super().__init__(inner.config)
            self.inner, self.conv = inner, nn.Conv1d(64, 64, 3, padding=1)

        def forward(self, **keywords):
            hidden = self.inner(**keywords).last_hidden_state
            return self.conv(hidden.transpose(1, 2))

    with pytest.raises(InputError, match=r"see each other: packed, the sequences of Convolved do not"):
        Convolved(inner)(**keywords)
    for again in (inner, copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert torch.equal(again(**keywords).last_hidden_state, expected)


def test_a_layer_called_alone_is_exact():
    model = attention.build("llama")
    layer, rotary = model.model.layers[0], model.model.rotary_emb
    keywords = flattened((4, 9))
    lengths = {name: keywords[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    hidden = torch.randn(1, 13, 64)
    found = layer(hidden, position_embeddings=rotary(hidden, keywords["position_ids"]), **lengths)
    for start, stop in ((0, 4), (4, 13)):
        part = hidden[:, start:stop]
        expected = layer(part, position_embeddings=rotary(part, torch.arange(stop - start)[None]))
        assert torch.allclose(found[:, start:stop], expected, atol=1e-6)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0, "rope_theta": 10000.0}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(("rope", "exact", "mixed"), [
    (LONGROPE, [(16, 3, 9), (17, 40), (40,)], [(17, 16), (3, 40)]),
    (DYNAMIC, [(16, 3, 9), (40,)], [(17, 16), (17, 40)]),
], ids=["longrope", "dynamic"])  # fmt: skip
def test_rotary_frequencies_of_a_rows_longest_sequence_are_exact_or_refused(rope, exact, mixed):
    sizes = {"max_position_embeddings": 16 if rope is DYNAMIC else 64, "rope_parameters": rope}
    model = attention.build("llama", **sizes)
    require_packing(model)
    for lengths in exact:
        keywords = flattened(lengths)
        assert torch.allclose(model(**keywords).logits[0], alone(model, keywords), atol=1e-5), lengths
    for lengths in mixed:
        with pytest.raises(
            InputError, match=r"frequencies change with the longest.*at most 16 tokens.*2 sequences of up"
        ):
            model(**flattened(lengths))


def test_positions_of_padding_and_of_images_are_no_restart():
    def mask(width, real=None):
        return packed_mask(1, width, width, mask_function=causal_mask_function, attention_mask=real)

    def restarts(positions, real=None):
        return bool(mask(5, real).restarts(torch.tensor(positions)))

    assert restarts([[0, 1, 2, 0, 1]])
    assert restarts([[0, 1, 1, 2, 3]])
    assert not restarts([[5, 6, 7, 8, 9]])
    left = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    assert not restarts([[1, 1, 0, 1, 2]], left)
    assert not restarts([[0, 1, 2, 1, 1]], left.flip(1))
    assert restarts([[0, 0, 0, 1, 0]], left)
    images = torch.tensor([[[0, 1, 1, 1, 4]], [[0, 1, 1, 2, 4]], [[0, 1, 2, 1, 4]]])
    assert not bool(mask(5).restarts(images))
    assert bool(mask(5).restarts(images[:, :, [0, 1, 2, 0, 1]]))
    assert mask(4).restarts(images) is None


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_call_looks_at_the_positions_that_reach_its_layers():
    torch._dynamo.reset()
    model = attention.build("llama")
    keywords = flattened((5, 5))
    compiled = torch.compile(model, backend="eager")
    ids, positions = keywords["input_ids"], keywords["position_ids"]
    whole = compiled(input_ids=ids, position_ids=torch.arange(10)[None], use_cache=False).logits
    assert torch.allclose(whole, model(input_ids=ids, use_cache=False).logits, atol=1e-5)
    # Where torch has given up to compile the attention, after many compilations in one process, it refuses by itself.
    with pytest.raises((RuntimeError, InputError), match="position_ids restart within a row"):
        compiled(input_ids=ids, position_ids=positions, use_cache=False)
    with pytest.raises(InputError, match="do not get what they get alone"):
        torch.compile(build("granitemoehybrid", "ullage"), backend="eager")(**calls()["lengths"], use_cache=False)
