"""``ullage plan LENGTHS``: where each sequence would go, in figures, as a page, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ullage.cli.options import AsJson, print_table
from ullage.core.errors import InputError, UllageError, UsageError

app = typer.Typer(add_completion=False)

_SOURCES = (
    "A file (.npy, .csv, .tsv, .txt, .json, .jsonl, .parquet, .arrow), a pattern or folder of these, a mock "
    "distribution (JSON, inline or a .json file), the name of a workload (megatron, chat, bimodal, uniform, pareto, "
    "code), docstrings, or - for standard input."
)
_CAPACITY = (
    "Tokens a rank holds in a microbatch. Several, such as 4096,8192,16384, are compared, a row for each. NAME=N, such "
    "as patches=16384, also limits what the file's column of that name holds."
)
_AMOUNT = "A column of the file with what each sequence takes besides tokens, such as patches: counted, and shown."

_Option = partial(typer.Option, metavar="NAME")
_Number = partial(typer.Option, metavar="N", min=1)
_Real = partial(typer.Option, metavar="X", min=0)
_File = partial(typer.Option, metavar="FILE")


@app.command()
def plan(
    lengths: Annotated[str, typer.Argument(metavar="LENGTHS", help=_SOURCES)],
    ranks: Annotated[int, _Number("--ranks", "-r", help="Ranks that hold data.")] = 8,
    capacity: Annotated[list[str] | None, _Option("--capacity", "-c", metavar="N|NAME=N", help=_CAPACITY)] = None,
    amount: Annotated[list[str] | None, _Option(help=_AMOUNT)] = None,
    global_batch_size: Annotated[int | None, _Number(help="Sequences of a step. Default: all are one step.")] = None,
    steps: Annotated[int | None, _Number(help="Plan only the first steps.")] = None,
    strategy: Annotated[str, _Option(help="How to plan: balanced, next_fit, or any that is installed.")] = "balanced",
    sync: Annotated[
        Literal["microbatch", "step"], typer.Option(help="When ranks wait for one another: FSDP and ZeRO-3, or DDP.")
    ] = "microbatch",
    context_parallel: Annotated[
        str, _Option(metavar="N|auto", help="Ranks that share a sequence: a number, or auto for giants only.")
    ] = "1",
    min_context_parallel: Annotated[int, _Number(help="With auto, ranks per microbatch at least.")] = 1,
    pad_to_multiple_of: Annotated[int, _Number(help="Slots are multiples of this.")] = 1,
    microbatch_multiple: Annotated[int, _Number(help="Microbatches come in multiples of this.")] = 1,
    max_sequences: Annotated[int | None, _Number(help="Sequences of one microbatch at most.")] = None,
    oversize: Annotated[
        Literal["error", "truncate", "drop"], typer.Option(help="What becomes of a sequence over the capacity.")
    ] = "error",
    linear: Annotated[float | None, _Real(help="Cost of a token. Default: a 7B transformer's.")] = None,
    quadratic: Annotated[float | None, _Real(help="Cost of a token squared. Default 1.")] = None,
    model: Annotated[
        Path | None, _File(metavar="FOLDER", help="The cost of a model: its config.json, or the folder it is in.")
    ] = None,
    column: Annotated[
        str | None, _Option("--column", "--text-column", help="The column of the file that holds lengths or text.")
    ] = None,
    tokenizer: Annotated[str | None, _Option(help="For text: a name or folder. Default: bytes.")] = None,
    n: Annotated[int | None, _Number("--n", "-n", help="Sequences. Default: all of a file, 512 drawn.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Of lengths that are drawn.")] = 0,
    as_json: AsJson = False,
    html: Annotated[Path | None, _File(help="Write the plan as one page.")] = None,
    save: Annotated[Path | None, _File(help="Write the plan itself, for Plan.from_json.")] = None,
) -> None:
    """Plan one step: which sequence goes to which microbatch of which rank.

    Prints the figures of the plan beside those of arrival order (next_fit), of padded batches, what no plan can beat,
    and the ideal. With several capacities, or several steps, prints a row for each capacity.
    """
    from rich.console import Console
    from rich.progress import track

    from ullage.cli.writing import require_ours, write_output
    from ullage.datasets.lengths import measured_lengths
    from ullage.planning import strategy_names
    from ullage.report.figures import cut, planned, summed
    from ullage.report.plan import plan_page

    name, measured, suggested = measured_lengths(lengths, n, seed, column, tokenizer)
    tokens, limits = _capacities(capacity or [])
    capacities = tokens or ([suggested] if suggested else [])
    if not capacities:
        raise UsageError("the capacity is missing", hint=f"pass --capacity; the longest is {measured.lengths.max()}")
    if steps is not None and global_batch_size is None:
        raise UsageError("--steps says nothing without the size of a step", hint="pass --global-batch-size")
    if strategy not in strategy_names():
        raise UsageError("no such strategy", expected=" or ".join(strategy_names()), found=strategy)
    # What would be refused is refused before a plan that may take minutes.
    outputs = {kind: path for kind, path in (("page", html), ("plan", save)) if path is not None}
    for kind, path in outputs.items():
        require_ours(kind, path, [lengths])
    settings: dict[str, Any] = {"ranks": ranks, "sync": sync, "pad_to_multiple_of": pad_to_multiple_of}
    settings |= {"context_parallel": _degree(context_parallel), "min_context_parallel": min_context_parallel}
    settings |= {"cost": _cost(linear, quadratic, model), "capacities": limits}
    settings |= {"microbatch_multiple": microbatch_multiple, "max_sequences": max_sequences, "oversize": oversize}
    amounts = _amounts(lengths, measured, [*limits, *(amount or [])])
    parts = [cut(values, global_batch_size, steps) for values in (measured.lengths, *amounts.values())]
    batches = [(each, dict(zip(amounts, others, strict=True))) for each, *others in zip(*parts, strict=True)]
    if len(capacities) == len(batches) == 1:
        step = planned(batches[0][0], strategy, settings | {"capacity": capacities[0], "amounts": batches[0][1]})
        texts = {"page": lambda: plan_page(step.plan, reference=step.reference, source=name), "plan": step.plan.to_json}
        told = [
            write_output(kind, path, lambda file, kind=kind: file.write(texts[kind]()), [lengths])
            for kind, path in outputs.items()
        ]
        _say_step(name, measured, step, as_json)
        for line in told:
            typer.echo(line, err=as_json)
        return
    if outputs:
        found = f"{len(batches):,} steps at {len(capacities):,} capacities"
        hint = "pass one --capacity, and --steps 1 with --global-batch-size"
        raise UsageError("a page or a saved plan holds one step", found=found, hint=hint)
    rows, console = list[Any](), Console(stderr=True)
    for each in capacities:
        options = settings | {"capacity": each}
        bar = track(batches, f"capacity {each:,}", console=console, transient=True, disable=not console.is_terminal)
        try:
            rows.append(summed([planned(part, strategy, options | {"amounts": also}) for part, also in bar]))
        except UllageError as error:
            rows.append(error)
    _say_capacities(name, measured, settings, capacities, rows, as_json)


def _capacities(texts: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Capacities of tokens, each once, and those of other resources by name."""
    tokens: list[int] = []
    limits: dict[str, int] = {}
    for word in ",".join(texts).split(",") if texts else ():
        name, _, number = (part.strip() for part in word.rpartition("="))
        if not number.replace("_", "").isdecimal() or not int(number):
            raise UsageError("not a capacity", where="--capacity", expected="an integer >= 1", found=repr(word.strip()))
        if name in ("", "tokens"):
            tokens.append(int(number))
        elif limits.setdefault(name, int(number)) != int(number):
            raise UsageError(f"two capacities of {name}", expected="one", found=f"{limits[name]} and {number}")
    return list(dict.fromkeys(tokens)), limits


