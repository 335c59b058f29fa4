"""Page of a plan: ranks against time, the content of each microbatch, and the lengths it was made for.

Two drawings of the same microbatches. *Time*: a block is a sequence, as wide as its cost, and where a rank waits for
the slowest one the bar is hatched. *Memory*: every microbatch is as wide as its capacity, a block is as wide as its
sequence, and the ullage is hatched. A block's colour is its cost. Blocks too narrow to see are drawn as one, and of a
very large plan only the first ranks and microbatches are drawn, so that a page has a bounded size.

*Histogram*: above the axis stand the sequences, below it hangs what they cost; few long sequences that cost more than
all others are the reason for a planner. *Timeline*: time is cost, a rank runs a microbatch in the time of its load; its
drawing is made of this table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ullage.core.display import quantity
from ullage.core.errors import listed
from ullage.core.layout import Int64
from ullage.planning import Plan
from ullage.report.drawing import Box, Row, percent, render, round_numbers, tick_texts
from ullage.report.figures import figure_rows, length_figures, lost_sequences, reference_name

#: Blocks, ranks and microbatches of one drawing at the most.
MAX_BLOCKS, MAX_RANKS, MAX_MICROBATCHES = 4096, 64, 96
#: Colours of cost: classes ``s0`` to ``s6`` of the template.
NUM_SHADES = 7
#: The highest cost over the cost below which every block has the palest colour.
_SPAN = 500
#: Per cent of the width that two numbers of microbatches are apart at least.
_LEAST_APART = 9
#: Ids that a block's title names before it only counts; buckets of the histogram, and numbers of its axis, at the most.
_NAMED, _BUCKETS, _MAX_TICKS = 6, 48, 6


class PlanDrawing(NamedTuple):
    """A row per rank; places in per cent of the width.

    ``cuts``: where a microbatch ends on all ranks; where each rank ends it by itself, its row has cuts. ``ideal``: the
    end of a step without waiting. ``shown``: the part of the plan that is drawn, in words; empty if it is all.
    ``microbatches`` are numbers over the drawing, ``ticks`` those of the axis under it.
    """

    rows: list[Row]
    cuts: list[float]
    ideal: float | None
    thin: bool
    shown: str
    microbatches: list[Tick]
    ticks: list[Tick]


def plan_page(plan: Plan, *, reference: Plan | None = None, source: str = "") -> str:
    """``plan`` as one HTML page without script or network.

    ``reference``: another plan of the same lengths to stand beside it, usually by ``next_fit``. ``source``: what the
    lengths are, for the title. Raises ``InputError`` without jinja2.
    """
    stats, shades = plan.statistics(), _Shades.of(plan)
    # Both plans on one axis, so that the shorter step is the shorter drawing.
    end = max(map(_end, [plan] if reference is None else [plan, reference]))
    return render(
        "plan.html",
        plan=plan,
        stats=stats,
        source=source,
        lost=lost_sequences(stats),
        described=length_figures(plan.original_lengths),
        figures=figure_rows(plan, reference),
        reference=reference,
        reference_name="" if reference is None else reference_name(reference),
        meets="in every microbatch" if plan.sync == "microbatch" else "once, at the end of the step",
        time=_time_drawing(plan, shades, end),
        memory=memory_drawing(plan),
        reference_time=None if reference is None else _time_drawing(reference, shades, end),
        num_shades=NUM_SHADES,
        histogram=histogram(plan.original_lengths, plan.costs),
    )


class _Shades(NamedTuple):
    """Costs to colours, evenly on a logarithmic scale up to the highest; what costs less than a 500th of it is pale."""

    low: float
    high: float

    @classmethod
    def of(cls, plan: Plan) -> _Shades:
        costs = plan.costs[plan.order]
        high = float(costs.max(initial=0)) or 1.0
        least = float(costs.min(initial=2**62))
        return cls(min(high, max(least, high / _SPAN)), high)

    def style(self, cost: float) -> str:
        if cost <= self.low or self.high <= self.low:
            return "s0"
        part = np.log(cost / self.low) / np.log(self.high / self.low)
        return f"s{min(NUM_SHADES - 1, int(part * NUM_SHADES))}"


class _Window(NamedTuple):
    """The part of a plan that is drawn: these ranks, and the first microbatches."""

    ranks: list[int]
    microbatches: int

    @classmethod
    def of(cls, plan: Plan) -> _Window:
        ranks = list(range(min(plan.ranks, MAX_RANKS)))
        busiest = int(plan.loads.sum(axis=0).argmax())
        if busiest not in ranks:  # the one that the others wait for must be seen
            ranks[-1] = busiest
        # Two boxes per microbatch are reckoned with: its content, and the waiting or the ullage after it.
        return cls(ranks, min(plan.num_microbatches, MAX_MICROBATCHES, MAX_BLOCKS // (2 * len(ranks))))

    @property
    def least(self) -> float:
        """The narrowest block in per cent, so that all rows together stay within ``MAX_BLOCKS``."""
        return max(0.25, 100 * len(self.ranks) / MAX_BLOCKS)

    def caption(self, plan: Plan) -> str:
        parts = []
        if self.microbatches < plan.num_microbatches:
            parts.append(f"the first {self.microbatches} of {plan.num_microbatches:,} microbatches")
        if len(self.ranks) < plan.ranks:
            parts.append(f"{len(self.ranks)} of {plan.ranks:,} ranks, the busiest among them")
        return f"Shown: {', on '.join(parts)}." if parts else ""


def _end(plan: Plan) -> float:
    """Cost at the right edge of a plan's drawing: where its step ends, or the last microbatch that is drawn."""
    times, shown = timeline(plan), _Window.of(plan).microbatches
    return times.end if shown == plan.num_microbatches else float((times.start + times.duration)[:shown].max())


