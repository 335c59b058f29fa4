"""Timeline of a plan: when each rank runs each microbatch, by the plan's own costs.

Time is cost: a rank runs a microbatch in the time of its load. Where ranks meet every microbatch, each microbatch
starts when the slowest rank has ended the one before; where they meet once per step, each rank runs on without
waiting. Every page and trace of a plan is drawn from this one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ullage.planning import Plan

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and duration of each microbatch on each rank, float64 [num_microbatches, ranks], in the cost's unit.

    ``meetings`` [num_microbatches]: when a microbatch has ended on every rank, if ranks wait for it; else empty.
    ``end``: when the step ends. ``ideal``: when it would end if every rank were busy until then.
    """

    start: Float64
    duration: Float64
    meetings: Float64
    end: float
    ideal: float


def timeline(plan: Plan) -> Timeline:
    """The timeline of one step."""
    duration = plan.loads
    if plan.sync == "microbatch":
        # A microbatch begins on all ranks when the slowest has ended the one before, so meetings are sums of maxima.
        meetings = np.cumsum(duration.max(axis=1, initial=0))
        start = np.repeat((meetings - duration.max(axis=1, initial=0))[:, None], plan.ranks, axis=1)
        end = float(meetings[-1]) if len(meetings) else 0.0
    else:
        meetings, start = np.empty(0), np.cumsum(duration, axis=0) - duration
        end = float(duration.sum(axis=0).max(initial=0))
    # Both figures are "time of the step over the ideal time", so the ideal time follows from the end.
    critical = plan.statistics().critical_path if plan.sync == "microbatch" else plan.statistics().rank_imbalance
    return Timeline(start, duration, meetings, end, end / critical if critical else end)


def write_trace(plan: Plan, file: IO[str]) -> None:
    """Write the step as a Chrome trace (chrome://tracing, Perfetto): a track per rank, sequences within microbatches.

    One second of the trace is the ideal time of the step. Format: the JSON object form of the Trace Event Format.
    """
    file.write(
        '{"displayTimeUnit": "ms", "otherData": {"one second": "the ideal time of the step"}, "traceEvents": [\n'
    )
    for number, event in enumerate(_events(plan)):
        file.write((",\n" if number else "") + json.dumps(event))
    file.write("\n]}\n")


def _events(plan: Plan) -> Iterator[dict[str, Any]]:
    times = timeline(plan)
    # A trace counts microseconds: the ideal step is 1e6 of them.
    scale = 1e6 / times.ideal if times.ideal else 1.0
    for rank in range(plan.ranks):
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for microbatch in range(plan.num_microbatches):
            start, duration = float(times.start[microbatch, rank]), float(times.duration[microbatch, rank])
            if duration:
                yield from _microbatch_events(plan, microbatch, rank, start * scale, duration * scale)
            if len(times.meetings) and times.meetings[microbatch] > start + duration:
                wait = float(times.meetings[microbatch]) - start - duration
                yield _event("waiting", "wait", rank, (start + duration) * scale, wait * scale)
        # Ranks that meet once per step wait once, after their last microbatch.
        busy = float(times.start[-1, rank] + times.duration[-1, rank]) if plan.num_microbatches else 0.0
        if not len(times.meetings) and times.end > busy:
            yield _event("waiting", "wait", rank, busy * scale, (times.end - busy) * scale)


def _microbatch_events(
    plan: Plan, microbatch: int, rank: int, start: float, duration: float
) -> Iterator[dict[str, Any]]:
    members = plan.members(microbatch, rank)
    layout = plan.layout(microbatch, rank)
    facts = {"tokens": layout.num_tokens, "slots": layout.size, "degree": plan.degree(microbatch, rank)}
    yield _event(f"microbatch {microbatch}", "microbatch", rank, start, duration, **facts)
    costs = plan.costs[members]
    # Within a microbatch, sequences share its time by cost.
    widths = costs * (duration / max(1, int(costs.sum())))
    begins = start + np.cumsum(widths) - widths
    for i, begin, width, length, slot in zip(members, begins, widths, layout.lengths, layout.slots):
        yield _event(f"sequence {i}", "sequence", rank, begin, width, length=int(length), slot=int(slot))


def _event(name: str, kind: str, rank: int, start: float, duration: float, **facts: Any) -> dict[str, Any]:
    times = {"ts": round(float(start), 3), "dur": round(float(duration), 3)}
    return {"ph": "X", "pid": 0, "tid": rank, "name": name, "cat": kind, **times, "args": facts}
