"""The example's own command lines, shortened."""

import json
import re

import pytest

from tests.support.launch import ROOT, torchrun

pytest.importorskip("megatron.core")

SCRIPT = ROOT / "examples" / "09_megatron_sft.py"
LENGTHS = {"type": "lognormal", "min_seq_len": 4, "max_seq_len": 64, "mean_seq_len": 20, "lognormal_sigma": 0.9}
MOCK = json.dumps({"mode": "distribution", **LENGTHS})
SMALL = ["--hidden-size", 64, "--train-iters", 4, "--global-batch-size", 12, "--sft-mock-dataset-config-json", MOCK]
STEP = re.compile(
    r"step (\d+): loss ([\d.]+), (\d+) microbatches, ullage ([\d.]+)%, imbalance ([\d.]+), ([\d.]+) model TFLOP/s a rank"
)


def run(processes, *flags):
    output = torchrun(processes, SCRIPT, *SMALL, *flags, timeout=400)
    steps = [tuple(map(float, found)) for found in STEP.findall(output)]
    assert [step[0] for step in steps] == [1, 2, 3, 4], output[-3000:]
    [summary] = re.findall(r"(packed \(\w+\)|padded): 4 steps, loss ([\d.]+) -> ([\d.]+), [\d,]+ tokens/s", output)
    assert (float(summary[1]), float(summary[2])) == (steps[0][1], steps[3][1])
    assert steps[3][1] < steps[0][1]
    return steps


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    ["--context-parallel-size", 2, "--tensor-model-parallel-size", 2],
    ["--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2],
    [
        *("--pipeline-model-parallel-size", 2, "--context-parallel-size", 2),
        *("--sequence-packing-scheduler", "dp_balanced"),
    ],
], ids=["cp2.tp2", "pp2.vpp2", "pp2.cp2"])  # fmt: skip
def test_packed_trains_as_padded(layout):
    in_sequence = ["--sequence-parallel"] * ("--tensor-model-parallel-size" in layout)
    packed = run(4, *layout, *in_sequence, "--sequence-packing", "--max-seqlen-per-dp-cp-rank", 96)
    padded = run(4, *layout)
    assert [step[1] for step in packed] == pytest.approx([step[1] for step in padded], abs=2e-4)
    assert all(few[2] < many[2] for few, many in zip(packed, padded))
    assert all(few[3] < many[3] for few, many in zip(packed, padded))


@pytest.mark.slow
def test_a_degree_for_each_microbatch():
    run(
        4, "--sequence-packing", "--sequence-packing-scheduler", "default_dynamic_cp", "--max-seqlen-per-dp-cp-rank", 32
    )
