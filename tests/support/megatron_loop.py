"""torchrun --nproc_per_node N megatron_loop.py CASE...: a script packed by two lines, against one sequence at a time.

A case is written as for ``megatron_parity.py``. Ten steps and two of evaluation each; prints one line of JSON per case.
"""

import json
import sys
import time
import warnings
from contextlib import contextmanager

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as state  # noqa: E402

from tests.support import megatron_script as script  # noqa: E402
from tests.support.megatron_cpu import on_cpu  # noqa: E402
from tests.support.megatron_model import Optimizer, build, config_of, one_by_one  # noqa: E402
from tests.support.megatron_parity import LENGTHS, sizes  # noqa: E402
from ullage.core.replacing import replaced  # noqa: E402
from ullage.datasets import MockSamples  # noqa: E402
from ullage.engines.megatron import PackingScheduler, get_batch_on_this_rank_for_sequence_packing  # noqa: E402

STEPS, EVALUATIONS, BATCH, LAYERS, CAPACITY = 10, 2, 24, 4, 48


def samples_of(seed):
    """The sequences of all steps, 1 to 40 tokens."""
    config = {**LENGTHS, "mean_seq_len": 12, "lognormal_sigma": 0.9}
    count = (STEPS + EVALUATIONS) * BATCH
    data = MockSamples(config, n=count, seed=seed, vocab_size=64, pad_to_multiple_of=8)
    return [data[i] for i in range(count)]


def double(**options):
    config = config_of(layers=LAYERS, params_dtype=torch.float64, **options)
    config.pipeline_dtype = torch.float64
    return config


def expected_losses(samples):
    """The losses of a plain loop in this process alone."""
    [model] = build(double(), wrapped=False)
    return one_by_one(model, batches_of(samples), EVALUATIONS)[0]


def batches_of(samples):
    return [samples[step * BATCH : (step + 1) * BATCH] for step in range(STEPS + EVALUATIONS)]


def script_config(**options):
    """A config as a script makes it, whose flags have no place for packing."""
    config = double(**options)
    config.variable_seq_lengths, config.max_seqlen_per_dp_cp_rank = False, None
    del config.sequence_packing_scheduler
    return config


def set_arguments():
    script.ARGS.__dict__.update(
        global_batch_size=BATCH, micro_batch_size=1, seq_length=64, train_iters=STEPS, eval_iters=EVALUATIONS,
        eval_global_batch_size=BATCH, parameters=1000, num_layers=LAYERS, hidden_size=32,
    )  # fmt: skip


def counted(samples):
    """Σlength and Σlength² of the sequences one by one."""
    lengths = [int(sample["original_seq_len"]) for sample in samples]
    return [sum(lengths), sum(length**2 for length in lengths)]


@contextmanager
def packed(scheduler):
    """The script with the two lines that pack it: its loop's function, and its forward step's batch."""

    def get_batch(data_iterator, vp_stage=None):
        virtual = state.get_virtual_pipeline_model_parallel_world_size()
        return get_batch_on_this_rank_for_sequence_packing(data_iterator, virtual, vp_stage=vp_stage)[:6]

    plain = script.get_forward_backward_func
    with (
        replaced(script, "get_forward_backward_func", lambda: scheduler(plain())),
        replaced(script, "get_batch", get_batch),
    ):
        yield scheduler


def run_case(case, samples, expected):
    """What the script's loop found under a layout, equal on every rank."""
    options = sizes(case)
    virtual = options.get("vpp")
    state.initialize_model_parallel(
        options.get("tp", 1), options.get("pp", 1), virtual, context_parallel_size=options.get("cp", 1)
    )
    begin = time.monotonic()
    capacity, scheduler = options.pop("capacity", CAPACITY), options.pop("scheduler", None)
    config = script_config(**options)
    set_arguments()
    model = build(config)
    with packed(PackingScheduler(capacity, scheduler)) as training:
        iterators = script.data_iterators(samples, virtual)
        losses = script.train(script.forward_step, model, Optimizer(model), iterators)
        losses += script.evaluate(script.forward_step, iterators, model)
    step = training.step
    mine = {
        "losses": losses,
        "counts": [step.num_tokens, step.sum_squared_lengths],
        "evaluated": training.evaluation.num_tokens,
        "microbatches": step.num_microbatches,
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = [part["losses"] for part in everyone if part["losses"][0] is not None]
    record = {
        "case": case,
        "processes": len(everyone),
        "losses": found[0],
        "expected": expected,
        "error": max(abs(a - b) / abs(b) for part in found for a, b in zip(part, expected, strict=True)),
        "counts": [part["counts"] for part in everyone],
        "counted": counted(samples[(STEPS - 1) * BATCH : STEPS * BATCH]),
        "evaluated": [training.evaluation.num_tokens, counted(samples[-BATCH:])[0]],
        "microbatches": sorted({part["microbatches"] for part in everyone}),
        "script's microbatches": BATCH // state.get_data_parallel_world_size(),
        "seconds": round(time.monotonic() - begin, 1),
    }
    state.destroy_model_parallel()
    return record


def main(cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples = samples_of(seed=11)
    with on_cpu(required=True):
        state.initialize_model_parallel()
        expected = expected_losses(samples)
        state.destroy_model_parallel()
        for case in cases:
            record = run_case(case, samples, expected)
            if dist.get_rank() == 0:
                print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
