"""Trackers get the metrics of docs/training.md by the names of docs/report.md, with the values of the log."""

from __future__ import annotations

import numbers
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.training.test_metering import PACKED, trainer
from tests.training.test_trainer import language_model
from ullage.report.run import read_run
from ullage.training.run.run_log import RunLog

SAMPLES = [{"input_ids": [3] * n, "labels": [3] * n} for n in (9, 1, 12, 30)]
#: A packed run that leaves a sequence out and has a peak: every metric of one process.
OPTIONS = {"packing_capacity": 12, "packing_oversize": "drop", "packing_peak_flops": 1e5}


def run(folder: Path, tracker: str):
    options = {**OPTIONS, "per_device_train_batch_size": 4, "max_steps": 2, "report_to": [tracker]}
    mine = trainer(folder, language_model(), SAMPLES, **options)
    mine.add_callback(RunLog(mine.meter))
    mine.train()
    mine.evaluate(SAMPLES[:2])
    return mine


def expected(history: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """What the log holds, by the names that trackers get."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for name, value in row.items():
            if name != "step":
                told = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                found.setdefault(told, []).append((row["step"], value))
    return found


def test_tensorboard_gets_every_metric_with_its_value(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    history = run(tmp_path / "run", "tensorboard").state.log_history
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    told = expected(history)
    assert found.keys() == told.keys()
    assert {f"train/{name}" for name in PACKED} <= found.keys()
    for tag, points in told.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points], rel=1e-6)


def test_wandb_gets_the_same_names_and_numbers_alone(tmp_path, monkeypatch):
    """transformers' own callback, with a module in place of W&B that keeps what it is given."""
    from transformers.integrations import integration_utils

    logged: list[dict] = []
    fake = ModuleType("wandb")
    keeper = SimpleNamespace(summary={}, config=SimpleNamespace(update=lambda *_, **__: None), name="run", id="1")
    vars(fake).update(
        run=keeper, init=lambda **_: None, log=logged.append, define_metric=lambda *_, **__: None, config=keeper.config,
        watch=lambda *_, **__: None, Settings=SimpleNamespace, finish=lambda: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    monkeypatch.setattr(
        integration_utils.WandbCallback, "setup", lambda self, *_, **__: setattr(self, "_initialized", True)
    )
    mine = run(tmp_path / "run", "wandb")
    told = expected(mine.state.log_history)
    summary = {f"train/{name}" for name in keeper.summary}  # W&B keeps the figures of the whole run apart
    assert {name for row in logged for name in row} - {"train/global_step"} == told.keys() - summary
    assert all(isinstance(value, numbers.Real) for row in logged for value in row.values())
    assert {f"train/{name}" for name in PACKED} <= {name for row in logged for name in row}
    # The log of the run has the same rows.
    ours = read_run(tmp_path / "run")
    assert [row["loss"] for row in ours.rows] == [value for _, value in told["train/loss"]]


def test_the_names_in_the_documentation_are_those_of_the_log():
    page = Path(__file__).parents[2].joinpath("docs/report.md").read_text(encoding="utf-8")
    table = page.partition("## Trackers")[2].partition("\n## ")[0]
    named = set(re.findall(r"`train/(\w+)`", table))
    assert named >= PACKED
