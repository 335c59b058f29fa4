"""Run by torchrun: what two ranks say where a checkpoint is not what was written."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from ullage.training import Trainer


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def make(folder):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        disable_tqdm=True,
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        ddp_timeout=60,
    )
    return Trainer(model=Line(), args=arguments, train_dataset=data)


def attempt(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resumed(folder, change, lines, which=None):
    """Changes the second of two checkpoints, on one rank, and goes on from it: the last step, what is said, the rest."""
    source = folder.parent / "whole"
    if dist.get_rank() == 0:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoint-6"))
        change(folder / "checkpoint-4")
    dist.barrier()
    lines.said.clear()
    trainer = make(folder)
    outcome = attempt(lambda: trainer.train(resume_from_checkpoint=which or str(folder / "checkpoint-4")).global_step)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    dist.barrier()
    return {"outcome": outcome, "said": list(lines.said), "losses": losses}


def without(*names):
    return lambda checkpoint: [(checkpoint / name).unlink() for name in names]


def shorten(checkpoint):
    os.truncate(checkpoint / "rng_state_1.pth", 100)


def enlarge(checkpoint):
    """As written by one process more, of which there was no random state."""
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "rng_state_0.pth").rename(checkpoint / "rng_state.pth")
    (checkpoint / "rng_state_1.pth").unlink()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    said = {}
    whole = make(folder / "whole")
    whole.train()
    lines = Lines()
    logging.getLogger("ullage").addHandler(lines)
    for name, change, which in (
        ("deleted", without("rng_state_1.pth"), None),
        ("cut", shorten, None),
        ("bare", shorten, True),
        ("older", without("manifest.json", "rng_state_1.pth"), None),
        ("fewer", enlarge, None),
    ):
        said[name] = resumed(folder / name, change, lines, which)
    said["losses"] = [row["loss"] for row in whole.state.log_history if "loss" in row]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
