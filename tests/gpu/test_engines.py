"""Training on GPUs against the same training on the CPU, each in processes of its own: Trainer, ZeRO, FSDP, Megatron.

``cases.py`` runs a case and writes its numbers; here it runs once as the machine is and once without its GPUs.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.cases import CASES
from tests.support.launch import ROOT, environment


def numbers(name, folder, device, processes=1):
    """What each rank wrote. ``device``: "cpu" hides the GPUs."""
    folder.mkdir()
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, "-m", "tests.gpu.cases", name, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**hidden), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def assert_near(found, expected, tolerance, where=""):
    """The same tree of numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_near(found[name], expected[name], tolerance, f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected)):
            assert_near(one, other, tolerance, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=1e-6), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", CASES)
def test_training_on_the_device_is_the_cpus(device, name, tmp_path):
    case = CASES[name]
    for module in case.needs:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    if device.type == "cuda" and torch.cuda.device_count() < case.processes:
        pytest.skip(f"needs {case.processes} GPUs, found {torch.cuda.device_count()}")
    found = numbers(name, tmp_path / "device", device.type, case.processes)
    expected = numbers(name, tmp_path / "cpu", "cpu", case.processes)
    for one, other in zip(found, expected, strict=True):
        assert one.pop("device") == device.type
        assert other.pop("device") == "cpu"
        assert one
        assert_near(one, other, case.tolerance)


def test_no_gpu_is_said_and_is_no_failure_unless_one_is_required():
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py")]
    for required, status in (("", 0), ("1", 5)):
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": required, "ULLAGE_TEST_DEVICE": ""}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == "no GPU: nothing was run\n"
        assert done.returncode == status
