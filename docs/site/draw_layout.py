"""Draws docs/assets/layout.svg, the one idea, from a real Layout: ``python docs/site/draw_layout.py``.

As a picture it follows the viewer's light or dark preference; on the site, where it stands in the page itself, it takes
the page's colours.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from ullage import Layout

UNIT, LEFT, GAP, HEIGHT = 13.0, 14.0, 10.0, 34.0
ROWS = {"items": 34.0, "buffer": 118.0, "shards": 206.0}
NAMES = "abcd"
STYLE = """<style>
svg.idea { color: #2b2420; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg.idea { color: #e8e0d8; } }
svg.idea text { fill: currentColor; }
svg.idea .row { font-size: 12px; opacity: 0.75; }
svg.idea .box { stroke: currentColor; stroke-width: 1; }
svg.idea .i0 { fill: #b5651d66; } svg.idea .i1 { fill: #4a7f5066; } svg.idea .i2 { fill: #3f6ea866; }
svg.idea .i3 { fill: #94508a66; } svg.idea .padding { fill: url(#idea-ullage); stroke-dasharray: 2 2; }
svg.idea .hatch { stroke: currentColor; stroke-width: 1; opacity: 0.5; }
svg.idea .cut { stroke: currentColor; stroke-width: 2; }
</style>"""


def box(kind: str, x: float, row: str, width: float, label: str = "") -> str:
    y = ROWS[row]
    shape = f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT:g}" rx="3"/>'
    if not label:
        return shape
    return shape + f'<text x="{x + width / 2:g}" y="{y + 22:g}" text-anchor="middle">{label}</text>'


def row_name(row: str, text: str) -> str:
    return f'<text class="row" x="{LEFT:g}" y="{ROWS[row] - 9:g}">{text}</text>'


def drawing() -> str:
    layout = Layout([5, 3, 7, 6], pad_to_multiple_of=4)
    cuts = np.arange(0, layout.size + 1, 7)
    pieces = layout.pieces(cuts)
    ullage = f"{layout.ullage:.0%}"
    parts = [
        row_name("items", "items: sequences, or parameters"),
        row_name(
            "buffer", f"one buffer: {layout.num_tokens} elements in {layout.size} slots; hatched, ullage {ullage}"
        ),
        row_name("shards", "shards: what of which item lies where"),
    ]
    at = LEFT
    for item, length in enumerate(layout.lengths.tolist()):
        parts.append(box(f"i{item}", at, "items", length * UNIT, NAMES[item]))
        start, slot = int(layout.starts[item]), int(layout.slots[item])
        parts.append(box(f"i{item}", LEFT + start * UNIT, "buffer", length * UNIT, NAMES[item]))
        parts.append(box("padding", LEFT + (start + length) * UNIT, "buffer", (slot - length) * UNIT))
        at += length * UNIT + 2 * GAP
    for cut in cuts.tolist():
        x, top = LEFT + cut * UNIT, ROWS["buffer"]
        parts.append(f'<line class="cut" x1="{x:g}" y1="{top - 5:g}" x2="{x:g}" y2="{top + HEIGHT + 5:g}"/>')
    shards = []  # x of each shard, and where its last piece ended so far
    for shard, (begin, end) in enumerate(pairwise(cuts.tolist())):
        x = LEFT + begin * UNIT + (shard - 1.5) * GAP / 3
        shards.append([x, 0])
        parts.append(f'<text x="{x + (end - begin) * UNIT / 2:g}" y="258" text-anchor="middle">shard {shard}</text>')
    rows = zip(pieces.item.tolist(), pieces.shard.tolist(), pieces.item_start.tolist(), pieces.shard_start.tolist())
    for (item, shard, first, start), length in zip(rows, pieces.length.tolist()):
        x, ended = shards[shard]
        if start > ended:
            parts.append(box("padding", x + ended * UNIT, "shards", (start - ended) * UNIT))
        part = NAMES[item] if length == layout.lengths[item] else f"{NAMES[item]}[{first}:{first + length}]"
        parts.append(box(f"i{item}", x + start * UNIT, "shards", length * UNIT, part if length > 2 else NAMES[item]))
        shards[shard][1] = start + length
    for x, ended in shards:
        if ended < cuts[1]:
            parts.append(box("padding", x + ended * UNIT, "shards", (int(cuts[1]) - ended) * UNIT))
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" class="idea" viewBox="0 0 392 270" role="img" '
            'aria-labelledby="idea-title">',
            '<title id="idea-title">Four items laid end to end in a buffer, each followed by its padding; four equal '
            "shards cut the buffer, so items c and d lie in two shards each</title>",
            STYLE,
            '<defs><pattern id="idea-ullage" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="5"/></pattern></defs>',
            *parts,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    Path(__file__).parents[1].joinpath("assets", "layout.svg").write_text(drawing() + "\n")
