"""``ullage plan LENGTHS``: where each sequence would go, in figures, as a page, as a trace, as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from ullage.errors import InputError, UllageError, UsageError

if TYPE_CHECKING:
    from ullage.datasets.files import Measured
    from ullage.planning import Plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: How many lengths are drawn from a distribution when nobody says.
DEFAULT_N = 512

_Lengths = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS",
        help="A file (.npy, .csv, .txt, .json, .jsonl, .parquet), a mock distribution (JSON, inline or a .json file), "
        "the name of a workload (megatron, chat, bimodal, uniform, pareto, code), docstrings, or - for standard input.",
    ),
]
_Strategy = Annotated[str, typer.Option(help="How to plan: balanced, next_fit, or any that is installed.")]
_Sync = Annotated[
    Literal["microbatch", "step"], typer.Option(help="When ranks wait for one another: FSDP and ZeRO-3, or DDP.")
]
_Context = Annotated[str, typer.Option(help="Ranks that share a sequence: a number, or auto for giants only.")]
_Oversize = Annotated[
    Literal["error", "truncate", "drop"], typer.Option(help="What becomes of a sequence longer than the capacity.")
]


@app.command()
def plan(
    lengths: _Lengths,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="Ranks that hold data.")] = 8,
    capacity: Annotated[
        int | None, typer.Option("--capacity", "-c", min=1, help="Tokens a rank holds in a microbatch.")
    ] = None,
    strategy: _Strategy = "balanced",
    sync: _Sync = "microbatch",
    context_parallel: _Context = "1",
    min_context_parallel: Annotated[int, typer.Option(min=1, help="With auto, ranks per microbatch at least.")] = 1,
    pad_to_multiple_of: Annotated[int, typer.Option(min=1, help="Slots are multiples of this.")] = 1,
    microbatch_multiple: Annotated[int, typer.Option(min=1, help="Microbatches come in multiples of this.")] = 1,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Sequences of one microbatch at most.")] = None,
    oversize: _Oversize = "error",
    linear: Annotated[float | None, typer.Option(min=0, help="Cost of a token. Default: a 7B transformer's.")] = None,
    quadratic: Annotated[float | None, typer.Option(min=0, help="Cost of a token squared. Default 1.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="The cost of a Hugging Face model: its config.json, or the folder it is in.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column of the file that holds lengths or text.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For text: a name or folder for AutoTokenizer. Default: bytes.")
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", min=1, help="How many sequences. Default: all of a file, 512 drawn.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of lengths that are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON on standard output.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the plan as one page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step as a Chrome trace.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan itself, for Plan.from_json.")] = None,
) -> None:
    """Plan one step: which sequence goes to which microbatch of which rank.

    Prints the figures of the plan beside those of arrival order (next_fit), what no plan can beat, and the ideal.
    """
    name, measured, suggested = _measured(lengths, n, seed, column, tokenizer)
    capacity = capacity or suggested
    if capacity is None:
        raise UsageError(
            "the capacity is missing", hint=f"pass --capacity; the longest is {int(measured.lengths.max())}"
        )
    settings: dict[str, Any] = {
        "ranks": ranks,
        "capacity": capacity,
        "sync": sync,
        "pad_to_multiple_of": pad_to_multiple_of,
    }
    settings |= {"context_parallel": _degree(context_parallel), "min_context_parallel": min_context_parallel}
    settings |= {"cost": _cost(linear, quadratic, model)}
    settings |= {"microbatch_multiple": microbatch_multiple, "max_sequences": max_sequences, "oversize": oversize}
    planned, reference = _planned(measured, strategy, settings)
    _outputs(planned, reference, name, html, trace, save)
    if as_json:
        typer.echo(json.dumps(_record(planned, reference, name, measured), indent=2))
    else:
        _show(planned, reference, name, measured)


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
    import io

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
        generated = config["mode"] != "file"
        drawn = mock_lengths(config, n or (DEFAULT_N if generated else None), seed)
        return f"mock {config['mode']}", Measured(drawn), config.get("max_seq_len")
    if source == "-":
        measured = read_stream(io.BytesIO(data), column, tokenizer)
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


def _planned(measured: Measured, strategy: str, settings: dict[str, Any]) -> tuple[Plan, Plan | None]:
    """The plan, and arrival order beside it, with the least fixed degree that holds what the plan holds."""
    from ullage.planning import plan as make_plan
    from ullage.planning import strategy_names
    from ullage.planning.placement import free_degrees

    if strategy not in strategy_names():
        raise UsageError("no such strategy", expected=" or ".join(strategy_names()), found=strategy)
    planned = make_plan(measured.lengths, strategy=strategy, **settings)
    if planned.strategy == "next_fit" or not planned.num_microbatches:
        return planned, None
    if settings["context_parallel"] != "auto":
        return planned, make_plan(measured.lengths, strategy="next_fit", **settings)
    # ``next_fit`` has one degree for all microbatches: with "auto", the smallest at which it can hold every sequence.
    for degree in free_degrees(planned.ranks, settings["min_context_parallel"]):
        if planned.ranks % degree:
            continue
        # The lengths of the plan are truncated already, so anything oversize here means a larger degree is needed.
        alone: dict[str, Any] = {**settings, "context_parallel": degree, "oversize": "error"}
        try:
            return planned, make_plan(planned.lengths, strategy="next_fit", **alone)
        except UllageError:
            continue
    return planned, None


def _outputs(
    planned: Plan, reference: Plan | None, name: str, html: Path | None, trace: Path | None, save: Path | None
) -> None:
    if html is not None:
        from ullage.report.plan import plan_page

        page = plan_page(planned, reference=reference, source=name)
        _write(html, lambda file: file.write(page))
    if trace is not None:
        from ullage.report.timeline import write_trace

        _write(trace, lambda file: write_trace(planned, file))
    if save is not None:
        _write(save, lambda file: file.write(planned.to_json()))


def _write(path: Path, fill: Callable[[IO[str]], object]) -> None:
    """Write beside the place and rename, so that no half file stands under the name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            fill(file)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError("a file cannot be written", where=str(path), found=error.strerror) from error


