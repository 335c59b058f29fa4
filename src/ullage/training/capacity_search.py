"""Search for the largest capacity that fits, by the memory that runs of it take; knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

#: A capacity is a multiple of it.
MULTIPLE = 64
#: Tokens of the first runs.
FIRST = (256, 512, 1024)
#: A run is at most so many times as long as one that fitted: a fit is not trusted further.
_GROWTH = 4
_MOST_RUNS = 16


@dataclass
class CapacitySearch:
    """The runs that find a capacity, one after the other; knows nothing of models.

    Attributes:
        room: bytes that a run may take.
        most: the largest capacity worth looking at, a multiple of 64.
        runs: tokens and bytes of the runs so far; ``inf`` bytes for one that failed.
    """

    room: float
    most: int
    runs: list[tuple[int, float]] = field(default_factory=list)

    @property
    def largest(self) -> int:
        """The largest run that fitted; 0 without one."""
        return max((tokens for tokens, used in self.runs if used <= self.room), default=0)

    @property
    def bound(self) -> int:
        """The largest capacity that has not been seen to be too large."""
        return min([self.most, *(tokens - MULTIPLE for tokens, used in self.runs if used > self.room)])

    def confirm(self, used: float) -> None:
        """Take the second measurement of the largest run into account, where it is the larger one."""
        again = self.largest
        self.runs = [(tokens, max(taken, used) if tokens == again else taken) for tokens, taken in self.runs]

    def next(self) -> int | None:
        """Tokens of the next run; None when the largest capacity has been run, or none fits."""
        done = {tokens for tokens, _ in self.runs}
        if self.bound < MULTIPLE or len(self.runs) >= _MOST_RUNS:
            return None
        for tokens in FIRST:
            tokens = min(tokens, self.most)
            if tokens not in done and tokens <= self.bound:
                return tokens
        if not self.largest:  # not even the first one fits
            return max(MULTIPLE, self.bound // 2 // MULTIPLE * MULTIPLE)
        tokens = min(self._fitting(), self.bound, self.largest * _GROWTH)
        tokens = tokens // MULTIPLE * MULTIPLE
        return tokens if tokens > self.largest else None

    def _fitting(self) -> int:
        """The largest capacity that fits, by the runs so far."""
        last, used = max(each for each in self.runs if each[1] <= self.room)
        failed = min((each for each in self.runs if each[1] > self.room), default=None)
        if failed is not None and failed[1] == inf:  # nobody knows by how much
            return (last + failed[0]) // 2
        if failed is not None:  # between two runs on a line, whatever the noise of both
            return last + int((failed[0] - last) * (self.room - used) / (failed[1] - used))
        known = sorted(self.runs)[-3:]
        grid = np.arange(MULTIPLE, self.bound + 1, MULTIPLE)
        if len(known) < 2:
            return int(grid[-1])
        sizes, taken = (np.array(each, float) for each in zip(*known, strict=True))
        fit = np.polyfit(sizes, taken, 2) if len(known) == 3 else np.zeros(1)
        if fit[0] <= 0:  # rather a line, through the longest two
            fit = np.polyfit(sizes[-2:], taken[-2:], 1)
        fits = grid[np.polyval(fit, grid) <= self.room]
        return int(fits[-1]) if len(fits) else 0
