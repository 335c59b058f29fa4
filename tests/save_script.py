"""Run by torchrun: rank 1 cannot write its part of the second checkpoint; both ranks say what they saw."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from ullage.training.saving import WholeCheckpointMixin


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


class Failing(WholeCheckpointMixin, Trainer):
    def _save_rng_state(self, output_dir):
        if self.state.global_step == 4 and self.args.process_index == 1:
            raise OSError("no space left on device")
        super()._save_rng_state(output_dir)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        disable_tqdm=True,
        max_steps=6,
        save_steps=2,
        per_device_train_batch_size=2,
        ddp_timeout=60,
    )
    trainer = Failing(model=Line(), args=arguments, train_dataset=data)
    try:
        trainer.train()
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    (folder / f"{arguments.process_index}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
