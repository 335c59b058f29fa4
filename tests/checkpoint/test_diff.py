"""Differences of two checkpoints, against numpy on the same numbers."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ullage.checkpoint
from tests.support import real_zero
from tests.support.launch import ROOT, environment
from tests.support.real_zero import Recipe
from ullage.checkpoint.conversion import comparing


def folder(place: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    place.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config))
    return place


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"w": (40, 7), "b": (7,), "one": (1,), "scalar": (), "empty": (0, 4)}
    made = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    return {**made, "count": torch.tensor([seed, 3])}


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> real_zero.Truth:
    groups = [{"a.w": (9, 5), "a.b": (3,)}, {"c": (11,)}]
    recipe = Recipe(stage=2, dp=3, groups=groups, frozen={"f": (4,)}, buffers={"s": (2,)}, tied={"a.tied": "a.w"})
    return real_zero.write(tmp_path_factory.mktemp("zero") / "source", recipe)


def test_every_format_of_one_checkpoint_is_the_same_and_an_inventory_is_one_line(zero, tmp_path):
    inventory = ullage.checkpoint.read(zero.tag_folder)
    assert repr(inventory).startswith(f"Inventory({str(inventory.folder)!r}, zero: fp32, exp_avg, exp_avg_sq; ")
    assert len(repr(inventory)) < 400
    assert "array" not in repr(inventory.tensors[0])
    for format in ("universal", "safetensors", "dcp"):
        ullage.checkpoint.convert(zero.tag_folder, tmp_path / format, format=format, optimizer=True)
        found = ullage.checkpoint.diff(zero.tag_folder, tmp_path / format)
        assert found.differences == (), format
        assert not found
        assert found.num_tensors == 3 * 3 + 2 + 1  # the tied weight has two names
        assert found.num_elements == 3 * (45 + 3 + 11) + 4 + 2 + 45


def test_values_are_counted_and_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "_RANGE_BYTES", 64)  # many ranges for one tensor
    one, other = tensors(0), tensors(0)
    other["w"][3, 2] += 0.5
    other["w"][39, 6] = -2 * one["w"][39, 6]
    other["b"][1] = math.nan
    other["b"][2] = math.inf
    other["count"][0] += 4
    found = ullage.checkpoint.diff(folder(tmp_path / "one", one), folder(tmp_path / "other", other))
    by_name = {difference.name: difference for difference in found.differences}
    assert sorted(by_name) == ["b", "count", "w"]
    distance = np.abs(one["w"].double().numpy() - other["w"].double().numpy())
    larger = np.maximum(one["w"].double().abs().numpy(), other["w"].double().abs().numpy())
    assert by_name["w"].differing == 2
    assert by_name["w"].elements == 280
    assert by_name["w"].max_abs == distance.max()
    assert by_name["w"].max_relative == (distance / larger).max()
    assert (by_name["b"].differing, by_name["b"].not_finite) == (2, 2)
    assert str(by_name["b"]) == "b weight: 2 of 7 elements differ, 2 of them NaN or Inf"
    assert (by_name["count"].differing, by_name["count"].max_abs, by_name["count"].max_relative) == (1, 4.0, 1.0)
    assert {difference.kind for difference in found.differences} == {"values"}
    # the same NaN on both sides is no difference, and a zero of the other sign is one of its bytes alone
    one["b"][1], one["b"][2], one["scalar"], other["scalar"] = math.nan, math.inf, torch.tensor(0.0), torch.tensor(-0.0)
    found = ullage.checkpoint.diff(folder(tmp_path / "3", one), folder(tmp_path / "4", other), weights_only=True)
    assert sorted(d.name for d in found.differences) == ["count", "scalar", "w"]
    assert {d.name: (d.differing, d.max_abs) for d in found.differences}["scalar"] == (1, 0.0)


def test_what_is_missing_or_of_another_kind_is_told(tmp_path):
    one, other = tensors(0), tensors(0)
    del other["b"]
    other["extra"] = torch.ones(2)
    other["w"] = other["w"].reshape(7, 40)
    other["one"] = other["one"].to(torch.bfloat16)
    other["scalar"] = other["scalar"].double()
    found = ullage.checkpoint.diff(folder(tmp_path / "one", one), folder(tmp_path / "other", other))
    kinds = {difference.name: (difference.kind, difference.differing) for difference in found.differences}
    assert kinds == {
        "b": ("missing in second", 0),
        "extra": ("missing in first", 0),
        "w": ("shape", 0),
        "one": ("dtype", 1),
        "scalar": ("dtype", 0),
    }
    told = json.loads(json.dumps(found.to_dict()))
    assert told["equal"] is False
    assert len(told["differences"]) == 5


def test_steps_and_states_differ_by_name(zero, tmp_path):
    other = real_zero.write(tmp_path / "other", Recipe(stage=1, dp=2, groups=[{"a.w": (9, 5), "c": (11,)}]))
    found = ullage.checkpoint.diff(zero.tag_folder, other.tag_folder)
    assert {(d.name, d.key) for d in found.differences} == {
        *(("a.b", key) for key in ("weight", "exp_avg", "exp_avg_sq")), ("f", "weight"), ("s", "weight"), ("a.tied", "weight"),
    }  # fmt: skip
    weights = ullage.checkpoint.diff(zero.tag_folder, other.tag_folder, weights_only=True)
    assert {d.key for d in weights.differences} == {"weight"}


def command(*arguments: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ullage", *map(str, arguments)],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_commands_say_what_the_functions_find(zero, tmp_path):
    ullage.checkpoint.convert(zero.tag_folder, tmp_path / "st", format="safetensors", optimizer=True)
    other = folder(tmp_path / "other", {k: v + 1 for k, v in load_file(tmp_path / "st/model.safetensors").items()})
    status, out, _ = command("diff", zero.tag_folder, tmp_path / "st")
    assert status == 0
    assert out == "12 tensors with 228 elements compared: all the same\n"
    status, out, _ = command("diff", tmp_path / "st", other, "--weights-only", "--json")
    assert status == 1
    assert len(json.loads(out)["differences"]) == 6
    status, out, _ = command("inspect", tmp_path / "st")
    assert status == 0
    assert "padding" not in out
    assert "ranks" not in out
