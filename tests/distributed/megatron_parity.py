"""torchrun --nproc_per_node N megatron_parity.py CASE...: packed under each layout against one sequence at a time.

A case is written as its sizes: ``tp2+sp``, ``pp2.vpp2``, ``dp2.cp2``. All run in one launch; the rest of the world is
data-parallel. Prints one line of JSON a case.
"""

import json
import re
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as state  # noqa: E402

from tests.distributed.megatron_model import (  # noqa: E402
    Optimizer,
    build,
    config_of,
    gradients,
    one_by_one,
    relative_error,
    run_step,
)
from ullage.datasets import MockSamples  # noqa: E402
from ullage.engines.megatron import on_cpu  # noqa: E402

STEPS, BATCH = 4, 11
LENGTHS = {"type": "lognormal", "mode": "distribution", "min_seq_len": 1, "max_seq_len": 40}


def batches():
    config = {**LENGTHS, "mean_seq_len": 12, "lognormal_sigma": 0.9}
    data = MockSamples(config, n=STEPS * BATCH, seed=3, vocab_size=64, multiple_of=8)
    return [[data[i] for i in range(k * BATCH, (k + 1) * BATCH)] for k in range(STEPS)]


def sizes(case):
    found = {name: int(number) for name, number in re.findall(r"(dp|tp|pp|cp|vpp)(\d+)", case)}
    found.pop("dp", None)
    options = {"sp": "sp" in case.split("+")}
    if "auto" in case:
        options |= {"scheduler": "default_dynamic_cp", "capacity": 32}
    return {**found, **options}


def run_case(case, samples, losses, expected):
    options = sizes(case)
    state.initialize_model_parallel(
        options.get("tp", 1), options.get("pp", 1), options.get("vpp"), context_parallel_size=options.get("cp", 1)
    )
    begin = time.monotonic()
    config = config_of(**options)
    chunks = build(config)
    optimizer = Optimizer(chunks)
    found, error, degrees, totals = [], None, set(), []
    for batch in samples:
        loss, step = run_step(chunks, batch, config)
        if error is None:
            error = relative_error(gradients(chunks), expected)
        found.append(loss)
        degrees |= set(step.plan.degrees.reshape(-1).tolist())
        totals.append([step.num_microbatches, step.num_tokens, step.sum_squared_lengths])
        optimizer.step()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, totals)
    record = {
        "case": case,
        "gradient error": error,
        "losses": found,
        "expected": losses,
        "degrees": sorted(degrees),
        "same totals": all(other == totals for other in everyone),
        "totals": totals,
        "seconds": round(time.monotonic() - begin, 1),
    }
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)
    state.destroy_model_parallel()


def main(cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples = batches()
    with on_cpu(required=True):
        state.initialize_model_parallel()
        losses, expected = one_by_one(samples)
        state.destroy_model_parallel()
        for case in cases:
            run_case(case, samples, losses, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
