"""The quickstart's table and page: what they say is what the logs say, and a loss that differs is not hidden."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ullage
from tests.support.browser import check_laid_out, lay_out, needs_chromium
from ullage.checkpoint.inventory import Group, Inventory, WrittenBy
from ullage.report.journey import Journey, Leg, Step, journey_page, read_steps


def step(number: int, loss: float | None = None, speed: float = 1000.0) -> Step:
    return Step(number, 5.0 / number if loss is None else loss, speed, 0.0, 0.1, 1.25)


def journey(error: float = 0.0) -> Journey:
    whole = [step(n) for n in range(1, 13)]
    ours = [replace(s, loss=s.loss * (1 + (error if s.number == 6 else 0.0))) for s in whole]
    unpacked = {"padding_computed": 0.8, "capacity_unused": None, "imbalance": None}
    padded = Leg("2 processes", [replace(s, tokens_per_second=250.0, **unpacked) for s in whole[:4]])
    legs = [Leg("2 processes, ZeRO 2", ours[:4]), Leg("1 process", ours[4:8]), Leg("2 processes, ZeRO 3", ours[8:])]
    return Journey(padded, Leg("2 processes, ZeRO 2", whole), legs)


def page(one: Journey) -> str:
    layout = ullage.Layout([40, 9, 300])
    group = Group(0, 0, ("a.weight", "b.bias", "c.weight"), layout.pieces(np.array([0, 180, 360])), 180, 2)
    inventory = Inventory(Path("runs/global_step4"), "zero", WrittenBy(2, "", dp=2), (), (), (group,))
    plan = ullage.plan(np.array([900, 30, 700, 12, 512]), ranks=2, capacity=1024, sync="step")
    return journey_page(one, plan, inventory, ["ullage train --output_dir a", "x" * 300])


def test_the_losses_around_each_change_are_compared_and_a_difference_is_seen():
    one = journey()
    assert one.agrees
    assert one.comparisons(one.legs[0]) == []
    assert [c.number for c in one.comparisons(one.legs[1])] == [4, 5, 6, 7]
    assert [c.number for c in one.comparisons(one.legs[2])] == [8, 9, 10, 11]
    assert journey(error=1e-6).agrees
    assert not journey(error=1e-4).agrees
    assert journey(error=1e-4).to_dict()["agrees"] is False
    rows = one.to_dict()["rows"]
    assert [row["run"] for row in rows] == ["padded", "whole", "stopped", "continued", "continued"]
    assert tuple(rows[0][name] for name in ("tokens/s", "padding", "unused", "imbalance")) == ("250", "80.0%", "", "")
    assert (rows[1]["padding"], rows[1]["unused"]) == ("0.0%", "10.0%")
    assert (rows[3]["steps"], rows[3]["imbalance"], rows[3]["loss"]) == ("5 to 8", "1.250", "0.625")


def test_the_page_draws_every_leg_and_the_padding():
    text = page(journey())
    assert text.count("<polyline") == 4
    assert "4.0 times" in text
    assert "The padding lies on rank 1" in text
    assert 'class="good"' in text
    assert 'class="number bad"' not in text
    assert page(journey(error=1e-4)).count('class="number bad"') == 1


def test_tables_name_every_row_and_align_their_numbers():
    text = page(journey())
    cells = re.findall(r"<td([^>]*)>([^<]*)</td>", text)
    assert all(value for attributes, value in cells if "number" not in attributes)
    numbers = [(attributes, value) for attributes, value in cells if re.fullmatch(r"[\d.,]+ ?%?", value)]
    assert len(numbers) > 30
    assert all("number" in attributes for attributes, _ in numbers)
    assert "before: 2 processes, ZeRO 2" in text
    assert "before: 1 process" in text


def test_steps_are_read_from_the_trainers_log(tmp_path):
    row = {"step": 3, "loss": 1.5, "tokens_per_second": 7.0, "padding_computed": 0.25, "learning_rate": 1e-3}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [row, {"step": 3, "eval_loss": 1.0}]}))
    assert read_steps(tmp_path) == [Step(3, 1.5, 7.0, 0.25, None, None)]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_chromium_lays_it_out_without_overlap_or_overflow(tmp_path: Path, width: int, dark: bool) -> None:
    for number, error in enumerate((0.0, 1e-4)):
        (tmp_path / f"{number}.html").write_text(page(journey(error)), encoding="utf-8")
    parts = "h1,h2,h3,p,dt,dd,li,.label,.number,.bar,.curves svg,.losses span,.steps span,.commands"
    for facts in lay_out(sorted(tmp_path.glob("?.html")), tmp_path, parts=parts, width=width, dark=dark).values():
        check_laid_out(facts, width=width, dark=dark, least=20)
