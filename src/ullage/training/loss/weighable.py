"""Losses in which sequences can be weighed, told by the source of the model, and the refusal of all others."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from transformers.loss import loss_utils

from ullage.attention.heads import (
    KNOWN_AUTHORS,
    loss_author,
    loss_shifts,
    package_of,
    works_by_sequence,
    works_by_token,
)
from ullage.errors import InputError
from ullage.models import causal_lm, classification
from ullage.training.loss.divisions import OwnLoss

#: What a ``forward`` may name of losses, for its loss to be a cross-entropy of the logits that it returns, and a
#: balance of experts by ``router_aux_loss_coef`` beside it.
_PLAIN = {"loss_function", "CrossEntropyLoss", "cross_entropy", "mlm_loss_fct", "loss_fn", "lm_loss"}
_EXPERTS = {"load_balancing_loss_func", "router_aux_loss_coef"}
_BY_SEQUENCE = {"loss_function", "CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss"}
#: Language models whose names do not say so.
_BY_TOKEN = {"BertGenerationDecoder", "MarianMTModel", "RecurrentEncoderDecoder"}
#: The functions that a model may call as its ``loss_function``.
_FUNCTIONS = (
    loss_utils.ForCausalLMLoss,
    loss_utils.ForMaskedLMLoss,
    loss_utils.ForTokenClassification,
    loss_utils.ForSequenceClassificationLoss,
    causal_lm.next_token_loss,
    classification.token_loss,
    classification.sequence_loss,
)

Kind = Literal["token", "sequence"]


def kind_of_loss(model: nn.Module) -> Kind | None:
    """Whether the model's loss is over the labels of tokens or of sequences; None if it is not known to be plain.

    A plain loss is the cross-entropy of the logits that the model returns (for sequences also the square of a
    difference, or a binary cross-entropy), and whatever the experts' balance adds to it.
    """
    author, words = loss_author(model)
    named = {word for word in words if "loss" in word.lower() or "entropy" in word.lower()}
    if package_of(author) not in KNOWN_AUTHORS or not named & (_PLAIN | _BY_SEQUENCE):
        return None
    if "loss_function" in named and getattr(model, "loss_function", None) not in _FUNCTIONS:
        return None
    if works_by_sequence(model):
        is_classifier = any("ForSequenceClassification" in each.__name__ for each in type(model).__mro__)
        return "sequence" if is_classifier and named <= _BY_SEQUENCE else None
    # The experts of an encoder-decoder have several balances.
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    known = named <= (_PLAIN if is_pair else _PLAIN | _EXPERTS)
    by_token = works_by_token(model) or any(each.__name__ in _BY_TOKEN for each in type(model).__mro__)
    return "token" if known and by_token and loss_shifts(model) is not None else None


def require_weighable(trainer: Any, model: nn.Module, word: str) -> None:
    """Raise ``InputError`` where the loss of ``trainer`` is not one in which sequences can be weighed by ``word``."""
    own = OwnLoss.of(trainer)
    if own is not None:
        raise _refusal(word, own.name, "a loss of its own, which decides how sequences weigh", "weigh them in it")
    if trainer.label_smoother is not None:
        raise _refusal(
            word,
            "label_smoothing_factor",
            "smoothed labels are averaged by transformers, over tokens",
            "leave label_smoothing_factor at 0",
        )
    if getattr(trainer, "packing_loss", None) is not None:
        name = f"{type(trainer).__name__}.packing_loss"
        raise _refusal(word, name, "a declared loss is divided as it says", "leave one of the two out")
    if kind_of_loss(model) is None:
        raise _refusal(
            word,
            type(model).__name__,
            "its loss is not known to be a cross-entropy of the logits that it returns",
            "compute the loss in compute_loss_func, and weigh sequences there",
        )


def _refusal(word: str, where: str, found: str, hint: str) -> InputError:
    return InputError(
        f"packing_loss_weighting={word!r} cannot be used here", where=where, expected="'token'", found=found, hint=hint
    )
