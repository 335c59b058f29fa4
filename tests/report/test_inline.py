"""What a terminal, a notebook and a browser are shown of an object."""

from __future__ import annotations

import contextlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from benchmarks.paper import on_paper
from tests.support.browser import check_laid_out, lay_out, needs_chromium
from tests.support.drawn_page import DrawnPage
from ullage import Audit, InputError, Layout, Plan, RaggedBatch
from ullage.checkpoint import Differences, Report
from ullage.cli import main
from ullage.planning.planner import arrival_order
from ullage.proofs import Check


def batch(*lengths):
    samples = [{"input_ids": [1] * n, "labels": [1] * n, "reward": 0.5} for n in lengths]
    return RaggedBatch.from_samples(samples, per_sequence=["reward"])


def plan(**how):
    return ullage.plan([6, 3, 9, 2, 1, 3], **{"ranks": 2, "capacity": 12, **how})


def checkpoint(dp=3):
    return on_paper([{"a.weight": (4, 5), "a.bias": (7,)}, {"<b>": (3,)}], dp=dp)


def objects():
    return {
        "Layout(2 items, 8 tokens, 12 slots, ullage 33.3 %)": Layout([3, 5], 4),
        "Layout(1 item, 1 token, 1 slot, ullage 0.0 %)": Layout([1]),
        "Layout(0 items, 0 tokens, 0 slots, ullage 0.0 %)": Layout([]),
        "RaggedBatch(2 sequences, 4 tokens, ullage 0.0 %, input_ids int64, labels int64, reward float32, cpu)": batch(1, 3),
        "RaggedBatch(2 sequences, 4 tokens, ullage 0.0 %, input_ids int64, labels int64, reward float32, meta)": batch(1, 3).to("meta"),
        "RaggedBatch(0 sequences, 0 tokens, ullage 0.0 %, cpu)": RaggedBatch({}, Layout([])),
        "Plan(6 sequences, 2 ranks, 1 microbatch, ullage 0.0 %, critical path 1.00)": plan(cost=lambda n: n),
        "Plan(0 sequences, 3 ranks, 0 microbatches, ullage 0.0 %, critical path 1.00)": ullage.plan([], ranks=3, capacity=4),
        "Statistics(6 sequences, 1 microbatch, ullage 0.0 %, rank imbalance 1.00, critical path 1.00)": plan(cost=lambda n: n).statistics(),
        "Report(dcp, 2 tensors, 1,200 bytes in 1 file, 0.50 s)": Report("a", "b", "dcp", 2, 1, 1200, seconds=0.5),
        "Differences(7 tensors compared, 0 differences)": Differences("a", "b", 7, 90),
        "Audit(LlamaForCausalLM: exact (largest difference 1e-14), 1 check)": Audit("llama", "LlamaForCausalLM", checks=[Check("logits", 1e-14, 1e-10)]),
    }  # fmt: skip


@pytest.mark.parametrize("line", objects())
def test_an_object_is_one_line_and_a_drawing_that_needs_nothing(line):
    value = objects()[line]
    assert repr(value) == line
    drawn = value._repr_html_()
    assert (drawn is None) == (not isinstance(value, (Layout, RaggedBatch, Plan)))  # a notebook prints the line then
    if drawn is None:
        return
    shape = DrawnPage(drawn)
    assert "script" not in shape.tags
    # The text is there for what takes styles out, and nothing changes from one run to the next.
    assert shape.text[shape.tags.index("pre") :] != []
    assert line in " ".join("".join(shape.text).split())
    assert drawn == objects()[line]._repr_html_()
    assert len(drawn) < 12_000


def test_an_inventory_is_drawn_with_its_names_escaped():
    drawn = checkpoint()._repr_html_()
    shape = DrawnPage(drawn)
    assert "<b>" not in drawn
    assert "<b>" in shape.text
    assert shape.tags.count("rect") > 8
    assert repr(checkpoint()).startswith("Inventory(")
    assert "\n" not in repr(checkpoint())


