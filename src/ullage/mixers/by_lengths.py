"""A packed row by lengths: its sequences in calls that they share, and what the calls gave as one row again.

Whoever calls a packed model gives one row [1, T, ...] and ``cu_seq_lens_q``. A part of the model that mixes tokens
gets the sequences of the row instead: ``Groups`` puts sequences of one length, or of similar lengths where padding
behind a sequence cannot change it, into calls [n, L, ...]. An encoder-decoder has two layouts in one row, sources and
targets, told apart by name; a group then holds sequences that are alike in both. Where a model runs as a
whole, :func:`call_whole` joins the losses of its calls too.

What a function is given and what it returns is told apart by shape. Beside one row [1, T, ...] with N > 1 sequences, a
tensor with T entries along its second dim has one per token, one with N entries along its first dim has one per
sequence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ullage.attention.heads import loss_author, loss_divides_by_count, package_of, works_by_sequence
from ullage.attention.ulysses import Slices
from ullage.core.columns import IGNORED_LABEL, is_media, is_target
from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout
from ullage.core.rows import LENGTH_NAMES, Calls, alike, end_to_end, on_device, read_row, similar, usual_positions
from ullage.mixers.items import RowItems

#: The keywords of the targets of an encoder-decoder.
TARGET_LENGTH_NAMES = tuple(f"decoder_{name}" for name in LENGTH_NAMES)
#: The sides of a row: an encoder-decoder has targets beside its sources.
SOURCES, TARGETS = "sources", "targets"
#: Attribute of an attention layer with the sides of its queries and keys, where a search found them.
SIDES = "_ullage_sides"
#: Cost of one more call of a mixer, in tokens of padding: calls are merged where that is cheaper. 48 was measured on a
#: CPU; on an H200 240 for Mamba 2 and 500 for Qwen3-Next without their kernels, and more for a convolution.
_CALL, _CALL_ON_GPU = 48, 512
#: Fields of audio.
_SOUND = re.compile(r"input_features|audio_|input_values")
#: Outputs that have one entry per sequence in every model.
_PER_SEQUENCE = frozenset({"pooler_output", "pooled_output", "seq_relationship_logits", "sentence_embedding"})


class PackedRow:
    """The sequences of one packed row of a model's call, on the host.

    Args:
        sources: the row's own layout.
        targets: that of an encoder-decoder's targets, if it has any.
        device: of the row's tensors.
    """

    def __init__(self, sources: Layout, targets: Layout | None, device: torch.device) -> None:
        self.sources, self.targets, self.device = sources, targets, device
        #: Whether a part of the model has run by lengths.
        self.is_served = False
        #: This rank's slice of the row, where ranks share it; the layout is that of the whole row.
        self.slices: Slices | None = None
        #: The fields by item of the sequences, if they have any.
        self.items: RowItems | None = None
        #: How many tokens of each sequence stand for items, by the kind of items, where that is known.
        self.tokens_of_items: dict[str, Int64] = {}
        #: For each sequence with images that text looks at by itself: which tiles each token sees, bool [L, tiles].
        self.seen_tiles: dict[int, Tensor] = {}
        #: The kinds of items of which the row has a stand-in alone.
        self.stand_ins: frozenset[str] = frozenset()
        #: Masks of sequences by what they depend on, shared by the layers.
        self.masks: dict[Any, tuple[Any]] = {}
        #: Whether parts that were found run by it, so that attention asks the row and nothing else.
        self.is_found = False
        #: Whether masks of a model's own attention are described alone, and made by sequence.
        self.defers_masks = False
        #: While parts are searched: masks of the row by their id, with what they are.
        self.noted: dict[int, Any] | None = None
        #: While parts are searched: the sides of layers of attention.
        self.seen: dict[nn.Module, tuple[str, str]] = {}

    @classmethod
    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def of(
        cls, keywords: Mapping[str, Any], targets: Layout | None = None, slices: Slices | None = None
    ) -> PackedRow | None:
        """From the keywords of a model's call; None for a call without ``cu_seq_lens_q``. Waits for the device.

        ``slices``: what this rank holds of the row, if ranks share it.

        Raises ``InputError`` for lengths that do not cover the row.
        """
        cu_seqlens = keywords.get("cu_seq_lens_q")
        if cu_seqlens is None:
            return None
        row = next((keywords[name] for name in ("input_ids", "inputs_embeds") if keywords.get(name) is not None), None)
        if not isinstance(row, Tensor) or row.ndim < 2 or row.shape[0] != 1:
            raise InputError(
                "a packed call takes one row of tokens beside cu_seq_lens_q",
                expected="input_ids [1, T]",
                found="none" if row is None else f"shape {list(row.shape)}",
                hint="pass what RaggedBatch.to_flattened() gives",
            )
        if slices is not None:
            shared = cls(slices.layout, None, row.device)
            shared.slices = slices
            return shared
        sources = read_row(cu_seqlens, row.shape[1], keywords.get("position_ids"))
        if targets is not None and len(targets.slots) != len(sources.slots):
            raise InputError(
                "a packed call needs one target for each source",
                expected=f"{len(sources.slots)} targets",
                found=len(targets.slots),
            )
        return cls(sources, targets, row.device)

    def __len__(self) -> int:
        return len(self.sources.slots)

    def layout_of(self, side: str) -> Layout:
        """The sequences of the sources, or of the targets."""
        assert side == SOURCES or self.targets is not None
        return self.targets if side == TARGETS and self.targets is not None else self.sources

    def sides_of(self, module: nn.Module, queries: int, keys: int) -> tuple[str, str] | None:
        """The sides that so many queries and keys are of; None for a call that is none of the row's.

        Where sources and targets have as many tokens, the module tells, of which it was found.
        """
        sizes = {side: self.layout_of(side).size for side in self.sides}
        known = vars(module).get(SIDES)
        if known is not None and all(sizes.get(side) == size for side, size in zip(known, (queries, keys))):
            return known
        found = tuple(next((side for side in sizes if sizes[side] == size), None) for size in (queries, keys))
        return None if None in found else found  # type: ignore[return-value]

    def note_sides(self, module: nn.Module, sides: tuple[str, str]) -> None:
        """While parts are searched: note the sides of a layer of attention."""
        if self.noted is not None and self.targets is not None:
            self.seen[module] = sides

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that it has."""
        return (SOURCES,) if self.targets is None else (SOURCES, TARGETS)

    def bounds_of(self, side: str, *, apart: bool) -> Tensor:
        """int32, the cumulated slots of a side on the row's device; with padding ``apart``, as sequences of its own."""
        key = ("bounds", side, apart)
        if key not in self.masks:
            layout = self.layout_of(side)
            sizes = layout.slots
            if apart and layout.num_tokens < layout.size:
                # Lengths [3, 4] in slots [4, 4] become the lengths [3, 1, 4].
                sizes = np.stack([layout.lengths, layout.slots - layout.lengths], 1).ravel()
                sizes = sizes[sizes > 0]
            self.masks[key] = (on_device(Layout(sizes).cu_seqlens, self.device),)
        return self.masks[key][0]

    def pairs_of(self, sides: tuple[str, str]) -> tuple[Calls, Calls]:
        """The calls of queries and of keys, of sequences of equal lengths on both sides."""
        groups = self.groups_of(frozenset(sides), "alike")
        return groups.of_side(sides[0]), groups.of_side(sides[1])

    def places_of(self, side: str) -> Tensor:
        """The place of each token in its sequence, int64 [T]; 0 in padding."""
        key = ("places", side)
        if key not in self.masks:
            self.masks[key] = (on_device(usual_positions(self.layout_of(side)), self.device),)
        return self.masks[key][0]

    def longest_of(self, side: str) -> int:
        """Tokens of the longest sequence of a side."""
        return int(self.layout_of(side).lengths.max(initial=0))

    def groups_of(self, sides: frozenset[str], kind: str) -> Groups:
        """Sequences in calls that they share, by the sides that a call has.

        ``kind``: "apart", each in a call of its own; "alike", those of equal lengths; "padded", those of similar ones;
        "one", all of them.
        """
        key = ("groups", sides, kind)
        if key not in self.masks:
            lengths = [self.layout_of(side).lengths for side in sorted(sides)]
            there = np.minimum.reduce(lengths) > 0
            if kind == "apart":
                members = [np.array([each]) for each in np.flatnonzero(there)]
            elif kind == "alike":
                members = alike(lengths, there)
            elif kind == "padded":
                members = similar(lengths[0], _CALL if self.device.type == "cpu" else _CALL_ON_GPU)
            else:
                members = [np.flatnonzero(there)[np.argsort(lengths[0][there], kind="stable")]]
            self.masks[key] = (Groups(self, members),)
        return self.masks[key][0]

    @cached_property
    def alike(self) -> Groups:
        """Sequences of one length, in sources and targets, share a call: exact for every model whose rows are."""
        keys = [self.sources.lengths] if self.targets is None else [self.sources.lengths, self.targets.lengths]
        there = self.sources.lengths > 0
        if self.items is None:
            return Groups(self, alike(keys, there))
        # Those with images are alone in their calls.
        has_items = self.items.sequences
        return Groups(self, [*alike(keys, there & ~has_items), *np.flatnonzero(there & has_items)[:, None]])

    @cached_property
    def of_kernels(self) -> dict[str, Tensor]:
        """Where the slots of the row lie, by the keywords of kernels; empty ones are left out."""
        slots = self.sources.slots[self.sources.slots > 0]
        bounds = on_device(np.cumsum([0, *slots]), self.device)
        numbers = on_device(np.repeat(np.arange(len(slots), dtype=np.int32), slots)[None], self.device)
        return {"cu_seq_lens_q": bounds, "cu_seqlens": bounds, "seq_idx": numbers}


