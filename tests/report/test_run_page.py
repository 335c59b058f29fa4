"""A run's log, figures and page: what they say is what the Trainer logged, whatever interrupted the run."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.browser import check_laid_out, lay_out, needs_chromium
from tests.support.drawn_page import DrawnPage
from tests.support.train_verb import history, texts, train, train_in
from ullage import __version__
from ullage.cli import main
from ullage.cli.report import report
from ullage.cli.train.progress import Progress
from ullage.core.errors import InputError
from ullage.report.run import (
    LayoutSpan,
    differing_settings,
    read_run,
    run_figures,
    run_record,
    short_names,
    what_was_run,
)
from ullage.report.run_page import PAGE, run_page, write_run_page
from ullage.training.run.log_file import LOG, append, read_log
from ullage.training.run.run_log import RunLog, command_line
from ullage.training.setup.arguments import published_peak

#: Numbers of every row of a packed run that the page draws.
DRAWN = ("loss", "tokens_per_second", "padding_computed", "capacity_unused", "imbalance", "flops_per_second",
         "plan_seconds", "exchange_seconds", "learning_rate", "grad_norm")  # fmt: skip


SMALL = ["--model", "lstm-16", "--packing_capacity", 128, "--logging_steps", 1, "--use_cpu", "--disable_tqdm", "1"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A packed run of ``ullage train``, stopped after step 3 and continued to step 6."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["--data", texts(folder, 40), "--output_dir", folder / "a", *SMALL, "--per_device_train_batch_size", 4]
    arguments += ["--save_steps", 2, "--eval_strategy", "steps", "--eval_steps", 2, "--max_steps", 6]
    train(*arguments, "--stop_at_step", 3)
    shutil.copytree(folder / "a", folder / "stopped")
    train(*arguments, "--resume_from_checkpoint")
    return folder / "a"


def test_the_log_holds_what_the_trainer_logged(ran):
    run = read_run(ran)
    theirs = {row["step"]: row for row in history(ran) if "loss" in row}
    assert sorted(theirs) == [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    for row in run.rows:
        # Rows of the state are rounded nowhere, so all numbers are the same.
        assert {name: row[name] for name in DRAWN} == {name: theirs[row["step"]][name] for name in DRAWN}
    evaluated = [(row["step"], row["eval_loss"]) for row in history(ran) if "eval_loss" in row]
    assert run.values("eval_loss") == evaluated
    assert {step for step, _ in evaluated} == {2, 4, 6}
    assert run.has_ended
    assert (run.step, run.max_steps, run.starts) == (6, 6, [0, 3])
    assert run.spans == [LayoutSpan("1 process", 0, 6, run.spans[0].began)]
    assert [path.name for path in run.checkpoints][-1] == "checkpoint-6"
    assert 3 in run.saved


def test_the_plan_is_that_of_a_step_of_the_run(ran):
    step, plan = read_run(ran).plan  # pyright: ignore[reportGeneralTypeIssues]
    assert (step, plan.ranks, plan.capacity, plan.num_sequences) == (4, 1, 128, 4)
    stopped = read_run(ran.parent / "stopped").plan
    assert stopped is not None
    assert stopped[0] == 1
    row = read_run(ran).rows[step - 1]
    used = plan.lengths.sum() / (plan.num_microbatches * plan.capacity)
    assert row["capacity_unused"] == pytest.approx(1 - used, abs=1e-4)


def test_figures_and_page_are_those_of_the_log(ran):
    run = read_run(ran)
    record = run_record(run)
    logged = [row for row in history(ran) if "loss" in row]
    assert record["last_loss"] == logged[-1]["loss"]
    assert record["eval_loss"] == [row for row in history(ran) if "eval_loss" in row][-1]["eval_loss"]
    # Without the first row of each process: steps 1 and 4.
    warm = [row["tokens_per_second"] for row in logged if row["step"] not in (1, 4)]
    assert record["tokens_per_second"] == statistics.median(warm)
    assert record["capacity_unused"] == statistics.fmean(row["capacity_unused"] for row in logged)
    page = html.unescape((ran / PAGE).read_text())
    # And the held-out loss; without the imbalance, which is 1 all the time on one process.
    assert page.count("<polyline") == len(DRAWN)
    assert "<h2>Imbalance</h2>" not in page
    for row in run_figures([run]):
        assert f'<td>{row[0]}</td><td class="number">{row[1]}</td>' in page
    strip = re.search(r"step 5\ntraining: ([\d.e+-]+)<", page)
    assert strip is not None
    assert strip[1] == f"{logged[4]['loss']:.5g}"
    assert "Step 4, planned" in page
    assert "checkpoint" in page.lower()
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=", page)


def test_the_page_says_what_was_run(ran):
    run = read_run(ran)
    told = dict(what_was_run(run))
    number = sum(each.numel() for each in AutoModelForCausalLM.from_pretrained(ran).parameters())
    assert told["model"] == f"RecurrentForCausalLM (lstm-16), {number:,} parameters"
    assert told["data"].startswith(f"{ran.parent / 'texts.jsonl'}, ")
    assert re.search(r"texts.jsonl, \d+ samples$", told["data"])
    assert told["learning rate"].startswith("0.004, cosine, adamw_torch")
    assert told["a step"] == "4 sequences per process, microbatches of 128 tokens"
    assert told["trained on"] == "cpu, float32, 1 process"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", told["began"])
    assert told["versions"].startswith(f"ullage {__version__}, torch {torch.__version__}, transformers ")
    assert "command" in told
    page = html.unescape((ran / PAGE).read_text())
    text = re.sub(r"<[^>]+>", "", page)
    assert [each for each in told.values() if each not in text] == []
    assert "<dt>padding avoided</dt>" in page


def test_the_terminal_has_the_speed_of_the_page(tmp_path):
    shown = Progress(SimpleNamespace(num_tokens=7), show=False)  # pyright: ignore[reportArgumentType]
    write(tmp_path, begin(0))
    for step, speed in enumerate((1.0, 30.0, 20.0, 50.0), 1):
        append(tmp_path, "log", step, values={"loss": 1.0, "tokens_per_second": speed})
        shown.on_log(None, None, None, {"loss": 1.0, "tokens_per_second": speed})
    assert shown.tokens_per_second == run_record(read_run(tmp_path))["tokens_per_second"] == 30.0


@pytest.mark.parametrize("event", [True, False])
def test_what_the_model_wrote_is_shown_newest_first(tmp_path, event):
    write(tmp_path, begin(0), row(1, 2.0), row(2, 1.0))
    for step, text in ((1, "<b>once</b>"), (2, "twice\n" + "long " * 1000)):
        line = {"samples": [{"prompt": "Say", "text": text}], "step": step}
        line |= {"event": "samples", "time": 1e9} if event else {}
        with (tmp_path / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert [(step, prompt) for step, prompt, _ in run.samples] == [(1, "Say"), (2, "Say")]
    page = run_page([run])
    assert "What the model wrote" in page
    assert 0 < page.index("twice") < page.index("&lt;b&gt;once")
    assert len(page) < 30_000
    assert run.seconds is not None
    write(tmp_path, begin(1))
    assert [step for step, *_ in read_run(tmp_path).samples] == [1]


@pytest.mark.parametrize("value", [2e-5, 0.0])
def test_what_is_constant_has_no_chart(tmp_path, value):
    facts = {"loss": 2.0, "learning_rate": value, "grad_norm": 0.5}
    rows = [("log", step, {"values": {**facts, "grad_norm": step * 1e-5}}) for step in (1, 2, 3)]
    write(tmp_path, begin(0), *rows)
    page = run_page([read_run(tmp_path)])
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == ["What was run", "Loss", "Gradient norm", "Figures"]
    assert "2e-5" in page  # of the axis


def test_ullage_train_says_where_the_page_is_and_goes_on_without_one(ran, capsys, monkeypatch):
    from ullage.cli.train.progress import leave_page
    from ullage.report import run_page as module

    said: list[str] = []
    command = SimpleNamespace(folder=ran.parent / "stopped", place=str(ran.parent / "stopped"))
    leave_page(command, False, said.append)  # pyright: ignore[reportArgumentType]
    assert said == []
    leave_page(command, True, said.append)  # pyright: ignore[reportArgumentType]
    assert said.pop() == f"report: {ran.parent / 'stopped' / PAGE}"

    def fail(runs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(module, "run_page", fail)
    leave_page(command, True, said.append)  # pyright: ignore[reportArgumentType]
    assert said == ["no report was written: ZeroDivisionError: a bug"]


def test_any_trainers_state_is_a_run(ran, tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    rows = [{"step": 10 * k, "loss": 3.0 - k, "learning_rate": 1e-3} for k in (1, 2)]
    state = {"log_history": [*rows, {"step": 20, "eval_loss": 2.0}], "global_step": 20, "max_steps": 40}
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{half")
    run = read_run(tmp_path)
    assert run.values("loss") == [(10, 2.0), (20, 1.0)]
    assert run.progress == "20 of 40 steps, not at its end"
    table = dict(row[:2] for row in run_figures([run]))
    assert table["held-out loss, last"] == "2.0000"
    assert "real tokens per second, median" not in table
    # The loss and what was held out; the learning rate is constant.
    assert run_page([run]).count("<polyline") == 2
    assert read_run(ran / "checkpoint-6").values("loss") == read_run(ran).values("loss")


def test_two_runs_are_drawn_over_each_other_and_their_settings_compared(ran):
    other = read_run(ran.parent / "stopped")
    other.settings["learning_rate"] = 7.0
    runs = [read_run(ran), other]
    assert short_names(runs) == ["a", "stopped"]
    assert [name for name, _ in differing_settings(runs)] == ["learning_rate"]
    page = html.unescape(run_page(runs))
    assert page.count('class="k1 broken') == page.count('class="k0 broken') > 0  # one point alone is a dot
    assert "a, held out" in page
    assert "<code>learning_<wbr>rate</code>" in page
    assert page.count("<h2>What was run</h2>") == 1
    assert "<h3>a</h3>" in page
    table = {row[0]: row for row in run_figures(runs)}
    ours, theirs = (dict(run.values("loss")) for run in runs)
    assert table["loss at the last log"][3] == f"{theirs[3] - ours[6]:+.3g}"
    # The same steps have the same losses: the second run is the first up to there.
    assert {step: ours[step] for step in theirs} == theirs


def write(folder: Path, *events: tuple) -> None:
    for event, step, facts in events:
        append(folder, event, step, **facts)


def begin(step: int, layout: str = "1 process") -> tuple:
    return ("begin", step, {"layout": layout, "max_steps": 9})


def row(step: int, loss: float) -> tuple:
    return ("log", step, {"values": {"loss": loss}})


def test_rows_beyond_the_checkpoint_that_a_run_continues_from_are_superseded(tmp_path):
    write(tmp_path, begin(0), *(row(k, 5.0 - k) for k in range(1, 6)), ("save", 4, {}), ("end", 5, {}))
    assert read_run(tmp_path).has_ended
    write(tmp_path, begin(4, "2 processes"), row(5, 0.5))
    run = read_run(tmp_path)
    assert run.values("loss") == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0), (5, 0.5)]
    assert not run.has_ended
    assert [(span.layout, span.start, span.stop) for span in run.spans] == [("1 process", 0, 4), ("2 processes", 4, 5)]
    assert run_page([run]).count("<line x1=") == 1  # where the layout changes
    write(tmp_path, begin(2, "3 processes"))
    run = read_run(tmp_path)
    assert run.values("loss") == [(1, 4.0), (2, 3.0)]
    assert run.saved == []
    assert [(span.layout, span.stop) for span in run.spans] == [("1 process", 2), ("3 processes", 2)]
    write(tmp_path, begin(0), row(1, 9.0))
    assert read_run(tmp_path).values("loss") == [(1, 9.0)]
    assert len((tmp_path / LOG).read_text().splitlines()) == 2


TWO, ONE = "2 processes, ZeRO 2", "1 process"


def killed_twice(folder: Path, *more: tuple) -> Path:
    """The log of a run that was killed in step 13, and again before its next checkpoint."""
    folder.mkdir(exist_ok=True)
    lived = [
        (100, "begin", 0, {"layout": TWO, "max_steps": 30, "started": 90}),
        *((100 + 3 * step, "log", step, {"values": {"loss": 9.0 - step}}) for step in range(1, 11)),
        (131, "save", 10, {}),
        (137, "step", 12, {}),
        (190, "begin", 10, {"layout": ONE, "max_steps": 30, "started": 160}),
        (193, "step", 11, {}),
        (240, "log", 20, {"values": {"loss": -1.0}}),
        (300, "begin", 10, {"layout": TWO, "max_steps": 30, "started": 270}),
        (303, "step", 11, {}),
        (400, "log", 25, {"values": {"loss": -2.0}}),
        *more,
    ]
    lines = (json.dumps({"event": event, "time": time, "step": step, **facts}) for time, event, step, facts in lived)
    (folder / LOG).write_text("\n".join(lines) + "\n")
    return folder


def test_the_life_of_a_run_is_told_by_its_log_alone(tmp_path):
    run = read_run(killed_twice(tmp_path))
    told = [(each.layout, each.start, each.reached, each.kept) for each in run.life.stretches]
    assert told == [(TWO, 0, 12, 10), (ONE, 10, 20, 10), (TWO, 10, 25, 25)]
    record = run_record(run)
    assert {name: record[name] for name in ("restarts", "steps_lost", "seconds_lost", "seconds_down")} == {
        "restarts": 2,
        "steps_lost": 2 + 10,
        "seconds_lost": (137 - 131) + (240 - 193),
        "seconds_down": (193 - 137) + (303 - 240),
    }
    assert [each["ended"] for each in record["life"]] == ["lost", "lost", "no end in the log"]
    table = dict(row[:2] for row in run_figures([run]))
    assert (table["restarts"], table["steps lost and trained again"], table["time down"]) == ("2", "12", "1 min 59 s")
    page = DrawnPage(run_page([run]))
    assert [box.style for box in page.bar("time")] == ["c0", "c0 d2", "c1 d2", "c0"]
    first = page.bar("time")[0]
    assert (first.x, first.width) == (0, pytest.approx(100 * 31 / 300, abs=0.01))
    assert [(box.style, box.width) for box in page.bar("steps")] == [("c0", 33.333), ("c0", 50.0)]
    said = " ".join("".join(page.text).split())
    assert "1 min 59 s down: 53 s until a process was started, 1 min 00 s until it trained" in said
    # What stood before still does: rows that were trained again count once.
    assert [step for step, _ in run.values("loss")] == [*range(1, 11), 25]


@pytest.mark.parametrize(
    ("more", "ended", "restarts"),
    [
        ([(401, "end", 25, {})], "stopped", 2),
        ([(410, "log", 30, {"values": {"loss": -3.0}}), (411, "end", 30, {})], "done", 2),
        # The same command again finds the run done.
        ([(411, "end", 30, {}), (500, "begin", 30, {"max_steps": 30}), (501, "end", 30, {})], "done", 2),
    ],
)
def test_how_a_life_ended_is_said(tmp_path, more, ended, restarts):
    life = read_run(killed_twice(tmp_path, *more)).life
    assert (life.how_it_ended(life.restarts), life.restarts) == (ended, restarts)


def test_a_run_that_was_lost_before_its_first_checkpoint_keeps_its_life_and_another_run_does_not(tmp_path):
    facts = {"model": "M", "max_steps": 9, "run": {"seed": 1, "learning_rate": 0.1, "command": "torchrun 1"}}
    moved = {**facts, "layout": "1 process", "run": {**facts["run"], "command": "torchrun 2", "batch": 4}}
    write(tmp_path, ("begin", 0, facts), row(1, 2.0), row(2, 1.0), ("begin", 0, moved), row(1, 2.0))
    life = read_run(tmp_path).life
    assert (life.restarts, life.steps_lost) == (1, 2)
    assert read_run(tmp_path).values("loss") == [(1, 2.0)]
    write(tmp_path, ("begin", 0, {**facts, "run": {"seed": 2}}), row(1, 2.0))
    assert read_run(tmp_path).life.restarts == 0
    write(tmp_path, ("end", 1, {}), ("begin", 0, {**facts, "run": {"seed": 2}}))
    assert read_run(tmp_path).life.restarts == 0


def test_a_process_tells_of_its_first_step_and_no_row_passes_in_silence(tmp_path, monkeypatch):
    log = logged(tmp_path, True)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=9)
    for state.global_step in (1, 2, 3):
        monkeypatch.setattr("ullage.training.run.run_log._SILENCE", 5.0 if state.global_step < 3 else 0.0)
        log.on_step_end(None, state, None)
    events = read_log(tmp_path)
    assert [each["step"] for each in events if each["event"] == "step"] == [1, 3]
    assert 0 < events[0]["started"] <= events[0]["time"]


def test_half_a_line_is_left_out_and_the_next_process_begins_a_new_one(tmp_path):
    write(tmp_path, begin(0), row(1, 2.0), ("save", 1, {}))
    with (tmp_path / LOG).open("a") as file:
        file.write('{"event": "log", "step": 2, "val')
    assert read_run(tmp_path).values("loss") == [(1, 2.0)]
    write(tmp_path, begin(1), row(2, 1.0))
    assert read_run(tmp_path).values("loss") == [(1, 2.0), (2, 1.0)]
    assert len(read_log(tmp_path)) == 5


def test_losses_that_are_not_numbers_are_gaps(tmp_path):
    write(tmp_path, begin(0), row(1, 2.0), row(2, float("nan")), row(3, 1.0))
    run = read_run(tmp_path)
    page = run_page([run])
    assert "nan" not in page.partition("</style>")[2]
    assert "Not finite in 1 of 3 logs, first at step 2." in page
    assert page.count("<polyline") == 1
    assert json.loads(json.dumps(run_record(run), allow_nan=False))["last_loss"] == 1.0
    write(tmp_path, row(4, float("inf")))
    assert run_record(read_run(tmp_path))["last_loss"] is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "No row has been logged yet"),
        ([2.0], "One step has been logged"),
        ([2.0], "2.0000"),
        ([NAN, NAN], "Not finite in 2 of 2 logs, first at step 1."),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, losses, said):
    write(tmp_path, begin(0), *(row(step, loss) for step, loss in enumerate(losses, 1)))
    page = run_page([read_run(tmp_path)])
    assert said in page
    assert page.count("<polyline") == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "begin", "step": 0}',
        '{"event": "log", "step": true, "time": 1.0, "values": {"loss": 1.0}}',
        '{"event": "log", "step": 2, "time": 1.0, "values": {"loss": "one", "imbalance": [1]}}',
        "[1]",
    ],
)
def test_what_another_wrote_into_the_log_is_left_out(tmp_path, line):
    write(tmp_path, begin(0), row(1, 2.0))
    with (tmp_path / LOG).open("a") as file:
        file.write(line + "\n")
    run = read_run(tmp_path)
    assert run.values("loss") == [(1, 2.0)]
    run_page([run])


def test_a_log_without_a_whole_line_is_not_taken_for_none(tmp_path):
    (tmp_path / LOG).write_bytes(b"\x00\xff\n" * 9)
    with pytest.raises(InputError, match="holds no whole line"):
        read_run(tmp_path)


def test_a_page_replaces_no_file_but_a_page(tmp_path, capsys):
    write(tmp_path, begin(0), row(1, 2.0))
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "mine"}')
    with pytest.raises(InputError, match="another file is there"):
        report(tmp_path, None, data)
    report(tmp_path, None, tmp_path / "new" / "page.html")
    report(tmp_path, None, tmp_path / "new" / "page.html")
    assert data.read_text() == '{"text": "mine"}'


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_what_holds_no_run_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"a run is a folder|no run has left its log"):
        read_run(tmp_path / name)


def test_a_page_that_cannot_be_written_is_said(ran, tmp_path):
    with pytest.raises(InputError, match="a page cannot be written"):
        write_run_page([read_run(ran)], tmp_path / "no" / "where.html")
    assert list(tmp_path.iterdir()) == []


def logged(folder, is_first):
    """The log of a rank that logged a row."""
    log, state = RunLog(), SimpleNamespace(is_world_process_zero=is_first, global_step=0, max_steps=2)
    arguments = SimpleNamespace(output_dir=str(folder), world_size=2, fsdp=[], packing_capacity=None)
    log.on_train_begin(arguments, state, None)
    log.on_log(arguments, state, None, {"loss": 1.0})
    return log


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / LOG).mkdir()
    assert logged(tmp_path, True).problem is not None
    assert capsys.readouterr().err.count("training goes on") == 1


@pytest.mark.parametrize("option", ["--hub_token", "--redis-password", "--wandb-api-key", "--client_secret"])
def test_what_is_secret_is_left_out_of_the_command(option):
    for words in ([option, "mine"], [f"{option}=mine"]):
        told = command_line(["train.py", *words, "--seed", "1"])
        assert "mine" not in told
        assert told.endswith("... --seed 1")


def test_other_ranks_write_nothing(tmp_path):
    logged(tmp_path, False)
    assert list(tmp_path.iterdir()) == []


PEAKS = [
    ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
    ("NVIDIA H100 PCIe", "fp16", 756e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ("NVIDIA H100 80GB HBM3", "fp32", None),
    ("NVIDIA H200", "bf16", 989e12),
    ("NVIDIA H200 NVL", "bf16", 835e12),
    ("NVIDIA GH200 480GB", "bf16", 989e12),
    ("NVIDIA B200", "bf16", 2250e12),
    ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
    ("NVIDIA A10", "bf16", 125e12),
    ("NVIDIA A10G", "bf16", None),
    ("NVIDIA L40S", "bf16", 362e12),
    ("NVIDIA L4", "bf16", 121e12),
    ("Tesla V100-SXM2-16GB", "bf16", None),
    ("Tesla V100-SXM2-16GB", "fp16", 125e12),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ("NVIDIA GeForce RTX 4090 D", "bf16", None),
    ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
    ("AMD Instinct MI250X", "bf16", 191.5e12),
    ("some other device", "bf16", None),
]


@pytest.mark.parametrize(("name", "number", "peak"), PEAKS)
def test_the_peak_is_that_of_the_device_and_of_no_other(name, number, peak):
    assert published_peak(name, bf16=number == "bf16", fp16=number == "fp16") == peak


def test_the_command(ran, tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ullage", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    status, out, err = call(ran, "--html", tmp_path / "page.html")
    assert status == 0, err
    assert "real tokens per second" in out
    assert (tmp_path / "page.html").read_text() == run_page([read_run(ran)])
    status, _, err = call(ran, ran.parent / "stopped")
    assert status == 0, err
    assert (ran / "comparison.html").exists()
    assert json.loads(call(ran, "--json")[1])["runs"] == [run_record(read_run(ran))]
    status, _, err = call(tmp_path / "nowhere")
    assert (status, len(err.splitlines())) == (1, 1)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_on_two_processes_that_goes_on_on_one(ran, tmp_path):
    """The first rank writes alone; the layouts, the waiting and the plan are those of the processes."""
    folder = tmp_path / "run"
    arguments = ["--data", ran.parent / "texts.jsonl", "--output_dir", folder, *SMALL, "--max_steps", 5]
    arguments += ["--per_device_train_batch_size", 2]
    done = train_in(2, tmp_path, *arguments, "--stop_at_step", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"report: {folder / PAGE}") == 1
    begun = read_run(folder)
    assert [row["step"] for row in begun.rows] == [1, 2, 3]
    assert begun.plan is not None
    assert (begun.plan[0], begun.plan[1].ranks) == (1, 2)
    assert all(row["wait_seconds"] > 0 for row in begun.rows)
    done = train_in(1, tmp_path, *arguments, "--resume_from_checkpoint")
    assert done.returncode == 0, done.stderr
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5]
    assert [(span.layout, span.start, span.stop) for span in run.spans] == [("2 processes", 0, 3), ("1 process", 3, 5)]
    assert all("wait_seconds" not in row for row in run.rows[3:])
    assert "2 processes, then on 1 process" in (folder / PAGE).read_text()


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_chromium_lays_it_out_without_overlap_or_overflow(ran, tmp_path, width, dark):
    runs = [read_run(ran), read_run(ran.parent / "stopped")]
    (tmp_path / "0.html").write_text(run_page(runs[:1]), encoding="utf-8")
    (tmp_path / "1.html").write_text(run_page(runs), encoding="utf-8")
    (tmp_path / "2.html").write_text(run_page([read_run(killed_twice(tmp_path / "life"))]), encoding="utf-8")
    parts = "h1,h2,p,dt,dd,li,td,th,.label,.number,.bar,.curves svg,.losses span,.steps span,.curves .word"
    told = {"prompt": "Say what " * 9, "text": "a_word_of_many_letters" * 20}
    runs[0] = replace(runs[0], samples=[(step, told["prompt"], told["text"]) for step in (2, 100_000)])
    for facts in lay_out(sorted(tmp_path.glob("?.html")), tmp_path, parts=parts, width=width, dark=dark).values():
        check_laid_out(facts, width=width, dark=dark, least=40)