def _time_drawing(plan: Plan, shades: _Shades, end: float) -> PlanDrawing:
    """Drawing of each rank's work and waiting, with ``end`` at the right edge."""
    times, window = timeline(plan), _Window.of(plan)
    scale = 100 / end if end else 0.0
    # The number beside a row is its load over the mean load: 1 is a rank with its exact share.
    mean = float(times.duration.sum()) / plan.ranks
    rows = []
    for rank in window.ranks:
        boxes: list[Box] = []
        for microbatch in range(window.microbatches):
            start, duration = (float(each[microbatch, rank]) for each in (times.start, times.duration))
            costs = plan.costs[plan.members(microbatch, rank)].astype(float)
            # The time of a microbatch, shared out to its sequences by cost; per cent of the drawing.
            widths = costs * (duration * scale / costs.sum()) if costs.sum() else costs
            boxes += _blocks(plan, microbatch, rank, start * scale, widths, widths, shades, window.least)
            # Then the rank waits until all meet, after the microbatch or at the end of the step.
            done, is_last = start + duration, microbatch == len(times.start) - 1
            until = float(times.meetings[microbatch]) if len(times.meetings) else times.end if is_last else done
            if (until - done) * scale > 0.02:
                part = percent((until - done) / times.end)
                title = f"rank {rank} waits for {part} of the step, in microbatch {microbatch}"
                boxes.append(Box(round(done * scale, 3), round((until - done) * scale, 3), "wait", title))
        load = float(times.duration[:, rank].sum())
        # Ranks that meet once per step begin their microbatches each at its own time.
        own = () if len(times.meetings) else times.start[1 : window.microbatches, rank]
        own_cuts = tuple(round(float(cut) * scale, 3) for cut in own)
        rows.append(Row(str(rank), tuple(boxes), f"{load / mean:.3f}" if mean else "", own_cuts))
    meetings = (times.meetings[: window.microbatches] * scale).tolist()
    ideal = times.ideal * scale if window.microbatches == plan.num_microbatches and end else None
    values = round_numbers(0.0, end / times.ideal) if times.ideal else []  # in ideal steps
    texts = tick_texts(values) if values else []
    ticks = [Tick(round(v * times.ideal * scale, 2), t) for v, t in zip(values, texts) if v * times.ideal <= end]
    cuts = [round(cut, 3) for cut in meetings[:-1]]
    return PlanDrawing(rows, cuts, ideal, plan.ranks > 16, window.caption(plan), _numbered([0.0, *meetings]), ticks)


