"""The example of ``ullage.engines.fsdp``: the same losses on one process and on two, and on from its own checkpoint."""

import os
import re

import pytest

from tests.support.examples import run_example
from tests.support.launch import ROOT, real_torchrun, torchrun

EXAMPLE = ROOT / "examples" / "10_fsdp_context_parallel.py"
SMALL = ("--hidden_size", 32, "--global_batch_size", 8, "--max_length", 256, "--capacity", 1024)


def losses(output):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.slow
def test_two_processes_print_what_one_prints(tmp_path):
    whole = losses(run_example(EXAMPLE.name, *SMALL, "--steps", 4).stdout)
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    saved = tmp_path / "there" / "checkpoint-2"
    first = real_torchrun(2, EXAMPLE, *SMALL, "--steps", 2, "--cp", 2, "--output_dir", saved.parent)
    then = torchrun(2, EXAMPLE, *SMALL, "--steps", 4, "--tp", 2, "--resume", saved)
    assert losses(first) + losses(then) == pytest.approx(whole, abs=2e-5)
    assert ".metadata" in os.listdir(saved / "model_and_optimizer")