def _amounts(source: str, measured: Any, names: Sequence[str]) -> dict[str, Any]:
    """What each sequence takes besides tokens, from the columns of these names."""
    from ullage.datasets.files import amounts_in_file

    if names and not Path(source).exists():
        expected = "a file with that column"
        raise UsageError(f"only a file has columns of {names[0]}", expected=expected, found=f"{source!r}")
    if names and measured.num_empty:
        problem = f"{measured.num_empty} rows have no tokens, and {names[0]} for each row"
        raise InputError(problem, where=source, hint="leave them out")
    return {name: amounts_in_file(source, name)[: len(measured.lengths)] for name in dict.fromkeys(names)}


def _degree(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise UsageError("context-parallel is unknown", expected="auto, or a number >= 1", found=text)
    return "auto" if text == "auto" else int(text)


def _cost(linear: float | None, quadratic: float | None, model: Path | None) -> Any:
    from ullage.datasets.files import read_text
    from ullage.planning import MultimodalCost, TransformerCost

    given = {name: value for name, value in (("linear", linear), ("quadratic", quadratic)) if value is not None}
    if model is None:
        return TransformerCost(**given)
    if given:
        raise UsageError("a model has its own cost", hint="pass --model, or --linear and --quadratic")
    path = model / "config.json" if model.is_dir() else model
    text = read_text(path)
    try:
        config = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise InputError("a model's config is not JSON of an object", where=str(path), found=str(error)) from error
    return (MultimodalCost if isinstance(config.get("vision_config"), dict) else TransformerCost).from_config(config)


def _say_step(name: str, measured: Any, step: Any, as_json: bool) -> None:
    """The figures of one step."""
    from ullage.report.figures import figure_rows, lost_sequences, step_record, step_sentence

    if as_json:
        typer.echo(json.dumps(_source(name, measured) | step_record(step), indent=2))
        return
    others = "".join(f" and {limit:,} {resource}" for resource, limit in step.plan.limits.items())
    _say_source(name, measured, step.plan.ranks, f"{step.plan.capacity:,}", step.plan.sync, others)
    if lost := lost_sequences(step.plan.statistics()):
        typer.echo(lost)
    print_table(figure_rows(step.plan, step.reference, step.padded))
    typer.echo(step_sentence(step))


def _say_capacities(
    name: str, measured: Any, settings: dict[str, Any], capacities: Sequence[int], rows: Sequence[Any], as_json: bool
) -> None:
    """A row for each capacity: all steps in sum, or why that capacity cannot hold them. Raises where none can."""
    errors = {each: row for each, row in zip(capacities, rows, strict=True) if isinstance(row, UllageError)}
    sums = [row for row in rows if not isinstance(row, UllageError)]
    if not sums:
        raise rows[-1]
    if as_json:
        by_capacity = {row.capacity: dataclasses.asdict(row) for row in sums}
        by_capacity |= {each: {"capacity": each, "error": str(error)} for each, error in errors.items()}
        told = _source(name, measured) | {"ranks": settings["ranks"], "sync": settings["sync"]}
        typer.echo(json.dumps(told | {"capacities": [by_capacity[each] for each in capacities]}, indent=2))
        return
    slots = f"{capacities[0]:,}" if len(rows) == 1 else "each capacity's"
    _say_source(name, measured, settings["ranks"], slots, settings["sync"])
    if several := sums[0].num_steps > 1:
        typer.echo(f"{sums[0].num_steps:,} steps in sum; times are in ideal steps, of the worst one too")
    table = [["capacity", "microbatches", "bound", "ullage", "time", *["worst"] * several, "next_fit", "padded"]]
    for row in sums:
        times = [row.time, *[row.worst_time] * several, row.next_fit_time, row.padded_time]
        cells = [f"{row.capacity:,}", f"{row.num_microbatches:,}", f"{row.lower_bound:,}", f"{100 * row.ullage:.2f} %"]
        table.append([*cells, *("–" if time is None else f"{time:.3f}" for time in times)])
    print_table(table)
    for capacity, error in errors.items():
        typer.echo(f"{capacity:,}: {error}")
    best = min(sums, key=lambda row: (row.time, row.capacity))
    typer.echo(f"Shortest at capacity {best.capacity:,}: {best.time:.3f} of the ideal time.")


def _source(name: str, measured: Any) -> dict[str, Any]:
    from ullage.report.figures import length_figures

    facts = {"name": name, "column": measured.column, "unit": measured.unit, "num_empty": measured.num_empty}
    return {"source": facts | length_figures(measured.lengths)}


def _say_source(name: str, measured: Any, ranks: int, slots: str, sync: str, others: str = "") -> None:
    """Print the lines about the lengths and the ranks."""
    from ullage.core.display import quantity

    facts = _source(name, measured)["source"]
    origin = name if measured.column is None else f"{name}, column {measured.column}"
    held = f"{quantity(int(facts['sequences']), 'sequence')}, {facts['tokens']:,} {measured.unit}"
    between = f"{facts['shortest']:,} to {facts['longest']:,} long, median {facts['median']:,.0f}"
    empty = f"; {quantity(measured.num_empty, 'empty row')} left out" if measured.num_empty else ""
    together = f"; they meet {'every microbatch' if sync == 'microbatch' else 'once a step'}" if ranks > 1 else ""
    typer.echo(f"{origin}: {held}, {between}{empty}")
    typer.echo(f"{quantity(ranks, 'rank')} of {slots} slots{others} a microbatch{together}")
