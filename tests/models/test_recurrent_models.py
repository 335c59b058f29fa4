"""Recurrent models: saved and loaded through the Auto classes, and what they say about input they cannot use."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils.generic import find_labels

from ullage import RaggedBatch
from ullage.attention.releases import CACHE
from ullage.models import (
    RaggedInputs,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
)

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


def _model(**changes: Any) -> RecurrentForCausalLM:
    torch.manual_seed(0)
    return RecurrentForCausalLM(RecurrentConfig(**{"vocab_size": 20, "hidden_size": 8, **changes})).eval()


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_through_the_auto_classes(cell: str, tied: bool, tmp_path: Path) -> None:
    model = _model(cell=cell, num_hidden_layers=2, layer_norm=True, residual=True, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RecurrentConfig)
    assert (config.cell, config.num_hidden_layers, config.tie_word_embeddings) == (cell, 2, tied)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is RecurrentForCausalLM
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is RecurrentModel
    assert torch.equal(backbone(input_ids=IDS).last_hidden_state, model.model(input_ids=IDS).last_hidden_state)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_resize_with_their_head(tied: bool) -> None:
    model = _model(tie_word_embeddings=tied)
    before = model(input_ids=IDS).logits
    model.resize_token_embeddings(25)
    after = model(input_ids=IDS).logits
    assert after.shape == (2, 3, 25)
    assert torch.equal(after[..., :20], before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.isfinite(model(input_ids=torch.tensor([[24, 3]]), labels=torch.tensor([[24, 3]])).loss)


def test_weights_start_as_documented() -> None:
    layers: Any = _model(num_hidden_layers=2).model.layers
    for layer in layers:
        rnn = layer.cells[0]
        bound = rnn.hidden_size**-0.5
        assert 0.8 * bound < rnn.weight_hh_l0.abs().max() <= bound
        assert (rnn.bias_ih_l0[8:16] == 1).all()
        assert (rnn.bias_hh_l0.abs() <= bound).all()


def test_a_state_comes_back_when_asked_for_and_by_default_in_evaluation() -> None:
    model = _model()
    assert model(input_ids=IDS)[CACHE].get_seq_length() == 3
    assert model(input_ids=IDS, labels=IDS).get(CACHE) is None
    assert model(input_ids=IDS, use_cache=False).get(CACHE) is None
    assert model.train()(input_ids=IDS).get(CACHE) is None
    assert model(input_ids=IDS, use_cache=True).get(CACHE) is not None


def test_states_are_reordered_selected_and_repeated() -> None:
    state = _model(num_hidden_layers=2)(input_ids=IDS)[CACHE]
    before = state.layers
    state.reorder_cache(torch.tensor([1, 1, 0]))
    assert all(torch.equal(new, old[[1, 1, 0]]) for a, b in zip(state.layers, before) for new, old in zip(a, b))
    state.batch_select_indices(torch.tensor([2]))
    state.batch_repeat_interleave(2)
    assert all(torch.equal(new, old[[0, 0]]) for a, b in zip(state.layers, before) for new, old in zip(a, b))


def test_padding_may_hold_what_is_no_token() -> None:
    rows = torch.tensor([[3, 4, -100], [5, 6, 7]])
    logits = _model()(input_ids=rows, input_lengths=[2, 3]).logits
    assert torch.allclose(logits[0, :2], _model()(input_ids=rows[:1, :2]).logits[0], rtol=0, atol=1e-6)


def test_a_mask_may_cover_what_the_state_has_seen() -> None:
    model = _model()
    state = model(input_ids=IDS)[CACHE]
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    longer = model(input_ids=IDS[:, :1], attention_mask=mask, cache=state)
    assert longer[CACHE].get_seq_length() == 4
    assert torch.equal(longer.logits, model(input_ids=IDS[:, :1], cache=state).logits)
    assert torch.equal(longer.logits, model(input_ids=IDS[:, :1], past_key_values=state).logits)  # its name until 5.24


def test_a_layer_is_called_once_whatever_the_lengths() -> None:
    """Sharded training gathers parameters at each call of a module, so ranks must call alike."""
    model = _model(num_hidden_layers=2)
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    seen = []
    for lengths in ([5], [1, 9, 2, 30, 4, 17], [3, 3, 3]):
        calls.clear()
        batch = RaggedBatch.from_samples([{"input_ids": [3] * n, "labels": [3] * n} for n in lengths])
        model(**batch.to_flattened()).loss.backward()
        seen.append(list(calls))
    assert seen[0] == seen[1] == seen[2]
    assert "model.layers.0.cells.0" in seen[0]


def test_the_signature_names_what_transformers_and_peft_look_for() -> None:
    """Trainer drops the columns that a forward does not name, and finds labels by it; generate() reads it too."""
    fields = {field.name for field in dataclasses.fields(RaggedInputs)}
    ignored = {"cu_seq_lens_k", "max_length_q", "max_length_k"}
    for kind, own, labels in (
        (RecurrentModel, {"cache", "sequences"}, []),
        (RecurrentForCausalLM, {"labels", "shift_labels", "logits_to_keep"}, ["labels", "shift_labels"]),
        (RecurrentForSequenceClassification, {"labels", "use_cache"}, ["labels"]),
        (RecurrentForTokenClassification, {"labels"}, ["labels"]),
        (RecurrentEncoderDecoder, {"labels", "decoder_input_ids", "encoder_outputs"}, ["labels"]),
    ):
        parameters = inspect.signature(kind.forward).parameters
        assert {"self", "kwargs"} | fields | ignored | own <= set(parameters)
        assert "inputs" not in parameters
        assert list(parameters)[:2] == ["self", "input_ids"]
        assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD  # transformers: takes num_items_in_batch
        assert find_labels(kind) == labels
    config = RecurrentConfig(vocab_size=50, hidden_size=8)
    assert "self" not in inspect.signature(RecurrentForCausalLM(config).forward).parameters
