"""Next fit: arrival order, a bin closed when the next item does not fit. What schedulers called balanced often do.

Kept for comparison and for data whose order matters. Source: Megatron-LM's ``DpBalancedScheduler``.
"""

from __future__ import annotations

from numba import int64

from ullage.planning.compiled import kernel
from ullage.planning.ordering import ARRAY


@kernel(int64(ARRAY, ARRAY, int64, int64, ARRAY))
def next_fit(slots, counts, capacity, limit, bins):
    """Fills ``bins`` [n] with the bin of each item, in arrival order, and returns how many there are."""
    used, held, crowd = 0, 0, 0
    for i in range(len(slots)):
        if used == 0 or held + slots[i] > capacity or crowd + counts[i] > limit:
            used, held, crowd = used + 1, 0, 0
        bins[i] = used - 1
        held += slots[i]
        crowd += counts[i]
    return used
