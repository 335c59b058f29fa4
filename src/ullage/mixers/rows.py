"""A packed row, and its sequences gathered in groups that share a call.

Whoever calls a packed model gives one row [1, T, ...] and ``cu_seq_lens_q``. A part of the model that mixes tokens
gets the sequences of the row instead: ``Groups`` puts sequences of one length, or of similar lengths where padding
behind a sequence cannot change it, into calls [n, L, ...], and lays the results end to end again. An encoder-decoder
has two layouts in one row, sources and targets; a group then holds sequences that are alike in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ullage.errors import InputError
from ullage.layout import Int64, counting, ranges, starts_of
from ullage.places import Places

#: Keywords that describe a packed row, as ``RaggedBatch.to_flattened`` writes them.
LENGTH_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: The same of the targets of an encoder-decoder.
TARGET_LENGTH_NAMES = tuple(f"decoder_{name}" for name in LENGTH_NAMES)

#: Cost of one more call, in tokens of padding: calls are merged where that is cheaper.
_CALL = 48


@dataclass(frozen=True, eq=False)
class Segments:
    """Sequences that lie end to end in a row [T, ...], each followed by its own padding.

    Attributes:
        lengths: int64 [N], real tokens.
        slots: int64 [N], tokens with their padding.
    """

    lengths: Int64
    slots: Int64

    @classmethod
    def of(cls, cu_seqlens: Any, position_ids: Tensor | None, name: str) -> Segments:
        """From cumulated lengths. Waits for the device.

        Where positions count from 0 in each slot and then stay at 0, as ``to_flattened`` writes them, those last tokens
        are padding. Any other positions say nothing of padding.

        Raises ``InputError`` for what is no cumulated length.
        """
        bounds = torch.as_tensor(cu_seqlens).detach().cpu().numpy().astype(np.int64)
        slots = np.diff(bounds) if bounds.ndim == 1 and len(bounds) else np.full(1, -1)
        if np.any(slots < 0) or bounds[0] != 0:
            raise InputError(
                f"{name} must be the places where sequences begin, and the end of the last",
                expected="int32 [N + 1], rising from 0",
                found=f"shape {list(bounds.shape)}",
                hint="pass what RaggedBatch.to_flattened() gives",
            )
        if position_ids is None or tuple(position_ids.shape) != (1, bounds[-1]):
            return cls(slots, slots)
        # A sequence ends with the last token that is not at 0, or with its first.
        is_real = position_ids[0].detach().cpu().numpy() != 0
        last = np.zeros(len(slots), np.int64)
        np.maximum.at(last, np.repeat(np.arange(len(slots)), slots)[is_real], counting(slots)[is_real])
        found = cls(np.minimum(last + 1, slots), slots)
        return found if found.counts_as_usual(position_ids) else cls(slots, slots)

    @property
    def num_slots(self) -> int:
        """Tokens of the row, padding included."""
        return int(self.slots.sum())

    def with_padding_apart(self) -> npt.NDArray[np.int32]:
        """Cumulated lengths, int32, of the sequences and of the padding behind each, as sequences of their own."""
        sizes = np.stack([self.lengths, self.slots - self.lengths], 1).ravel()
        return np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int32)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Segments:
        """Sequences without padding."""
        sizes = np.asarray(lengths, np.int64)
        return cls(sizes, sizes)

    def positions(self, device: torch.device) -> Tensor:
        """Positions int64 [1, T], counted from 0 in each sequence; 0 in padding."""
        return torch.from_numpy(self._positions())[None].to(device)

    def counts_as_usual(self, position_ids: Tensor) -> bool:
        """Whether positions are those that every model counts by itself. Waits for the device."""
        expected = self._positions()
        return position_ids.shape == (1, len(expected)) and np.array_equal(position_ids[0].cpu().numpy(), expected)

    def _positions(self) -> Int64:
        positions = counting(self.slots)
        positions[positions >= np.repeat(self.lengths, self.slots)] = 0
        return positions


class Calls:
    """One layout of a row, in calls: which sequences share one, and where their tokens go.

    Args:
        segments: of the row.
        members: the sequences of each call; every sequence with a token in exactly one.
        device: of the row's tensors.
    """

    def __init__(self, segments: Segments, members: Sequence[Int64], device: torch.device) -> None:
        order = np.concatenate([*members, np.zeros(0, np.int64)]).astype(np.int64)
        lengths = segments.lengths[order]
        self.widths = [int(segments.lengths[part].max()) for part in members]
        #: (number of sequences, tokens of each) of each call.
        self.shapes = [(len(part), width) for part, width in zip(members, self.widths)]
        slots = np.repeat(np.asarray(self.widths, np.int64), [len(part) for part in members])
        place_of = np.full(segments.num_slots, -1, np.int64)
        place_of[ranges(starts_of(segments.slots)[order], lengths)] = ranges(starts_of(slots), lengths)
        self.num_slots = segments.num_slots
        self._places = None
        if not np.array_equal(place_of, np.arange(int(slots.sum()))):
            self._places = Places.of(place_of, int(slots.sum()), device)

    def cut(self, row: Tensor) -> list[Tensor]:
        """A row [T, ...] as one tensor [n, L, ...] per call; zeros where a shorter sequence has ended."""
        placed = row if self._places is None else self._places.place(row)
        parts = placed.split([n * width for n, width in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [n, L, ...], one per call, as the row [T, ...]; zeros in the row's padding."""
        placed = torch.cat([part.flatten(0, 1) for part in parts])
        return placed if self._places is None else self._places.take(placed)


