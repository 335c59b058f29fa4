"""``ullage plan`` as a person runs it: sources, options, figures, files, and what it says of mistakes."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import ullage
from ullage.datasets import CAPACITIES, WORKLOADS, mock_lengths

MOCK = {"mode": "distribution", "type": "lognormal", "min_seq_len": 128, "max_seq_len": 2048}
MOCK |= {"mean_seq_len": 512, "lognormal_sigma": 1.2}


def figures(run, *arguments, stdin=b"", written=()):
    """The JSON; on standard error stands nothing but what was ``written``, a line for each kind and path."""
    status, out, err = run("plan", *arguments, "--json", stdin=stdin)
    assert (status, err.splitlines()) == (0, [f"{kind}: {path}" for kind, path in written])
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


def test_the_table_says_the_same_and_no_number_is_cut_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = run("plan", "megatron", "-n", 256)
    assert (status, err) == (0, "")
    found = figures(run, "megatron", "-n", 256)
    for name in ("plan", "next_fit"):
        assert f"{found[name]['critical_path']:.3f}" in out
        assert f"{100 * found[name]['ullage']:.2f} %" in out
    for word in ("balanced", "next_fit", "lower bound", "ideal", "microbatches per rank", "rank imbalance"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "60")
    narrow = run("plan", "megatron", "-n", 256)[1]
    assert [word for word in narrow.split() if word[0].isdigit()] == [word for word in out.split() if word[0].isdigit()]


def test_mock_distributions_and_files(run, tmp_path):
    found = figures(run, json.dumps(MOCK), "-n", 100, "--seed", 7)
    assert found["source"]["tokens"] == mock_lengths(MOCK, 100, 7).sum()
    assert found["capacity"] == 2048
    assert figures(run, "-", "-n", 100, "--seed", 7, stdin=json.dumps(MOCK).encode()) == found
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
    options = {"ranks": 3, "capacity": 130, "pad_to_multiple_of": 8, "sync": "step"}
    options |= {"microbatch_multiple": 2, "max_sequences": 9}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    figures(run, path, *flags, "--save", tmp_path / "plan.json", written=[("plan", tmp_path / "plan.json")])
    saved = ullage.Plan.from_json((tmp_path / "plan.json").read_text())
    cost = ullage.TransformerCost()
    assert saved == ullage.plan(np.arange(1, 60), **options, cost=cost)
    assert saved.problems() == []
    cost = ["--linear", 0, "--quadratic", 2, "--strategy", "next_fit"]
    figures(run, path, "-c", 130, *cost, "--save", tmp_path / "b.json", written=[("plan", tmp_path / "b.json")])
    saved = ullage.Plan.from_json((tmp_path / "b.json").read_text())
    np.testing.assert_array_equal(saved.costs, 2 * np.arange(1, 60) ** 2)
    assert saved.strategy == "next_fit"
    assert figures(run, path, "-c", 130, "-n", 10)["source"]["sequences"] == 10


def test_cost_of_a_model(run, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        written = [("plan", tmp_path / "plan.json")]
        figures(run, "chat", "-n", 50, "--model", path, "--save", tmp_path / "plan.json", written=written)
        saved = ullage.Plan.from_json((tmp_path / "plan.json").read_text())
        lengths = WORKLOADS["chat"](50, 0)
        cost = ullage.TransformerCost.from_config(config)
        assert saved == ullage.plan(lengths, ranks=8, capacity=CAPACITIES["chat"], cost=cost)
    (tmp_path / "config.json").write_text("{}")
    assert run("plan", "chat", "--model", tmp_path)[0] == 1
    assert run("plan", "chat", "--model", tmp_path, "--linear", 1)[0] == 2


def test_oversize_and_giants_over_several_ranks(run, tmp_path):
    (tmp_path / "a.txt").write_text("10 200 30 400")
    status, out, err = run("plan", tmp_path / "a.txt", "-c", 100)
    assert (status, out) == (1, "")
    assert all(word in err for word in ("sequence 1", "200", "100", "--oversize"))
    status, _, err = run("plan", tmp_path / "a.txt")
    assert status == 2
    assert "the capacity is missing" in err
    found = figures(run, tmp_path / "a.txt", "-c", 100, "--oversize", "truncate")["plan"]
    assert (found["truncated_tokens"], found["num_tokens"]) == (400, 240)
    assert "2 sequences of 600 tokens dropped" in run("plan", tmp_path / "a.txt", "-c", 100, "--oversize", "drop")[1]
    (tmp_path / "a.txt").write_text("100 30 350 40 20 10")
    found = figures(run, tmp_path / "a.txt", "-c", 100, "-r", 4, "--context-parallel", "auto")
    assert found["plan"]["num_shared"] > 0
    assert found["next_fit"]["num_tokens"] == 550
    fixed = figures(run, tmp_path / "a.txt", "-c", 100, "-r", 4, "--context-parallel", "4")
    assert fixed["plan"]["num_shared"] == 6


#: Arguments, the exit status, and words of what is said.
WRONG = [
    (["nope"], 1, "no such file or workload (nope): expected a file, or one of megatron, chat"),
    (["nope.npy"], 1, "there is no such file of lengths here (nope.npy)"),
    (['{"mode": "x"}'], 1, "mode is unknown"),
    (["-"], 1, "holds no lengths"),
    (["chat", "--model", __file__], 1, "not JSON"),
    (["chat", "-n", "8", "-c", "1,2"], 1, "does not fit into a microbatch"),
    (["chat", "-n", "8", "--html", "/dev/null/plan.html"], 1, "cannot be written (/dev/null/plan.html)"),
    (["chat", "--strategy", "best"], 2, "no such strategy: expected balanced or"),
    (["chat", "--context-parallel", "some"], 2, "expected auto, or a number >= 1, found some"),
    (["chat", "--ranks", "0"], 2, "--ranks"),
    (["chat", "--capacity", "-5"], 2, "--capacity"),
    (["chat", "--capacity", "8,x"], 2, "expected an integer >= 1, found 'x'"),
    (["chat", "--steps", "2"], 2, "Pass --global-batch-size"),
    (["chat", "-n", "8", "-c", "30000,40000", "--html", "x.html"], 2, "found 1 steps at 2 capacities"),
    ([], 2, "LENGTHS"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("arguments", "status", "message"), WRONG)
def test_mistakes_are_said_in_a_line(run, arguments, status, message):
    found, out, err = run("plan", *arguments)
    assert (found, out) == (status, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    if status == 1:
        assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--html", "--save"])
def test_what_is_not_ours_is_kept(run, tmp_path, option):
    data, other, empty = tmp_path / "data.csv", tmp_path / "notes.txt", tmp_path / "empty"
    data.write_text("5\n6\n7\n")
    other.write_text("mine")
    empty.touch()
    (tmp_path / "link").symlink_to(data)
    for target, message in (
        (data, "the output would replace the input"),
        (tmp_path / "link", "the output would replace the input"),
        (other, "another file is there, and is kept"),
        (tmp_path, "cannot be written"),
    ):
        status, out, err = run("plan", data, "-c", 10, option, target)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert message in err
    assert (data.read_text(), other.read_text()) == ("5\n6\n7\n", "mine")
    status, out, err = run("plan", data, "-c", 10, option, empty)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].endswith(f": {empty}")
    assert run("plan", data, "-c", 10, option, empty)[0] == 0  # its own file is replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv", "empty", "link", "notes.txt"]
    # A file of another kind of ours is not this one.
    others = {"--html": "--save", "--save": "--html"}
    assert run("plan", data, "-c", 10, others[option], empty)[0] == 1


def test_a_row_for_each_capacity_and_one_for_padded_batches(run, tmp_path):
    found = figures(run, "chat", "-n", 200, "-r", 4, "-c", "500,32768,65_536,32768")["capacities"]
    assert [row["capacity"] for row in found] == [500, 32768, 65536]
    assert "does not fit" in found[0]["error"]
    for row in found[1:]:
        alone = figures(run, "chat", "-n", 200, "-r", 4, "-c", row["capacity"])
        assert row["time"] == pytest.approx(alone["plan"]["critical_path"])
        assert row["next_fit_time"] == pytest.approx(alone["next_fit"]["critical_path"])
        assert row["padded_time"] == pytest.approx(alone["padded"]["critical_path"])
        assert row["ullage"] == pytest.approx(alone["plan"]["ullage"])
        assert (row["num_steps"], row["lower_bound"]) == (1, alone["lower_bound"]["num_microbatches"])
    status, out, err = run("plan", "chat", "-n", 200, "-r", 4, "-c", "500,32768,65536")
    assert (status, err) == (0, "")
    assert "Shortest at capacity" in out
    assert max(len(line) for line in out.splitlines() if line.startswith(" ")) <= 80
    (tmp_path / "a.txt").write_text("5 3 9 1")
    found = figures(run, tmp_path / "a.txt", "-c", 12, "-r", 2)["padded"]
    assert (found["num_batches"], found["num_microbatches"], found["num_slots"]) == (3, 2, 20)
    out = run("plan", tmp_path / "a.txt", "-c", 12, "-r", 2)[1]
    assert "padded" in out
    assert "(10.0 % padding)" in out
    shared = figures(run, tmp_path / "a.txt", "-c", 12, "-r", 2, "--context-parallel", 2)
    assert shared["padded"] is None


def test_steps_of_a_data_set(run, tmp_path):
    lengths = WORKLOADS["chat"](100, 0)
    np.save(tmp_path / "a.npy", lengths)
    given = [tmp_path / "a.npy", "-r", 3, "-c", 32768, "--sync", "step", "--global-batch-size", 32]
    (row,) = figures(run, *given)["capacities"]
    plans = [ullage.plan(lengths[k : k + 32], ranks=3, capacity=32768, sync="step") for k in range(0, 100, 32)]
    assert row["num_steps"] == len(plans) == 4  # the last one holds four
    assert row["num_microbatches"] == sum(plan.num_microbatches for plan in plans)
    spent = sum(plan.loads.sum(axis=0).max() for plan in plans)
    assert row["time"] == pytest.approx(spent / (sum(plan.loads.sum() for plan in plans) / 3))
    assert row["worst_time"] == pytest.approx(max(plan.statistics().rank_imbalance for plan in plans))
    (two,) = figures(run, *given, "--steps", 2)["capacities"]
    assert (two["num_steps"], two["num_microbatches"]) == (2, sum(plan.num_microbatches for plan in plans[:2]))
    page = tmp_path / "plan.html"
    one = figures(run, *given, "--steps", 1, "--html", page, written=[("page", page)])
    assert one["plan"]["num_tokens"] == lengths[:32].sum()


def test_ctrl_c_while_the_interpreter_ends_changes_nothing():
    """Python gives the signal its deadly meaning back then; the object is deleted after the last handler has run."""
    code = (
        "import os, signal, sys\nfrom ullage.cli import main\n"
        "class Late:\n    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT): kill(pid, number)\n"
        "late = Late()\nsys.argv = ['ullage', '--version']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_capacities_by_name_limit_columns_of_the_file(run, tmp_path):
    rows = [{"length": 30 + i, "patches": [[4 * i, 16], [], [64]][i % 3]} for i in range(40)]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures(run, file, "-r", 2, "-c", 400, "-c", "patches=300")
    plan = ullage.plan(
        [row["length"] for row in rows],
        ranks=2,
        capacities={"tokens": 400, "patches": 300},
        amounts={"patches": [row["patches"] for row in rows]},
    )
    assert found["capacities"] == {"tokens": 400, "patches": 300}
    assert found["plan"]["resources"] == [dataclasses.asdict(use) for use in plan.statistics().resources]
    assert found["plan"]["resources"][0]["largest"] <= 300
    # Without a capacity it is counted and shown all the same.
    status, out, _ = run("plan", file, "-r", 2, "-c", 400, "--amount", "patches")
    assert (status, "most patches in a microbatch" in out, "capacity of patches" in out) == (0, True, False)
    status, out, _ = run("plan", file, "-r", 2, "-c", "400,800,patches=300", "--html", tmp_path / "a.html")
    assert status == 2
    assert run("plan", file, "-c", "400,patches=300", "--html", tmp_path / "a.html")[0] == 0
    assert "400 slots and 300 patches a rank" in (tmp_path / "a.html").read_text()
    for wrong, words in (
        ("pixels=3", "a column is missing"),
        ("patches=x", "not a capacity"),
        ("patches=8", "at most"),
    ):
        status, _, err = run("plan", file, "-c", 400, "-c", wrong)
        assert (status, words in err) == (2 if words == "not a capacity" else 1, True)
