"""The page of a plan: what its drawings say agrees with the plan, and a browser lays it out without overflow."""

import re

import numpy as np
import pytest

import ullage
from tests.support.browser import check_laid_out, lay_out, needs_chromium
from tests.support.drawn_page import DrawnPage
from ullage.datasets import CAPACITIES, WORKLOADS
from ullage.report import plan as drawing
from ullage.report.plan import plan_page, timeline


def planned(name, n, ranks, **how):
    return ullage.plan(WORKLOADS[name](n, 1), ranks=ranks, capacity=CAPACITIES[name], **how)


def page_of(name, n, ranks, **how):
    return plan_page(
        planned(name, n, ranks, **how), reference=planned(name, n, ranks, **how, strategy="next_fit"), source=name
    )


def bars_of(page):
    return [boxes for _, boxes in DrawnPage(page).bars]


@pytest.mark.parametrize("how", [{}, {"sync": "step"}, {"pad_to_multiple_of": 64}, {"microbatch_multiple": 4}])
def test_every_sequence_is_drawn_once_where_the_plan_has_it(how):
    plan = planned("bimodal", 96, 4, **how)
    bars = bars_of(plan_page(plan))
    time, memory = bars[:4], bars[4:8]
    for rank in range(plan.ranks):
        expected = np.concatenate([plan.members(m, rank) for m in range(plan.num_microbatches)]).tolist()
        for row in (time[rank], memory[rank]):
            titles = " | ".join(title for style, _, _, title in row if style.startswith("s"))
            parts = re.findall(r"sequences?:? ([\d, ]+)", titles)
            assert [int(i) for part in parts for i in part.strip(", ").split(", ")] == expected


def test_what_is_hatched_is_what_is_lost():
    plan = planned("chat", 300, 6)
    stats, times = plan.statistics(), timeline(plan)
    bars = bars_of(plan_page(plan))
    waiting = sum(width for row in bars[:6] for style, _, width, _ in row if style == "wait") / 6
    assert waiting == pytest.approx(100 * (1 - 1 / stats.critical_path), abs=0.1)
    ullage_drawn = sum(width for row in bars[6:12] for style, _, width, _ in row if style == "padding") / 6
    assert ullage_drawn == pytest.approx(100 * stats.ullage, abs=0.1)
    assert times.end / times.ideal == pytest.approx(stats.critical_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("n", "ranks", "limit"), [(4096, 32, 1_500_000), (20_000, 200, 2_500_000), (30_000, 4, 2_500_000)]
)
def test_large_plans_make_pages_of_bounded_size(n, ranks, limit):
    page = page_of("megatron", n, ranks)
    assert len(page) < limit
    bars = bars_of(page)
    assert max(map(len, bars)) < 2 * drawing.MAX_BLOCKS
    assert len(bars) <= 3 * drawing.MAX_RANKS
    assert (f"of {ranks} ranks, the busiest among them" in page) == (ranks > drawing.MAX_RANKS)
    busiest = planned("megatron", n, ranks).loads.sum(axis=0).argmax()
    assert f'aria-label="rank {busiest}: ' in page


@pytest.mark.parametrize(("ranks", "waits"), [(1, False), (8, True)])
def test_the_legend_has_waiting_only_where_a_rank_waits(ranks, waits):
    page = page_of("chat", 64, ranks)
    assert ('class="wait" x=' in page.replace('<rect class="wait" width="16"', "")) == waits
    assert ("</svg>waiting</span>" in page) == waits
    assert "</svg>ullage</span>" in page


def test_the_reference_stands_beside_on_the_same_axis():
    plan, other = planned("chat", 300, 6), planned("chat", 300, 6, strategy="next_fit")
    bars = bars_of(plan_page(plan, reference=other))
    ends = [max(x + width for row in bars[k : k + 6] for _, x, width, _ in row) for k in (0, 6)]
    assert ends[1] == pytest.approx(100, abs=0.1)
    assert ends[0] == pytest.approx(100 * timeline(plan).end / timeline(other).end, abs=0.1)


@pytest.mark.parametrize(
    ("lengths", "said"), [([], "There is no sequence to place."), ([99], "1 sequence of 99 tokens dropped.")]
)
def test_where_nothing_is_placed_no_empty_drawings_stand(lengths, said):
    page = plan_page(ullage.plan(lengths, ranks=2, capacity=16, oversize="drop"))
    assert said in page
    assert "Ranks against time" not in page
    assert "1 sequences" not in page


def test_page_reaches_for_nothing_and_escapes_names():
    page = page_of("chat", 64, 4)
    assert "&lt;b onclick" in plan_page(planned("chat", 8, 2), source='<b onclick="x">&')
    for word in ("http:", "https:", "//", "<script", "<link", "@import", "<img", "<iframe", "src=", "onload"):
        assert word not in page, word
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#hatch", "#wait"}


PARTS = "h1,h2,p,dt,dd,td,th,summary,footer,.label,.number,.axis span,.swatches span,.bar,.histogram svg"


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_chromium_lays_out_every_kind_of_plan_without_overlap_or_overflow(tmp_path, width, dark):
    auto = ullage.plan(WORKLOADS["pareto"](96, 1), ranks=8, capacity=32768, context_parallel="auto")
    pages = {
        "large": page_of("megatron", 2048, 32),
        "three": page_of("chat", 3, 1),
        "step": page_of("chat", 512, 8, sync="step"),
        "auto": plan_page(auto),
    }
    for name, content in pages.items():
        (tmp_path / f"{name}.html").write_text(content, encoding="utf-8")
    found = lay_out([tmp_path / f"{name}.html" for name in pages], tmp_path, parts=PARTS, width=width, dark=dark)
    assert len(found) == len(pages)
    for facts in found.values():
        check_laid_out(facts, width=width, dark=dark, least=30)
