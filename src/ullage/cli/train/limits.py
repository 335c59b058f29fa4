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
#: The part of a row that the usual step ought to fill.
_FILLED = 0.8


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
    """Lines on the lengths of the samples: more than a model was made for, too few for a packed row.

    Raises ``InputError`` for a sequence longer than the model has positions, and where the capacity leaves none to
    train on.
    """
    longest = max(int(dataset.layout.lengths.max()) for dataset in (training, held_out) if dataset is not None)
    arguments, ranks = command.training, command.parallel.data_ranks(command.training.world_size)
    # A step of ours is one global batch, so accumulation adds nothing to a packed one.
    batch = arguments.per_device_train_batch_size * ranks
    # Ranks that share a row each hold the capacity.
    rows = ranks * (command.parallel.cp or 1)
    room = arguments.packing_capacity
    shortest = int(training.layout.lengths.min())
    if isinstance(room, int) and arguments.packing_oversize == "drop" and shortest > room * (command.parallel.cp or 1):
        raise InputError(
            "every sequence is longer than a packed row, so that all are dropped",
            where="--packing_capacity",
            expected=f"at least {shortest}, the tokens of the shortest",
            found=room,
        )
    notes = (
        _beyond(model, longest, command.data.max_length),
        _unfilled(training.layout.lengths, min(batch, len(training)), rows, arguments.packing_capacity),
    )
    return [note for note in notes if note is not None]


def _beyond(model: nn.Module, longest: int, max_length: int) -> str | None:
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
        return None
    return f"the longest sequence has {longest:,} tokens, and {name} was made for {trained:,} (--max_length cuts)"


def _unfilled(lengths: Any, batch: int, ranks: int, capacity: Any) -> str | None:
    """A line where a packed step cannot fill one row on each rank, so that larger steps would cost little more.

    Args:
        lengths: of the sequences to train on, in tokens.
        batch: sequences per step, over all ranks.
        ranks: ranks, each with a row or a part of one.
        capacity: tokens per row; nothing is said where it is none, or yet to be found.
    """
    mean = float(lengths.mean())
    if not isinstance(capacity, int) or mean * batch >= _FILLED * capacity * ranks:
        return None
    rows = "a row" if ranks == 1 else f"one row on each of {ranks} ranks"
    return (
        f"a step of {batch} sequences fills {mean * batch / (capacity * ranks):.0%} of {rows}: raise "
        "--per_device_train_batch_size, or lower --packing_capacity"
    )