class PackedRow:
    """The sequences of one packed row of a model's call, on the host.

    Args:
        sources: the row's own layout.
        targets: that of an encoder-decoder's targets, if it has any.
        device: of the row's tensors.
    """

    def __init__(self, sources: Segments, targets: Segments | None, device: torch.device) -> None:
        self.sources, self.targets, self.device = sources, targets, device
        #: Whether a part of the model has run by lengths.
        self.is_served = False
        #: Whether the caller gave positions that no model counts by itself.
        self.has_own_positions = False

    @classmethod
    def of(cls, keywords: Mapping[str, Any], targets: Segments | None = None) -> PackedRow | None:
        """From the keywords of a model's call; None for a call without ``cu_seq_lens_q``. Waits for the device.

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
        sources = Segments.of(cu_seqlens, keywords.get("position_ids"), "cu_seq_lens_q")
        if sources.num_slots != row.shape[1]:
            raise InputError(
                "cu_seq_lens_q does not cover the row",
                expected=f"{row.shape[1]} tokens",
                found=sources.num_slots,
                hint="pass what RaggedBatch.to_flattened() gives",
            )
        if targets is not None and len(targets.slots) != len(sources.slots):
            raise InputError(
                "a packed call needs one target for each source",
                expected=f"{len(sources.slots)} targets",
                found=len(targets.slots),
            )
        return cls(sources, targets, row.device)

    def __len__(self) -> int:
        return len(self.sources.slots)

    @cached_property
    def alike(self) -> Groups:
        """Sequences of one length, in sources and targets, share a call: exact for every model whose rows are."""
        keys = [self.sources.lengths] if self.targets is None else [self.sources.lengths, self.targets.lengths]
        return Groups(self, _alike(keys, self.sources.lengths > 0))

    @cached_property
    def alike_pairs(self) -> Groups:
        """The same of an encoder-decoder's pairs that have tokens on both sides."""
        assert self.targets is not None
        keys = [self.sources.lengths, self.targets.lengths]
        return Groups(self, _alike(keys, np.minimum(*keys) > 0))

    @cached_property
    def alike_sources(self) -> Calls:
        """Sources of one length share a call, whatever their targets."""
        return Calls(self.sources, _alike([self.sources.lengths], self.sources.lengths > 0), self.device)

    @cached_property
    def alike_targets(self) -> Calls:
        """Targets of one length share a call, whatever their sources."""
        assert self.targets is not None
        return Calls(self.targets, _alike([self.targets.lengths], self.targets.lengths > 0), self.device)

    @cached_property
    def in_one_call(self) -> Groups:
        """All sequences in one call, padded behind the shorter ones: as many calls as on every other rank."""
        there = np.flatnonzero(self.sources.lengths > 0)
        return Groups(self, [there[np.argsort(self.sources.lengths[there], kind="stable")]])

    @cached_property
    def one_by_one(self) -> Groups:
        """Each sequence in a call of its own."""
        return Groups(self, [np.array([each]) for each in np.flatnonzero(self.sources.lengths > 0)])

    @cached_property
    def padded_behind(self) -> Groups:
        """Sequences of similar lengths share a call: exact where no token sees a later one."""
        return Groups(self, _similar(self.sources.lengths))


class Groups:
    """Sequences of a row in the calls that they share.

    Attributes:
        members: the sequences of each call.
        sources, targets: where their tokens go.
    """

    def __init__(self, row: PackedRow, members: list[Int64]) -> None:
        self.members, self.num_sequences = members, len(row)
        self.sources = Calls(row.sources, members, row.device)
        self.targets = None if row.targets is None else Calls(row.targets, members, row.device)
        # Place of each sequence among those of all calls.
        self._order = np.concatenate([*members, np.zeros(0, np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def select(self, values: Tensor) -> list[Tensor]:
        """Values [N, ...] by sequence, as one tensor [n, ...] per call."""
        return [values.index_select(0, torch.from_numpy(part).to(values.device)) for part in self.members]

    def ordered(self, parts: Sequence[Tensor]) -> Tensor:
        """Values [n, ...] of the sequences of each call, as [N, ...] in the row's order; zeros for an empty one."""
        values = torch.cat(list(parts))
        place_of = torch.from_numpy(np.argsort(self._order)).to(values.device)
        found = values.index_select(0, place_of)
        if len(self._order) == self.num_sequences:
            return found
        there = torch.from_numpy(np.sort(self._order)).to(values.device)
        return found.new_zeros((self.num_sequences, *found.shape[1:])).index_copy(0, there, found)


def _alike(keys: Sequence[Int64], is_there: npt.NDArray[np.bool_]) -> list[Int64]:
    """Sequences of equal keys in one call each, without those that are not there."""
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    group = group.reshape(-1)  # numpy 2.0 gives it another shape than its neighbours
    there = np.flatnonzero(is_there)
    return [there[group[there] == each] for each in dict.fromkeys(group[there].tolist())]


def _similar(lengths: Int64) -> list[Int64]:
    """Sequences in calls of similar lengths, such that padding and number of calls cost the least together."""
    there = np.flatnonzero(lengths > 0)
    order = there[np.argsort(lengths[there], kind="stable")]
    if not len(order):
        return []
    # best[j]: least cost of the j shortest sequences. A call of i..j-1 computes (j - i) times the longest of them.
    sizes = lengths[order]
    count = np.arange(len(sizes) + 1)
    best, begin = np.zeros(len(sizes) + 1, np.int64), np.zeros(len(sizes) + 1, np.int64)
    for j in range(1, len(sizes) + 1):
        costs = best[:j] + _CALL + (j - count[:j]) * sizes[j - 1]
        begin[j] = int(costs.argmin())
        best[j] = costs[begin[j]]
    calls, j = [], len(sizes)
    while j:
        calls.append(order[begin[j] : j])
        j = int(begin[j])
    return calls[::-1]
