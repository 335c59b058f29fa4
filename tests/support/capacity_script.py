"""Packed training with a capacity that is found, then with the same number; run by torchrun.

``capacity_script.py FOLDER '[[0], [3]]'``: at these ZeRO stages; "memory": how much of it the steps really take.
"""

import os
import re
from pathlib import Path

import psutil
from transformers import TrainerCallback

from tests.support import packing_script
from tests.support.small_runs import logged, serve
from ullage.core.replacing import replaced
from ullage.training.setup.device_memory import DeviceMemory

LENGTHS = [300, 40, 170, 290, 7, 120, 260, 33, 300, 1, 90, 210] * 3


class Peaks(TrainerCallback):
    """The most that the process held in each step, in bytes."""

    def __init__(self, peaks):
        self.peaks = peaks

    def on_step_begin(self, args, state, control, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")

    def on_step_end(self, args, state, control, **kwargs):
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
        self.peaks.append(int(peak) * 1024)


def train(folder, stage=0, name="llama", lengths=LENGTHS, resume=None, callbacks=(), **options):
    options = {"max_steps": 3, "packing_capacity": "auto", **options}
    trainer = packing_script.make_trainer(name, folder, stage, packing_script.make_samples(lengths), **options)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    losses, norms = zip(*logged(trainer), strict=True)
    return {
        "capacity": trainer._packer.options.capacity,
        "kept": trainer.state.stateful_callbacks.get("ullage_packing_capacity"),
        "losses": list(losses),
        "norms": list(norms),
        "steps": trainer.state.global_step,
    }


def real_peak(folder):
    """The most that a process held in three steps, above what it was allowed; a wide model, so that memory counts."""
    packing_script.SIZES.update(hidden_size=128, intermediate_size=384)
    allowed = psutil.Process().memory_info().rss + 200 * 2**20
    peaks = []
    options = {"per_device_train_batch_size": 64, "callbacks": [Peaks(peaks)]}
    found = train(folder, lengths=[500] * 192, packing_memory=str(allowed), **options)
    return {**found, "allowed": allowed, "peaks": [peak - allowed for peak in peaks]}


def found_and_given(folder, stage):
    """A run whose capacity is found, and one with the number. Rank 1 may hold less: by itself it would find another."""
    if stage == "memory":
        return real_peak(folder)
    size = (8 if os.environ.get("RANK") == "1" else 10) * 2**20
    with replaced(DeviceMemory, "limit", lambda memory, given: memory.ground + size):
        found = train(folder, stage)
    return [found, train(folder, stage, packing_capacity=found["capacity"])]


if __name__ == "__main__":
    serve(found_and_given)
