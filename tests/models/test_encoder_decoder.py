"""The encoder-decoder: saved and loaded through the Auto classes, resized, and what it says about bad input."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from ullage.attention.releases import CACHE
from ullage.core.errors import InputError
from ullage.models import RecurrentEncoderDecoder, RecurrentEncoderDecoderConfig

SOURCES = torch.tensor([[3, 4, 5], [6, 7, 8]])
LABELS = torch.tensor([[9, 10, 11, 2], [12, 2, -100, -100]])


def _model(**changes: Any) -> RecurrentEncoderDecoder:
    torch.manual_seed(0)
    options = {"vocab_size": 20, "hidden_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(**{**options, **changes})).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention", ["additive", "dot"])
def test_saved_and_loaded_through_the_auto_classes(attention: str, tied: bool, tmp_path: Path) -> None:
    model = _model(attention=attention, cell="gru", num_decoder_layers=2, layer_norm=True, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RecurrentEncoderDecoderConfig)
    assert (config.attention, config.cell, config.num_decoder_layers) == (attention, "gru", 2)
    assert config.is_encoder_decoder
    for auto in (AutoModelForSeq2SeqLM, AutoModel):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is RecurrentEncoderDecoder
        found, expected = (m(input_ids=SOURCES, labels=LABELS).logits for m in (loaded, model))
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)
        assert (loaded.lm_head.weight is loaded.encoder.embed_tokens.weight) == tied
        assert (loaded.decoder.embed_tokens.weight is loaded.encoder.embed_tokens.weight) == tied
        assert torch.equal(loaded.generate(SOURCES, max_new_tokens=4), model.generate(SOURCES, max_new_tokens=4))
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_resize_on_both_sides_with_their_head(tied: bool) -> None:
    model = _model(tie_word_embeddings=tied)
    before = model(input_ids=SOURCES, labels=LABELS).logits
    model.resize_token_embeddings(25)
    assert model.config.vocab_size == 25
    after = model(input_ids=SOURCES, labels=LABELS).logits
    assert after.shape == (2, 4, 25)
    real = LABELS != -100
    assert torch.equal(after[..., :20][real], before[real])
    assert (model.lm_head.weight is model.decoder.embed_tokens.weight) == tied
    new = torch.tensor([[24, 3, 24]])
    assert torch.isfinite(model(input_ids=new, labels=new).loss)
    model.resize_token_embeddings(20)
    assert torch.equal(model(input_ids=SOURCES, labels=LABELS).logits[real], before[real])


def test_the_state_bridge_hands_on_the_upper_layers() -> None:
    model = _model(num_hidden_layers=3, num_decoder_layers=2, bidirectional=False)
    layers = model.encoder(input_ids=SOURCES, use_cache=True)[CACHE].layers
    assert model.bridge(layers) == (layers[1], layers[2])
    deeper = _model(num_hidden_layers=1, num_decoder_layers=2, bidirectional=False)
    (only,) = deeper.encoder(input_ids=SOURCES, use_cache=True)[CACHE].layers
    assert deeper.bridge((only,)) == (only, only)


def test_a_state_comes_back_when_asked_for_and_by_default_in_evaluation() -> None:
    model = _model()
    start = torch.tensor([[1], [1]])
    assert model(input_ids=SOURCES, decoder_input_ids=start)[CACHE].get_seq_length() == 1
    assert model(input_ids=SOURCES, labels=LABELS).get(CACHE) is None
    assert model.train()(input_ids=SOURCES, decoder_input_ids=start).get(CACHE) is None
    assert model.generate(SOURCES, max_new_tokens=2).shape == (2, 3)  # in training too


def test_a_target_needs_a_token_to_start_from() -> None:
    model = _model(bos_token_id=None)
    with pytest.raises(InputError, match="a decoder needs a token to start from"):
        model(input_ids=SOURCES, labels=LABELS)
    other = _model(bos_token_id=None, decoder_start_token_id=4)
    assert other.prepare_decoder_input_ids_from_labels(LABELS).tolist() == [[4, 9, 10, 11], [4, 12, 2, 0]]
    assert (other.generate(SOURCES, max_new_tokens=3)[:, 0] == 4).all()
