"""Any function of a packed row, run by lengths: its sequences in calls that they share, its results as one row again.

What a function is given and what it returns is told apart by shape. Beside one row [1, T, ...] with N > 1 sequences, a
tensor with T entries along its second dim has one per token, one with N entries along its first dim has one per
sequence. An encoder-decoder's targets have a row of their own, told by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ullage.errors import InputError
from ullage.mixers.rows import LENGTH_NAMES, TARGET_LENGTH_NAMES, Calls, Groups, PackedRow
from ullage.schema import is_target

#: Fields of images, videos and audio.
_OTHER_MEDIA = re.compile(r"pixel_|image_|images|video|input_features|audio_|input_values")
#: Outputs that have one entry per sequence in every model.
_PER_SEQUENCE = frozenset({"pooler_output", "pooled_output", "seq_relationship_logits", "sentence_embedding"})


def call_by_lengths(
    function: Callable[..., Any],
    groups: Groups,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    per_sequence: frozenset[str] = frozenset(),
) -> list[Any]:
    """The results of ``function`` for each call of the groups.

    Args:
        function: takes ``arguments`` and ``keywords`` for sequences in rows [n, L, ...].
        groups: of the packed row.
        arguments, keywords: of the packed row; each value is cut as its shape says.
        per_sequence: keywords that hold one entry per sequence, whatever their shape.

    Raises ``InputError`` for a tensor that is neither by token nor by sequence.
    """
    positional = [_parts(value, groups, f"argument {place}", False) for place, value in enumerate(arguments)]
    named = {name: _parts(value, groups, name, name in per_sequence) for name, value in keywords.items()}
    return [
        function(*(parts[call] for parts in positional), **{name: parts[call] for name, parts in named.items()})
        for call in range(len(groups))
    ]


def require_cuttable(keywords: Mapping[str, Any], row: PackedRow) -> None:
    """Raise ``InputError`` for images and audio, and for a tensor that is neither by token nor by sequence."""
    sizes = {row.sources.num_slots, row.sources.num_slots if row.targets is None else row.targets.num_slots}
    for name, value in keywords.items():
        if not isinstance(value, Tensor) or name in (*LENGTH_NAMES, *TARGET_LENGTH_NAMES) or value.numel() == 1:
            continue
        shape = tuple(value.shape)
        is_by_token = any(shape[:2] == (1, size) or shape[1:] == (1, size) or shape == (size,) for size in sizes)
        if _OTHER_MEDIA.match(name) or not (is_by_token or shape[0] == len(row)):
            raise _not_cuttable(name, value, row.sources.num_slots, len(row))


def _not_cuttable(name: str, value: Tensor, num_slots: int, num_sequences: int) -> InputError:
    return InputError(
        "a packed row takes fields with one entry per token or per sequence",
        where=name,
        expected=f"[1, {num_slots}, ...] or [{num_sequences}, ...]",
        found=f"shape {list(value.shape)}",
        hint="leave the field out: images, audio and masks cannot be cut by the lengths of the text",
    )


def _parts(value: Any, groups: Groups, name: str, is_per_sequence: bool) -> list[Any]:
    """A value of the packed row, for each call."""
    if isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
        parts = [_parts(part, groups, name, is_per_sequence) for part in value]
        return [type(value)(each) if type(value) in (tuple, list) else tuple(each) for each in zip(*parts)]
    if not isinstance(value, Tensor) or value.ndim == 0 or (value.numel() == 1 and value.ndim == 1):
        return [value] * len(groups)
    calls = _calls_of(name, groups)
    if is_per_sequence and value.shape[0] == groups.num_sequences:
        return groups.select(value)
    if value.ndim >= 2 and tuple(value.shape[:2]) == (1, calls.num_slots):
        return calls.cut(value[0])
    # Positions along several axes, [axes, 1, T].
    if value.ndim == 3 and tuple(value.shape[1:]) == (1, calls.num_slots):
        return [part.movedim(-1, 0) for part in calls.cut(value[:, 0].transpose(0, 1))]
    if value.shape[0] == groups.num_sequences:
        return groups.select(value)
    if value.ndim == 1 and value.shape[0] == calls.num_slots:
        return [part.flatten() for part in calls.cut(value)]
    raise _not_cuttable(name, value, calls.num_slots, groups.num_sequences)


def _calls_of(name: str, groups: Groups) -> Calls:
    return groups.targets if groups.targets is not None and is_target(name) else groups.sources


def join_outputs(
    outputs: Sequence[Any], groups: Groups, *, name: str = "", per_sequence: frozenset[str] = frozenset()
) -> Any:
    """Outputs of each call as those of the packed row: [1, T, ...] by token, [N, ...] by sequence.

    Args:
        outputs: tensors, or tuples and dicts of them, alike in all calls.
        groups: of the packed row.
        name: of the output, for an encoder-decoder's layouts and for what is known to be per sequence.
        per_sequence: outputs that have one entry per sequence, beside those of every model.

    What belongs to no token or sequence (caches, attention weights, numbers) becomes None.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        parts = {
            key: join_outputs([each[key] for each in outputs], groups, name=key, per_sequence=per_sequence)
            for key in first
        }
        return type(first)(**{key: value for key, value in parts.items() if value is not None})
    if isinstance(first, (tuple, list)):
        return tuple(join_outputs(each, groups, name=name, per_sequence=per_sequence) for each in zip(*outputs))
    if not isinstance(first, Tensor) or first.ndim == 0 or "attentions" in name:
        return None
    calls = groups.sources
    if groups.targets is not None and not name.startswith("encoder_"):
        calls = groups.targets
    if not {name} & (_PER_SEQUENCE | per_sequence):
        if all(part.ndim >= 2 and tuple(part.shape[:2]) == shape for part, shape in zip(outputs, calls.shapes)):
            return calls.join(outputs)[None]
        # Experts' scores: the tokens of all rows, one below the other.
        if all(part.shape[0] == n * width for part, (n, width) in zip(outputs, calls.shapes)):
            return calls.join([part.unflatten(0, shape) for part, shape in zip(outputs, calls.shapes)])
    is_alike = len({tuple(part.shape[1:]) for part in outputs}) == 1
    if is_alike and all(part.shape[0] == n for part, (n, _) in zip(outputs, calls.shapes)):
        return groups.ordered(outputs)
    return None
