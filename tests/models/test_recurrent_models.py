"""Recurrent models: saved and loaded through the Auto classes, and what they say about input they cannot use."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils.generic import find_labels

from ullage import RaggedBatch
from ullage.attention.releases import CACHE
from ullage.core.errors import InputError
from ullage.models import (
    RaggedInputs,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
)

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
LABELS = torch.tensor([[9, 10, 11, 2], [12, 2, -100, -100]])
KINDS: dict[str, tuple[Any, Any]] = {
    "causal": (RecurrentForCausalLM, AutoModelForCausalLM),
    "sequence": (RecurrentForSequenceClassification, AutoModelForSequenceClassification),
    "token": (RecurrentForTokenClassification, AutoModelForTokenClassification),
    "pairs": (RecurrentEncoderDecoder, AutoModelForSeq2SeqLM),
}


def _model(kind: str = "causal", **changes: Any) -> Any:
    torch.manual_seed(0)
    config: Any = RecurrentConfig
    if kind == "pairs":
        config = RecurrentEncoderDecoderConfig
        changes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}
    return KINDS[kind][0](config(**{"vocab_size": 20, "hidden_size": 8, **changes})).eval()


def _is_tied(model: Any) -> bool:
    encoder = getattr(model, "encoder", None)
    if encoder is None:
        return model.lm_head.weight is model.model.embed_tokens.weight
    embedding = encoder.embed_tokens.weight
    tied = {part.weight is embedding for part in (model.lm_head, model.decoder.embed_tokens)}
    assert len(tied) == 1
    return tied.pop()


CELLS_AND_TIES = [("lstm", False), ("gru", True), ("rnn_tanh", False), ("rnn_relu", True)]
CLASSES = {"num_labels": 3, "pooling": "attention", "id2label": {0: "a", 1: "b", 2: "c"}, "cell": "minlstm"}
SAVED: list[tuple[str, dict[str, Any]]] = [
    *(("causal", {"cell": cell, "residual": True, "tie_word_embeddings": tied}) for cell, tied in CELLS_AND_TIES),
    *((head, {**CLASSES, "bidirectional": both}) for head in ("sequence", "token") for both in (False, True)),
    *(
        ("pairs", {"cell": "gru", "attention": attention, "num_decoder_layers": 2, "tie_word_embeddings": tied})
        for attention in ("additive", "dot")
        for tied in (False, True)
    ),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "changes"), SAVED)
def test_saved_and_loaded_through_the_auto_classes(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = _model(kind, num_hidden_layers=2, layer_norm=True, **changes)
    model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is type(model.config)
    assert {name: getattr(config, name) for name in changes} == changes
    loaded, report = KINDS[kind][1].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is KINDS[kind][0]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    keywords = {"input_ids": IDS, **({"labels": LABELS} if kind == "pairs" else {})}
    found, expected = loaded(**keywords).logits, model(**keywords).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-6 if kind == "pairs" else 0)
    backbone = AutoModel.from_pretrained(tmp_path)
    if kind == "pairs":
        assert type(backbone) is RecurrentEncoderDecoder
        assert torch.equal(loaded.generate(IDS, max_new_tokens=4), model.generate(IDS, max_new_tokens=4))
        assert loaded.generation_config.eos_token_id == 2
    else:
        assert type(backbone) is RecurrentModel
        assert torch.equal(backbone(input_ids=IDS).last_hidden_state, model.model(input_ids=IDS).last_hidden_state)
    if kind in ("causal", "pairs"):
        assert _is_tied(loaded) == changes["tie_word_embeddings"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["causal", "pairs"])
def test_embeddings_resize_with_their_head(kind: str, tied: bool) -> None:
    model, labels = _model(kind, tie_word_embeddings=tied), LABELS if kind == "pairs" else IDS
    before, real = model(input_ids=IDS, labels=labels).logits, labels != -100
    model.resize_token_embeddings(25)
    assert model.config.vocab_size == 25
    after = model(input_ids=IDS, labels=labels).logits
    assert after.shape == (*labels.shape, 25)
    assert torch.equal(after[..., :20][real], before[real])
    assert _is_tied(model) == tied
    new = torch.tensor([[24, 3, 24]])
    assert torch.isfinite(model(input_ids=new, labels=new).loss)
    model.resize_token_embeddings(20)
    assert torch.equal(model(input_ids=IDS, labels=labels).logits[real], before[real])


def test_the_state_bridge_hands_on_the_upper_layers() -> None:
    model = _model("pairs", num_hidden_layers=3, num_decoder_layers=2, bidirectional=False)
    layers = model.encoder(input_ids=IDS, use_cache=True)[CACHE].layers
    assert model.bridge(layers) == (layers[1], layers[2])
    deeper = _model("pairs", num_hidden_layers=1, num_decoder_layers=2, bidirectional=False)
    (only,) = deeper.encoder(input_ids=IDS, use_cache=True)[CACHE].layers
    assert deeper.bridge((only,)) == (only, only)


def test_a_target_needs_a_token_to_start_from() -> None:
    model = _model("pairs", bos_token_id=None)
    with pytest.raises(InputError, match="a decoder needs a token to start from"):
        model(input_ids=IDS, labels=LABELS)
    other = _model("pairs", bos_token_id=None, decoder_start_token_id=4)
    assert other.prepare_decoder_input_ids_from_labels(LABELS).tolist() == [[4, 9, 10, 11], [4, 12, 2, 0]]
    assert (other.generate(IDS, max_new_tokens=3)[:, 0] == 4).all()


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
    model, start = _model("pairs"), torch.tensor([[1], [1]])
    assert model(input_ids=IDS, decoder_input_ids=start)[CACHE].get_seq_length() == 1
    assert model(input_ids=IDS, labels=LABELS).get(CACHE) is None
    assert model.train()(input_ids=IDS, decoder_input_ids=start).get(CACHE) is None
    assert model.generate(IDS, max_new_tokens=2).shape == (2, 3)  # in training too


def test_states_are_reordered_selected_and_repeated() -> None:
    state = _model(num_hidden_layers=2)(input_ids=IDS)[CACHE]
    before = state.layers
    state.reorder_cache(torch.tensor([1, 1, 0]))
    assert all(torch.equal(new, old[[1, 1, 0]]) for a, b in zip(state.layers, before) for new, old in zip(a, b))
    state.reorder_cache(torch.tensor([2]))
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
