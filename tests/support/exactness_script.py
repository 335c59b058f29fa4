"""Steps of the real Trainer on real processes, each against the same step by hand; run by torchrun.

``exactness_script.py FOLDER FIRST LAST``: a run of ``STEPS`` steps for each seed from FIRST to before LAST. Rank 0
compares the gradient, after its reduction, with that of the step's samples one by one at the same weights. Each rank
writes ``results<rank>.json``.
"""

import os
import sys

import numpy as np
import torch
from transformers import TrainerCallback

from tests.support import exactness
from tests.support.small_runs import leave, packed_steps

STEPS, BATCH, CAPACITY = 4, 8, 16
STRATEGIES = ("balanced", "next_fit")


def describe(seed):
    """What the run of a seed is: every family in turn, and each with every weighting in time."""
    families = list(exactness.FAMILIES)
    family = families[seed % len(families)]
    others = ("drop", "error") if exactness.FAMILIES[family][1] == "target" else ("truncate", "drop", "error")
    return {
        "family": family,
        "weighting": exactness.WEIGHTINGS[(seed % len(families) + seed // len(families)) % 3],
        "strategy": STRATEGIES[seed % 2],
        "oversize": others[seed % len(others)],
        "dtype": list(exactness.DTYPES)[seed // 2 % 2],
    }


def make_samples(seed, run):
    rng = np.random.default_rng(seed)
    low = 2 if exactness.FAMILIES[run["family"]][1] == "target" else 1
    longest = CAPACITY if run["oversize"] == "error" else 2 * CAPACITY
    lengths = [CAPACITY, low, *rng.integers(low, longest + 1, STEPS * BATCH - 2).tolist()]
    return [exactness.make_sample(rng, run["family"], n, run["weighting"], rng.random() < 0.2) for n in lengths]


def kept(samples, run):
    """The samples of a step as they are trained on."""
    if run["oversize"] == "truncate":
        return [exactness.cut(sample, CAPACITY) for sample in samples]
    return [sample for sample in samples if exactness.num_tokens(run["family"], sample) <= CAPACITY]


class Compare(TrainerCallback):
    """Compares each step's gradient before the optimizer takes it."""

    def __init__(self, run, samples):
        self.run, self.samples, self.found = run, samples, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if args.process_index:
            return
        run, first = self.run, state.global_step * BATCH
        alone = exactness.unpacked_model(run["family"], run["dtype"])
        alone.load_state_dict(model.state_dict())
        step = kept(self.samples[first : first + BATCH], run)
        _, by_hand = exactness.gradient_by_hand(alone, run["family"], run["weighting"], step)
        self.found.append(exactness.difference(exactness.flat_gradient(model), by_hand))


def compare(seed, folder):
    """The differences of a run's steps, and what was run."""
    run, world = describe(seed), int(os.environ.get("WORLD_SIZE", 1))
    samples = make_samples(seed, run)
    trainer = exactness.trainer_of(
        run["family"], run["weighting"], run["dtype"], folder, samples, packing_capacity=CAPACITY, max_steps=STEPS,
        packing_plan_strategy=run["strategy"], packing_oversize=run["oversize"], learning_rate=0.05, optim="sgd",
        per_device_train_batch_size=BATCH // world, train_sampling_strategy="sequential", max_grad_norm=0.0,
    )  # fmt: skip
    watch = Compare(run, samples)
    trainer.add_callback(watch)
    steps = packed_steps(trainer)
    trainer.train()
    empty = [sum(not len(microbatch) for microbatch in step.microbatches) for step in steps]
    return {**run, "seed": seed, "differences": watch.found, "empty microbatches": empty}


if __name__ == "__main__":
    folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    leave(folder, [compare(seed, folder) for seed in range(first, last)])
