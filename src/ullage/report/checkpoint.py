"""Drawing of a checkpoint: each group's flat buffer, the shards that cut it, the fragments in them, and the padding.

Everything on the page comes from :class:`~ullage.checkpoint.Group`: a box is a piece, and padding is what no piece
covers, found by walking over a shard. Groups of hundreds of ranks are folded: the first ranks, the ranks where padding
begins, and the last ranks are drawn, and a line says how many were left out between them and how they look. Fragments
too narrow to be seen are drawn together, in grey, with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ullage.checkpoint.core.inventory import Group, Inventory, Tensor
from ullage.checkpoint.core.problem import Problem
from ullage.core.display import quantity, size
from ullage.report.drawing import NUM_COLOURS, Box, Row, render

#: Ranks drawn at the head and the tail of a group, groups drawn, names and problems listed.
_HEAD, _TAIL, _GROUPS, _TENSORS, _PROBLEMS = 4, 6, 12, 1000, 20
#: Per cent of a bar: below the first a fragment is drawn with its neighbours; a letter takes the second.
_NARROW, _LETTER = 0.25, 1.9
#: Shades of each colour, classes ``d1`` and ``d2`` beside the plain one, and colours in all their shades.
_SHADES = 3
_STYLES = NUM_COLOURS * _SHADES
#: Shards in one bar up to which their cuts are drawn.
_CUTS = 48


class GroupDrawing(NamedTuple):
    """One group: a sentence about it, its buffer end to end, and its shards.

    ``legend``: classes and names of as many parameters as there are colours, with their numbers, and of padding.
    ``unnamed``: how many parameters come after those, in the same colours again.
    """

    title: str
    sentence: str
    whole: Row | None
    shards: tuple[Row, ...]
    legend: tuple[tuple[str, str], ...]
    unnamed: int = 0


def checkpoint_page(inventory: Inventory, problems: Sequence[Problem] = ()) -> str:
    """The drawing of a checkpoint as one self-contained HTML page. Reads no tensor data.

    ``problems``: those of :meth:`Inventory.problems`, listed on the page. Raises ``InputError`` without jinja2.
    """
    written_by, names = inventory.written_by, by_name(inventory)
    kinds: dict[str, list[int]] = {}
    for file in inventory.files:
        kinds.setdefault(file.kind, []).append(file.num_bytes)
    return render(
        "checkpoint.html",
        inventory=inventory,
        title=f"Checkpoint {inventory.folder.name}",
        ranks=f"dp {written_by.dp} × tp {written_by.tp} × pp {written_by.pp}"
        + (f", ep {' and '.join(map(str, written_by.ep))}" if written_by.ep else ""),
        problems=[str(problem) for problem in problems[:_PROBLEMS]],
        num_problems=len(problems),
        padded_shards=sum(int(np.count_nonzero(group.padding_of())) for group in inventory.groups),
        drawings=[draw(group) for group in inventory.groups[:_GROUPS]],
        groups_left_out=max(0, len(inventory.groups) - _GROUPS),
        kinds=[(kind, len(found), size(sum(found))) for kind, found in kinds.items()],
        rows=list(names.values())[:_TENSORS],
        tensors_left_out=max(0, len(names) - _TENSORS),
    )


def by_name(inventory: Inventory) -> dict[str, list[Tensor]]:
    """The states of each parameter and buffer, by its name."""
    found: dict[str, list[Tensor]] = {}
    for tensor in inventory.tensors:
        found.setdefault(tensor.name, []).append(tensor)
    return found


def draw(group: Group) -> GroupDrawing:
    """A group's buffer and its shards as bars; reads no tensor data."""
    padding = group.padding_of()
    padded = np.flatnonzero(padding)
    held = int(group.pieces.length.sum())
    sentence = (
        f"{held:,} elements of {quantity(len(group.names), 'parameter')} and {group.padding:,} elements of padding "
        f"fill {quantity(group.num_shards, 'shard')} of {group.shard_size:,}."
    )
    if len(padded):
        ranks = f"rank {padded[0]}" if len(padded) == 1 else f"{len(padded):,} ranks, from {padded[0]} to {padded[-1]}"
        sentence += f" The padding lies on {ranks}."
    # Padding as the files book it: before DeepSpeed 0.16.4 all of it on the last rank, which may hold less than that.
    booked = np.array(group.booked) if len(group.booked) == group.num_shards else padding
    wrong = np.flatnonzero(booked > group.shard_size)
    if len(wrong):
        sentence += (
            f" The files book {booked[wrong[0]]:,} of it on rank {wrong[0]}, which holds only {group.shard_size:,} "
            f"elements: cutting it off there would leave {group.shard_size - booked[wrong[0]]:,}.".replace("-", "−")
        )
    # At stages 1 and 2 shards are parts of one buffer. At stage 3 each parameter is cut by itself, so positions fall
    # from one piece to the next, and there is no whole buffer to draw.
    end_to_end = bool(np.all(np.diff(_position(group)) > 0)) and group.num_shards > 1
    title = f"Group {group.index}" + (f", model rank {group.model_rank}" if group.model_rank else "")
    title += f", experts of rank {group.ep_rank}" if group.ep_rank is not None else ""
    named = [(_style(i), f"{i} {name}") for i, name in enumerate(group.names[:_STYLES])]
    return GroupDrawing(
        title,
        sentence,
        _whole(group) if end_to_end else None,
        tuple(_shard_rows(group, padding)),
        (*named, *[("padding", "padding")] * bool(group.padding)),
        max(0, len(group.names) - _STYLES),
    )


