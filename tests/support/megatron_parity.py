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

from tests.support.megatron_cpu import on_cpu  # noqa: E402
from tests.support.megatron_model import (  # noqa: E402
    Optimizer,
    build,
    config_of,
    gradients,
    one_by_one,
    relative_error,
    run_step,
)
from ullage.datasets import MockSamples  # noqa: E402

STEPS, BATCH = 4, 11
LENGTHS = {"type": "lognormal", "mode": "distribution", "min_seq_len": 1, "max_seq_len": 40}


def batches():
    config = {**LENGTHS, "mean_seq_len": 12, "lognormal_sigma": 0.9}
    data = MockSamples(config, n=STEPS * BATCH, seed=3, vocab_size=64, pad_to_multiple_of=8)
    return [[data[i] for i in range(k * BATCH, (k + 1) * BATCH)] for k in range(STEPS)]


def sizes(case):
    found = {name: int(number) for name, number in re.findall(r"(dp|tp|pp|cp|vpp)(\d+)", case)}
    found.pop("dp", None)
    options: dict = {"sp": "sp" in case.split("+")}
    if "mtp" in case:
        options["mtp_num_layers"] = 1
    if "middle" in case:  # the prediction layer alone on the third of four stages, the loss on the last
        options["pipeline_model_parallel_layout"] = "Etttt|tttt|m|L"
    if "auto" in case:
        options |= {"scheduler": "default_dynamic_cp", "capacity": 32}
    return {**found, **options}


def alone(**options):
    [model] = build(config_of(**options), wrapped=False)
    return model


def run_case(case, samples, losses, expected):
    options = sizes(case)
    state.initialize_model_parallel(
        options.get("tp", 1),
        options.get("pp", 1),
        options.get("vpp"),
        context_parallel_size=options.get("cp", 1),
        # The stages that hold the word embedding: the first, and the one that predicts.
        get_embedding_ranks=(lambda ranks, *_: [ranks[0], ranks[2]]) if "middle" in case else None,
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
        expected = {}
        if any("mtp" not in case for case in cases):
            expected[False] = one_by_one(alone(), samples)
        if any("mtp" in case for case in cases):
            expected[True] = one_by_one(alone(mtp_num_layers=1), samples)
        state.destroy_model_parallel()
        for case in cases:
            run_case(case, samples, *expected["mtp" in case])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
