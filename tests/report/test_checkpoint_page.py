"""The page of a checkpoint: what it draws is what the layout says, and it is one file that needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.support.browser import check_laid_out, lay_out, needs_chromium
from tests.support.drawn_page import DrawnPage
from ullage.checkpoint.core.inventory import Group, Inventory, Tensor, WrittenBy
from ullage.checkpoint.core.problem import Problem
from ullage.report.checkpoint import checkpoint_page, draw


def group(lengths: list[int], ranks: int, names: list[str] | None = None, booked: tuple[int, ...] = ()) -> Group:
    """A group of stage 1: parameters end to end, partitions of equal, even size."""
    layout = ullage.Layout(lengths)
    part = -(-layout.size // (2 * ranks)) * 2
    names = names or [f"layers.{i}.weight" for i in range(len(lengths))]
    return Group(0, 0, tuple(names), layout.pieces(np.arange(ranks + 1) * part), part, ranks, booked)


def page(*groups: Group, problems: tuple[Problem, ...] = (), tensors: tuple[Tensor, ...] = ()) -> str:
    topology = WrittenBy(1, "BF16_Optimizer", dp=groups[0].num_shards if groups else 1)
    return checkpoint_page(Inventory(Path("runs/global_step7"), "zero", topology, (), tensors, groups), problems)


def states(*names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, key, (3, 5), "float32", "parameter", ()) for name in names for key in ("fp32", "exp_avg"))


def story() -> Group:
    """266,240 elements over 768 ranks of 348, all padding booked on the last."""
    return group([4096] * 65, 768, booked=(0,) * 767 + (1024,))


def test_a_padding_of_1024_over_three_shards_can_be_seen_on_a_page_that_stands_alone() -> None:
    text = page(story())
    drawn = DrawnPage(text)
    assert "1,024 elements of padding" in text
    assert "20 + 328 padding" in text
    assert text.count("0 + 348 padding") == 2
    for rank, width in (("rank 765", 100 * 328 / 348), ("rank 766", 100.0), ("rank 767", 100.0)):
        [hatched] = [box.width for box in drawn.bar(rank) if box.style == "padding"]
        assert abs(hatched - width) < 0.001
    assert all(box.style != "padding" for box in drawn.bar("rank 764"))
    assert "768 shards of 348" in text
    assert "book 1,024 of it on rank 767" in text
    assert "−676" in text
    assert "<script" not in text
    assert not re.findall(r"https?://|url\((?!#)|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert len(text) < 200_000


@pytest.mark.parametrize(("lengths", "padded"), [([4, 4], False), ([4, 3], True)])
def test_the_legend_has_padding_only_where_some_is_drawn(lengths: list[int], padded: bool) -> None:
    text = page(group(lengths, 2))
    assert ('class="padding"' in text) == padded
    assert ("</svg>padding</li>" in text) == padded
    assert ("in 1 shard<" in text) == padded
    assert "At a line a shard ends." in text


def test_names_are_escaped_problems_said_and_tensors_listed() -> None:
    text = page(group([5], 1, ["<b>&.weight"]), problems=(Problem("a shard is missing", rank=3),))
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;.weight" in text
    assert "a shard is missing (rank 3)" in text
    text = page(group([5], 1), tensors=states(*(f"l.{i}.w" for i in range(41))))
    assert '<details class="fold"><summary>41 names</summary>' in text
    assert text.count("<td>fp32, exp_avg</td>") == 41
    assert '<details class="fold" open><summary>1 name</summary>' in page(group([5], 1), tensors=states("w"))


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 40))
def test_boxes_fill_every_bar_and_hatch_what_no_fragment_covers(lengths: list[int], ranks: int) -> None:
    drawn = group(lengths if sum(lengths) else [1], ranks)
    drawing = draw(drawn)
    padding = drawn.padding_of()
    rows = [row for row in (*drawing.shards, drawing.whole) if row is not None and row.boxes]
    assert rows
    for row in rows:
        at = 0.0
        for box in row.boxes:
            assert abs(box.start - at) < 0.001
            at = box.start + box.width
        assert abs(at - 100) < 0.001
    for row in drawing.shards:
        if row.boxes:
            rank = int(row.label.split()[1])
            hatched = sum(box.width for box in row.boxes if box.style == "padding")
            assert abs(hatched * drawn.shard_size / 100 - padding[rank]) < 0.01


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_chromium_lays_it_out_without_overlap_or_overflow(tmp_path: Path, width: int, dark: bool) -> None:
    long = group([300, 5, 70, 1], 3, [f"model.decoder.layers.{i}.self_attn.{'q' * 60}_proj.weight" for i in range(4)])
    trouble = Problem("elements are in no fragment", "mp_rank_00/" + "x" * 90 + ".pt", parameter="q" * 90)
    deep = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(40)]
    wide = page(group([30] * 40, 8, deep), tensors=states(*deep, "model." + "embed" * 20))
    for number, content in enumerate([page(story()), page(long, problems=(trouble,)), wide]):
        (tmp_path / f"{number}.html").write_text(content, encoding="utf-8")
    parts = "h1,h2,h3,p,dt,dd,td,th,li,summary,footer,.label,.number,.swatches span,.bar"
    for facts in lay_out(sorted(tmp_path.glob("?.html")), tmp_path, parts=parts, width=width, dark=dark).values():
        check_laid_out(facts, width=width, dark=dark, least=20)
