"""``ullage inspect``, ``convert`` and ``verify`` as a user calls them: what they print, write and exit with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_zero import Recipe, Truth, write


def ullage(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ullage", *map(str, arguments)], capture_output=True, text=True)


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


def test_inspect_says_what_is_there(truth: Truth) -> None:
    done = ullage("inspect", truth.folder)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "zero stage 1\n" in re.sub(" +\n", "\n", done.stdout)  # once, where the optimizer has no other name
    assert "5, buffers among them" in done.stdout
    for said in ("stage 1", "dp 3", "embed.weight", "19 × 5", "fp32, exp_avg, exp_avg_sq", "scale", "mean", "whole"):
        assert said in done.stdout


def test_inspect_as_json_conserves_elements(truth: Truth) -> None:
    found = json.loads(ullage("inspect", truth.tag_folder, "--json").stdout)
    assert found["dp"] == 3
    assert found["problems"] == []
    assert {t["name"] for t in found["tensors"]} == {"embed.weight", "leave.weight", "norm.weight", "scale", "mean"}
    for group, shapes in zip(found["groups"], truth.recipe.groups, strict=True):
        elements = sum(t["num_bytes"] // 4 for t in found["tensors"] if t["name"] in shapes and t["key"] == "fp32")
        assert elements + group["padding"] == group["size"] == group["shard_size"] * group["num_shards"]
        assert sum(group["padding_by_rank"].values()) == group["padding"] > 0


def test_inspect_draws_a_page(truth: Truth, tmp_path: Path) -> None:
    done = ullage("inspect", truth.folder, "--html", tmp_path / "new" / "page.html")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"page: {tmp_path / 'new' / 'page.html'}"
    text = (tmp_path / "new" / "page.html").read_text()
    assert "embed.weight" in text
    assert "rank 2" in text


def test_inspect_loads_neither_torch_nor_deepspeed(truth: Truth) -> None:
    code = (
        "import sys; from ullage.cli import main; sys.argv = ['ullage', 'inspect', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'deepspeed', 'numba', 'transformers', 'jinja2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(truth.folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_inspect_of_a_damaged_checkpoint_exits_with_one(truth: Truth, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(truth.tag_folder, damaged)
    (damaged / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    done = ullage("inspect", damaged)
    assert done.returncode == 1
    assert "a shard is missing" in done.stdout
    assert "rank 1" in done.stdout
    assert json.loads(ullage("inspect", damaged, "--json").stdout)["problems"]
    refused = ullage("convert", damaged, tmp_path / "target")
    assert refused.returncode == 1
    assert "rank 1" in one_line(refused.stderr)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged"]


def test_convert_then_verify(truth: Truth, tmp_path: Path) -> None:
    target = tmp_path / "made" / "on the way" / "universal"
    done = ullage("convert", truth.folder, target, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert str(target) in done.stdout
    assert "2 workers" in done.stdout
    same = ullage("verify", truth.folder, target)
    assert same.returncode == 0
    assert same.stdout.startswith("equal: ")
    path = target / "zero" / "embed.weight" / "exp_avg.pt"
    data = bytearray(path.read_bytes())
    at = data.index(truth.tensor("embed.weight", "exp_avg").tobytes())
    data[at + 40] ^= 1
    path.write_bytes(data)
    different = ullage("verify", truth.folder, target, "--json")
    assert different.returncode == 1
    report = json.loads(different.stdout)
    assert report["equal"] is False
    assert len(report["problems"]) == 1
    assert "embed.weight" in report["problems"][0]


def test_convert_reports_as_json(truth: Truth, tmp_path: Path) -> None:
    report = json.loads(ullage("convert", truth.folder, tmp_path / "u", "--json").stdout)
    written = sum(path.stat().st_size for path in (tmp_path / "u").rglob("*.pt"))
    assert report["num_bytes"] == written
    assert report["num_tensors"] > 0


def test_a_dry_run_tells_and_leaves_nothing(truth: Truth, tmp_path: Path) -> None:
    told = json.loads(ullage("convert", truth.folder, tmp_path / "a" / "u", "--dry-run", "--json").stdout)
    assert list(tmp_path.iterdir()) == []
    done = json.loads(ullage("convert", truth.folder, tmp_path / "a" / "u", "--json").stdout)
    assert {key: told[key] for key in ("num_bytes", "num_files", "num_tensors")} == {
        key: done[key] for key in ("num_bytes", "num_files", "num_tensors")
    }


def test_bad_input_is_one_line_and_status_one(truth: Truth, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    for arguments, said in (
        (("inspect", tmp_path / "nowhere"), "nowhere"),
        (("inspect", tmp_path / "empty"), "not a checkpoint"),
        (("convert", truth.folder, tmp_path / "taken"), "exists"),
        (("convert", truth.tag_folder, truth.tag_folder / "inside"), "inside the source"),
        (("convert", truth.folder, tmp_path / "file" / "target"), str(tmp_path / "file")),
        (("verify", truth.folder, tmp_path / "empty"), "not a checkpoint"),
    ):
        done = ullage(*arguments)
        assert done.returncode == 1, (arguments, done.stdout, done.stderr)
        assert said in one_line(done.stderr)
    assert not (truth.tag_folder / "inside").exists()


def test_wrong_usage_is_status_two(truth: Truth, tmp_path: Path) -> None:
    for arguments in (
        ("convert", truth.folder),
        ("convert", truth.folder, tmp_path / "t", "--to", "tarball"),
        ("convert", truth.folder, tmp_path / "t", "--workers", 0),
        ("convert", truth.folder, tmp_path / "t", "--dtype", "bfloat16"),
        ("convert", truth.folder, tmp_path / "t", "--weights-only"),
        ("inspect",),
    ):
        assert ullage(*arguments).returncode == 2, arguments
    assert list(tmp_path.iterdir()) == []


def test_8_bit_state_of_an_unknown_form_is_said_by_inspect_and_refused_by_convert_in_one_line(tmp_path: Path) -> None:
    from tests.checkpoint.test_carried_state import to_8bit
    from tests.support.checkpoints import edit

    written = write(tmp_path / "run", Recipe(stage=2, dp=2, groups=[{"w": (40, 40)}]))
    for rank, path in enumerate(sorted(written.tag_folder.glob("*optim_states.pt"))):
        edit(path, lambda c, r=rank: to_8bit(c["optimizer_state_dict"]["base_optimizer_state"]["state"][0], r))
    said = ullage("inspect", written.folder)
    assert said.returncode == 0, said.stdout
    assert (
        "the weights only can be converted: optimizer state state1 is quantised in a way that is not known"
        in said.stdout
    )
    done = ullage("convert", written.folder, tmp_path / "u")
    assert done.returncode == 1
    assert "state1 is quantised" in one_line(done.stderr)
    assert ullage("convert", written.folder, tmp_path / "st", "--to", "safetensors", "--weights-only").returncode == 0
    assert ullage("verify", written.folder, tmp_path / "st").returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "st"]


def test_a_page_that_cannot_be_written_is_one_line(truth: Truth, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ullage("inspect", truth.folder, "--html", tmp_path / "file" / "page.html")
    assert done.returncode == 1
    assert "a file cannot be written (" in one_line(done.stderr)


#: What Windows lacks.
WITHOUT = """
import os, sys
for module in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[module] = None
for name in ("pread", "preadv", "pwrite", "O_CLOEXEC", "getuid", "sched_getaffinity", "memfd_create", "posix_fadvise"):
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
