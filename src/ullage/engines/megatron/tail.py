"""The tail of a packed row: padding behind the last sequence, which gives rows of one shape, or of few.

``pad_packed_seq_alignment`` rounds each context-parallel rank's part of a row up to a multiple, once per row and not
once per sequence; ``"max"`` makes every part ``max_seqlen_per_dp_cp_rank`` long. With ``thd_max_packed_sequences`` the
cumulated lengths have one more entry than that in every step. Tokens and lengths then have the same shapes each step,
as CUDA graphs require.

The tail is a sequence of its own, the dummy (``thd_tail_padding_policy="append_dummy_seq"``, the default), or belongs
to the slot of the last sequence (``"extend_last"``). A dummy is an ordinary sequence to attention and padding to the
loss: its length is in ``cu_seqlens_q``, and the padding mask covers it.

Source: ``pad_sequence_for_thd`` in ``megatron/core/packed_seq_params.py`` of Megatron-LM's dev branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.errors import InputError, require_int, require_one_of
from ullage.layout import Int64, Layout

_POLICIES = ("append_dummy_seq", "extend_last")


def sequence_limit(config: Any) -> int | None:
    """``thd_max_packed_sequences``, or ``None``. Raises ``InputError`` for what is no number."""
    most = getattr(config, "thd_max_packed_sequences", None)
    return None if most is None else require_int(most, "config.thd_max_packed_sequences", least=1)


@dataclass(frozen=True)
class Tail:
    """How long a row is made, and to which sequence the padding belongs. Lengths are tokens of one rank's part.

    Attributes:
        alignment: the part is a multiple of it; ``None`` where ``target`` is set.
        target: the part is exactly this long; ``None`` where ``alignment`` is set.
        max_sequences: number of sequences in the cumulated lengths, the dummy among them; ``None`` for as many as
            there are.
        extend_last: whether the tail belongs to the last sequence.
        per_rank: what a part must be divisible by besides.
    """

    alignment: int | None
    target: int | None
    max_sequences: int | None
    extend_last: bool
    per_rank: int = 1

    @classmethod
    def of(cls, config: Any, per_rank: int = 1) -> Tail | None:
        """Read the config; ``None`` where rows get no tail. Raises ``InputError`` for a value that is none."""
        policy = getattr(config, "thd_tail_padding_policy", None) or _POLICIES[0]
        require_one_of(policy, _POLICIES, "config.thd_tail_padding_policy")
        most = sequence_limit(config)
        asked = getattr(config, "pad_packed_seq_alignment", None)
        if asked is None:
            return None
        if most == 1 and policy == _POLICIES[0]:
            raise InputError(
                "config.thd_max_packed_sequences counts the dummy sequence of the tail",
                expected="at least 2",
                found=most,
                hint="or set thd_tail_padding_policy to 'extend_last'",
            )
        # Graphs are captured at one shape, whatever the alignment is.
        captured = getattr(config, "cuda_graph_impl", None) not in (None, "none")
        alignment = target = None
        if isinstance(asked, str) and asked.isdecimal():
            asked = int(asked)
        if asked != "max" and (isinstance(asked, (bool, str)) or not isinstance(asked, (int, np.integer)) or asked < 1):
            raise InputError(
                "config.pad_packed_seq_alignment must be a number of tokens or 'max'",
                expected="'max' or a positive integer",
                found=asked,
            )
        if asked == "max" or captured:
            longest = getattr(config, "max_seqlen_per_dp_cp_rank", None)
            target = require_int(longest, "config.max_seqlen_per_dp_cp_rank", least=1)
        else:
            alignment = int(asked)
        return cls(alignment, target, most, policy == "extend_last", per_rank)

    def filled(self, layout: Layout, parts: int, order: str = "zigzag") -> tuple[Layout, Int64]:
        """The layout with its tail, and the length of each sequence that ``cu_seqlens_q`` shows.

        Args:
            layout: of a whole row.
            parts: context-parallel ranks that share it.
            order: how it is cut.

        A last sequence without tokens is a dummy already and is made longer. Raises ``InputError`` for a row that is
        longer than the target or has too many sequences.

        >>> tail = Tail(alignment=8, target=None, max_sequences=4, extend_last=False)
        >>> layout, shown = tail.filled(Layout([3, 7]), parts=1)
        >>> layout.cu_seqlens_padded.tolist(), layout.lengths.tolist(), shown.tolist()
        ([0, 3, 10, 16, 16], [3, 7, 0, 0], [3, 7, 6, 0])
        """
        rest = self._length(layout.size, parts, order) * parts - layout.size
        lengths, slots = layout.lengths.tolist(), layout.slots.tolist()
        has_dummy = not self.extend_last and bool(lengths) and not lengths[-1]
        if rest and (has_dummy or (self.extend_last and lengths)):
            slots[-1] += rest
        elif rest:
            lengths.append(0)
            slots.append(rest)
            has_dummy = not self.extend_last
        shown = np.array(lengths, np.int64)
        if has_dummy:
            shown[-1] = slots[-1]
        # Sequences of no tokens, which repeat the last entry of the cumulated lengths.
        spare = 0 if self.max_sequences is None else self.max_sequences - len(lengths)
        if spare < 0:
            raise InputError(
                "a packed row has more sequences than config.thd_max_packed_sequences",
                expected=f"at most {self.max_sequences}" + (", the dummy included" if has_dummy else ""),
                found=len(lengths),
                hint="raise it, or let wrap_data_iterator pack the row",
            )
        zeros = [0] * spare
        return Layout.from_slots(lengths + zeros, slots + zeros), np.append(shown, zeros).astype(np.int64)

    def _length(self, size: int, parts: int, order: str) -> int:
        """Tokens of one part."""
        # In zigzag order a part is two chunks of each slot, so it is even.
        unit = math.lcm(self.per_rank, 2 if parts > 1 and order == "zigzag" else 1)
        least = -(-size // parts)
        if self.target is None:
            unit = math.lcm(unit, self.alignment or 1)
            return -(-least // unit) * unit
        if self.target % unit:
            raise InputError(
                "rows cannot be padded to config.max_seqlen_per_dp_cp_rank",
                expected=f"a multiple of {unit}, which the ranks can divide",
                found=self.target,
            )
        if least > self.target:
            raise InputError(
                "a packed row is longer than what it is padded to",
                expected=f"at most {self.target} tokens per rank, config.max_seqlen_per_dp_cp_rank",
                found=least,
            )
        return self.target