def _numbered(cuts: list[float]) -> list[Tick]:
    """The numbers of the microbatches between ``cuts``, in the middle of each, as many as there is room for."""
    ticks: list[Tick] = []
    for k, (left, right) in enumerate(itertools.pairwise(cuts)):
        place = round((left + right) / 2, 2)
        # At the edge a number stands to the left of its place.
        if not ticks or place - ticks[-1].place >= _LEAST_APART + 4 * (place > 96):
            ticks.append(Tick(place, str(k)))
    return ticks


def memory_drawing(plan: Plan) -> PlanDrawing:
    """Drawing of the contents of each microbatch of each rank, as wide as its capacity, the ullage hatched."""
    window, shades = _Window.of(plan), _Shades.of(plan)
    cell = 100 / max(1, window.microbatches)
    rows = []
    for rank in window.ranks:
        boxes: list[Box] = []
        held = 0
        for microbatch in range(window.microbatches):
            layout = plan.layout(microbatch, rank)
            # Ranks that share a microbatch hold an equal part of its tokens each, and of its slots.
            held += int(layout.num_tokens) / plan.degree(microbatch, rank)
            scale = cell / (plan.capacity * plan.degree(microbatch, rank))
            slots, lengths = layout.slots * scale, layout.lengths * scale
            start = microbatch * cell
            boxes += _blocks(plan, microbatch, rank, start, slots, lengths, shades, window.least)
            empty = cell - float(slots.sum())
            if empty > 0.02:
                title = f"microbatch {microbatch}, rank {rank}: {percent(1 - layout.num_tokens * scale / cell)} ullage"
                boxes.append(Box(round(start + cell - empty, 3), round(empty, 3), "padding", title))
        size = window.microbatches * plan.capacity
        rows.append(Row(str(rank), tuple(boxes), percent(1 - held / size) if size else ""))
    cuts = [round(k * cell, 3) for k in range(window.microbatches + 1)]
    return PlanDrawing(rows, cuts[1:-1], None, plan.ranks > 16, window.caption(plan), _numbered(cuts), [])


def _blocks(
    plan: Plan,
    microbatch: int,
    rank: int,
    start: float,
    pitch: np.ndarray,
    widths: np.ndarray,
    shades: _Shades,
    least: float,
) -> Iterator[Box]:
    """The members of one bin as boxes, narrow neighbours as one.

    Args:
        plan, microbatch, rank: whose members are drawn.
        start: per cent of the row at which the bin begins.
        pitch [members]: per cent from the beginning of a sequence to that of the next.
        widths [members]: per cent that a sequence fills of its pitch; what is left over is padding.
        shades: colours of costs.
        least: per cent below which a block is drawn with its neighbours.
    """
    members, ends = plan.members(microbatch, rank), start + np.cumsum(pitch)
    degree = plan.degree(microbatch, rank)
    first_rank = rank - rank % degree
    shared = f", shared by ranks {first_rank} to {first_rank + degree - 1}" if degree > 1 else ""
    for first, last in _groups(pitch, least):
        ids, left = members[first:last], float(ends[first] - pitch[first])
        tokens = f"{int(plan.lengths[ids].sum()):,} tokens"
        # Neighbours drawn as one are as wide as their slots; one sequence alone as its tokens, its padding beside it.
        if len(ids) > 1:
            width = float(ends[last - 1] - left)
            title = f"{len(ids)} sequences: {listed(ids.tolist(), _NAMED)}: {tokens}"
        else:
            width, title = float(widths[first]), f"sequence {ids[0]}: {tokens}"
        style = shades.style(float(plan.costs[ids].mean())) + (" shared" if shared else "")
        yield Box(round(left, 3), round(width, 3), style, title + shared)
        if len(ids) == 1 and pitch[first] - width > 0.02:
            title = f"padding of sequence {ids[0]}"
            yield Box(round(left + width, 3), round(float(pitch[first]) - width, 3), "padding", title)


