"""``ullage inspect``, ``convert`` and ``verify`` as a user calls them: what they print, write and exit with."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import edit, flip
from tests.support.real_zero import Recipe, Truth, write

#: Of the fixture ``run``.
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    groups: list[dict[str, tuple[int, ...]]] = [
        {"embed.weight": (19, 5), "leave.weight": (7, 5)},
        {"norm.weight": (5,)},
    ]
    recipe = Recipe(stage=1, dp=3, groups=groups, frozen={"scale": (4,)}, buffers={"mean": (3,)})
    return write(tmp_path_factory.mktemp("source"), recipe)


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


def as_json(answer: tuple[int, str, str]) -> dict[str, Any]:
    return json.loads(answer[1])


def test_inspect_says_what_is_there_draws_a_page_and_conserves_elements(run: Run, truth: Truth, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    status, out, err = run("inspect", truth.folder, "--html", page)
    assert (status, err) == (0, "")
    assert "zero stage 1\n" in re.sub(" +\n", "\n", out)  # once, where the optimizer has no other name
    assert "5, buffers among them" in out
    for said in ("stage 1", "dp 3", "embed.weight", "19 × 5", "fp32, exp_avg, exp_avg_sq", "scale", "mean", "whole"):
        assert said in out
    assert out.splitlines()[-1] == f"page: {page}"
    assert "embed.weight" in page.read_text()
    assert "rank 2" in page.read_text()
    found = as_json(run("inspect", truth.tag_folder, "--json"))
    assert found["dp"] == 3
    assert found["problems"] == []
    assert {t["name"] for t in found["tensors"]} == {"embed.weight", "leave.weight", "norm.weight", "scale", "mean"}
    for group, shapes in zip(found["groups"], truth.recipe.groups, strict=True):
        elements = sum(t["num_bytes"] // 4 for t in found["tensors"] if t["name"] in shapes and t["key"] == "fp32")
        assert elements + group["padding"] == group["size"] == group["shard_size"] * group["num_shards"]
        assert sum(group["padding_by_rank"].values()) == group["padding"] > 0


def test_inspect_loads_neither_torch_nor_deepspeed(truth: Truth) -> None:
    code = (
        "import sys; from ullage.cli import main; sys.argv = ['ullage', 'inspect', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'deepspeed', 'numba', 'transformers', 'jinja2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(truth.folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_inspect_of_a_damaged_checkpoint_exits_with_one(run: Run, truth: Truth, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(truth.tag_folder, damaged)
    (damaged / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    status, out, _ = run("inspect", damaged)
    assert status == 1
    assert "a shard is missing" in out
    assert "rank 1" in out
    assert as_json(run("inspect", damaged, "--json"))["problems"]
    status, _, err = run("convert", damaged, tmp_path / "target")
    assert status == 1
    assert "rank 1" in one_line(err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_inspect_cuts_nothing_and_is_no_wider_than_the_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    name = "model.layers.10.post_attention_layernorm.weight"
    shapes = {name: (12, 300), "lm_head.weight": (2000, 9)}
    shown = write(tmp_path / "s", Recipe(stage=1, dp=3, groups=[shapes]))
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("inspect", shown.tag_folder)[1].splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    whole = "\n".join(lines)
    for fact in ("12 × 300", "2000 × 9", "43.2 kB", "216 kB", "21,600", "7,200"):  # none is folded
        assert re.search(rf"(?<!\S){fact}(?!\S)", whole), fact
    assert name in re.sub(r"\n +", "", whole)
    # Beside each other where there is room, and below it each number by its name.
    assert ("per shard 7,200" in whole) == (columns < 100)
    assert ("elements  shards  per shard" in whole) == (columns == 100)


def test_tensors_are_counted_alike_whatever_the_ranks_and_a_step_is_a_whole_number(
    run: Run, truth: Truth, tmp_path: Path
) -> None:
    number = len(as_json(run("inspect", truth.folder, "--json"))["tensors"])
    for ranks in (1, 4):
        target = tmp_path / str(ranks)
        status, out, err = run("convert", truth.folder, target, "--to", "zero2", "--ranks", ranks)
        assert status == 0, err
        assert f"{number} tensors in " in out
    shown = write(tmp_path / "no buffers", Recipe(stage=1, dp=1, groups=[{"w": (3,)}]))
    assert re.search(r"parameters +1 *\n", run("inspect", shown.folder)[1])
    trainers = tmp_path / "trainer"
    assert run("convert", truth.folder, trainers, "--to", "trainer")[0] == 0
    assert re.search(r"step +7 *\n", run("inspect", trainers)[1])


def test_convert_then_verify(run: Run, truth: Truth, tmp_path: Path) -> None:
    target = tmp_path / "made" / "on the way" / "universal"
    status, out, err = run("convert", truth.folder, target, "--workers", 2)
    assert status == 0, err
    assert str(target) in out
    assert "2 workers" in out
    status, out, _ = run("verify", truth.folder, target)
    assert status == 0
    assert out.startswith("equal: ")
    path = target / "zero" / "embed.weight" / "exp_avg.pt"
    flip(path, path.read_bytes().index(truth.tensor("embed.weight", "exp_avg").tobytes()) + 40)
    different = run("verify", truth.folder, target, "--json")
    assert different[0] == 1
    report = as_json(different)
    assert report["equal"] is False
    [problem] = report["problems"]
    assert "embed.weight" in problem


#: Calls, with F for a good checkpoint, its exit status, and words of what is said.
WRONG = [
    ("inspect empty", 1, "not a checkpoint"),
    ("inspect F --html file/page.html", 1, "a file cannot be written ("),
    ("convert F taken", 1, "exists"),
    ("convert F F/inside", 1, "inside the source"),
    ("convert F file/target", 1, "/file). Name a folder"),
    ("convert F t --to tarball", 2, "tarball"),
    ("convert F t --dtype bfloat16", 2, "dtype"),
    ("convert F t --weights-only", 2, "weights"),
]


@pytest.mark.parametrize(("call", "status", "message"), WRONG)
def test_bad_input_is_said_and_nothing_written(run: Run, truth: Truth, tmp_path, monkeypatch, call, status, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("empty", "taken"):
        (tmp_path / name).mkdir()
    found, _, err = run(*(word.replace("F", str(truth.tag_folder)) for word in call.split()))
    assert found == status
    assert message in (one_line(err) if status == 1 else err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "taken"]
    assert not (truth.tag_folder / "inside").exists()


def test_8_bit_state_of_an_unknown_form_is_said_by_inspect_and_refused_by_convert(run: Run, tmp_path: Path) -> None:
    from tests.checkpoint.test_carried_state import to_8bit

    written = write(tmp_path / "run", Recipe(stage=2, dp=2, groups=[{"w": (40, 40)}]))
    for rank, path in enumerate(sorted(written.tag_folder.glob("*optim_states.pt"))):
        edit(path, lambda c, r=rank: to_8bit(c["optimizer_state_dict"]["base_optimizer_state"]["state"][0], r))
    status, out, _ = run("inspect", written.folder)
    assert status == 0
    only = "the weights only can be converted: optimizer state state1 is quantised in a way that is not known"
    assert only in " ".join(out.split())
    status, _, err = run("convert", written.folder, tmp_path / "u")
    assert status == 1
    assert "state1 is quantised" in one_line(err)
    assert run("convert", written.folder, tmp_path / "st", "--to", "safetensors", "--weights-only")[0] == 0
    assert run("verify", written.folder, tmp_path / "st")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "st"]


#: What Windows lacks.
WITHOUT = """
import os, sys
for module in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[module] = None
for name in ("pread", "preadv", "pwrite", "O_CLOEXEC", "getuid", "sched_getaffinity", "posix_fadvise"):
    delattr(os, name)
"""
READ = """
from ullage.cli import main
_, source, target = sys.argv
status = []
for arguments in (["inspect", source], ["plan", "chat", "-n", "8", "--ranks", "2", "--capacity", "32768"],
                  ["convert", source, target, "--to", "universal"]):
    sys.argv = ["ullage", *arguments]
    try:
        main()
    except SystemExit as leaving:
        status.append(leaving.code or 0)
print(status)
"""


def test_a_checkpoint_is_read_and_a_step_planned_without_what_windows_lacks(truth: Truth, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT + READ, str(truth.folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[0, 0, 1]", done.stdout + done.stderr
    assert "whole" in done.stdout or "complete" in done.stdout
    assert done.stderr.startswith("ullage: checkpoints cannot be written on this system: expected a system with pwrite")
    assert not list(tmp_path.iterdir())