def _record(planned: Plan, reference: Plan | None, name: str, measured: Measured) -> dict[str, Any]:
    from ullage.report.figures import bound_ullage, described, ideal_microbatches, step_time

    def numbers(one: Plan) -> dict[str, Any]:
        return {"strategy": one.strategy, "step_time": step_time(one), **dataclasses.asdict(one.statistics())}

    stats = planned.statistics()
    ideal = {
        "num_microbatches": ideal_microbatches(planned, stats),
        "ullage": 0.0,
        "rank_imbalance": 1.0,
        "critical_path": 1.0,
    }
    bound = {
        "num_microbatches": stats.lower_bound,
        "ullage": bound_ullage(planned, stats),
        "rank_imbalance": stats.rank_imbalance_bound,
        "critical_path": stats.critical_path_bound,
    }
    return {
        "source": {"name": name, "column": measured.column, "unit": measured.unit, **described(measured.lengths)},
        "ranks": planned.ranks,
        "capacity": planned.capacity,
        "pad_to_multiple_of": planned.pad_to_multiple_of,
        "sync": planned.sync,
        "plan": numbers(planned),
        "next_fit": None if reference is None else numbers(reference),
        "lower_bound": bound,
        "ideal": ideal,
    }


def _show(planned: Plan, reference: Plan | None, name: str, measured: Measured) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ullage.report.figures import described, figures, lost_sequences, reference_name, step_time

    facts = described(measured.lengths)
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    origin = name if measured.column is None else f"{name}, column {measured.column}"
    counted = f"{facts['sequences']:,} sequences, {facts['tokens']:,} {measured.unit}"
    say(f"{origin}: {counted}, {facts['shortest']:,} to {facts['longest']:,} long, median {facts['median']:,.0f}")
    meets = "every microbatch" if planned.sync == "microbatch" else "once a step"
    say(f"{planned.ranks:,} ranks of {planned.capacity:,} slots a microbatch; they meet {meets}")
    if lost := lost_sequences(planned.statistics()):
        say(lost)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    columns = [planned.strategy, *([] if reference is None else [reference_name(reference)]), "lower bound", "ideal"]
    for title in columns:
        table.add_column(title, justify="right")
    for figure in figures(planned, reference):
        cells = [figure.plan, *([figure.reference] if reference is not None else []), figure.bound, figure.ideal]
        table.add_row(figure.name, *cells)
    console.print(table)
    if reference is not None:
        say(f"The step takes {100 * step_time(planned) / step_time(reference):.1f} % of next_fit's time.")