class Groups:
    """Sequences of a row in the calls that they share.

    Sequences of 3, 5 and 3 tokens make two calls, with the members [0, 2] and [1].

    Attributes:
        members: the sequences of each call.
    """

    def __init__(self, row: PackedRow, members: list[Int64]) -> None:
        self.members, self.num_sequences, self._row = members, len(row), row
        # Place of each sequence among those of all calls.
        self._order = end_to_end(members)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def sources(self) -> Calls:
        """Where the tokens of sources go."""
        return Calls(self._row.sources, self.members, self._row.device)

    @cached_property
    def targets(self) -> Calls | None:
        """Where those of targets go."""
        return None if self._row.targets is None else Calls(self._row.targets, self.members, self._row.device)

    def of_side(self, side: str) -> Calls:
        """Where those of a side go."""
        calls = self.targets if side == TARGETS else self.sources
        assert calls is not None
        return calls

    def select(self, values: Tensor) -> list[Tensor]:
        """Values [N, ...] by sequence, as one tensor [n, ...] per call."""
        return [values.index_select(0, on_device(part, values.device)) for part in self.members]

    def ordered(self, parts: Sequence[Tensor]) -> Tensor:
        """Values [n, ...] of the sequences of each call, as [N, ...] in the row's order; zeros for an empty one."""
        # The calls gave sequences 0, 2, 1: the sequences 0, 1, 2 are then at 0, 2, 1.
        values = torch.cat(list(parts))
        place_of = on_device(np.argsort(self._order), values.device)
        in_order = values.index_select(0, place_of)
        if len(self._order) == self.num_sequences:
            return in_order
        there = on_device(np.sort(self._order), values.device)
        return in_order.new_zeros((self.num_sequences, *in_order.shape[1:])).index_copy(0, there, in_order)