def test_a_line_says_what_it_can_of_an_object_that_is_half_made():
    for kind in (Plan, Layout, RaggedBatch, Report):
        value = object.__new__(kind)
        assert repr(value) == f"{kind.__name__}(...)"
        assert value._repr_html_() is None
    wrong = Plan(**{name: [0, 9] for name in ("order", "offsets", "lengths", "original_lengths", "costs")}, degrees=[[1]], ranks=1, capacity=4)  # fmt: skip
    assert repr(wrong) == "Plan(2 sequences, 1 rank, 1 microbatch, ...)"


def test_without_jinja2_a_notebook_prints_the_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert plan()._repr_html_() is None
    target = tmp_path / "never.html"
    with pytest.raises(Exception, match="jinja2"):
        plan().to_html(target)
    assert not target.exists()


#: Options of the command line, by the arguments of ``plan`` that they are.
_OPTIONS = {"cost": ("--linear", 3, "--quadratic", 2)}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"sync": "step", "pad_to_multiple_of": 4, "microbatch_multiple": 3, "max_sequences": 2},
        {"ranks": 4, "capacity": 5, "context_parallel": "auto"},
        {"capacity": 8, "oversize": "drop", "strategy": "next_fit"},
        {"ranks": 1, "capacity": 9, "cost": ullage.TransformerCost(3, 2)},
    ],
)
def test_the_page_is_that_of_the_command_line(how, tmp_path, monkeypatch):
    how = {"ranks": 2, "capacity": 12, **how}
    (tmp_path / "a.json").write_text("[6, 3, 9, 2, 1, 3]")
    options = [_OPTIONS.get(name, (f"--{name.replace('_', '-')}", value)) for name, value in how.items()]
    command = ["plan", tmp_path / "a.json", *(part for option in options for part in option)]
    monkeypatch.setattr(sys, "argv", ["ullage", *map(str, command), "--html", str(tmp_path / "told.html")])
    with contextlib.suppress(SystemExit):  # what it wrote is compared below
        main()
    path = tmp_path / "plan.html"
    path.write_text("what was there before")
    assert plan(**how).to_html(path, source="a.json") == path
    assert path.read_text() == (tmp_path / "told.html").read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "plan.html", "told.html"]


@given(
    st.lists(st.integers(0, 12), max_size=20),
    st.integers(1, 5),
    st.sampled_from(["error", "truncate", "drop"]),
    st.sampled_from([1, "auto"]),
)
@settings(max_examples=40, deadline=None)
def test_arrival_order_places_the_same_sequences(lengths, ranks, oversize, degree):
    capacity = 12 if oversize == "error" else 9
    made = ullage.plan(lengths, ranks=ranks, capacity=capacity, oversize=oversize, context_parallel=degree)
    found = arrival_order(made)
    if not made.num_microbatches:
        assert found is None
        return
    assert found is not None
    assert found.problems() == []
    assert found.strategy == "next_fit"
    assert (found.lengths.tolist(), found.costs.tolist()) == (made.lengths.tolist(), made.costs.tolist())
    assert sorted(found.order.tolist()) == sorted(made.order.tolist()) or made.degrees.max() > made.degrees.min()
    assert found.statistics().critical_path >= made.statistics().critical_path_bound - 1e-9


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match="a page cannot be written"):
        checkpoint().to_html(tmp_path / "folder.html")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_lays_drawings_out(tmp_path, width):
    values = [Layout([3, 5, 0, 9], 4), batch(5, 1, 9), plan(), checkpoint()]
    page = tmp_path / "notebook.html"
    page.write_text(
        "<!doctype html><body style='background: white'>"
        + "<hr>".join(value._repr_html_() for value in values)
        + "</body>"
    )
    parts = ".line, .title, .label, .number, .bar, td, th, li, .note"
    [facts] = lay_out([page], tmp_path, parts=parts, width=width, dark=False).values()
    check_laid_out(facts, width=width, dark=False, least=60)
