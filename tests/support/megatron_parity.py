"""torchrun --nproc_per_node N megatron_parity.py CASE...: packed under each layout against one sequence at a time.

A Megatron loop packed by two lines: ``PackingScheduler`` around its ``forward_backward_func``, and our batches in its
forward step. A case is written as its sizes: ``tp2+sp``, ``pp2.vpp2``, ``dp2.cp2``, in float64 with ``+double``. All run
in one launch; the rest of the world is data-parallel. Prints one line of JSON a case.
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
from ullage.engines.megatron import PackingScheduler  # noqa: E402

#: Of the batches the last is of evaluation.
STEPS, EVALUATED, BATCH = 4, 1, 11
LENGTHS = {"type": "lognormal", "mode": "distribution", "min_seq_len": 1, "max_seq_len": 40}


def batches():
    config = {**LENGTHS, "mean_seq_len": 12, "lognormal_sigma": 0.9}
    count = (STEPS + EVALUATED) * BATCH
    data = MockSamples(config, n=count, seed=3, vocab_size=64, pad_to_multiple_of=8)
    return [[data[i] for i in range(begin, begin + BATCH)] for begin in range(0, count, BATCH)]


def model_options(case):
    """What the model of a case has in one process too."""
    options = {"mtp_num_layers": 1} if "mtp" in case else {}
    return options | ({"dtype": torch.float64} if "double" in case else {})


def sizes(case):
    found = {name: int(number) for name, number in re.findall(r"(dp|tp|pp|cp|vpp)(\d+)", case)}
    found.pop("dp", None)
    options = {**found, **model_options(case), "sp": "sp" in case.split("+")}
    if "middle" in case:  # the prediction layer alone on the third of four stages, the loss on the last
        options["pipeline_model_parallel_layout"] = "Etttt|tttt|m|L"
    return options


def expected_of(case, samples):
    """Losses of one sequence at a time in this process alone, and the gradients of the first step."""
    state.initialize_model_parallel()
    [model] = build(config_of(**model_options(case)), wrapped=False)
    found = one_by_one(model, samples, EVALUATED)
    state.destroy_model_parallel()
    return found


def run_case(case, samples, losses, expected):
    """What the loop found under a layout, on every rank."""
    options = sizes(case)
    state.initialize_model_parallel(
        options.get("tp", 1), options.get("pp", 1), options.get("vpp"), context_parallel_size=options.get("cp", 1),
        # The stages that hold the word embedding: the first, and the one that predicts.
        get_embedding_ranks=(lambda ranks, *_: [ranks[0], ranks[2]]) if "middle" in case else None,
    )  # fmt: skip
    begin = time.monotonic()
    config = config_of(**options)
    chunks = build(config)
    optimizer = Optimizer(chunks)
    scheduler = PackingScheduler(32, "default_dynamic_cp") if "auto" in case else PackingScheduler(64)
    found, error, degrees, totals = [], None, set(), []
    for number, batch in enumerate(samples):
        is_trained = number < STEPS
        loss, step = run_step(chunks, batch, config, scheduler, not is_trained)
        if error is None:
            error = relative_error(gradients(chunks), expected)
        found.append(loss)
        degrees |= set(step.plan.degrees.reshape(-1).tolist())
        totals.append([step.num_microbatches, step.num_tokens, step.sum_squared_lengths])
        if is_trained:
            optimizer.step()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, totals)
    lengths = [[int(sample["original_seq_len"]) for sample in batch] for batch in samples]
    record = {
        "case": case, "processes": len(everyone), "gradient error": error, "losses": found, "expected": losses,
        "error": max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)),
        "degrees": sorted(degrees), "same totals": all(other == totals for other in everyone), "totals": totals,
        "counted": [[sum(batch), sum(n * n for n in batch)] for batch in lengths],
        "microbatches": sorted({step[0] for step in totals}), "seconds": round(time.monotonic() - begin, 1),
        "script's microbatches": -(-BATCH // state.get_data_parallel_world_size()),
    }  # fmt: skip
    state.destroy_model_parallel()
    return record


def main(cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples, expected = batches(), {}
    with on_cpu(required=True):
        for case in cases:
            kind = str(model_options(case))
            if kind not in expected:
                expected[kind] = expected_of(case, samples)
            record = run_case(case, samples, *expected[kind])
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