def call_by_lengths(
    function: Callable[..., Any],
    groups: Groups,
    keywords: Mapping[str, Any],
    *,
    per_sequence: frozenset[str] = frozenset(),
    items: RowItems | None = None,
) -> list[Any]:
    """The results of ``function`` for each call of the groups.

    Args:
        function: takes ``keywords`` for sequences in rows [n, L, ...].
        groups: of the packed row.
        keywords: of the packed row; each value is cut as its shape says.
        per_sequence: keywords that hold one entry per sequence, whatever their shape.
        items: fields by item, which take the place of keywords of their names.

    Raises ``InputError`` for a tensor that is neither by token nor by sequence.
    """
    if items is not None:
        keywords = {name: value for name, value in keywords.items() if name not in items}
    named = {name: _parts(value, groups, name, name in per_sequence) for name, value in keywords.items()}
    if items is not None:
        cut = [items.of(part.tolist()) for part in groups.members]
        named |= {name: [each[name] for each in cut] for name in cut[0]} if cut else {}
    return [function(**{name: parts[call] for name, parts in named.items()}) for call in range(len(groups))]


def require_cuttable(keywords: Mapping[str, Any], row: PackedRow) -> None:
    """Raise ``InputError`` for audio, images without their rows by sequence, and a tensor that cannot be cut."""
    sizes = {row.sources.size, row.sources.size if row.targets is None else row.targets.size}
    for name, value in keywords.items():
        if not isinstance(value, Tensor) or name in (*LENGTH_NAMES, *TARGET_LENGTH_NAMES) or value.numel() == 1:
            continue
        shape = tuple(value.shape)
        is_by_token = any(shape[:2] == (1, size) or shape[1:] == (1, size) or shape == (size,) for size in sizes)
        if is_media(name):
            raise InputError(
                "a packed row with images needs cu_seq_items, which says which of their rows belong to each sequence",
                where=name,
                hint="pass what RaggedBatch.to_flattened() gives, to a model that takes images",
            )
        if _SOUND.match(name) or not (is_by_token or shape[0] == len(row)):
            raise _not_cuttable(name, value, row.sources.size, len(row))


