"""``ullage quickstart``: one run on four layouts, by commands that anyone could type, and what became of its loss.

Every command continues what it finds in its folder, so an interrupted quickstart goes on where it was.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.errors import InputError, TrainingError
from ullage.extras import MissingExtraError

if TYPE_CHECKING:
    from ullage.report.journey import Journey

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

#: Sequences of a global batch; tokens of a microbatch; bytes that the checkpoints take at the most.
_BATCH, _CAPACITY, _DISK_BYTES = 32, 2048, 1_000_000_000
#: Steps of the padded run, which only shows its speed and its padding.
_PADDED_STEPS = 6


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
    overwrite: Annotated[
        bool, typer.Option("--overwrite_output_dir", "--overwrite-output-dir", help="Start over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table as one line of JSON on stdout.")] = False,
) -> None:
    """Train packed on two processes, stop, convert, and go on with other processes and ZeRO stages.

    Shows each command, then a table and a page. Exit status 1 if a loss is not what the uninterrupted run has.
    """
    _require_surroundings(output_dir)
    if overwrite:
        _remove(output_dir)
    _Shown.quiet = as_json
    try:
        journey, page = _Quickstart(output_dir, steps, model).run()
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({**journey.to_dict(), "page": str(page)}))
    else:
        _show(journey, page)
    if not journey.agrees:
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
    free = shutil.disk_usage(above).free
    if free < _DISK_BYTES:
        raise InputError(
            "too little disk",
            where=str(above),
            expected=f"{_DISK_BYTES / 1e9:.1f} GB free",
            found=f"{free / 1e9:.1f} GB",
            hint="free some space, or give another --output_dir",
        )


def _remove(folder: Path) -> None:
    """Remove the files of an earlier quickstart, and nothing else."""
    for name in ("padded", "whole", "run"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "quickstart.html").unlink(missing_ok=True)


class _Shown:
    """Commands are shown on stdout; with ``--json`` on stderr, with what they print."""

    quiet = False

    @classmethod
    def line(cls, text: str) -> None:
        typer.secho(text, err=cls.quiet, bold=text.startswith("$"))


class _Quickstart:
    """The commands of one quickstart, in order. ``typed`` keeps them for the page."""

    def __init__(self, folder: Path, steps: int, model: str) -> None:
        self.folder, self.steps = folder, steps
        self.typed: list[str] = []
        # The last step of each leg: equal parts of the run, the last one at its end.
        self.stops = [steps * (k + 1) // len(_LAUNCHES) for k in range(len(_LAUNCHES))]
        self.common = ["--model", model, "--learning_rate", "2e-3", "--logging_steps", "1", "--eval_strategy", "no"]
        self.common += ["--save_total_limit", "20", "--per_device_train_batch_size", str(_BATCH // 2)]
        # --max_steps is that of the whole run on every leg, since the learning rate's schedule depends on it.
        self.packed = ["--packing_capacity", str(_CAPACITY), "--max_steps", str(steps)]

    def run(self) -> tuple[Journey, Path]:
        first, *others = _LAUNCHES
        _Shown.line("Each line that begins with $ is a command for your own terminal; OMP_NUM_THREADS=1 is set.\n")
        self.tell("How one step is planned", "plan", "docstrings", "--n", _BATCH, "--ranks", 2, "--capacity", _CAPACITY)
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
        journey = self.journey()
        return journey, self.page(journey)

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
        command = [*launch.launcher, "ullage", "train", "--output_dir", str(folder), *flags]
        self.do(title, command, done=_reached(folder) >= until)

    def convert(self) -> None:
        """The checkpoint of the first leg, looked at, converted and compared."""
        checkpoint = self.folder / "run" / f"checkpoint-{self.stops[0]}"
        tag = f"global_step{self.stops[0]}"
        target = checkpoint / f"{tag}_universal"
        done = target.is_dir()
        self.do("What it left behind", ["ullage", "inspect", str(checkpoint / tag), "--summary"], done)
        self.do("Converted, for any number of ranks", ["ullage", "convert", str(checkpoint / tag), str(target)], done)
        self.do("Compared, byte by byte", ["ullage", "verify", str(checkpoint / tag), str(target)], done)

    def tell(self, title: str, *command: Any) -> None:
        self.do(title, ["ullage", *map(str, command)], done=False)

    def do(self, title: str, command: Sequence[str], done: bool) -> None:
        """Show a command and run it unless that is ``done``. Raises ``TrainingError`` if it fails."""
        shown = shlex.join(command)
        self.typed.append(shown)
        _Shown.line(f"\n{title}{' (done before)' if done else ''}")
        _Shown.line(f"$ {shown}")
        if not done:
            _run(command, shown)

    def journey(self) -> Journey:
        """The logs of the runs."""
        from ullage.report.journey import Journey, Leg, read_steps

        folders = {name: self.folder / name for name in ("padded", "whole", "run")}
        steps = {name: read_steps(folder / f"checkpoint-{_reached(folder)}") for name, folder in folders.items()}
        # The log of the last checkpoint has the steps of all legs; each leg is cut out of it by its numbers.
        begins = [0, *self.stops]
        legs = [
            Leg(str(launch), [step for step in steps["run"] if begin < step.number <= end])
            for launch, begin, end in zip(_LAUNCHES, begins, self.stops, strict=False)
        ]
        first = str(_LAUNCHES[0])
        return Journey(Leg(first, steps["padded"]), Leg(first, steps["whole"]), legs)

    def page(self, journey: Journey) -> Path:
        """Write the page; returns its path."""
        from ullage.checkpoint import read
        from ullage.datasets.text import docstring_lengths
        from ullage.display import write_page
        from ullage.planning import plan
        from ullage.report.journey import journey_page

        stop = self.stops[0]
        inventory = read(self.folder / "run" / f"checkpoint-{stop}" / f"global_step{stop}")
        step = plan(docstring_lengths(_BATCH), ranks=2, capacity=_CAPACITY, sync="step")
        return write_page(self.folder / "quickstart.html", journey_page(journey, step, inventory, self.typed))


def _run(command: Sequence[str], shown: str) -> None:
    """Run a command with this Python; Ctrl-C ends all of its processes at once, which harms no checkpoint."""
    modules = {"torchrun": "torch.distributed.run", "ullage": "ullage"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}
    # In a session of its own, so that Ctrl-C in the terminal reaches this process alone, which then ends them all.
    process = subprocess.Popen(
        [sys.executable, "-m", modules[command[0]], *command[1:]],
        env=environment,
        stdout=sys.stderr if _Shown.quiet else None,
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
            where=shown,
            expected="exit status 0",
            found=status,
            hint="the same quickstart goes on from here; --overwrite_output_dir starts over",
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


def _show(journey: Journey, page: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from ullage.report.journey import HEADINGS

    console = Console(highlight=False)
    # 78 columns wide, so that a terminal or a log of 80 cuts no number.
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for heading in HEADINGS[:-1]:
        number = heading in ("tokens/s", "padding", "unused", "imbalance")
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in journey.rows():
        table.add_row(*row[:-1])
    console.print("\n", table, "\n", sep="")
    after = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("continued on", "step", "loss", "uninterrupted", ""):
        after.add_column(heading, no_wrap=True)
    for leg in journey.legs:
        for k, found in enumerate(journey.comparisons(leg)):
            losses = f"{found.loss:.5f}", f"{found.uninterrupted:.5f}"
            verdict = "" if found.agrees else "[bold red]differs"
            after.add_row(leg.layout if k == 1 else "", str(found.number), *losses, verdict)
        after.add_section()
    console.print(after, "\n", sep="")
    first, last = journey.compared[0], journey.compared[-1]
    console.print(
        f"Packed, {journey.faster:.1f} times as many real tokens per second as padded, over the same steps, "
        f"{first} to {last}.",
        soft_wrap=True,
    )
    if journey.agrees:
        line = "After every change of layout the next losses equal the uninterrupted run's to five digits."
        console.print(line, soft_wrap=True)
    else:
        console.print("[bold red]After a change of layout a loss differs within five digits.")
    console.print(f"The curves, the plan and the shards: {page}", soft_wrap=True)
