"""What verbs share: options, the bar of what is read, and how tables and lists are printed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from ullage.core.errors import InputError, UllageError, first_line, root_cause

#: Lines of a list that are printed without ``--all``.
SHOWN = 20

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
AllRows = Annotated[bool, typer.Option("--all", help="List everything.")]
Workers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Threads; by default 2 per processor, at most 8.")
]
StorageOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of fsspec, for URLs; may be repeated.")
]


def storage_options(given: list[str] | None) -> dict[str, Any]:
    """fsspec's options from ``key=value``: JSON where it is some, text otherwise; dots in a key lead into a dict.

    Raises ``UsageError`` for what has no ``=``.
    """
    from ullage.core.errors import UsageError

    found: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError("not a storage option", expected="key=value", found=text)
        *outer, last = key.split(".")
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
        try:
            inner[last] = json.loads(value)
        except ValueError:
            inner[last] = value
    return found


@contextlib.contextmanager
def progress_bar(verb: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr with bytes, rate and time left; yields the function to call with (bytes done, bytes in all)."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(verb, total=None)

    def step(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if console.is_terminal and not bar.live.is_started:  # not before there is something to show: it may be refused
            bar.start()

    try:
        yield step
    finally:
        if bar.live.is_started:
            bar.stop()
    console.print(bar.get_renderable())


def print_list(lines: Sequence[Any], all_rows: bool, indent: str = "") -> None:
    """Print the lines, or the first of them and how many more there are."""
    for line in lines if all_rows else lines[:SHOWN]:
        typer.echo(f"{indent}{line}")
    if not all_rows and len(lines) > SHOWN:
        typer.echo(f"{indent}and {len(lines) - SHOWN:,} more (--all)")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """The first row holds the headings. Names may be broken between words where there is no room, and no number."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, cells in enumerate(zip(*rows, strict=True)):
        # A heading such as "next_fit, degree 8" is broken into its words.
        words = [*cells[0].split(), *(" ".join(cells[1:]).split() if not place and not cells[0] else cells[1:])]
        justify = "right" if place or cells[0] else "left"
        table.add_column(cells[0], justify=justify, min_width=max(map(len, words), default=0), overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    Console(highlight=False).print(table, crop=False)


#: Arguments of others, as patterns -> what does that here.
HINTS = {
    "(n|num_?)?(gpus?|proc\\w*)": "start N processes by torchrun --nproc_per_node N -m ullage train ...",
    "device|cuda|cpu": "--use_cpu, or CUDA_VISIBLE_DEVICES=0 before the command; a GPU is taken where there is one",
    "wandb\\w*|tensorboard": "--report_to wandb, or another tracker",
    "attn\\w*|flash\\w*": "packed runs choose it; in Python: from_pretrained(..., attn_implementation=...)",
    "(use_)?(lora|peft)\\w*": "ullage trl sft --use_peft trains an adapter",
    "(num|hidden|n)_(\\w+_)?(layers?|size)": "--model llama-64x2 is a new model, hidden size 64, 2 layers",
    "pack(ing)?": "--packing_capacity N packs",
    "precision|dtype": "--bf16 or --fp16",
    "context_length|seq\\w*|max_tokens": "--max_length N cuts sequences",
    "resume": "the same command goes on; --resume_from_checkpoint FOLDER from elsewhere",
    "log(ging)?_dir": "--output_dir FOLDER holds the logs",
}


def hint_for(name: str) -> str | None:
    """What does here what an argument of others does; None where nobody has asked."""
    return next((HINTS[kind] for kind in HINTS if re.fullmatch(kind, name)), None)


@contextlib.contextmanager
def refused_by_library(where: str) -> Iterator[None]:
    """Pass a library's refusal to load something on in one line that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UllageError):
            raise
        raise InputError("the run cannot begin", where=where, found=first_line(root_cause(error))) from error