def _not_cuttable(name: str, value: Tensor, num_slots: int, num_sequences: int) -> InputError:
    return InputError(
        "a packed row takes fields with one entry per token or per sequence",
        where=name,
        expected=f"[1, {num_slots}, ...] or [{num_sequences}, ...]",
        found=f"shape {list(value.shape)}",
        hint="leave the field out: audio and masks cannot be cut by the lengths of the text",
    )


def _parts(value: Any, groups: Groups, name: str, is_per_sequence: bool) -> list[Any]:
    """A value of the packed row, for each call."""
    if type(value) is dict and value:
        parts = [_parts(part, groups, name, is_per_sequence) for part in value.values()]
        return [dict(zip(value, each)) for each in zip(*parts)]
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
            # Sequences without images have no outputs of them.
            if all(key in each for each in outputs)
        }
        return type(first)(**{key: value for key, value in parts.items() if value is not None})
    if isinstance(first, (tuple, list)):
        parts = [join_outputs(each, groups, name=name, per_sequence=per_sequence) for each in zip(*outputs)]
        return parts if isinstance(first, list) else tuple(parts)
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


# A whole model by lengths, head and loss included: each call computes the loss of its sequences.
#
# The losses of the calls are means over labels or over sequences, so their mean weighed by what they count is the loss
# of the packed row; or sums.

#: Fields that hold one entry per sequence, whatever their shape.
_SEQUENCE_FIELDS = frozenset({"start_positions", "end_positions", "next_sentence_label", "sentence_order_label"})


def call_whole(
    model: nn.Module, own: Callable[..., Any], row: PackedRow, keywords: dict[str, Any], division: str | None = None
) -> Any:
    """Outputs of a packed call of a model that runs by lengths as a whole: [1, T, ...] by token, [N, ...] by sequence.

    Args:
        model: whose class tells what its head returns.
        own: its forward, of sequences in rows.
        row: the packed row.
        keywords: of the call, without lengths and masks.
        division: "total", or "sequence_mean", where the loss was found to be so; else it is a mean over labels.

    Waits for the device where there are labels. Raises ``InputError`` for a field that is neither by token nor by
    sequence.
    """
    labels = keywords.get("labels")
    by_token = isinstance(labels, Tensor) and len(row) > 1 and tuple(labels.shape[:2]) == (1, row.sources.size)
    by_sequence = works_by_sequence(model) and not by_token
    if not by_sequence:
        require_one_loss(model, labels_by_sequence(keywords, row))
    config = getattr(model, "config", None)
    # Heads that look for a sequence's last token take one sequence at a time where padding has no id.
    alone = by_sequence and getattr(config, "pad_token_id", None) is None
    groups = row.groups_of(frozenset(row.sides), "apart") if alone else row.alike
    # Each call gives a mean, which is weighed below.
    num_items = keywords.pop("num_items_in_batch", None)
    fields = _SEQUENCE_FIELDS | ({"labels"} if by_sequence else frozenset())
    outputs = call_by_lengths(own, groups, keywords, per_sequence=fields, items=row.items)
    # Scores [n, classes] are by sequence, also with as many classes as tokens; those [n, L, classes] never are.
    scores = outputs[0].get("logits") if by_sequence and isinstance(outputs[0], Mapping) else None
    is_whole = isinstance(scores, Tensor) and scores.ndim < 3
    joined = join_outputs(outputs, groups, per_sequence=frozenset({"logits"} if is_whole else ()))
    losses: list[Any] = [_loss_of(each) for each in outputs]
    if losses[0] is None:
        return joined
    counts = _counts(labels, groups, by_sequence=by_sequence)
    if division == "sequence_mean":
        counts = [len(part) for part in groups.members]
    loss = loss_of_answers(model, outputs, groups, keywords)
    if loss is None:
        loss = sum(losses[1:], losses[0]) if division == "total" else _weighted_mean(losses, counts)
    if num_items is not None and loss_divides_by_count(model):
        loss = loss * (sum(counts) / num_items)
    if isinstance(joined, tuple):
        return (loss, *joined[1:])
    joined["loss"] = loss
    return type(joined)(**{name: joined[name] for name in outputs[0] if name in joined})


