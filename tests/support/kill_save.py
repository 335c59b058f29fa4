"""Runs that are killed while a checkpoint is written in the background, and what is left to go on from."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import processes

STEPS, EVERY = 9, 3


def train(rank: int, folder: str, resume: bool, told: str, width: int) -> None:
    """One run with a save after every third step; a line of the file ``told`` says when the copy of each was made."""
    import torch

    from ullage.training import Trainer, TrainingArguments
    from ullage.training.saving.background import BackgroundSave

    torch.set_num_threads(1)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, width), torch.nn.Linear(width, width)

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            hidden = torch.nn.functional.dropout(self.two(self.one(x).relu()), 0.1)
            return {"loss": (hidden.sum(-1) - labels).square().mean()}

    begin = BackgroundSave.begin

    def heard(self: Any, *args: Any) -> None:
        begin(self, *args)
        tell(time.monotonic())

    def tell(seconds: float) -> None:
        with open(told, "a") as file:
            file.write(f"{seconds}\n")

    BackgroundSave.begin = heard
    torch.manual_seed(0)
    samples = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(40)]
    arguments = TrainingArguments(
        folder, use_cpu=True, disable_tqdm=True, report_to=[], max_steps=STEPS, save_steps=EVERY, save_total_limit=2,
        per_device_train_batch_size=4, learning_rate=1e-3, async_save=True,
    )  # fmt: skip
    began = time.monotonic()
    Trainer(Net(), arguments, train_dataset=samples).train(resume_from_checkpoint=resume or None)
    tell(time.monotonic() - began)


def heard(told: Path) -> list[float]:
    """What a run has said so far; a line that is being written is not read."""
    return [float(line) for line in told.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Outcome:
    """What a kill left, and what the same command made of it."""

    delay: float  # seconds from the copy of a save to the kill
    save: int  # from 0
    killed: bool  # whether the process was still running
    left: list[str]  # names in the folder after the kill
    before: str  # the newest checkpoint under its own name, "" without one
    problems: list[str]


class Runs:
    """Runs forked from a server that has everything loaded. ``width``: of the model, width² weights."""

    def __init__(self, folder: Path, width: int = 700) -> None:
        self._folder, self._width = folder, width
        self.whole = folder / "whole"
        self.duration = self._finish(self.whole, resume=False)

    def _start(self, folder: Path, resume: bool) -> tuple[Any, Path]:
        told = folder.with_name(f"{folder.name}.told")
        told.write_text("")
        arguments = (str(folder), resume, str(told), self._width)
        log = folder.with_name(f"{folder.name}.log")
        return processes.start(train, 1, *arguments, loads=("torch", "training"), output=log), told

    def _finish(self, folder: Path, resume: bool) -> float:
        process, told = self._start(folder, resume)
        assert process.wait(240) == [0], folder.with_name(f"{folder.name}.log").read_text()[-4000:]
        return heard(told)[-1]

    def kill(self, number: int, save: int, delay: float) -> Outcome:
        """Kill a new run ``delay`` seconds after the copy of save ``save``; look at what is left, and go on."""
        from ullage.training.saving.checkpoints import checkpoints_in
        from ullage.training.saving.damage import examine

        folder = self._folder / f"killed{number}"
        process, told = self._start(folder, resume=False)
        until = time.monotonic() + 120
        while len(heard(told)) <= save:
            assert time.monotonic() < until, "the run made no save"
            time.sleep(0.0005)
        copied = heard(told)[save]
        while time.monotonic() < copied + delay:
            time.sleep(0.0005)
        killed = process.poll() == [None]
        process.end()
        left = sorted(path.name for path in folder.iterdir())
        there = checkpoints_in(folder)
        problems = [f"{path.name} is damaged" for path in there if examine(path).damage]
        # The saves before this one were settled: at most one was under way.
        if save and not any(int(path.name.rpartition("-")[2]) >= EVERY * save for path in there):
            problems.append(f"checkpoint-{EVERY * save} is gone, and none is after it")
        self._finish(folder, resume=bool(there))
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            last = f"checkpoint-{STEPS}/{name}"
            if (folder / last).read_bytes() != (self.whole / last).read_bytes():
                problems.append(f"{last} is another one")
        # A save removes what killed ones left; a run with no step left makes none.
        saves = not there or there[-1].name != f"checkpoint-{STEPS}"
        if saves and any(path.name.endswith(".partial") for path in folder.iterdir()):
            problems.append("a staging folder is left")
        return Outcome(delay, save, killed, left, there[-1].name if there else "", problems)
