"""One rank of a Hugging Face Trainer under DeepSpeed, for tests that resume it from a checkpoint."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.support.checkpoints import flip
from tests.support.processes import raised
from tests.support.small_runs import quiet
from tests.support.zero_worker import FEATURES, GLOBAL_BATCH, Job, build, config


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


def arguments(job: Job, folder: Path | None, **options: Any) -> Any:
    from transformers import TrainingArguments

    made = {key: value for key, value in config(job).items() if key != "steps_per_print"}
    options = {"max_steps": 8, "save_steps": 3, **options}
    rates = {"learning_rate": 1e-2, "weight_decay": 0.1}
    # accelerate makes of 0 what DeepSpeed's config lacks: 1
    options = {"save_strategy": "steps", "max_grad_norm": 0.0 if job.stage else 1.0, **rates, **options}
    size = {"per_device_train_batch_size": GLOBAL_BATCH // job.world, "remove_unused_columns": False}
    return quiet(folder, TrainingArguments, deepspeed=made if job.stage else None, **size, **options)


def losses(trainer: Any) -> dict[int, float]:
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


def train(job: Job, rank: int) -> dict[str, Any]:
    """Eight steps of training, or, from ``job.load_from``, what is left of them; the losses by step."""
    from transformers import Trainer

    from ullage.training.deepspeed import checkpoints_loaded_by

    trainer = Trainer(model=Wrapped(build(job)), args=arguments(job, job.save_to), train_dataset=Rows())
    with checkpoints_loaded_by(lambda engine, path, strict: False):
        trainer.train(resume_from_checkpoint=str(job.load_from) if job.load_from else None)
    assert job.load_from is None or trainer.state.global_step == 8
    return {"losses": losses(trainer)}


def train_ours(job: Job, rank: int) -> dict[str, Any]:
    """As :func:`train`, by our Trainer, with what it says beforehand of a checkpoint of another layout."""
    from ullage.training import Trainer

    trainer = Trainer(model=Wrapped(build(job)), args=arguments(job, job.save_to), train_dataset=Rows())
    said = str(trainer.conversion_for(job.load_from)) if job.load_from else ""
    trainer.train(resume_from_checkpoint=str(job.load_from) if job.load_from else None)
    return {"losses": losses(trainer), "said": said}


#: files of a checkpoint at stage 2 on two ranks
FILES = (
    "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "global_step4/mp_rank_00_model_states.pt",
    "latest",
    "rng_state_1.pth",
    "trainer_state.json",
)


DAMAGE = {"flipped": flip, "cut": lambda path: os.truncate(path, path.stat().st_size // 2), "deleted": Path.unlink}


def damage(job: Job, rank: int) -> dict[str, Any]:
    """Five steps inside an epoch of eight; what is said of damage of every kind, and what is trained from what."""
    from ullage.training import Trainer

    assert job.save_to is not None

    def make(folder: Path) -> Any:
        options = arguments(job, folder, max_steps=5, save_steps=2)
        return Trainer(model=Wrapped(build(job)), args=options, train_dataset=Rows())

    def copy(name: str, without: str, do: Any) -> Path:
        folder = job.results / name.replace("/", "-")
        if rank == 0:
            shutil.copytree(job.save_to, folder, ignore=shutil.ignore_patterns(without))  # pyright: ignore
            do(folder)
        torch.distributed.barrier()
        return folder

    whole = make(job.save_to)
    whole.train()
    said = {}
    for name, kind in zip(FILES, [*DAMAGE, *DAMAGE], strict=True):
        folder = copy(f"{kind}-{name}", "checkpoint-5", lambda folder: DAMAGE[kind](folder / "checkpoint-4" / name))  # noqa: B023
        error = raised(lambda: make(folder).train(resume_from_checkpoint=str(folder / "checkpoint-4")))  # noqa: B023
        said[name, kind] = (error or "trained").replace(str(folder), "RUN")
    bare = make(copy("bare", "checkpoint-5", lambda folder: flip(folder / "checkpoint-4" / FILES[1])))
    bare.train(resume_from_checkpoint=True)
    last = make(copy("last", "nothing", lambda folder: None))
    output = last.train(resume_from_checkpoint=True)
    names = sorted(path.name for path in Path(last.args.output_dir).glob("checkpoint-*"))
    return {
        "said": said,
        "losses": losses(whole),
        "bare": losses(bare),
        "last": (losses(last), output.global_step, names),
        "aside": (Path(bare.args.output_dir) / "checkpoint-4.damaged" / "damaged.txt").exists(),
    }
