"""A DeepSpeed run goes on under FSDP2, tensor and context parallel: as it is, or by ``ullage convert --to dcp``."""

import json

import pytest

from tests.support import packing_script
from tests.support.fsdp_cases import run_jobs
from tests.support.launch import torchrun
from ullage import checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_a_zero_run_goes_on(tmp_path, stage):
    """Five steps under ZeRO on two processes; the last two again from the checkpoint after the third."""
    options = {"save_strategy": "steps", "save_steps": 3}
    torchrun(2, packing_script.__file__, tmp_path, json.dumps([["llama", stage, options]]), timeout=500)
    [result] = json.loads((tmp_path / "results0.json").read_text())
    checkpoint.convert(tmp_path / "checkpoint-3" / "global_step3", tmp_path / "dcp", format="dcp")
    shards = "checkpoint-3/global_step3"
    cases = [("dcp", [1, 1, 1], True), ("dcp", [2, 1, 1], True), ("dcp", [1, 2, 1], False), (shards, [1, 1, 2], True)]
    arguments = [{"folder": str(tmp_path / name), "mesh": mesh, "settings": kept} for name, mesh, kept in cases]
    arguments.append({**arguments[1], "folder": str(tmp_path / "checkpoint-3"), "resumes": True})
    alone, two = run_jobs([[1, [["continue_zero", arguments[0]]]], [2, [["continue_zero", a] for a in arguments[1:]]]])
    for rank in (*alone, *two):
        for case in rank:
            assert "error" not in case, case
            assert case["losses"] == pytest.approx(result["losses"][3:], rel=1e-5)
            assert (case["step"], case["left"]) == (5, [])
