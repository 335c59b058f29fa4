"""Configuration of the recurrent models."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from transformers import PretrainedConfig

from ullage.attention.releases import CACHE
from ullage.core.errors import InputError, require_one_of
from ullage.models.cells import cell_class

#: Kinds of pooling in front of a classifier.
POOLINGS = ("last", "mean", "attention")


class StrictConfig(PretrainedConfig):
    """Configuration that takes no argument it does not know; of a file it takes what others have written into it."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        return super().from_dict({"model_type": cls.model_type, **config_dict}, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if "model_type" in kwargs:  # which configurations write, and nobody else gives
            return
        fields = [field.name for field in dataclasses.fields(self)]
        # transformers uses up what it knows, or has a property for it, and sets anything else as an attribute.
        for name in vars(self).keys() & kwargs.keys() - {"auto_map", *dir(type(self))}:
            near = get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else None
            raise InputError("no such argument", where=type(self).__name__, found=name, hint=hint)


class RecurrentConfig(StrictConfig):
    """Configuration of every recurrent model except the encoder-decoder.

    Attributes:
        cell: name of a registered cell: lstm, gru, rnn_tanh, rnn_relu, mingru, minlstm, or your own
        vocab_size: number of token ids
        hidden_size: of the embeddings, and of each direction of a layer
        num_hidden_layers: layers of one cell (or two) each
        bidirectional: run every layer in both directions
        dropout: probability, on the output of every layer
        residual: add each layer's input to its output, where their sizes agree
        layer_norm: normalise before every layer and after the last one
        pooling: of a sequence for a classifier: last, mean or attention
        classifier_dropout: probability, between pooling and classifier
        initializer_range: standard deviation of the initial embeddings and linear layers; cells draw their own
        use_cache: return final states outside of training

    Raises ``InputError`` for a cell that is not registered, for sizes of no possible model and unknown arguments.
    """

    model_type = "ullage_recurrent"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]

    cell: str = "lstm"
    vocab_size: int = 384
    hidden_size: int = 256
    num_hidden_layers: int = 1
    bidirectional: bool = False
    dropout: float = 0.0
    residual: bool = False
    layer_norm: bool = False
    pooling: str = "last"
    classifier_dropout: float = 0.0
    initializer_range: float = 0.1
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        cell_class(self.cell)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be positive", expected=">= 1", found=getattr(self, name))
        for name in ("dropout", "classifier_dropout"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise InputError(f"{name} must be a probability", expected=f"0 <= {name} < 1", found=value)
        require_one_of(self.pooling, POOLINGS, "pooling")
