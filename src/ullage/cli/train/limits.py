"""What a model cannot do whatever the data: see only what lies behind, and count positions beyond its table.

Checked over every type of causal language model in transformers 5.23, with a changed token and with a sequence longer
than the configuration allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ullage.attention.support import attends_both_ways, first_position
from ullage.core.errors import InputError

if TYPE_CHECKING:
    from ullage.cli.train.settings import TrainCommand

#: The field of a config that makes a decoder of an encoder whose attention does not say of itself that it is one's;
#: None for types that see the tokens ahead whatever their config says.
_SWITCHES = {
    **dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roformer"), "is_decoder"),
    "xlm": "causal",
    "cpmant": None,
    "xlnet": None,
}
#: Tables of positions that end, by the names that transformers' models have for them: modules and buffers.
_TABLE = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|positions_embed|pos_encoding)$")
#: Parts of a model that count pixels or frames.
_OTHER_PARTS = re.compile(r"vision|image|audio|img")
#: Fields with the number of positions; those of the second kind hold for a type without a table.
_FIELDS = ("n_positions", "max_position_embeddings", "max_target_positions")
_FIELD_OF = {"mpt": "max_seq_len"}


def require_causal(model: nn.Module) -> None:
    """Raise ``InputError`` for a model whose predictions see the tokens that they are to predict."""
    config: Any = model.config
    switch = _SWITCHES.get(config.model_type, "is_decoder")
    marked = config.model_type in _SWITCHES and not (switch and getattr(config, switch))
    if marked or attends_both_ways(model):
        other = "take a model that was trained to predict the next token"
        raise InputError(
            f"{type(model).__name__} attends in both directions, so it would see the tokens that it is to predict",
            where=f"a model of type {config.model_type}",
            expected="a causal language model",
            hint=f"set {switch}=True in its config ({switch}: true in config.json), or {other}" if switch else other,
        )


def max_positions(model: nn.Module) -> int | None:
    """Tokens of the longest sequence that a model with a table of positions can read; None where nothing ends."""
    config = _text_config(model)
    if config.model_type in _FIELD_OF:
        return getattr(config, _FIELD_OF[config.model_type])
    rows = [
        rows for name, rows in _tables(model) if _TABLE.search(name) is not None and _OTHER_PARTS.search(name) is None
    ]
    if not rows:
        return None
    said = [getattr(config, field) for field in _FIELDS if isinstance(getattr(config, field, None), int)]
    # Tables may have rows in front that no token takes, of which the config says nothing or everything.
    return min(min(rows) - first_position(model), *said)


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config()


def _tables(model: nn.Module) -> list[tuple[str, int]]:
    modules = [
        (name, module.num_embeddings) for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    return modules + [(name, len(buffer)) for name, buffer in model.named_buffers() if buffer.dim() == 2]


def within_positions(command: TrainCommand, model: nn.Module, say: Callable[[str], None]) -> TrainCommand:
    """The call, with a default ``--max_length`` that the model's positions allow, and a line where that is another.

    The call itself stays as it is, so that it is recorded as it was typed. A length that the call gives is looked at
    when those of the samples are known.
    """
    limit, name = max_positions(model), type(model).__name__
    if limit is None or command.data.max_length <= limit or "max_length" in command.given:
        return command
    say(f"sequences are cut to {limit} tokens, the positions of {name} (--max_length)")
    return replace(command, data=replace(command.data, max_length=limit))


def notes_on_lengths(command: TrainCommand, model: nn.Module, training: Any, held_out: Any) -> list[str]:
    """A line where the samples are longer than the model was made for.

    Raises ``InputError`` for a sequence longer than the model has positions, and where the capacity leaves none to
    train on.
    """
    longest = max(int(dataset.layout.lengths.max()) for dataset in (training, held_out) if dataset is not None)
    shortest, room = int(training.layout.lengths.min()), command.training.packing_capacity
    is_dropped = isinstance(room, int) and shortest > room * (command.parallel.cp or 1)
    if is_dropped and command.training.packing_oversize == "drop":
        raise InputError(
            "every sequence is longer than a packed row, so that all are dropped",
            where="--packing_capacity",
            expected=f"at least {shortest}, the tokens of the shortest",
            found=room,
        )
    return _beyond(model, longest, command.data.max_length)


def _beyond(model: nn.Module, longest: int, max_length: int) -> list[str]:
    limit, name = max_positions(model), type(model).__name__
    if limit is not None and longest > limit:
        raise InputError(
            "a sequence is longer than the model has positions",
            where=f"--max_length {max_length}",
            expected=f"at most {limit} tokens, the positions of {name}",
            found=longest,
            hint=f"give --max_length {limit}, which cuts longer ones",
        )
    trained = getattr(_text_config(model), "max_position_embeddings", None)
    if limit is not None or not trained or longest <= trained:
        return []
    return [f"the longest sequence has {longest:,} tokens, and {name} was made for {trained:,} (--max_length cuts)"]