def _groups(pitch: np.ndarray, least: float) -> list[tuple[int, int]]:
    """Ranges [first, last) of neighbours that are ``least`` wide together; a narrow rest joins the range before it."""
    runs: list[tuple[int, int]] = []
    first, width = 0, 0.0
    for k, step in enumerate(pitch.tolist()):
        width += step
        if width >= least:
            runs.append((first, k + 1))
            first, width = k + 1, 0.0
    if width > 0:
        first = runs.pop()[0] if runs else first
        runs.append((first, len(pitch)))
    return runs


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
    """Buckets that hold something, left to right, on a logarithmic axis."""

    buckets: list[Bucket]
    ticks: list[Tick]


def histogram(lengths: Int64, costs: Int64) -> Histogram:
    """The histogram of ``lengths`` [n] in tokens and their ``costs`` [n]."""
    if not len(lengths):
        return Histogram([], [])
    low, high = max(1, int(lengths.min())), max(1, int(lengths.max()))
    # Lengths are integers: edges that round to the same one are merged. Lengths of 1 to 4 have the edges 1, 2, 3, 4, 5.
    edges = np.unique(np.rint(np.geomspace(low, high + 1, _BUCKETS + 1)).astype(np.int64))
    counts, _ = np.histogram(lengths.clip(low), edges)
    shares, _ = np.histogram(lengths.clip(low), edges, weights=costs.astype(float))
    place = _places(edges, low, high)
    buckets = []
    for k in np.flatnonzero(counts).tolist():
        part, of_cost = (f"{100 * each[k] / max(1.0, float(each.sum())):.1f} %" for each in (counts, shares))
        many = quantity(int(counts[k]), "sequence")
        title = f"{edges[k]:,} to {edges[k + 1] - 1:,} tokens: {many} ({part}), {of_cost} of the cost"
        height, depth = (round(float(100 * each[k] / max(1.0, float(each.max()))), 2) for each in (counts, shares))
        start, width = float(place[k]), float(place[k + 1] - place[k])
        buckets.append(Bucket(round(start, 3), round(width, 3), height, depth, title))
    # From the first power of two that is not below the shortest length to the last not above the longest.
    powers = [2**k for k in range((low - 1).bit_length(), high.bit_length())]
    values = powers[:: -(-len(powers) // _MAX_TICKS)] if len(powers) > 1 else sorted({low, high})
    ticks = [Tick(round(float(at), 2), token_label(v)) for at, v in zip(_places(values, low, high), values)]
    return Histogram(buckets, ticks)


def _places(values: Int64 | list[int], low: int, high: int) -> np.ndarray:
    """Per cent of the axis, which goes from ``low`` to behind ``high``."""
    return 100 * np.log(np.asarray(values) / low) / np.log((high + 1) / low)


def token_label(tokens: int) -> str:
    """512 → ``512``, 131072 → ``128k``, 1536 → ``1.5k``."""
    if tokens < 1024:
        return str(tokens)
    return f"{tokens / 1024:.3g}k" if tokens < 1024**2 else f"{tokens / 1024**2:.3g}M"


class Timeline(NamedTuple):
    """Start and duration of each microbatch on each rank, float64 [num_microbatches, ranks], in the cost's unit.

    ``meetings`` [num_microbatches]: when a microbatch has ended on every rank, if ranks wait for it; else empty.
    ``end``: when the step ends. ``ideal``: when it would end if every rank were busy until then.
    """

    start: np.ndarray
    duration: np.ndarray
    meetings: np.ndarray
    end: float
    ideal: float


def timeline(plan: Plan) -> Timeline:
    """The timeline of one step."""
    duration, stats = plan.loads, plan.statistics()
    # Both figures are "time of the step over the ideal time", so the ideal time follows from the end.
    if plan.sync == "microbatch":
        # A microbatch begins on all ranks when the slowest has ended the one before, so meetings are sums of maxima.
        slowest = duration.max(axis=1, initial=0)
        meetings = np.cumsum(slowest)
        start = np.repeat((meetings - slowest)[:, None], plan.ranks, axis=1)
        end, over = float(slowest.sum()), stats.critical_path
    else:
        meetings, start = np.empty(0), np.cumsum(duration, axis=0) - duration
        end, over = float(duration.sum(axis=0).max(initial=0)), stats.rank_imbalance
    return Timeline(start, duration, meetings, end, end / over if over else end)
