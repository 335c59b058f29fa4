"""Small drawings for notebooks: a plan, a layout, a batch, a checkpoint.

A drawing is the object's own line, bars, and a table. It is the same HTML in every notebook: colours follow the theme
of Jupyter, VS Code or Colab, and where styles are taken out (as forges do that show notebooks) the text is left.
Everything is bounded: of a large object the first part is drawn, and a line says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ullage.core.display import in_columns, size
from ullage.planning.planner import arrival_order
from ullage.report import checkpoint as checkpoints
from ullage.report.drawing import NUM_COLOURS, Box, Row, render
from ullage.report.figures import figure_rows, reference_name
from ullage.report.plan import memory_drawing, plan_page

if TYPE_CHECKING:
    from ullage.checkpoint.core.inventory import Inventory
    from ullage.core.batch import RaggedBatch
    from ullage.core.layout import Layout
    from ullage.planning import Plan

#: Ranks of a plan, items of a layout, rows of a table and groups of a checkpoint that are drawn.
_RANKS, _ITEMS, _LINES, _GROUPS = 16, 256, 24, 2
#: Sequences up to which arrival order is planned beside a plan that is only looked at.
_COMPARED = 100_000
#: Per cent of a bar that a character of text takes.
_LETTER = 1.2


class Bars(NamedTuple):
    """A heading, rows, the legend of their colours, and a sentence below."""

    title: str
    rows: Sequence[Row]
    legend: Sequence[tuple[str, str]] = ()
    thin: bool = False
    note: str = ""


class Inline(NamedTuple):
    """What is drawn of an object: bars, and a table whose first row holds the headings."""

    bars: Sequence[Bars] = ()
    table: Sequence[Sequence[str]] = ()
    note: str = ""


def fragment(value: object) -> str | None:
    """``value`` as HTML for a notebook; None for a type that has no drawing. Raises ``InputError`` without jinja2."""
    drawn = _inline(value)
    if drawn is None:
        return None
    line = repr(value)
    # A notebook is one document: names that styles refer to differ between drawings, and are the same at each run.
    name = hashlib.blake2b(repr((line, drawn)).encode(), digest_size=4).hexdigest()
    return render("inline.html", name=name, line=line, drawn=drawn, text=_text(line, drawn))


def page(value: Any, **facts: Any) -> str:
    """The page of ``value``, a plan or a checkpoint. ``facts``: those of :func:`plan_page`."""
    if hasattr(value, "written_by"):
        return checkpoints.checkpoint_page(value, value.problems(manifest=False))
    facts["reference"] = facts.get("reference") or arrival_order(value)
    return plan_page(value, **facts)


def _text(line: str, drawn: Inline) -> str:
    # The first column is of names, the others are of numbers.
    lines = in_columns(drawn.table, range(1, len(drawn.table[0]) if drawn.table else 1))
    return "\n".join([line, *lines, *([drawn.note] if drawn.note else [])])


def _inline(value: object) -> Inline | None:
    drawer = next(filter(None, (_DRAWERS.get(each.__name__) for each in type(value).__mro__)), None)
    return None if drawer is None else drawer(value)


def _plan(plan: Plan) -> Inline:
    reference = arrival_order(plan) if plan.num_sequences <= _COMPARED else None
    bars = [_memory(plan, f"{plan.strategy}: ranks × microbatches of {plan.capacity:,} slots")]
    if reference is not None:
        bars.append(_memory(reference, f"{reference_name(reference)}, the order of arrival"))
    return Inline(bars if plan.num_microbatches else (), figure_rows(plan, reference))


def _memory(plan: Plan, title: str) -> Bars:
    drawing = memory_drawing(plan)
    rows = [Row(f"rank {row.label}", row.boxes, row.number, tuple(drawing.cuts)) for row in drawing.rows[:_RANKS]]
    note = f"{len(rows)} of {plan.ranks:,} ranks are shown." if len(rows) < plan.ranks else drawing.shown
    return Bars(title, rows, (("s0", "a cheap sequence"), ("s6", "an expensive one"), ("padding", "empty")), True, note)


def _buffer(layout: Layout, things: str, entries: str = "tokens") -> Bars:
    """The flat buffer as one bar: items in turning colours, padding hatched."""
    shown = min(layout.num_items, _ITEMS)
    starts, lengths, slots = (array[:shown].tolist() for array in (layout.starts, layout.lengths, layout.slots))
    end = (starts[-1] + slots[-1]) or 1
    boxes = []
    for item, (start, length, slot) in enumerate(zip(starts, lengths, slots)):
        left, width, whole = (round(100 * part / end, 3) for part in (start, length, slot))
        if length:
            label = str(item) if len(str(item)) * _LETTER < width else ""
            title = f"{things[:-1]} {item}: {length:,} {entries}"
            boxes.append(Box(left, width, f"c{item % NUM_COLOURS}", title, label))
        if slot > length:
            title = f"padding of {things[:-1]} {item}: {slot - length:,} slots"
            boxes.append(Box(round(left + width, 3), round(whole - width, 3), "padding", title))
    note = f"The first {shown:,} of {layout.num_items:,} {things} are shown." if shown < layout.num_items else ""
    legend = [("padding", "padding")] if layout.num_tokens < layout.size else []
    row = Row("buffer", tuple(boxes), f"{layout.size:,} {'slots' if entries == 'tokens' else entries}")
    return Bars("", [row], legend, False, note)


def _batch(batch: RaggedBatch) -> Inline:
    table = [["field", "dtype", "shape", "per"]]
    for name in batch.names:
        dtype, shape = str(batch[name].dtype).removeprefix("torch."), str(list(batch[name].shape))
        unit = "item" if name in batch.items else "sequence" if name in batch.per_sequence else "token"
        table.append([name, dtype, shape, unit])
    left = len(table) - 1 - _LINES
    note = f"{left:,} more fields." if left > 0 else ""
    bars = [_buffer(batch.layout, "sequences")] if batch.layout.size else []
    # The rows of items in the colours of their sequences.
    bars += [_buffer(rows, "sequences", "rows")._replace(title=name) for name, rows in batch.items.items()]
    return Inline(bars, table[: _LINES + 1], note)


def _inventory(inventory: Inventory) -> Inline:
    bars = []
    for group in inventory.groups[:_GROUPS]:
        drawing = checkpoints.draw(group)
        rows = [row for row in (drawing.whole, *drawing.shards[:_RANKS]) if row is not None and row.boxes]
        bars.append(Bars(drawing.title, rows, drawing.legend, True, drawing.sentence))
    table = [["parameter", "shape", "states", "bytes"]]
    for name, states in list(checkpoints.by_name(inventory).items())[:_LINES]:
        keys = ", ".join(f"{tensor.key} {tensor.dtype}" for tensor in states)
        table.append([name, str(list(states[0].shape)), keys, size(sum(tensor.num_bytes for tensor in states))])
    left = len(checkpoints.by_name(inventory)) + 1 - len(table)
    return Inline(bars, table, f"{left:,} more." if left > 0 else "")


#: By the name of a class, for itself and those made of it: nothing here loads torch.
_DRAWERS: dict[str, Callable[[Any], Inline]] = {
    "Plan": _plan,
    "Layout": lambda layout: Inline([_buffer(layout, "items")] if layout.size else ()),
    "RaggedBatch": _batch,
    "Inventory": _inventory,
}
