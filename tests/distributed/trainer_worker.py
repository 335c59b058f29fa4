"""One rank of a Hugging Face Trainer under DeepSpeed, for tests that resume it from a universal checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from tests.distributed.zero_worker import FEATURES, GLOBAL_BATCH, Job, build, config


class Rows(Dataset):
    """Rows that depend on their number only."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": torch.sin(x.sum())}


class Wrapped(torch.nn.Module):
    """The network with the loss where the Trainer looks for it."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.net.norm.eval()
        return {"loss": self.net(x, y)}


def train(job: Job, rank: int) -> dict[str, Any]:
    """Eight steps of training, or, from ``job.load_from``, what is left of them; the losses by step."""
    from transformers import Trainer, TrainingArguments

    from ullage.training.deepspeed import resume_from_universal

    made = {key: value for key, value in config(job).items() if key != "steps_per_print"}
    arguments = TrainingArguments(
        output_dir=str(job.save_to),
        deepspeed=made,
        use_cpu=True,
        per_device_train_batch_size=GLOBAL_BATCH // job.world,
        max_steps=8,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.0,
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model=Wrapped(build(job)), args=arguments, train_dataset=Rows())
    with resume_from_universal():
        trainer.train(resume_from_checkpoint=str(job.load_from) if job.load_from else None)
    assert job.load_from is None or trainer.state.global_step == 8
    return {"losses": {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}}
