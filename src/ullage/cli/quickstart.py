"""``ullage quickstart``: one run on four layouts, by commands that anyone could type, and what became of its loss.

Every command continues what it finds in its folder, so an interrupted quickstart goes on where it was. The last of
them, ``ullage report``, shows the run beside the padded one and the one that nothing interrupted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.core.errors import InputError, TrainingError
from ullage.core.extras import MissingExtraError

if TYPE_CHECKING:
    from ullage.report.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

#: Sequences of a global batch; tokens of a microbatch.
_BATCH, _CAPACITY = 32, 2048
#: Steps of the padded run, which only shows its speed and its padding.
_PADDED_STEPS = 6
#: Steps after a change of layout that are compared with the uninterrupted run, and digits that must agree.
_COMPARED, _DIGITS = 3, 5
#: Steps at the start of a process, which wait for compilers and caches and are left out of a comparison of speeds.
_WARMING = 2


@dataclass(frozen=True)
class _Launch:
    """Number of processes and ZeRO stage of a leg; ``zero`` 0 is without DeepSpeed."""

    processes: int
    zero: int

    def __str__(self) -> str:
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        return processes + (f", ZeRO {self.zero}" if self.zero else "")

    @property
    def launcher(self) -> list[str]:
        several = self.processes > 1
        return ["torchrun", "--standalone", "--nproc_per_node", str(self.processes), "-m"] if several else []

    @property
    def flags(self) -> list[str]:
        return ["--zero", str(self.zero)] if self.zero else []


#: The legs of the run: processes and stage change each time.
_LAUNCHES = (_Launch(2, 2), _Launch(1, 1), _Launch(2, 3), _Launch(1, 0))


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option("--output_dir", "--output-dir", help="Where all of it goes.")] = Path(
        "runs/quickstart"
    ),
    steps: Annotated[int, typer.Option(min=8, help="Optimizer steps of the run.")] = 48,
    model: Annotated[str, typer.Option(help="As for ullage train.")] = "llama-128x2",
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as one line of JSON on stdout.")] = False,
) -> None:
    """Train packed on two processes, stop, convert, and go on with other processes and ZeRO stages.

    Shows each command, then what became of the losses. Exit status 1 if one is not what the uninterrupted run has.
    """
    from ullage.report.run import read_run

    _require_surroundings(output_dir)
    commands = _Commands(output_dir, steps, model, quiet=as_json)
    try:
        commands.run()
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    padded, whole, run = (read_run(output_dir / name) for name in ("padded", "whole", "run"))
    changes = compared(run, whole)
    if as_json:
        typer.echo(json.dumps({"changes": [asdict(each) for each in changes], "page": str(commands.page)}))
    else:
        _show(changes, faster(whole, padded), commands.page)
    if not all(each.agrees for each in changes):
        raise typer.Exit(1)


def _require_surroundings(folder: Path) -> None:
    """Raise for what is missing, before anything is written."""
    for module in ("transformers", "deepspeed"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError.of("ullage quickstart", module)
    # The folder need not exist yet: the nearest one above it that does tells rights and space.
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError("the folder cannot be written", where=str(above), hint="give another --output_dir")


class _Commands:
    """The commands of one quickstart, in order; shown on stdout, or, if ``quiet``, on stderr with what they print."""

    def __init__(self, folder: Path, steps: int, model: str, *, quiet: bool) -> None:
        self.folder, self.steps, self.quiet = folder, steps, quiet
        self.page = folder / "quickstart.html"
        # The last step of each leg: equal parts of the run, the last one at its end.
        self.stops = [steps * (k + 1) // len(_LAUNCHES) for k in range(len(_LAUNCHES))]
        self.common = ["--model", model, "--learning_rate", "2e-3", "--logging_steps", "1", "--eval_strategy", "no"]
        self.common += ["--save_total_limit", "20", "--per_device_train_batch_size", str(_BATCH // 2)]
        # --max_steps is that of the whole run on every leg, since the learning rate's schedule depends on it.
        self.packed = ["--packing_capacity", str(_CAPACITY), "--max_steps", str(steps)]

    def run(self) -> None:
        """Run what is not done yet. Raises ``TrainingError`` for a command that fails."""
        first, *others = _LAUNCHES
        self.show("Each line that begins with $ is a command for your own terminal; OMP_NUM_THREADS=1 is set.\n")
        step = ["docstrings", "--n", _BATCH, "--ranks", 2, "--capacity", _CAPACITY]
        self.do("How one step is planned", ["ullage", "plan", *step, "--html", self.folder / "plan.html"])
        padded = ["--max_steps", str(_PADDED_STEPS), "--save_steps", str(_PADDED_STEPS)]
        self.train("Padded, for comparison", first, "padded", _PADDED_STEPS, [*self.common, *padded])
        saves = ["--save_steps", str(self.stops[0])]
        whole = [*self.common, *self.packed, *saves]
        self.train("Packed, without interruption: the run to compare with", first, "whole", self.steps, whole)
        self.train("The same run, stopped on the way", first, "run", self.stops[0], whole, stop=True)
        self.convert()
        for launch, stop in zip(others, self.stops[1:], strict=True):
            title = f"Continued on {launch}" + (" without DeepSpeed" if not launch.zero else "")
            self.train(title, launch, "run", stop, ["--resume_from_checkpoint"], stop=stop < self.steps)
        runs = [self.folder / name for name in ("run", "whole", "padded")]
        self.do("Drawn beside the others", ["ullage", "report", *runs, "--html", self.page])

    def train(
        self, title: str, launch: _Launch, name: str, until: int, flags: Sequence[str], stop: bool = False
    ) -> None:
        """Run one ``ullage train``, unless its folder has reached the step already.

        Args:
            title: what the command is for.
            launch: processes and ZeRO stage.
            name: of its folder.
            until: the step that it ends at.
            flags: further arguments.
            stop: whether it ends there on the way, with a checkpoint.
        """
        folder = self.folder / name
        flags = [*launch.flags, *flags, *(["--stop_at_step", str(until)] if stop else [])]
        command = [*launch.launcher, "ullage", "train", "--output_dir", folder, *flags]
        self.do(title, command, done=_reached(folder) >= until)

    def convert(self) -> None:
        """The checkpoint of the first leg, looked at, converted and compared."""
        checkpoint = self.folder / "run" / f"checkpoint-{self.stops[0]}"
        tag = f"global_step{self.stops[0]}"
        target = checkpoint / f"{tag}_universal"
        done = target.is_dir()
        self.do("What it left behind", ["ullage", "inspect", checkpoint / tag, "--summary"], done)
        self.do("Converted, for any number of ranks", ["ullage", "convert", checkpoint / tag, target], done)
        self.do("Compared, byte by byte", ["ullage", "verify", checkpoint / tag, target], done)

    def do(self, title: str, command: Sequence[object], done: bool = False) -> None:
        """Show a command and run it unless that is ``done``. Raises ``TrainingError`` if it fails."""
        words = list(map(str, command))
        self.show(f"\n{title}{' (done before)' if done else ''}")
        self.show(f"$ {shlex.join(words)}")
        if not done:
            _run(words, sys.stderr if self.quiet else None)

    def show(self, line: str) -> None:
        typer.secho(line, err=self.quiet, bold=line.startswith("$"))


def _run(command: Sequence[str], stdout: Any) -> None:
    """Run a command with this Python; Ctrl-C ends all of its processes at once, which harms no checkpoint."""
    modules = {"torchrun": "torch.distributed.run", "ullage": "ullage"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}
    # In a session of its own, so that Ctrl-C in the terminal reaches this process alone, which then ends them all.
    process = subprocess.Popen(
        [sys.executable, "-m", modules[command[0]], *command[1:]],
        env=environment,
        stdout=stdout,
        start_new_session=True,
    )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        _end(process)
        raise
    if status:
        raise TrainingError(
            "a command failed; what it said stands above",
            where=shlex.join(command),
            expected="exit status 0",
            found=status,
            hint="the same quickstart goes on from here; without its folder it starts over",
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started, by process: torchrun's workers are in sessions of their own."""
    import psutil

    parent = psutil.Process(process.pid)
    # All are listed before the first is killed: the children of a dead process are given to another parent.
    for one in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _reached(folder: Path) -> int:
    """The step of the last checkpoint there, 0 if there is none."""
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


