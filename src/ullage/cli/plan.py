"""``ullage plan LENGTHS``: where each sequence would go, in figures, as a page, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from ullage.core.errors import InputError, UllageError, UsageError

if TYPE_CHECKING:
    from ullage.core.layout import Int64
    from ullage.datasets.files import Measured
    from ullage.report.figures import PlannedStep, StepTotals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: How many lengths are drawn from a distribution when nobody says.
DEFAULT_N = 512


_Lengths = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS",
        help="A file (.npy, .csv, .tsv, .txt, .json, .jsonl, .parquet, .arrow), a pattern or folder of these, a mock "
        "distribution (JSON, inline or a .json file), the name of a workload (megatron, chat, bimodal, uniform, "
        "pareto, code), docstrings, or - for standard input.",
    ),
]
_Strategy = Annotated[
    str,
    typer.Option(metavar="NAME", help="How to plan: balanced, next_fit, or any that is installed."),
]
_Sync = Annotated[
    Literal["microbatch", "step"], typer.Option(help="When ranks wait for one another: FSDP and ZeRO-3, or DDP.")
]
_Context = Annotated[
    str, typer.Option(metavar="N|auto", help="Ranks that share a sequence: a number, or auto for giants only.")
]
_Oversize = Annotated[
    Literal["error", "truncate", "drop"], typer.Option(help="What becomes of a sequence longer than the capacity.")
]


@app.command()
def plan(
    lengths: _Lengths,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, metavar="N", help="Ranks that hold data.")] = 8,
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity",
            "-c",
            metavar="N[,N...]",
            help="Tokens a rank holds in a microbatch. Several, such as 4096,8192,16384, are compared, a row for each.",
        ),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            "--global-batch-size",
            "--global_batch_size",
            min=1,
            metavar="N",
            help="Sequences of a step: the file is cut into steps in its order. Default: all are one step.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Plan only the first steps.")] = None,
    strategy: _Strategy = "balanced",
    sync: _Sync = "microbatch",
    context_parallel: _Context = "1",
    min_context_parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="With auto, ranks per microbatch at least.")
    ] = 1,
    pad_to_multiple_of: Annotated[int, typer.Option(min=1, metavar="N", help="Slots are multiples of this.")] = 1,
    microbatch_multiple: Annotated[
        int, typer.Option(min=1, metavar="N", help="Microbatches come in multiples of this.")
    ] = 1,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sequences of one microbatch at most.")
    ] = None,
    oversize: _Oversize = "error",
    linear: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="Cost of a token. Default: a 7B transformer's.")
    ] = None,
    quadratic: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="Cost of a token squared. Default 1.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The cost of a Hugging Face model: its config.json, or the folder it is in."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column of the file that holds lengths or text.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="For text: a name or folder for AutoTokenizer. Default: bytes.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", "-n", min=1, metavar="N", help="How many sequences. Default: all of a file, 512 drawn."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Of lengths that are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON on standard output.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as one page.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan itself, for Plan.from_json.")
    ] = None,
) -> None:
    """Plan one step: which sequence goes to which microbatch of which rank.

    Prints the figures of the plan beside those of arrival order (next_fit), of padded batches, what no plan can beat,
    and the ideal. With several capacities, or several steps, prints a row for each capacity.
    """
    from ullage.cli.plan_shown import PlanShown
    from ullage.report.figures import cut, planned

    name, measured, suggested = _measured(lengths, n, seed, column, tokenizer)
    capacities = _capacities(capacity) or ([suggested] if suggested else [])
    if not capacities:
        raise UsageError(
            "the capacity is missing", hint=f"pass --capacity; the longest is {int(measured.lengths.max())}"
        )
    if steps is not None and global_batch_size is None:
        raise UsageError("--steps says nothing without the size of a step", hint="pass --global-batch-size")
    outputs = {kind: path for kind, path in (("page", html), ("plan", save)) if path is not None}
    _require_possible(outputs, lengths, strategy)
    settings: dict[str, Any] = {"ranks": ranks, "sync": sync, "pad_to_multiple_of": pad_to_multiple_of}
    settings |= {"context_parallel": _degree(context_parallel), "min_context_parallel": min_context_parallel}
    settings |= {"cost": _cost(linear, quadratic, model)}
    settings |= {"microbatch_multiple": microbatch_multiple, "max_sequences": max_sequences, "oversize": oversize}
    batches = list(cut(measured.lengths, global_batch_size, steps))
    shown = PlanShown(name, measured, as_json)
    if len(capacities) == len(batches) == 1:
        step = planned(batches[0], strategy, settings | {"capacity": capacities[0]})
        written = _write(step, outputs, name, lengths)
        shown.step(step)
        for line in written:
            typer.echo(line, err=as_json)
        return
    if outputs:
        raise UsageError(
            "a page or a saved plan holds one step",
            found=f"{len(batches):,} steps at {len(capacities):,} capacities",
            hint="pass one --capacity, and --steps 1 with --global-batch-size",
        )
    shown.sweep(_sweep(batches, capacities, strategy, settings), settings)


def _capacities(text: str | None) -> list[int]:
    """Capacities from numbers with commas between them, without repetitions."""
    words = [word.strip().replace("_", "") for word in text.split(",")] if text else []
    for word in words:
        if not word.isdecimal() or not int(word):
            raise UsageError("not a capacity", where="--capacity", expected="an integer >= 1", found=repr(word))
    return list(dict.fromkeys(map(int, words)))


def _require_possible(outputs: dict[str, Path], source: str, strategy: str) -> None:
    """Raise for what would be refused after a plan that may take minutes."""
    from ullage.cli.writing import require_ours
    from ullage.planning import strategy_names

    if strategy not in strategy_names():
        raise UsageError("no such strategy", expected=" or ".join(strategy_names()), found=strategy)
    for kind, path in outputs.items():
        require_ours(kind, path, [source])


def _sweep(
    batches: Sequence[Int64], capacities: Sequence[int], strategy: str, settings: dict[str, Any]
) -> Iterator[tuple[int, StepTotals | UllageError]]:
    """All steps at each capacity, or why a capacity cannot hold them. Raises where none can."""
    from tqdm import tqdm

    from ullage.report.figures import planned, summed

    failed: list[UllageError] = []
    for capacity in capacities:
        try:
            bar = tqdm(batches, desc=f"capacity {capacity:,}", unit="step", disable=None, leave=False)
            found = summed([planned(batch, strategy, settings | {"capacity": capacity}) for batch in bar])
        except UllageError as error:
            failed.append(error)
            if len(failed) == len(capacities):
                raise
            yield capacity, error
        else:
            yield capacity, found


def _measured(
    source: str, n: int | None, seed: int, column: str | None, tokenizer: str | None
) -> tuple[str, Measured, int | None]:
    """A name for people, the lengths, and the capacity that belongs to them, if any.

    Args:
        source: the argument LENGTHS: a workload, ``docstrings``, a distribution in JSON, ``-``, or a file.
        n: number of sequences; None for all of a file, :data:`DEFAULT_N` of what is drawn.
        seed: of what is drawn.
        column: of a file.
        tokenizer: for text.
    """
    from ullage.datasets.files import Measured, read_lengths, read_stream
    from ullage.datasets.lengths import CAPACITIES, WORKLOADS, mock_config, mock_lengths, read_text

    if source in WORKLOADS:
        return source, Measured(WORKLOADS[source](n or DEFAULT_N, seed)), CAPACITIES[source]
    if source == "docstrings":
        from ullage.datasets.text import docstring_lengths

        return "docstrings", Measured(docstring_lengths(n or DEFAULT_N, seed)), 8192
    # Standard input is read once, before it is known whether it holds a distribution or lengths.
    data = sys.stdin.buffer.read() if source == "-" else b""
    name = "standard input" if source == "-" else Path(source).name
    text = data.decode("utf-8", "replace") if data else source
    # A .json file may be a list of lengths or a distribution: an object with a "mode" is the latter.
    if source.endswith(".json") and not source.lstrip().startswith("{"):
        text = read_text(source)
    if text.lstrip().startswith("{") and (source.lstrip().startswith("{") or _has_mode(text)):
        config = mock_config(source if source.endswith(".json") else text)
        return "mock distribution", Measured(mock_lengths(config, n or DEFAULT_N, seed)), config["max_seq_len"]
    if source == "-":
        measured = read_stream(data, column, tokenizer)
    elif not Path(source).suffix and not Path(source).exists():
        raise InputError("no such file or workload", where=source, expected=f"a file, or one of {', '.join(WORKLOADS)}")
    else:
        measured = read_lengths(source, column, tokenizer)
    return name, dataclasses.replace(measured, lengths=measured.lengths[:n]), None


def _has_mode(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and "mode" in value


def _degree(context_parallel: str) -> int | str:
    if context_parallel == "auto":
        return "auto"
    if not context_parallel.isdecimal() or not int(context_parallel):
        raise UsageError("context-parallel is unknown", expected="auto, or a number >= 1", found=context_parallel)
    return int(context_parallel)


def _cost(linear: float | None, quadratic: float | None, model: Path | None) -> Any:
    from ullage.datasets.lengths import read_text
    from ullage.planning import TransformerCost

    given = {name: value for name, value in (("linear", linear), ("quadratic", quadratic)) if value is not None}
    if model is None:
        return TransformerCost(**given)
    if given:
        raise UsageError("a model has its own cost", hint="pass --model, or --linear and --quadratic")
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, UllageError):
            raise
        raise InputError("a model's config is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(config, dict):
        raise InputError("a model's config must be a JSON object", where=str(path), found=type(config).__name__)
    return TransformerCost.from_config(config)


def _write(step: PlannedStep, outputs: dict[str, Path], name: str, source: str) -> list[str]:
    """Write what was asked for; returns a line for each."""
    from ullage.cli.writing import write_output
    from ullage.report.plan import plan_page

    fill: dict[str, Callable[[IO[str]], object]] = {
        "page": lambda file: file.write(plan_page(step.plan, reference=step.reference, source=name)),
        "plan": lambda file: file.write(step.plan.to_json()),
    }
    return [write_output(kind, path, fill[kind], [source]) for kind, path in outputs.items()]
