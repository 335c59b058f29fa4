"""The drawings of README and home page, from real lengths and a real plan: ``python -m maintenance.drawings``.

``padded_packed.svg``: a batch of docstrings, padded, and the same sequences end to end. ``plan.svg``: the ranks of a
step against time, in arrival order and as planned. Both take the colours of the page that they stand in.
"""

# ruff: noqa: E501  (the drawings)

from __future__ import annotations

from pathlib import Path

import numpy as np

import ullage
from ullage.datasets import WORKLOADS, byte_tokenizer, docstrings, tokenize

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
WIDTH = 480  # narrow: at 360 pixels, a phone's, the letters are still 11 high

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" class="idea" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{id}">
<title id="{id}">{title}</title>
<style>
svg.idea {{ color: #2b2420; font: 15px system-ui, sans-serif; }}
@media (prefers-color-scheme: dark) {{ svg.idea {{ color: #e8e0d8; }} }}
svg.idea text {{ fill: currentColor; }} svg.idea .row {{ font-size: 14px; opacity: 0.8; }}
svg.idea .p0 {{ fill: #b5651d; }} svg.idea .p1 {{ fill: #d98f45; }} svg.idea .p2 {{ fill: #4a7f50; }} svg.idea .p3 {{ fill: #3f6ea8; }}
svg.idea .waste {{ fill: url(#{id}-hatch); }} svg.idea .{id}-line {{ stroke: currentColor; stroke-width: 1; opacity: 0.45; }}
svg.idea .end {{ stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 4 3; }}
</style>
<defs><pattern id="{id}-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="{id}-line" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>
"""


def _box(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height}"/>'


def _text(text: str, x: float, y: float, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}"{f" class={style!r}" if style else ""} text-anchor="{anchor}">{text}</text>'


def _svg(name: str, title: str, height: int, parts: list[str]) -> str:
    head = _HEAD.format(id=name, title=title, width=WIDTH, height=height)
    return head + "\n".join(part.replace("'", '"') for part in parts) + "\n</svg>\n"


def padded_packed() -> str:
    """Ten docstrings in a padded batch, and end to end."""
    samples = tokenize(docstrings(), byte_tokenizer(), max_length=1024)
    drawn = np.random.default_rng(0).choice(len(samples), 10, replace=False)
    lengths = [len(samples[int(i)]["input_ids"]) for i in drawn]
    total, longest = sum(lengths), max(lengths)
    slots = longest * len(lengths)
    scale, row, gap = WIDTH / longest, 13, 3
    parts = [_text(f"padded: {slots:,} slots computed for {total:,} tokens, {1 - total / slots:.0%} padding", 0, 15)]
    for k, length in enumerate(lengths):
        y = 26 + k * (row + gap)
        parts += [
            _box(f"p{k % 4}", 0, y, length * scale, row),
            _box("waste", length * scale, y, (longest - length) * scale, row),
        ]
    below = 26 + len(lengths) * (row + gap) + 24
    parts.append(_text(f"packed: {total:,} slots, one row (folded here), no padding", 0, below))
    # The same scale, so that a row's width can be compared; the row goes on in a second line.
    x, y = 0.0, below + 11
    for k, length in enumerate(lengths):
        left = length * scale
        while left > 0.01:
            width = min(left, WIDTH - x)
            parts.append(_box(f"p{k % 4}", x, y, max(width - 1.5, 0.4), row))
            x, left = x + width, left - width
            if x > WIDTH - 0.01:
                x, y = 0.0, y + row + gap
    title = f"A padded batch of {len(lengths)} sequences beside the same sequences packed"
    return _svg("packed", title, round(y + row + 4), parts)


def plan_of_a_step() -> str:
    """Ranks against time: what each waits for, in arrival order and as planned."""
    lengths, ranks, capacity = WORKLOADS["chat"](512, 0), 8, 32768
    plans = [ullage.plan(lengths, ranks=ranks, capacity=capacity, strategy=name) for name in ("next_fit", "balanced")]
    row, gap, high = 13, 3, 184
    most = plans[0].statistics().critical_path
    parts = [_text("a row is a rank, a colour a microbatch; hatched: waiting", 0, 15, "row")]
    for k, (plan, name) in enumerate(zip(plans, ("in arrival order", "planned"))):
        top, path = k * high + 52, plan.statistics().critical_path
        work = np.array(
            [[plan.costs[plan.members(m, rank)].sum() for rank in range(ranks)] for m in range(plan.num_microbatches)],
            dtype=np.float64,
        )
        ideal = work.sum() / ranks
        scale = WIDTH / ideal / most
        parts.append(_text(f"{name}: {path:.2f} times the ideal time", 0, top - 10))
        for rank in range(ranks):
            start, y = 0.0, top + rank * (row + gap)
            for m in range(plan.num_microbatches):
                slowest = work[m].max()
                parts += [
                    _box(f"p{(0, 3, 2)[m % 3]}", start * scale, y, work[m, rank] * scale, row),
                    _box("waste", (start + work[m, rank]) * scale, y, (slowest - work[m, rank]) * scale, row),
                ]
                start += slowest
        x, bottom = ideal * scale, top + ranks * (row + gap)
        parts += [
            f'<line class="end" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}"/>',
            _text("ideal end", x, bottom + 14, "row", "middle"),
        ]
    title = (
        f"A step of 512 chats on 8 ranks: {most:.2f} times the ideal time in arrival order, {path:.2f} times planned"
    )
    return _svg("plan", title, bottom + 20, parts)


DRAWINGS = {"padded_packed.svg": padded_packed, "plan.svg": plan_of_a_step}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")
