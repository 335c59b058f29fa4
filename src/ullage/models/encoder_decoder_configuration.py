"""Configuration of the recurrent encoder-decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from ullage.errors import InputError, require_one_of
from ullage.models.configuration import RecurrentConfig
from ullage.models.decoder_attention import ATTENTIONS

_SHARED = ("cell", "vocab_size", "hidden_size", "dropout", "residual", "layer_norm", "initializer_range", "use_cache")


class RecurrentEncoderDecoderConfig(PretrainedConfig):
    """Configuration of :class:`RecurrentEncoderDecoder`; what is not listed is as in :class:`RecurrentConfig`.

    Attributes:
        attention: of the decoder over the source, ``additive`` (Bahdanau) or ``dot`` (Luong)
        num_hidden_layers: layers of the encoder
        num_decoder_layers: layers of the decoder; by default as many as the encoder has
        bidirectional: run the encoder in both directions
        tie_word_embeddings: use one matrix to embed source and target and as the head
        decoder_start_token_id: the token that a decoder starts from; by default ``bos_token_id``

    Raises ``InputError`` for an unknown attention or cell, and for sizes of no possible model.
    """

    model_type = "ullage_recurrent_encoder_decoder"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "encoder_last_hidden_state",
        "cross_attentions",
    ]

    cell: str = "lstm"
    attention: str = "additive"
    vocab_size: int = 384
    hidden_size: int = 256
    num_hidden_layers: int = 1
    num_decoder_layers: int | None = None
    bidirectional: bool = True
    dropout: float = 0.0
    residual: bool = False
    layer_norm: bool = False
    initializer_range: float = 0.1
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require_one_of(self.attention, ATTENTIONS, "attention")
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_hidden_layers
        self.encoder_config()
        self.decoder_config()

    def encoder_config(self) -> RecurrentConfig:
        """The configuration of the encoder alone."""
        return self._part(num_hidden_layers=self.num_hidden_layers, bidirectional=self.bidirectional)

    def decoder_config(self) -> RecurrentConfig:
        """The configuration of the decoder's recurrent layers alone."""
        return self._part(num_hidden_layers=self.num_decoder_layers)

    def start_token_id(self) -> int:
        """The token that a decoder starts from. Raises ``InputError`` where the configuration names none."""
        start = self.bos_token_id if self.decoder_start_token_id is None else self.decoder_start_token_id
        if start is None:
            raise InputError(
                "a decoder needs a token to start from",
                where=type(self).__name__,
                expected="decoder_start_token_id or bos_token_id",
                found="neither",
            )
        return start

    def _part(self, **sizes: Any) -> RecurrentConfig:
        shared = {name: getattr(self, name) for name in _SHARED}
        return RecurrentConfig(**shared, **sizes, pad_token_id=self.pad_token_id)
