"""DeepSpeed's communication starts without a compiler; a lock that a killed process left is removed, a held one not."""

from __future__ import annotations

import os

import pytest

from tests.support import processes
from ullage.training import Trainer  # here, so that the forks have it and DeepSpeed

ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}


def without_a_compiler(folder):
    """Nothing to compile with, and an empty folder of extensions."""
    os.environ.update(CXX="no-such-compiler", PATH=str(folder), TORCH_EXTENSIONS_DIR=str(folder))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def start_communication(rank, world, folder):
    without_a_compiler(folder)
    import deepspeed

    from ullage.training.deepspeed import init_distributed

    before = vars(deepspeed.ops).get("__compatible_ops__")
    init_distributed()
    assert vars(deepspeed.ops).get("__compatible_ops__") is before
    return deepspeed.comm.comm.cdb.shm_comm_op is None


def make_a_trainer(rank, world, folder):
    """With transformers' own arguments, which tell DeepSpeed nothing."""
    without_a_compiler(folder)
    import deepspeed
    import torch
    import transformers

    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, deepspeed=ZERO, report_to=[])
    Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=[{"input": torch.zeros(2)}])
    return deepspeed.comm.comm.cdb.shm_comm_op is None


@pytest.mark.parametrize("start", [start_communication, make_a_trainer])
def test_deepspeeds_communication_starts_without_a_compiler(start, tmp_path):
    outcome = processes.run(start, 1, tmp_path, loads=("torch", "training"))
    assert processes.values(outcome) == [True]
    assert list(tmp_path.iterdir()) == []
