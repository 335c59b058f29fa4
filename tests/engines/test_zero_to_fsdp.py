"""A DeepSpeed run goes on under FSDP2, tensor and context parallel, through ``ullage convert --to dcp``."""

import json

import pytest
import torch

from tests.support import packing_script, real_zero
from tests.support.fsdp_cases import make_model, run_jobs
from tests.support.launch import torchrun
from ullage import checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_zero_run_goes_on(tmp_path, stage):
    """Five steps under ZeRO on two processes; the last two again from the checkpoint after the third."""
    options = {"save_strategy": "steps", "save_steps": 3}
    torchrun(2, packing_script.__file__, tmp_path, json.dumps([["llama", stage, options]]), timeout=500)
    [result] = json.loads((tmp_path / "results0.json").read_text())
    checkpoint.convert(tmp_path / "checkpoint-3" / "global_step3", tmp_path / "dcp", format="dcp")
    meshes = [([1, 1, 1], True), ([2, 1, 1], True), ([1, 2, 1], False), ([1, 1, 2], True)]
    arguments = [{"folder": str(tmp_path / "dcp"), "mesh": mesh, "settings": kept} for mesh, kept in meshes]
    alone, two = run_jobs([[1, [["continue_zero", arguments[0]]]], [2, [["continue_zero", a] for a in arguments[1:]]]])
    for rank in (*alone, *two):
        for case in rank:
            assert "error" not in case, case
            assert case["losses"] == pytest.approx(result["losses"][3:], rel=1e-5)
            assert case["step"] == 5


@pytest.mark.parametrize("stage", [1, 3])
def test_every_element_arrives(tmp_path, stage):
    """Known values in every element of weights and moments, written by DeepSpeed's own code on three ranks."""
    shapes = {name: tuple(parameter.shape) for name, parameter in make_model().named_parameters()}
    names = list(shapes)
    groups = [{name: shapes[name] for name in names[::2]}, {name: shapes[name] for name in names[1::2]}]
    truth = real_zero.write(tmp_path / "run", real_zero.Recipe(stage=stage, dp=3, groups=groups))
    checkpoint.convert(truth.folder, tmp_path / "dcp", format="dcp")
    told = {name: torch.from_numpy(truth.tensor(name, "fp32")) for name in names}
    told |= {f"{n}/{key}": torch.from_numpy(truth.tensor(n, key)) for n in names for key in ("exp_avg", "exp_avg_sq")}
    torch.save(told, tmp_path / "truth.pt")
    case = {"folder": str(tmp_path / "dcp"), "truth": str(tmp_path / "truth.pt")}
    [ranks] = run_jobs([[4, [["load_zero", {**case, "mesh": mesh}] for mesh in ([4, 1, 1], [2, 1, 2], [1, 2, 2])]]])
    for rank in ranks:
        for found in rank:
            assert "error" not in found, found
            assert found["differing"] == []
            assert found["compared"] == 3 * len(names)
