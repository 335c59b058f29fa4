"""Causal language models by name: sizes, what is refused, and that the last token tells nothing of those before."""

import pytest
from transformers import BertConfig, BertLMHeadModel

from ullage.core.errors import InputError
from ullage.datasets import byte_tokenizer
from ullage.models.by_name import causal_model, new_config


def test_a_llama_by_name_has_usual_proportions():
    config = new_config("llama-64x2", byte_tokenizer())
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 259)
    assert (config.num_attention_heads * config.head_dim, config.intermediate_size) == (64, 128)
    assert new_config("gru-8x3", byte_tokenizer()).num_hidden_layers == 3
    assert new_config("lstm", byte_tokenizer()).hidden_size == 256


def test_other_names_are_none_and_odd_sizes_refused():
    for name in ("qwen3", "llama-64x2x9", "org/name", "./llama"):
        assert new_config(name, byte_tokenizer()) is None
    for name in ("llama-33", "llama-64x0"):
        with pytest.raises(InputError, match="a model has layers, and an even hidden size"):
            new_config(name, byte_tokenizer())


def test_a_model_that_sees_the_tokens_ahead_and_one_without_its_weights_are_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=20, **sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(
        InputError, match=r"BertLMHeadModel sees the tokens that it is to predict\. Set is_decoder=True"
    ):
        causal_model(str(tmp_path / "bert"), None)
    whole = causal_model("llama-16x1", byte_tokenizer())
    state = {name: value for name, value in whole.state_dict().items() if "mlp" not in name}
    whole.save_pretrained(tmp_path / "torn", state_dict=state)
    with pytest.raises(InputError, match="the model's files lack weights"):
        causal_model(str(tmp_path / "torn"), None)