def _loss_of(outputs: Any) -> Tensor | None:
    first = outputs.get("loss") if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else None
    return first if isinstance(first, Tensor) and first.ndim == 0 else None


def _counts(labels: Any, groups: Groups, *, by_sequence: bool) -> list[int]:
    """How much the mean of each call counts: its labels that are not -100, or its sequences where labels are values."""
    calls = groups.sources if groups.targets is None else groups.targets
    if isinstance(labels, Tensor) and not by_sequence and tuple(labels.shape[:2]) == (1, calls.num_slots):
        is_label = labels[0] != IGNORED_LABEL
        return [int(part.sum()) for part in calls.cut(is_label.reshape(calls.num_slots, -1).any(1).long())]
    by_sequence = by_sequence or (isinstance(labels, Tensor) and labels.shape[0] == groups.num_sequences)
    if isinstance(labels, Tensor) and by_sequence and labels.ndim == 1 and not labels.is_floating_point():
        is_label = (labels != IGNORED_LABEL).cpu()
        return [int(is_label[torch.as_tensor(part)].sum()) for part in groups.members]
    return [len(part) for part in groups.members]


def _weighted_mean(losses: Sequence[Any], weights: Sequence[int]) -> Tensor:
    """The mean of losses by weight: losses 2 and 5 of 3 labels and 1 are 2.75. One of weight 0 may even be nan."""
    counted = [loss * (weight / sum(weights)) for loss, weight in zip(losses, weights) if weight]
    return torch.stack(counted).sum() if counted else losses[0]


# Heads of question answering on a packed row whose answers lie behind their sequences, in part.
#
# Such a head ignores a place behind the row, and its mean over none is nan. Sequences that share no call would then
# count for nothing together, so the loss is computed here from the scores of all calls.


#: The places of an answer, and the scores that they are compared with.
_PLACES = {"start_positions": "start_logits", "end_positions": "end_logits"}


def loss_of_answers(model: nn.Module, outputs: Sequence[Any], groups: Groups, keywords: Mapping[str, Any]) -> Any:
    """The loss of a row in which answers lie behind their sequences; None where none does, and for another head.

    The mean of two means: over the places of starts that lie in their sequences, and over those of ends. Waits for the
    device. Source: ``transformers.loss.loss_utils.ForQuestionAnsweringLoss``.
    """
    answers = [keywords.get(name) for name in _PLACES]
    is_known = isinstance(outputs[0], Mapping) and all(name in outputs[0] for name in _PLACES.values())
    if not is_known or any(each is None for each in answers) or package_of(loss_author(model)[0]) != "transformers":
        return None
    parts: list[Tensor] = []
    is_behind = False
    for places, scores in zip(answers, _PLACES.values()):
        assert isinstance(places, Tensor)
        total: Any = 0
        number: Any = 0
        for output, part in zip(outputs, groups.select(places.reshape(-1))):
            width = output[scores].shape[1]
            wanted = part.clamp(0, width)
            total = total + cross_entropy(output[scores], wanted, ignore_index=width, reduction="sum")
            number = number + (wanted < width).sum()
        is_behind = is_behind or int(number) < sum(len(part) for part in groups.members)
        parts.append(total / torch.as_tensor(number).clamp(min=1))
    return torch.stack(parts).mean() if is_behind else None


# Labels by sequence beside labels by token.


def require_one_loss(model: nn.Module, by_sequence: Iterable[str]) -> None:
    """Raise ``InputError`` for labels by sequence beside ``labels`` by token, where the sum of their losses is unknown.

    ``by_sequence``: the fields of the batch with one entry per sequence; those that ``forward`` names are looked at.
    """
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in by_sequence if "label" in name and name in taken), None)
    if name is not None:
        raise InputError(
            "a loss per sequence beside one per token cannot be packed: each is a mean over another number, and their "
            "sum does not tell them apart",
            where=type(model).__name__,
            expected="labels of one kind",
            found=f"labels by token, and {name} by sequence",
            hint=f"leave {name} or packing out",
        )


def labels_by_sequence(keywords: Mapping[str, Any], row: PackedRow) -> list[str]:
    """The keywords of a packed call with one entry per sequence, beside ``labels`` by token; none without those."""
    labels = keywords.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.shape[0] != 1 or labels.shape[1] == len(row):
        return []
    tensors = {name: value for name, value in keywords.items() if isinstance(value, Tensor) and value.ndim}
    return [name for name, value in tensors.items() if value.shape[0] == len(row) and value.ndim == 1]
