"""A run's figures and page: what they say is what the Trainer logged, whatever interrupted the run."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.browser import check_laid_out, lay_out, needs_chromium
from tests.support.own_models import llama_config, sequences
from tests.support.small_runs import quiet
from ullage.cli import main
from ullage.cli.report import report
from ullage.core.errors import InputError
from ullage.report.run import LayoutSpan, read_run, run_figures, run_page, run_record, short_names
from ullage.training import RaggedCollator, Trainer
from ullage.training.run import LAYOUTS
from ullage.training.run.layouts import LayoutHistory
from ullage.training.setup.arguments import published_peak

#: Numbers of every row of a packed run that the page draws.
DRAWN = ("loss", "tokens_per_second", "padding_computed", "capacity_unused", "flops_per_second", "learning_rate",
         "grad_norm")  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A packed run, stopped after step 3 and continued to step 6."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("runs")
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in sequences((7, 3, 12, 5, 9, 3, 8, 4) * 3)]

    def train(resume=None):
        options = {"packing_capacity": 32, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
        arguments = quiet(folder / "a", max_steps=6, per_device_train_batch_size=4, eval_steps=2, **options)
        model = LlamaForCausalLM(llama_config(num_hidden_layers=1))
        Trainer(model, arguments, RaggedCollator(), rows, rows[:3]).train(resume_from_checkpoint=resume)

    train()
    for step in (4, 5, 6):
        shutil.rmtree(folder / "a" / f"checkpoint-{step}")
    shutil.copytree(folder / "a", folder / "stopped")
    train(resume=True)
    return folder / "a"


def history(folder: Path) -> list[dict]:
    return json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]


def test_figures_and_page_are_those_of_the_trainers_history(ran):
    run = read_run(ran)
    record = run_record(run)
    logged = [row for row in history(ran) if "loss" in row]
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    assert record["last_loss"] == logged[-1]["loss"]
    assert record["eval_loss"] == [row for row in history(ran) if "eval_loss" in row][-1]["eval_loss"]
    assert record["tokens_per_second"] == statistics.median(row["tokens_per_second"] for row in logged[1:])
    assert record["capacity_unused"] == statistics.fmean(row["capacity_unused"] for row in logged)
    assert run.spans == [LayoutSpan("1 process", 0, 3), LayoutSpan("1 process", 3, 6)]
    assert record["restarts"] == 1
    page = html.unescape(run_page([run]))
    # And the held-out loss; without the imbalance, which is 1 all the time on one process.
    assert page.count("<polyline") == len(DRAWN) + 1
    assert "<h2>Imbalance</h2>" not in page
    for row in run_figures([run]):
        assert f'<td>{row[0]}</td><td class="number">{row[1]}</td>' in page
    strip = re.search(r"step 5\ntraining: ([\d.e+-]+)<", page)
    assert strip is not None
    assert strip[1] == f"{logged[4]['loss']:.5g}"
    assert f"loss {logged[0]['loss']:.3g} to {logged[-1]['loss']:.3g} in 6 steps" in title_of(page)
    assert re.sub(r"\s+", " ", re.search("Dotted: .*?</p>", page, re.DOTALL)[0]) == (
        "Dotted: a process began at step 3 on 1 process.</p>"
    )
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=", page)


def test_any_trainers_state_is_a_run(ran, tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    rows = [{"step": 10 * k, "loss": 3.0 - k, "learning_rate": 1e-3} for k in (1, 2)]
    write(tmp_path / "checkpoint-20", [*rows, {"step": 20, "eval_loss": 2.0}, "no row"], max_steps=40)
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{half")
    run = read_run(tmp_path)
    assert run.values("loss") == [(10, 2.0), (20, 1.0)]
    assert run.progress == "20 of 40 steps"
    table = dict(row[:2] for row in run_figures([run]))
    assert table["held-out loss, last"] == "2.0000"
    assert "real tokens per second, median" not in table
    # The loss and what was held out; the learning rate is constant.
    assert run_page([run]).count("<polyline") == 2
    assert read_run(ran / "checkpoint-6").values("loss") == read_run(ran).values("loss")


def test_two_runs_are_drawn_over_each_other(ran):
    runs = [read_run(ran), read_run(ran.parent / "stopped")]
    assert short_names(runs) == ["a", "stopped"]
    page = html.unescape(run_page(runs))
    assert {label: style for label, style in legend(page) if "training" in label or "held out" in label} == {
        "a, training": "k0",
        "a, held out (dashed)": "k0 broken",
        "stopped, training (wide and pale)": "k1 under",  # its losses are those of the first run
        "stopped, held out (wide and pale)": "k1 broken under",  # of one evaluation: a point
    }
    assert title_of(page) == "a beside stopped: the same losses at 3 common steps"
    table = {row[0]: row for row in run_figures(runs)}
    ours, theirs = (dict(run.values("loss")) for run in runs)
    assert table["loss at the last log"][3] == f"{theirs[3] - ours[6]:+.3g}"
    # The same steps have the same losses: the second run is the first up to there.
    assert {step: ours[step] for step in theirs} == theirs


def title_of(page: str) -> str:
    return html.unescape(re.search("<h1>(.*?)</h1>", page)[1])


def legend(page: str) -> list[tuple[str, str]]:
    """Each entry of the legends: its words, and the classes in which its curve is drawn."""
    entries = re.findall(r'<li>.*?class="line (?:dots )?(.*?)".*?</svg>(.*?)</li>', page, re.DOTALL)
    return [(re.sub(r"\s+", " ", label).strip(), style) for style, label in entries]


def drawn(page: str) -> list[str]:
    """Classes of the curves that are drawn."""
    return re.findall(r'<polyline class="line (.*?)"', page)


def points(page: str) -> list[int]:
    """How many points show on each curve that has any."""
    return [path.count("M") for path in re.findall(r'<path class="line dots [^"]*" d="(M[^"]*M[^"]*)"', page)]


@pytest.mark.parametrize(("steps", "every", "shown"), [(20, 1, 20), (20, 10, 2), (29, 1, 29), (30, 1, None)])
def test_a_short_run_shows_each_step_that_was_logged(tmp_path, steps, every, shown):
    write(tmp_path, [{"step": k, "loss": 3.0 - k / 100} for k in range(every, steps + 1, every)])
    page = run_page([read_run(tmp_path)])
    assert points(page) == ([] if shown is None else [shown])
    assert len(legend(page)) == len(drawn(page)) == 1  # and nothing was held out


def test_the_page_begins_with_figures_and_the_loss_and_folds_other_curves(ran):
    page = run_page([read_run(ran)])
    large = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    table = dict(row[:2] for row in run_figures([read_run(ran)]))
    assert [name for name, _ in large][:2] == ["held-out loss, last", "real tokens per second, median"]
    assert len(large) == 4
    for name, text in large:
        assert table[name] == text.replace("\u00a0", " ")
    before, _, after = page.partition("<details")
    assert re.findall("<h2>(.*?)</h2>", before) == ["Loss", "Figures"]
    assert len(drawn(before)) == 2
    assert re.findall("<h2>(.*?)</h2>", after)[:2] == ["Speed", "Padding"]
    assert re.search("<summary>(.*?)</summary>", after)[1].startswith("More curves: Speed, Padding")
    assert sorted(style for _, style in legend(page)) == sorted(drawn(page))


def test_curves_that_hide_each_other_are_both_seen_and_the_largest_difference_is_said(tmp_path):
    runs = []
    for name, by in (("a", 0.0), ("same", 0.0), ("near", 0.25), ("other", 2.0)):
        (tmp_path / name).mkdir()
        rows = [{"step": k, "loss": 9.0 - k + by * (k == 4 or name == "other")} for k in range(1, 9)]
        runs.append(read_run(write(tmp_path / name, rows)))
    page = run_page(runs)
    assert [(label.partition(",")[0], "wide and pale" in label, style) for label, style in legend(page)] == [
        ("a", False, "k0"),
        ("same", True, "k1 under"),
        ("near", True, "k2 under"),
        ("other", False, "k3"),
    ]
    assert title_of(run_page(runs[:2])) == "a beside same: the same losses at 8 common steps"
    assert title_of(run_page([runs[0], runs[2]])) == "a beside near: losses at most 0.25 apart at 8 common steps"
    assert [run_figures([runs[0], each])[2][3] for each in runs[1:]] == ["equal", "equal", "+2"]
    assert "equal" in re.findall("<dd>(.*?)</dd>", run_page(runs[:2]))


def write(folder: Path, rows: list, **state) -> Path:
    """A state as a Trainer writes it."""
    steps = [row["step"] for row in rows if isinstance(row, dict)]
    state = {"log_history": rows, "global_step": max(steps, default=0), **state}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def losses(*values: float) -> list[dict]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, 1)]


def test_losses_that_are_not_numbers_are_gaps_and_what_cannot_be_drawn_is_said(tmp_path):
    page = run_page([read_run(write(tmp_path, losses(2.0, float("nan"), 1.0)))])
    assert "nan" not in page.partition("</style>")[2]
    assert "training: not finite in 1 of 3 logs, first at step 2" in page
    assert page.count("<polyline") == 1
    page = run_page([read_run(write(tmp_path, losses(float("nan"))))])
    assert page.count("<polyline") == 0
    assert "No row has been logged yet" in run_page([read_run(write(tmp_path, []))])
    assert "One step has been logged" in run_page([read_run(write(tmp_path, losses(2.0)))])
    record = run_record(read_run(write(tmp_path, losses(2.0, float("inf")))))
    assert json.loads(json.dumps(record, allow_nan=False))["last_loss"] is None


def test_a_page_replaces_no_file_but_a_page(tmp_path, capsys):
    write(tmp_path, losses(2.0))
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
    with pytest.raises(InputError, match=r"a run is a folder|no run has left its state"):
        read_run(tmp_path / name)


PEAKS = [
    ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ("NVIDIA H100 80GB HBM3", "fp32", None),
    ("NVIDIA H200", "bf16", 989e12),
    ("NVIDIA H200 NVL", "bf16", 835e12),
    ("NVIDIA A10", "bf16", 125e12),
    ("NVIDIA A10G", "bf16", None),
    ("NVIDIA L4", "bf16", 121e12),
    ("Tesla V100-SXM2-16GB", "bf16", None),
    ("Tesla V100-SXM2-16GB", "fp16", 125e12),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
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


def test_a_process_that_goes_on_from_a_checkpoint_is_another_layout():
    state = SimpleNamespace(global_step=0, stateful_callbacks={})
    for step, processes in ((0, 2), (3, 2), (3, 1)):  # the second one was lost before its first checkpoint
        state.global_step = step
        LayoutHistory().on_train_begin(SimpleNamespace(world_size=processes, fsdp=[]), state, None, model=None)
    assert state.stateful_callbacks[LAYOUTS] == [[0, "2 processes"], [3, "1 process"]]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_chromium_lays_it_out_without_overlap_or_overflow(ran, tmp_path, width, dark):
    runs = [read_run(ran), read_run(ran.parent / "stopped")]
    (tmp_path / "0.html").write_text(run_page(runs[:1]), encoding="utf-8")
    (tmp_path / "1.html").write_text(run_page(runs), encoding="utf-8")
    parts = "h1,h2,p,dt,dd,li,td,th,.label,.number,.bar,.curves svg,.losses span,.steps span,.curves .word"
    for facts in lay_out(sorted(tmp_path.glob("?.html")), tmp_path, parts=parts, width=width, dark=dark).values():
        check_laid_out(facts, width=width, dark=dark, least=40)