@dataclass(frozen=True)
class Comparison:
    """The loss of one step beside a change of layout, here and in the uninterrupted run; whether they agree."""

    layout: str
    step: int
    loss: float
    uninterrupted: float
    agrees: bool


def compared(run: Run, whole: Run) -> list[Comparison]:
    """The losses around each change of layout of ``run``, beside those of ``whole``."""
    ours, theirs = dict(run.values("loss")), dict(whole.values("loss"))
    found = []
    for span in run.spans[1:]:
        # From the last step before the change, which shows that both runs were alike up to there.
        for step in range(span.start, min(span.start + _COMPARED, span.stop) + 1):
            agrees = abs(ours[step] - theirs[step]) < 10**-_DIGITS * max(1.0, abs(theirs[step]))
            found.append(Comparison(span.layout, step, ours[step], theirs[step], agrees))
    return found


def faster(whole: Run, padded: Run) -> tuple[float, int, int]:
    """Real tokens per second, packed over padded, by medians over the steps of both; the first and the last of them."""
    ours, theirs = (dict(run.values("tokens_per_second")) for run in (whole, padded))
    both = sorted(ours.keys() & theirs.keys())[_WARMING:]
    ratio = statistics.median(ours[step] for step in both) / statistics.median(theirs[step] for step in both)
    return ratio, both[0], both[-1]


def _show(changes: Sequence[Comparison], speed: tuple[float, int, int], page: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("continued on", "step", "loss", "uninterrupted", ""):
        table.add_column(heading, no_wrap=True)
    for each in changes:
        losses = f"{each.loss:.5f}", f"{each.uninterrupted:.5f}"
        table.add_row(each.layout, str(each.step), *losses, "" if each.agrees else "[bold red]differs")
    console.print("\n", table, "\n", sep="")
    ratio, first, last = speed
    told = f"Packed, {ratio:.1f} times as many real tokens per second as padded"
    console.print(f"{told}, over the same steps, {first} to {last}.", soft_wrap=True)
    if all(each.agrees for each in changes):
        told = "After every change of layout the next losses equal the uninterrupted run's to five digits."
        console.print(told, soft_wrap=True)
    else:
        console.print("[bold red]After a change of layout a loss differs within five digits.")
    console.print(f"The curves, the layouts and the checkpoints: {page}", soft_wrap=True)
