"""``ullage plan`` as a person runs it: sources, options, figures, files, and what it says of mistakes."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest

import ullage
from ullage.cli import main
from ullage.datasets import CAPACITIES, WORKLOADS, mock_lengths
from ullage.report.timeline import timeline

MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 128,
    "max_seq_len": 2048,
    "mean_seq_len": 512,
    "lognormal_sigma": 1.2,
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the command line: (status, standard output, standard error)."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["ullage", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return call


def figures(run, *arguments, stdin=b""):
    status, out, err = run("plan", *arguments, "--json", stdin=stdin)
    assert (status, err) == (0, "")
    return json.loads(out)


def test_figures_are_the_plans(run):
    found = figures(run, "chat", "-n", 200, "-r", 4, "--seed", 3)
    lengths = WORKLOADS["chat"](200, 3)
    for name in ("balanced", "next_fit"):
        stats = ullage.plan(lengths, ranks=4, capacity=CAPACITIES["chat"], strategy=name).statistics()
        shown = found["plan" if name == "balanced" else name]
        for field in ("num_microbatches", "critical_path", "rank_imbalance", "ullage", "num_tokens", "lower_bound"):
            assert shown[field] == getattr(stats, field)
    assert found["source"]["tokens"] == lengths.sum()
    assert found["lower_bound"]["num_microbatches"] <= found["plan"]["num_microbatches"]
    assert found["plan"]["critical_path"] < found["next_fit"]["critical_path"]


def test_the_table_says_the_same(run):
    status, out, err = run("plan", "megatron", "-n", 256)
    assert (status, err) == (0, "")
    found = figures(run, "megatron", "-n", 256)
    for name in ("plan", "next_fit"):
        assert f"{found[name]['critical_path']:.3f}" in out
        assert f"{100 * found[name]['ullage']:.2f} %" in out
    for word in ("balanced", "next_fit", "lower bound", "ideal", "microbatches per rank", "rank imbalance"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("inline", [True, False])
def test_mock_distribution(run, tmp_path, inline):
    (tmp_path / "mock.json").write_text(json.dumps(MOCK))
    found = figures(run, json.dumps(MOCK) if inline else tmp_path / "mock.json", "-n", 100, "--seed", 7)
    lengths = mock_lengths(MOCK, 100, 7)
    assert found["source"]["tokens"] == lengths.sum()
    assert found["capacity"] == 2048
    assert figures(run, "-", "-n", 100, "--seed", 7, stdin=json.dumps(MOCK).encode()) == found


def test_mock_file_is_read_whole(run, tmp_path):
    (tmp_path / "lengths.csv").write_text("5\n6\n7\n")
    (tmp_path / "mock.json").write_text('{"mode": "file", "path": "lengths.csv"}')
    assert figures(run, tmp_path / "mock.json", "-c", 10)["source"]["tokens"] == 18


@pytest.mark.parametrize(
    "stdin", [b"5 6 7", b"length\n5\n6\n7\n", b'{"length": 5}\n{"length": 6}\n{"length": 7}\n', b"[5, 6, 7]"]
)
def test_standard_input(run, stdin):
    found = figures(run, "-", "-c", 10, "-r", 2, stdin=stdin)
    assert (found["source"]["sequences"], found["source"]["tokens"]) == (3, 18)


def test_options_reach_the_planner(run, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1, 60))
    path = tmp_path / "a.npy"
    options = {
        "ranks": 3,
        "capacity": 130,
        "pad_to_multiple_of": 8,
        "sync": "step",
        "microbatch_multiple": 2,
        "max_sequences": 9,
    }
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    figures(run, path, *flags, "--save", tmp_path / "plan.json")
    saved = ullage.Plan.from_json((tmp_path / "plan.json").read_text())
    cost = ullage.TransformerCost()
    assert saved == ullage.plan(np.arange(1, 60), **options, cost=cost)
    assert saved.problems() == []
    figures(
        run, path, "-c", 130, "--linear", 0, "--quadratic", 2, "--strategy", "next_fit", "--save", tmp_path / "b.json"
    )
    saved = ullage.Plan.from_json((tmp_path / "b.json").read_text())
    np.testing.assert_array_equal(saved.costs, 2 * np.arange(1, 60) ** 2)
    assert saved.strategy == "next_fit"
    assert figures(run, path, "-c", 130, "-n", 10)["source"]["sequences"] == 10


def test_cost_of_a_model(run, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        figures(run, "chat", "-n", 50, "--model", path, "--save", tmp_path / "plan.json")
        saved = ullage.Plan.from_json((tmp_path / "plan.json").read_text())
        lengths = WORKLOADS["chat"](50, 0)
        cost = ullage.TransformerCost.from_config(config)
        assert saved == ullage.plan(lengths, ranks=8, capacity=CAPACITIES["chat"], cost=cost)
    (tmp_path / "config.json").write_text("{}")
    status, _, err = run("plan", "chat", "--model", tmp_path)
    assert status == 1
    assert err.count("\n") == 1
    assert "not JSON" in run("plan", "chat", "--model", __file__)[2]
    assert run("plan", "chat", "--model", tmp_path, "--linear", 1)[0] == 2


def test_oversize(run, tmp_path):
    (tmp_path / "a.txt").write_text("10 200 30 400")
    status, out, err = run("plan", tmp_path / "a.txt", "-c", 100)
    assert (status, out) == (1, "")
    assert "sequence 1" in err
    assert "200" in err
    assert "100" in err
    found = figures(run, tmp_path / "a.txt", "-c", 100, "--oversize", "truncate")["plan"]
    assert (found["truncated_tokens"], found["num_tokens"]) == (400, 240)
    assert "2 sequences of 600 tokens dropped" in run("plan", tmp_path / "a.txt", "-c", 100, "--oversize", "drop")[1]


def test_giants_over_several_ranks(run, tmp_path):
    (tmp_path / "a.txt").write_text("100 30 350 40 20 10")
    found = figures(run, tmp_path / "a.txt", "-c", 100, "-r", 4, "--context-parallel", "auto")
    assert found["plan"]["num_shared"] > 0
    assert found["next_fit"]["num_tokens"] == 550
    fixed = figures(run, tmp_path / "a.txt", "-c", 100, "-r", 4, "--context-parallel", "4")
    assert fixed["plan"]["num_shared"] == 6


def test_page_and_trace_are_written_whole(run, tmp_path):
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    figures(run, "bimodal", "-n", 64, "-r", 4, "--html", page, "--trace", trace)
    assert page.read_text().rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "trace.json"]


@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_trace_tells_the_timeline(run, tmp_path, sync):
    figures(run, "bimodal", "-n", 64, "-r", 4, "--sync", sync, "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    plan = ullage.plan(WORKLOADS["bimodal"](64, 0), ranks=4, capacity=CAPACITIES["bimodal"], sync=sync)
    times = timeline(plan)
    whole = [event for event in events if event["ph"] == "X"]
    sequences = [event for event in whole if event["cat"] == "sequence"]
    assert sorted(int(event["name"].split()[1]) for event in sequences) == list(range(64))
    assert sum(event["args"]["length"] for event in sequences) == plan.lengths.sum()
    assert max(event["ts"] + event["dur"] for event in whole) == pytest.approx(1e6 * times.end / times.ideal, rel=1e-6)
    waits = sum(event["dur"] for event in whole if event["cat"] == "wait")
    assert waits / 4 == pytest.approx(1e6 * (times.end / times.ideal - 1), abs=1)
    for rank in range(4):
        track = [event for event in whole if event["tid"] == rank and event["cat"] != "sequence"]
        ends = [event["ts"] + event["dur"] for event in track]
        assert all(after["ts"] >= end - 0.01 for after, end in zip(track[1:], ends))
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {f"rank {r}" for r in range(4)}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nope"], 1, "no such file or workload (nope): expected a file, or one of megatron, chat"),
        (["nope.npy"], 1, "cannot be read (nope.npy): found No such file"),
        (['{"mode": "x"}'], 1, "mode is unknown"),
        (['{"mode": "distribution", "sigma": 1}'], 1, "unknown keys"),
        (["{broken"], 1, "not JSON"),
        (["-"], 1, "holds no lengths"),
        (["chat", "--strategy", "best"], 2, "no such strategy: expected balanced or"),
        (["chat", "--context-parallel", "some"], 2, "expected auto, or a number >= 1, found some"),
        (["chat", "--context-parallel", "0"], 2, "context-parallel"),
        (["chat", "--sync", "never"], 2, "--sync"),
        (["chat", "--ranks", "0"], 2, "--ranks"),
        (["chat", "--capacity", "-5"], 2, "--capacity"),
        (["chat", "--what"], 2, "--what"),
        (["chat", "-n", "8", "--html", "/nowhere/plan.html"], 1, "cannot be written (/nowhere/plan.html)"),
        (["chat", "-n", "8", "--trace", "/nowhere/t.json"], 1, "cannot be written (/nowhere/t.json)"),
        ([], 2, "LENGTHS"),
    ],
)
def test_mistakes_are_said_in_a_line(run, arguments, status, message):
    found, out, err = run("plan", *arguments)
    assert found == status
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert out == ""
    if status == 1:
        assert err.count("\n") == 1


def test_capacity_is_asked_for_where_nothing_suggests_one(run, tmp_path):
    (tmp_path / "a.txt").write_text("1 2 3")
    status, _, err = run("plan", tmp_path / "a.txt")
    assert status == 2
    assert "the capacity is missing" in err


def test_as_a_process_with_a_pipe():
    command = [sys.executable, "-m", "ullage", "plan", "-", "-c", "10", "--json"]
    done = subprocess.run(command, input=b"5 6 7\n", capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout)["source"]["tokens"] == 18
