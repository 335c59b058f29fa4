"""Histogram of lengths and of their cost, placed in per cent of its box.

Above the axis stand the sequences, below it hangs what they cost; few long sequences that cost more than all others
are the reason for a planner. The axis is logarithmic where the longest is more than twenty times the shortest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ullage.display import counted
from ullage.layout import Int64

_BUCKETS = 48
#: Longest over shortest above which the axis is logarithmic.
_LOG_FROM = 20
_MAX_TICKS = 6


class Bucket(NamedTuple):
    """``start`` and ``width`` in per cent of the axis; ``height`` (sequences) and ``depth`` (cost) of the tallest."""

    start: float
    width: float
    height: float
    depth: float
    title: str


class Tick(NamedTuple):
    """A number on the axis: ``place`` in per cent."""

    place: float
    text: str


class Histogram(NamedTuple):
    """Buckets that hold something, left to right, and the axis. ``logarithmic``: how the axis runs."""

    buckets: list[Bucket]
    ticks: list[Tick]
    logarithmic: bool


def histogram(lengths: Int64, costs: Int64) -> Histogram:
    """The histogram of ``lengths`` [n] in tokens and their ``costs`` [n]."""
    if not len(lengths):
        return Histogram([], [], False)
    low, high = max(1, int(lengths.min())), max(1, int(lengths.max()))
    logarithmic = high > _LOG_FROM * low
    edges = _edges(low, high, logarithmic)
    bucket = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(bucket, minlength=len(edges) - 1)
    shares = np.bincount(bucket, costs.astype(float), minlength=len(edges) - 1)
    total = max(1.0, float(shares.sum()))
    place = _places(edges, logarithmic)
    buckets = []
    for k in np.flatnonzero(counts).tolist():
        # The upper edge belongs to the next bucket, except that of the last.
        last = edges[k + 1] - (k < len(edges) - 2)
        many = counted(int(counts[k]), "sequence")
        title = (
            f"{edges[k]:,} to {last:,} tokens: {many} ({100 * counts[k] / len(lengths):.1f} %),"
            f" {100 * shares[k] / total:.1f} % of the cost"
        )
        size = [float(100 * part[k] / max(1.0, float(part.max()))) for part in (counts, shares)]
        start, width = float(place[k]), float(place[k + 1] - place[k])
        buckets.append(Bucket(round(start, 3), round(width, 3), round(size[0], 2), round(size[1], 2), title))
    return Histogram(buckets, _ticks(edges, logarithmic), logarithmic)


def _edges(low: int, high: int, logarithmic: bool) -> Int64:
    """Integer edges that rise; the last is the longest length, which its bucket includes."""
    if high == low:
        return np.array([low, high + 1])
    edges = np.geomspace(low, high, _BUCKETS + 1) if logarithmic else np.linspace(low, high, _BUCKETS + 1)
    # Lengths are integers: edges that round to the same one are merged, and there are fewer buckets.
    return np.unique(np.rint(edges).astype(np.int64))


def _places(values: Int64 | list[int], logarithmic: bool, edges: Int64 | None = None) -> np.ndarray:
    scale = np.log if logarithmic else np.asarray
    edges = np.asarray(values) if edges is None else edges
    first, last = float(scale(float(edges[0]))), float(scale(float(edges[-1])))
    return 100 * (scale(np.asarray(values, float)) - first) / (last - first)


def _ticks(edges: Int64, logarithmic: bool) -> list[Tick]:
    low, high = int(edges[0]), int(edges[-1])
    if high - low == 1:
        return [Tick(0.0, token_label(low))]
    if logarithmic:
        # From the first power of two that is not below the shortest length to the last not above the longest.
        powers = [2**k for k in range(low.bit_length() - (low & (low - 1) == 0), high.bit_length())]
        values = powers[:: -(-len(powers) // _MAX_TICKS)]
    else:
        # The least power of two that gives at most ``_MAX_TICKS`` steps.
        step = 2 ** max(0, int(np.ceil(np.log2((high - low) / _MAX_TICKS))))
        values = list(range(-(-low // step) * step, high + 1, step))
    return [
        Tick(round(float(place), 2), token_label(v)) for place, v in zip(_places(values, logarithmic, edges), values)
    ]


def token_label(tokens: int) -> str:
    """512 → ``512``, 131072 → ``128k``, 1536 → ``1.5k``."""
    if tokens < 1024:
        return str(tokens)
    return f"{tokens / 1024:.3g}k" if tokens < 1024**2 else f"{tokens / 1024**2:.3g}M"
