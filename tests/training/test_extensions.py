"""DeepSpeed's communication starts without a compiler, under transformers' own arguments too."""

from __future__ import annotations

import os

from tests.support import processes
from ullage.training import Trainer  # here, so that the fork has it and DeepSpeed

ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}


def make_a_trainer(rank, world, folder):
    """With nothing to compile with, an empty folder of extensions, and arguments that tell DeepSpeed nothing."""
    os.environ.update(CXX="no-such-compiler", PATH=str(folder), TORCH_EXTENSIONS_DIR=str(folder))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import deepspeed
    import torch
    import transformers

    before = vars(deepspeed.ops).get("__compatible_ops__")
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, deepspeed=ZERO, report_to=[])
    Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=[{"input": torch.zeros(2)}])
    assert vars(deepspeed.ops).get("__compatible_ops__") is before
    return deepspeed.comm.comm.cdb.shm_comm_op is None


def test_deepspeeds_communication_starts_without_a_compiler(tmp_path):
    assert processes.values(processes.run(make_a_trainer, 1, tmp_path, loads=("torch", "training"))) == [True]
    assert list(tmp_path.iterdir()) == []
