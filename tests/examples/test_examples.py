"""The numbered examples, run as their first lines say."""

from __future__ import annotations

import re

import pytest

from tests.support.examples import run_example
from tests.support.launch import ROOT


def run(name, *arguments, **options) -> str:
    return run_example(name, *arguments, **options).stdout


def test_the_index_lists_every_example():
    listed = re.findall(r"\[(\w+\.\w+)\]\((.+?)\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"))
    assert listed == [(path.name, path.name) for path in sorted((ROOT / "examples").glob("[0-9]*"))]


def test_a_batch():
    said = run("01_a_batch.py")
    assert "flat        [5, 6, 7, 8, 1, 2, 3, 4, 5]" in said
    assert "packed      [1, 5, 8, 2, 6, 3, 7, 4, 5] batch sizes [3, 2, 2, 1, 1]" in said
    assert "labels      [[-100, 6, 7, -100, -100, 2, 3, 4, 5]]" in said
    assert "segment 2: 5 elements on shard 1 from 0" in said
    assert "16 slots, 9 tokens, ullage 44%" in said


@pytest.mark.slow
def test_packed_training_is_the_same_on_two_processes(tmp_path):
    pattern = r"loss ([\d.]+) to ([\d.]+), capacity unused [\d.]+%, imbalance ([\d.]+)"
    one, two = (
        re.search(pattern, run("02_train_packed.py", "--steps", 10, "--batch", 32 // n, processes=n, cwd=tmp_path))
        for n in (1, 2)
    )
    assert one is not None
    assert two is not None
    first, last, imbalance = map(float, one.groups())
    assert last < first - 0.5
    assert imbalance == 1.0
    assert two.groups()[:2] == one.groups()[:2]


def test_a_plan(tmp_path):
    said = run("03_plan_a_step.py", "--html", tmp_path / "plan.html")
    paths = [float(found) for found in re.findall(r"critical path ([\d.]+)", said)]
    assert paths[0] < 1.1 < paths[1]
    assert "degrees in use: [1, " in said
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_a_carried_checkpoint_goes_on(tmp_path):
    said = run(
        "04_carry_a_checkpoint.py", processes=2, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path / "no")
    )
    assert not (tmp_path / "no").exists()
    assert "4 parameters on 2 shards" in said
    losses = {stage: said.split(f"ZeRO {stage} ")[1].splitlines()[0].split() for stage in (2, 3)}
    assert len(losses[2]) == 3
    assert all(abs(float(a) - float(b)) < 2e-6 for a, b in zip(losses[2], losses[3], strict=True))
