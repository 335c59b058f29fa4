"""The page of a plan: what its drawings say agrees with the plan, and a browser lays it out without overflow."""

import re

import numpy as np
import pytest

import ullage
from tests.support.browser import check_laid_out, lay_out, needs_chromium
from tests.support.drawn_page import DrawnPage
from ullage.datasets import CAPACITIES, WORKLOADS
from ullage.report import plan as drawing
from ullage.report.plan import histogram, plan_page, timeline, token_label


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


def test_padding_is_hatched_behind_each_sequence():
    lengths = [5, 9, 3, 12]
    plan = ullage.plan(lengths, ranks=1, capacity=64, pad_to_multiple_of=16)
    _, memory = bars_of(plan_page(plan))
    hatched = [round(0.64 * width) for style, _, width, _ in memory if style == "padding"]
    assert hatched == [16 - lengths[i] for i in plan.members(0, 0)]


def test_work_of_a_rank_is_as_wide_as_its_cost():
    plan = planned("pareto", 64, 4, sync="step")
    bars = bars_of(plan_page(plan))
    loads = plan.loads.sum(axis=0)
    for rank in range(4):
        drawn = sum(width for style, _, width, _ in bars[rank] if style.startswith("s"))
        assert drawn == pytest.approx(100 * loads[rank] / loads.max(), abs=0.2)


def test_dearer_sequences_are_never_paler():
    plan = planned("uniform", 64, 2)
    shades = drawing._Shades.of(plan)
    styles = [int(shades.style(cost)[1:]) for cost in np.sort(plan.costs).tolist()]
    assert styles == sorted(styles)
    assert styles[-1] == drawing.NUM_SHADES - 1


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


@pytest.mark.parametrize("ranks", [2, 32])
def test_microbatches_are_parted_and_the_axes_have_numbers(ranks):
    plan = planned("megatron", 40 * ranks, ranks)
    times, page = timeline(plan), plan_page(plan)
    for name, expected in (
        ("time", times.meetings[:-1] / times.end),
        ("memory", np.arange(1, plan.num_microbatches) / plan.num_microbatches),
    ):
        symbol = page.split(f'id="cuts-{name}"')[1].split("</symbol>")[0]
        drawn = [float(x) for x in re.findall(r'class="line" x1="([\d.]+)%"', symbol)]
        assert drawn == pytest.approx(100 * expected, abs=0.001)
        assert page.count(f'<use href="#cuts-{name}"/>') == ranks
    under = re.findall(r'class="axis middle under">(.*?)</div>', page)[0]
    ticks = [(float(x), float(t)) for x, t in re.findall(r'left: ([\d.]+)%">([\d.]+)<', under)]
    assert len(ticks) >= 3
    assert ticks[0] == (0.0, 0.0)
    for place, time in ticks:
        assert place == pytest.approx(100 * time * times.ideal / times.end, abs=0.01)


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


def test_page_reaches_for_nothing():
    page = page_of("chat", 64, 4)
    for word in ("http:", "https:", "//", "<script", "<link", "@import", "<img", "<iframe", "src=", "onload"):
        assert word not in page, word
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#hatch", "#wait"}


def test_names_are_escaped():
    page = plan_page(planned("chat", 8, 2), source='<b onclick="x">&')
    assert "<b onclick" not in page
    assert "&lt;b onclick" in page


def test_lost_sequences_are_said():
    plan = ullage.plan([10, 200, 30, 400], ranks=2, capacity=100, oversize="truncate")
    assert "2 sequences truncated by 400 tokens" in plan_page(plan)
    plan = ullage.plan([10, 200, 30, 400], ranks=2, capacity=100, oversize="drop")
    assert "2 sequences of 600 tokens dropped" in plan_page(plan)


def test_histogram_counts_every_sequence():
    lengths = WORKLOADS["chat"](1000, 0)
    picture = histogram(lengths, lengths**2)
    found = [re.search(r": ([\d,]+) sequences? .*?, ([\d.]+) % of the cost", b.title) for b in picture.buckets]
    assert sum(int(one[1].replace(",", "")) for one in found) == 1000
    assert sum(float(one[2]) for one in found) == pytest.approx(100, abs=2)
    assert max(b.height for b in picture.buckets) == max(b.depth for b in picture.buckets) == 100
    assert all(0 <= tick.place <= 100 for tick in picture.ticks)
    assert 2 <= len(picture.ticks) <= 7
    # No power of two but one lies between: the ends have numbers.
    assert [tick.text for tick in histogram(np.arange(100, 200), np.arange(100)).ticks] == ["100", "199"]
    assert histogram(np.empty(0, np.int64), np.empty(0, np.int64)).buckets == []
    assert (token_label(512), token_label(131_072), token_label(1536)) == ("512", "128k", "1.5k")


PARTS = "h1,h2,p,dt,dd,td,th,summary,footer,.label,.number,.axis span,.swatches span,.bar,.histogram svg"


@needs_chromium
@pytest.mark.parametrize(("name", "width", "dark"), [("chat", 400, True), ("megatron", 1280, False)])
def test_chromium_lays_it_out_without_overlap_or_overflow(tmp_path, name, width, dark):
    n, ranks = (64, 4) if name == "chat" else (2048, 32)
    page = tmp_path / "page.html"
    page.write_text(page_of(name, n, ranks), encoding="utf-8")
    [facts] = lay_out([page], tmp_path, parts=PARTS, width=width, dark=dark).values()
    check_laid_out(facts, width=width, dark=dark, least=40)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_chromium_lays_out_every_kind_of_plan(tmp_path, width, dark):
    auto = ullage.plan(WORKLOADS["pareto"](96, 1), ranks=8, capacity=32768, context_parallel="auto")
    pages = {
        "three": page_of("chat", 3, 1),
        "step": page_of("chat", 512, 8, sync="step"),
        "auto": plan_page(auto),
        "uneven": page_of("bimodal", 130, 3),
    }
    for name, content in pages.items():
        (tmp_path / f"{name}.html").write_text(content, encoding="utf-8")
    found = lay_out([tmp_path / f"{name}.html" for name in pages], tmp_path, parts=PARTS, width=width, dark=dark)
    assert len(found) == len(pages)
    for facts in found.values():
        check_laid_out(facts, width=width, dark=dark, least=30)
