"""Recurrent models for transformers, on sequences of unequal length without padding.

Importing this package registers them with the Auto classes, so that ``AutoModelForCausalLM.from_pretrained`` and
``AutoModelForSeq2SeqLM.from_pretrained`` load what was saved.
"""

from __future__ import annotations

from ullage.core.extras import needed_by

with needed_by("ullage.models", ["transformers"]):
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

from ullage.models.causal_lm import RecurrentForCausalLM
from ullage.models.cells import Cell, register_cell
from ullage.models.classical import GRUCell, LSTMCell, ReLUCell, TanhCell
from ullage.models.classification import RecurrentForSequenceClassification, RecurrentForTokenClassification
from ullage.models.configuration import RecurrentConfig
from ullage.models.encoder_decoder import RecurrentEncoderDecoder, RecurrentEncoderDecoderConfig
from ullage.models.sequences import RaggedInputs
from ullage.models.minimal import MinGRUCell, MinLSTMCell, linear_scan
from ullage.models.modeling import RecurrentModel
from ullage.models.state import RecurrentState

AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig, exist_ok=True)
AutoModel.register(RecurrentConfig, RecurrentModel, exist_ok=True)
AutoModelForCausalLM.register(RecurrentConfig, RecurrentForCausalLM, exist_ok=True)
AutoConfig.register(RecurrentEncoderDecoderConfig.model_type, RecurrentEncoderDecoderConfig, exist_ok=True)
AutoModel.register(RecurrentEncoderDecoderConfig, RecurrentEncoderDecoder, exist_ok=True)
AutoModelForSeq2SeqLM.register(RecurrentEncoderDecoderConfig, RecurrentEncoderDecoder, exist_ok=True)
AutoModelForSequenceClassification.register(RecurrentConfig, RecurrentForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(RecurrentConfig, RecurrentForTokenClassification, exist_ok=True)

__all__ = [
    "Cell",
    "GRUCell",
    "LSTMCell",
    "MinGRUCell",
    "MinLSTMCell",
    "RaggedInputs",
    "ReLUCell",
    "RecurrentConfig",
    "RecurrentEncoderDecoder",
    "RecurrentEncoderDecoderConfig",
    "RecurrentForCausalLM",
    "RecurrentForSequenceClassification",
    "RecurrentForTokenClassification",
    "RecurrentModel",
    "RecurrentState",
    "TanhCell",
    "linear_scan",
    "register_cell",
]
