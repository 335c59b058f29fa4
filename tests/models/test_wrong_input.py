"""What recurrent models and their configurations say about input that they cannot use, each in one line."""

import json
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import AutoConfig

from ullage.attention.releases import CACHE
from ullage.core.errors import InputError
from ullage.models import (
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
)
from ullage.models.cells import CELLS

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
LABELS = torch.tensor([[9, 10, 11, 2], [12, 2, -100, -100]])
PACKED = pack_sequence([IDS[0], IDS[1, :2]])
KINDS: dict[str, Any] = {
    "causal": RecurrentForCausalLM,
    "sequence": RecurrentForSequenceClassification,
    "token": RecurrentForTokenClassification,
    "pairs": RecurrentEncoderDecoder,
}


def _model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    options = {"vocab_size": 20, "hidden_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}
    config = RecurrentEncoderDecoderConfig if kind == "pairs" else RecurrentConfig
    return KINDS[kind](config(**options)).eval()


def _rows(**more: Any) -> dict[str, Any]:
    return {"input_ids": IDS, **more}


def _masked(*rows: list[int], **more: Any) -> dict[str, Any]:
    return _rows(attention_mask=torch.tensor(rows), **more)


def _bounds(*ends: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": IDS.view(1, 6), "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32), **more}


LENGTHS = "input_lengths and cu_seq_lens_q disagree: expected 2 lengths, each at most its slot, found"
OTHER_ID = "a token id lies outside the vocabulary"
OTHER_LENGTHS = "labels and input_ids disagree: expected a PackedSequence of the same lengths, found"
RESIZE = "Use the tokenizer that the model was made for, or resize_token_embeddings"
TURNED = pack_sequence([IDS[1, :2], IDS[0]], enforce_sorted=False)
#: The model, the keywords, and how the error begins.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    # Where the sequences lie.
    ("causal", _masked([1, 0, 1], [1, 1, 1]), "attention_mask has holes (row 0)"),
    ("causal", _masked([1, 1, 1], [0, 0, 0]), "a row of attention_mask is all padding (row 1)"),
    ("causal", _masked(*[[1] * 3] * 3), "attention_mask and rows disagree: expected [2, 3], found shape [3, 3]"),
    ("causal", _rows(input_lengths=[3]), "input_lengths and rows disagree: expected 2 lengths, found 1"),
    ("causal", _rows(input_lengths=torch.tensor([4, 1])),
     "a length does not fit its row (row 0): expected 1 to 3, found 4"),
    ("causal", _bounds(0, 2, 5),
     "cu_seq_lens_q does not cover the row: expected rising from 0 to 6, found 2 sequences, 5 tokens"),
    ("causal", _bounds(0, 3, 6, input_ids=IDS),
     "sequences that lie end to end come in one row: expected [1, T], found [2, 3]"),
    ("causal", _bounds(0, 3, 6, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]])),
     "rows without padding take no attention_mask (attention_mask beside cu_seq_lens_q)"),
    ("token", {"input_ids": pack_sequence([IDS[0]]), "attention_mask": torch.ones(1, 3)},
     "a PackedSequence knows its own lengths (attention_mask beside it)"),
    ("token", _masked([1, 1, 0], [1, 1, 1], input_lengths=[3, 3]),
     "attention_mask and input_lengths disagree: expected [2, 3], found [3, 3]"),
    ("token", _bounds(0, 2, 6, input_lengths=[3, 2]), f"{LENGTHS} 2 lengths, 5 tokens"),
    ("sequence", _bounds(0, 4, 4, 6), "a sequence without tokens has nothing to pool (sequence 1)"),
    ("pairs", _bounds(0, 6, 6, labels=LABELS), "a source is empty (sequence 1): expected at least one token"),
    # Tokens.
    ("causal", {"input_ids": torch.tensor([[3, 4, 0], [5, 20, 6]]), "input_lengths": [2, 3]},
     f"{OTHER_ID} (sequence 1, position 1): expected 0 to 19, found 20"),
    ("causal", {"input_ids": IDS[:, :0]},
     "a model needs rows of tokens: expected [N, L] of at least one token, found shape [2, 0]"),
    ("causal", {"labels": IDS}, "a model needs input_ids or inputs_embeds: found neither"),
    ("token", _rows(inputs_embeds=torch.zeros(2, 3, 8)), "a model takes input_ids or inputs_embeds: found both"),
    # Labels.
    ("causal", _rows(labels=IDS[:, :2]), "labels and input_ids disagree: expected [2, 3], found shape [2, 2]"),
    ("causal", _rows(labels=IDS, logits_to_keep=1), "logits_to_keep names columns of rows (labels beside it)"),
    ("sequence", _rows(labels=torch.tensor([1])),
     "labels and sequences disagree: expected 2 labels, one per sequence, found shape [1]"),
    ("sequence", _rows(labels=IDS % 3),
     "labels and logits disagree: expected [2] classes, found int64 of shape [2, 3]"),
    ("token", {"input_ids": PACKED, "labels": IDS}, f"{OTHER_LENGTHS} shape [2, 3]"),
    ("token", {"input_ids": PACKED, "labels": TURNED}, f"{OTHER_LENGTHS} lengths [2, 3]"),
    ("pairs", _rows(), "a decoder needs labels or decoder_input_ids: found neither"),
    ("pairs", _rows(labels=LABELS[:1]), "sources and targets disagree: expected 2 targets, found 1"),
    ("pairs", _rows(labels=LABELS, decoder_input_ids=LABELS[:, :3]),
     "labels and decoder_input_ids disagree: expected [2, 3], found shape [2, 4]"),
    ("pairs", _rows(labels=torch.full((2, 2), 20)),
     f"{OTHER_ID} (sequence 0, position 0): expected 0 to 19, found 20. {RESIZE}"),
    (
        "pairs",
        {"encoder_outputs": (torch.zeros(2, 3, 16),), "labels": LABELS},
        "encoder_outputs hold no final states for the decoder to start from: expected " + CACHE + " in them. Call the encoder with use_cache=True",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "keywords", "message"), WRONG, ids=lambda value: value if type(value) is str else "")
