"""What a model's head does with hidden states and labels, by its class: one entry per token or per sequence, a shift.

Nothing is run to find it out. Whoever packs a model, or adds up the losses of microbatches, has to know.
"""

from __future__ import annotations

import inspect
import re

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

#: Packages whose losses are known by the name of the class.
KNOWN_AUTHORS = ("ullage", "transformers")

_BY_TOKEN = re.compile(
    r"(For(CausalLM|MaskedLM|TokenClassification|ConditionalGeneration)|LMHeadModel|WithLMHead|MarianMTModel)$"
)
_BY_SEQUENCE = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$|DoubleHeadsModel$")


def works_by_token(model: nn.Module) -> bool:
    """Whether logits and loss have one entry per token, so that the head can work on a packed row.

    Told by the name of the class that defines ``forward``, or of one that it inherits. What another author's class
    does before its head, or around it, no name tells (:mod:`ullage.attention.parts`).
    """
    kinds = type(model).__mro__
    return any(_BY_TOKEN.search(each.__name__) for each in kinds[kinds.index(_author_of_forward(model)) :])


def spans_sequences(model: nn.Module) -> bool:
    """Whether the head looks at a sequence as a whole, for its class or for a span in it, so that a row will not do."""
    return works_by_sequence(model) or any("ForQuestionAnswering" in each.__name__ for each in type(model).__mro__)


def works_by_sequence(model: nn.Module) -> bool:
    """Whether logits and labels have one entry per sequence. Told by name."""
    return any(_BY_SEQUENCE.search(each.__name__) for each in type(model).__mro__)


def is_multiple_choice(model: nn.Module) -> bool:
    """Whether a head scores the choices of a question, which are several sequences. Told by name."""
    return any("ForMultipleChoice" in each.__name__ for each in type(model).__mro__)


def loss_name(model: nn.Module) -> str | None:
    """The entry of transformers' ``LOSS_MAPPING`` that a model's class is named after; None if its name does not tell.

    A subclass of another name that keeps the ``forward`` of its base keeps its loss, so the name of the class that
    defines ``forward`` is asked next.
    """
    name = getattr(model, "loss_type", None)
    if name in LOSS_MAPPING:
        return name
    author = _author_of_loss(model)
    if package_of(author) not in KNOWN_AUTHORS:
        return None
    # The longest, because names contain each other: DeformableDetrForObjectDetection and ForObjectDetection.
    return max((name for name in LOSS_MAPPING if name in author.__name__), key=len, default=None)


def loss_shifts(model: nn.Module) -> bool | None:
    """Whether the model's loss compares the output at a token with the label of the next; None if that is not known.

    Read off what ``forward`` names: ``loss_function``, or, in transformers' own, a cross-entropy, whose labels are
    shifted or not. Of models of other authors the name of the class tells, as it tells transformers.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    name, author = loss_name(model), _author_of_loss(model)
    names, variables = _words_of_forward(author)
    if package_of(author) != "ullage":
        if "loss_function" in names:
            # PreTrainedModel.loss_function falls back to ForCausalLM for a loss_type that is not in the mapping.
            name = name if getattr(model, "loss_type", None) in LOSS_MAPPING else "ForCausalLM"  # its default
        elif package_of(author) == "transformers" and names & {"CrossEntropyLoss", "cross_entropy"}:
            # Older heads compute the cross-entropy themselves; those that shift give the shifted tensors these names.
            return bool(variables & {"shift_labels", "shift_logits"})
        elif package_of(author) == "transformers" and name == "ForCausalLM":
            return None  # it is computed elsewhere: ProphetNet's does not shift
    return None if name is None else LOSS_MAPPING[name] is ForCausalLMLoss


def loss_divides_by_count(model: nn.Module) -> bool:
    """Whether the model's loss is a sum over its labels, divided by ``num_items_in_batch``, by its source.

    So are all of ours, and transformers' ``ForCausalLMLoss``. Most other heads of transformers take keywords and give
    a mean whatever they are given, and of others' models nobody knows; a mean is weighed by who asked for it.
    """
    author = _author_of_forward(model)
    if package_of(author) == "ullage":
        return True
    return (
        package_of(author) == "transformers"
        and "loss_function" in _words_of_forward(author)[0]
        and loss_shifts(model) is True
    )


def is_loss_known(model: nn.Module) -> bool:
    """Whether the source of the model's loss is transformers' or ours, and tells whether it shifts labels.

    Not that of a subclass of another author with a method of its own, nor one with another ``loss_function``.
    """
    others = [each for each in type(model).__mro__ if package_of(each) not in (*KNOWN_AUTHORS, "torch", "builtins")]
    methods = {name for each in others for name, value in vars(each).items() if inspect.isfunction(value)}
    function = getattr(model, "_loss_function", None)
    is_own = function is not None and str(getattr(function, "__module__", "")).partition(".")[0] not in KNOWN_AUTHORS
    return not is_own and not methods - {"__init__", "_init_weights"} and loss_shifts(model) is not None


def loss_author(model: nn.Module) -> tuple[type, set[str]]:
    """The class whose ``forward`` computes the loss of a model, and the names that this ``forward`` refers to."""
    author = _author_of_loss(model)
    return author, _words_of_forward(author)[0]


def _author_of_forward(model: nn.Module) -> type:
    return next(each for each in type(model).__mro__ if "forward" in vars(each))


def _author_of_loss(model: nn.Module) -> type:
    """The class whose ``forward`` computes the loss: not one of a user's that hands on to ``super().forward``."""
    authors = [each for each in type(model).__mro__ if "forward" in vars(each)]
    for author in authors:
        if package_of(author) in KNOWN_AUTHORS or not {"super", "forward"} <= _words_of_forward(author)[0]:
            return author
    return authors[0]


def _words_of_forward(author: type) -> tuple[set[str], set[str]]:
    """The names that a class's ``forward`` refers to, and those of its own variables."""
    code = getattr(inspect.unwrap(vars(author)["forward"]), "__code__", None)
    return (set(code.co_names), set(code.co_varnames)) if code is not None else (set(), set())


def package_of_forward(model: nn.Module) -> str:
    """The package of the class that defines a model's ``forward``, whatever class a wrapper has made of it."""
    return package_of(_author_of_forward(model))


def package_of(kind: type) -> str:
    """The package that a class belongs to."""
    return kind.__module__.partition(".")[0]
