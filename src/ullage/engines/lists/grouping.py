"""Groups of sequences as items of a plan, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.layout import Int64
from ullage.planning.request import groups as item_numbers


@dataclass(frozen=True)
class Grouping:
    """The item of each sequence: a group of sequences that stay together, or the sequence alone.

    Attributes:
        item [n]: number of the item of each sequence, int64.
        members: ids of the sequences of each item, ascending.
    """

    item: Int64
    members: list[list[int]]

    @classmethod
    def read(cls, groups: Any, n: int) -> Grouping:
        """``groups``: as ``keep_together`` of ``ullage.plan``; ``None`` leaves every sequence alone."""
        item = np.arange(n) if groups is None else item_numbers(groups, n, np.arange(n))
        members: list[list[int]] = [[] for _ in range(int(item.max(initial=-1)) + 1)]
        for i, number in enumerate(item.tolist()):
            members[number].append(i)
        return cls(item, members)

    def sums(self, values: Int64) -> Int64:
        """Sum over each item."""
        found = np.zeros(len(self.members), np.int64)
        np.add.at(found, self.item, values)
        return found

    def ids(self, items: Sequence[int]) -> list[int]:
        """Ids of the sequences of ``items``, ascending."""
        return sorted(i for number in items for i in self.members[number])
