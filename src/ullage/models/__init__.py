"""Recurrent models for the Hugging Face world, for sequences of unequal length without padding.

Importing this package registers them with the Auto classes, so that ``AutoModelForCausalLM.from_pretrained`` and
``AutoModelForSeq2SeqLM.from_pretrained`` load what was saved.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ullage.models.causal_lm import RecurrentForCausalLM
from ullage.models.cells import Cell, register_cell
from ullage.models.configuration import RecurrentConfig
from ullage.models.encoder_decoder import RecurrentEncoderDecoder
from ullage.models.encoder_decoder_configuration import RecurrentEncoderDecoderConfig
from ullage.models.modeling import RecurrentModel
from ullage.models.state import RecurrentState

AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig, exist_ok=True)
AutoModel.register(RecurrentConfig, RecurrentModel, exist_ok=True)
AutoModelForCausalLM.register(RecurrentConfig, RecurrentForCausalLM, exist_ok=True)
AutoConfig.register(RecurrentEncoderDecoderConfig.model_type, RecurrentEncoderDecoderConfig, exist_ok=True)
AutoModel.register(RecurrentEncoderDecoderConfig, RecurrentEncoderDecoder, exist_ok=True)
AutoModelForSeq2SeqLM.register(RecurrentEncoderDecoderConfig, RecurrentEncoderDecoder, exist_ok=True)

__all__ = [
    "Cell",
    "RecurrentConfig",
    "RecurrentEncoderDecoder",
    "RecurrentEncoderDecoderConfig",
    "RecurrentForCausalLM",
    "RecurrentModel",
    "RecurrentState",
    "register_cell",
]