def _style(number: int) -> str:
    """Classes of a parameter's colour and shade: as many as can be told apart, then from the first again."""
    shade = number // NUM_COLOURS % _SHADES
    return f"c{number % NUM_COLOURS}" + (f" d{shade}" if shade else "")


def _position(group: Group) -> np.ndarray:
    """First position of each piece when the shards are laid end to end, [pieces]."""
    return group.pieces.shard * group.shard_size + group.pieces.shard_start


def _whole(group: Group) -> Row:
    """All shards as one bar, with a line at each cut if there is room for them."""
    shards, pieces = group.num_shards, group.pieces
    total = shards * group.shard_size
    boxes = _boxes(group.names, pieces.item, _position(group), pieces.length, total)
    cuts = tuple(round(100 * i / shards, 4) for i in range(1, shards)) if shards <= _CUTS else ()
    return Row("whole buffer", boxes, f"{total:,}", cuts)


def _shard_rows(group: Group, padding: np.ndarray) -> Iterable[Row]:
    """A row per drawn shard; between them, a line for the ranks that are left out."""
    last, pieces = group.num_shards, group.pieces
    shown = {*range(min(_HEAD, last)), *range(max(0, last - _TAIL), last)}
    padded = np.flatnonzero(padding)
    if len(padded) and len(padded) < last:  # where padding begins
        shown |= {*range(max(0, int(padded[0]) - 1), min(last, int(padded[0]) + 2))}
    if last <= _HEAD + _TAIL + 4:
        shown = {*range(last)}
    # Pieces by shard: those of rank r are by_shard[bounds[r] : bounds[r + 1]].
    by_shard = np.argsort(pieces.shard, kind="stable")
    bounds = np.searchsorted(pieces.shard, np.arange(last + 1), sorter=by_shard)
    before = -1
    for rank in sorted(shown):
        if rank > before + 1:
            yield Row(_left_out(padding[before + 1 : rank], before + 1, rank - 1, group.shard_size))
        mine, pad = by_shard[bounds[rank] : bounds[rank + 1]], int(padding[rank])
        boxes = _boxes(group.names, pieces.item[mine], pieces.shard_start[mine], pieces.length[mine], group.shard_size)
        held = f"{group.shard_size - pad:,} + {pad:,} padding" if pad else f"{group.shard_size:,}"
        yield Row(f"rank {rank}", boxes, held)
        before = rank


def _left_out(padding: np.ndarray, first: int, last: int, shard_size: int) -> str:
    some, total = int(np.count_nonzero(padding)), len(padding)
    what = f"{int(padding.sum()):,} elements of padding in {some:,} of them" if some else "no padding"
    if some == total and int(padding.min()) == shard_size:
        what = "padding only"
    return f"ranks {first:,} to {last:,}: {total:,} more, {what}"


def _boxes(
    names: Sequence[str], item: np.ndarray, start: np.ndarray, length: np.ndarray, total: int
) -> tuple[Box, ...]:
    """The pieces of one bar in order, padding where there are gaps between them.

    ``item`` [n]: the parameter of each piece, as its number in ``names``. ``start``, ``length`` [n]: which elements it
    covers of the bar's ``total``.
    """
    order = np.argsort(start, kind="stable")
    boxes: list[Box] = []
    narrow: list[tuple[int, int, int]] = []
    at = 0

    def place(begin: int, end: int, style: str, title: str, *texts: str) -> None:
        width = 100 * (end - begin) / total
        # The first text that fits the width, else none.
        short = next((text for text in texts if len(text) * _LETTER <= width), "")
        boxes.append(Box(round(100 * begin / total, 4), round(width, 4), style, title, short))

    def flush() -> None:
        if len(narrow) == 1:
            i, begin, end = narrow[0]
            place(begin, end, _style(i), f"{i} {names[i]}: {end - begin:,} elements")
        elif narrow:
            begin, end, many = narrow[0][1], narrow[-1][2], f"{len(narrow):,} fragments"
            place(begin, end, "many", f"{many}, {end - begin:,} elements", many)
        narrow.clear()

    for k in order:
        i, begin, end = int(item[k]), int(start[k]), int(start[k] + length[k])
        # What no piece covers is padding.
        if begin > at:
            flush()
            place(at, begin, "padding", f"padding: {begin - at:,} elements", "padding")
        if 100 * (end - begin) / total < _NARROW:
            narrow.append((i, begin, end))
        else:
            flush()
            title = f"{i} {names[i]}: {end - begin:,} elements from {begin:,}"
            # The whole name, else its last two parts, else its number, which the legend has too.
            place(begin, end, _style(i), title, names[i], ".".join(names[i].split(".")[-2:]), str(i))
        at = end
    flush()
    if at < total:
        place(at, total, "padding", f"padding: {total - at:,} elements", "padding")
    return tuple(boxes)