def test_input_that_cannot_be_used(kind: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        _model(kind)(**keywords)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_states_that_do_not_fit() -> None:
    state = _model("causal")(input_ids=IDS)[CACHE]
    of_batch = r"the state is of another batch \(cache, layer 0\): expected \[1 sequences, 8\], found \[2, 8\]"
    with pytest.raises(InputError, match=of_batch):
        _model("causal")(input_ids=IDS[:1], cache=state)
    of_model = r"the state is of another model \(cache\): expected 1 layers of 1 tensors, found 1 of 2"
    with pytest.raises(InputError, match=of_model):
        _model("causal", cell="gru")(input_ids=IDS, cache=state)
    pairs = _model("pairs")
    state = pairs(input_ids=IDS, labels=LABELS, use_cache=True)[CACHE]
    with pytest.raises(InputError, match="the state is of another batch"):
        pairs(input_ids=IDS[:1], labels=LABELS[:1], cache=state)


NAMES = " or ".join(map(repr, CELLS))
POOLINGS = "'last' or 'mean' or 'attention'"
ATTENTIONS = "expected 'additive' or 'dot'"


@pytest.mark.parametrize(("config", "changes", "message"), [
    (RecurrentConfig, {"cell": "mamba"}, f"no such recurrent cell: expected {NAMES}, found 'mamba'"),
    (RecurrentConfig, {"hidden_size": 0}, "hidden_size must be positive: expected >= 1, found 0"),
    (RecurrentConfig, {"dropout": 1.0}, "dropout must be a probability: expected 0 <= dropout < 1, found 1.0"),
    (RecurrentConfig, {"pooling": "max"}, f"no such pooling: expected {POOLINGS}, found 'max'"),
    (RecurrentEncoderDecoderConfig, {"attention": "linear"}, f"no such attention: {ATTENTIONS}, found 'linear'"),
    (RecurrentEncoderDecoderConfig, {"num_decoder_layers": 0}, "num_hidden_layers must be positive"),
])  # fmt: skip
def test_configurations_that_make_no_model(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        config(**changes)
    assert str(error.value).startswith(message)


def test_a_causal_model_refuses_to_run_backwards() -> None:
    with pytest.raises(InputError, match=r"runs in one direction \(RecurrentConfig\): expected bidirectional=False"):
        RecurrentForCausalLM(RecurrentConfig(bidirectional=True))


@pytest.mark.regression
@pytest.mark.parametrize("kind", [RecurrentConfig, RecurrentEncoderDecoderConfig])
def test_an_argument_that_a_configuration_does_not_know_is_an_error(kind, tmp_path):
    for name, meant in {"num_layers": "num_hidden_layers", "cel": "cell"}.items():
        with pytest.raises(InputError, match=rf"no such argument \({kind.__name__}\): found {name}. .* {meant}\?$"):
            kind(**{name: 3})
    known = {"architectures": ["x"], "dtype": "float32", "num_labels": 3, "return_dict": False, "name_or_path": "x",
             "auto_map": {"a": "b"}, "output_hidden_states": True, "torch_dtype": "float32", "temperature": 0.5,
             "transformers_version": "5.4.0", "attn_implementation": "eager"}  # fmt: skip
    kind(**known).save_pretrained(tmp_path)
    # What others have written into a file stays, as in those of transformers.
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 7, "hidden_size": 24}))
    found = AutoConfig.from_pretrained(tmp_path)
    assert (type(found), found.hidden_size, found.num_layers, found.num_labels) == (kind, 24, 7, 3)
    assert kind(**found.to_dict()).to_dict() == found.to_dict()
    assert kind.from_dict({"hidden_size": 24, "num_layers": 7}).hidden_size == 24
