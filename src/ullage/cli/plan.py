"""``ullage plan LENGTHS``: where each sequence would go, in figures, as a page, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ullage.core.errors import InputError, UllageError, UsageError

if TYPE_CHECKING:
    from ullage.datasets.files import Measured
    from ullage.report.figures import PlannedStep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: How many lengths are drawn from a distribution when nobody says.
DEFAULT_N = 512
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
    global_batch_size: Annotated[
        int | None,
        _Number("--global-batch-size", "--global_batch_size", help="Sequences of a step. Default: all are one step."),
    ] = None,
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
    column: Annotated[str | None, _Option(help="The column of the file that holds lengths or text.")] = None,
    tokenizer: Annotated[str | None, _Option(help="For text: a name or folder. Default: bytes.")] = None,
    n: Annotated[int | None, _Number("--n", "-n", help="Sequences. Default: all of a file, 512 drawn.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Of lengths that are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON on standard output.")] = False,
    html: Annotated[Path | None, _File(help="Write the plan as one page.")] = None,
    save: Annotated[Path | None, _File(help="Write the plan itself, for Plan.from_json.")] = None,
) -> None:
    """Plan one step: which sequence goes to which microbatch of which rank.

    Prints the figures of the plan beside those of arrival order (next_fit), of padded batches, what no plan can beat,
    and the ideal. With several capacities, or several steps, prints a row for each capacity.
    """
    from ullage.cli.writing import require_ours, write_output
    from ullage.planning import strategy_names
    from ullage.report.figures import cut, planned
    from ullage.report.plan import plan_page

    name, measured, suggested = _measured(lengths, n, seed, column, tokenizer)
    tokens, limits = _capacities(capacity or [])
    capacities = tokens or ([suggested] if suggested else [])
    if not capacities:
        hint = f"pass --capacity; the longest is {int(measured.lengths.max())}"
        raise UsageError("the capacity is missing", hint=hint)
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
    parts = [list(cut(values, global_batch_size, steps)) for values in (measured.lengths, *amounts.values())]
    batches = [(each, dict(zip(amounts, others, strict=True))) for each, *others in zip(*parts, strict=True)]
    shown = _Shown(name, measured, as_json)
    if len(capacities) == len(batches) == 1:
        settings |= {"capacity": capacities[0], "amounts": batches[0][1]}
        step = planned(batches[0][0], strategy, settings)
        texts = {"page": lambda: plan_page(step.plan, reference=step.reference, source=name), "plan": step.plan.to_json}
        told = [
            write_output(kind, path, lambda file, kind=kind: file.write(texts[kind]()), [lengths])
            for kind, path in outputs.items()
        ]
        shown.step(step)
        for line in told:
            typer.echo(line, err=as_json)
        return
    if outputs:
        found = f"{len(batches):,} steps at {len(capacities):,} capacities"
        hint = "pass one --capacity, and --steps 1 with --global-batch-size"
        raise UsageError("a page or a saved plan holds one step", found=found, hint=hint)
    shown.sweep([(each, _totals(batches, strategy, settings | {"capacity": each})) for each in capacities], settings)


# What is asked for.


def _capacities(texts: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Capacities of tokens, each once, and those of other resources by name."""
    tokens: list[int] = []
    limits: dict[str, int] = {}
    for word in ",".join(texts).split(",") if texts else ():
        name, _, number = word.rpartition("=")
        name, number = name.strip(), number.strip().replace("_", "")
        if not number.isdecimal() or not int(number):
            raise UsageError("not a capacity", where="--capacity", expected="an integer >= 1", found=repr(word.strip()))
        if not name or name == "tokens":
            tokens.append(int(number))
        elif limits.setdefault(name, int(number)) != int(number):
            raise UsageError(f"two capacities of {name}", expected="one", found=f"{limits[name]} and {number}")
    return list(dict.fromkeys(tokens)), limits


def _amounts(source: str, measured: Measured, names: Sequence[str]) -> dict[str, Any]:
    """What each sequence takes besides tokens, from the columns of these names."""
    from ullage.datasets.files import amounts_in_file

    if names and not Path(source).exists():
        expected = "a file with that column"
        raise UsageError(f"only a file has columns of {names[0]}", expected=expected, found=f"{source!r}")
    if names and measured.num_empty:
        problem = f"{measured.num_empty} rows have no tokens, and {names[0]} for each row"
        raise InputError(problem, where=source, hint="leave them out")
    return {name: amounts_in_file(source, name)[: len(measured.lengths)] for name in dict.fromkeys(names)}


def _measured(
    source: str, n: int | None, seed: int, column: str | None, tokenizer: str | None
) -> tuple[str, Measured, int | None]:
    """A name for people, the lengths, and the capacity that belongs to them, if any.

    ``n``: None for all of a file, :data:`DEFAULT_N` of what is drawn.
    """
    from ullage.datasets.files import Measured, read_lengths, read_stream, read_text
    from ullage.datasets.lengths import CAPACITIES, WORKLOADS, mock_config, mock_lengths

    if source in WORKLOADS:
        return source, Measured(WORKLOADS[source](n or DEFAULT_N, seed)), CAPACITIES[source]
    if source == "docstrings":
        from ullage.datasets.text import docstring_lengths

        return source, Measured(docstring_lengths(n or DEFAULT_N, seed)), 8192
    # Standard input is read once, before it is known whether it holds a distribution or lengths.
    data = sys.stdin.buffer.read() if source == "-" else b""
    name = "standard input" if source == "-" else Path(source).name
    text = data.decode("utf-8", "replace") if data else source
    # A .json file may be a list of lengths or a distribution: an object with a "mode" is the latter.
    if source.endswith(".json") and not source.lstrip().startswith("{"):
        text = read_text(source)
    if text.lstrip().startswith("{") and (source.lstrip().startswith("{") or _has_mode(text)):
        config = mock_config(source if source.endswith(".json") else text)
        drawn = mock_lengths(config, n or (DEFAULT_N if config["mode"] != "file" else None), seed)
        return f"mock {config['mode']}", Measured(drawn), config.get("max_seq_len")
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
        config = json.loads(text)
    except ValueError as error:
        raise InputError("a model's config is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(config, dict):
        raise InputError("a model's config must be a JSON object", where=str(path), found=type(config).__name__)
    kind = MultimodalCost if isinstance(config.get("vision_config"), dict) else TransformerCost
    return kind.from_config(config)


def _totals(batches: Sequence[tuple[Any, dict[str, Any]]], strategy: str, settings: dict[str, Any]) -> Any:
    """All steps at one capacity in sum, or the error that says why it cannot hold them."""
    from tqdm import tqdm

    from ullage.report.figures import planned, summed

    bar = tqdm(batches, desc=f"capacity {settings['capacity']:,}", unit="step", disable=None, leave=False)
    try:
        return summed([planned(lengths, strategy, settings | {"amounts": amounts}) for lengths, amounts in bar])
    except UllageError as error:
        return error


# What is printed.


@dataclasses.dataclass(frozen=True)
class _Shown:
    """Figures of a step, or a row per capacity, as a table or as JSON. ``name``: of what was planned."""

    name: str
    measured: Measured
    as_json: bool

    def step(self, step: PlannedStep) -> None:
        """The figures of one step."""
        from ullage.report.figures import figures, lost_sequences, reference_name, step_record, step_sentence

        if self.as_json:
            typer.echo(json.dumps(self._source() | step_record(step), indent=2))
            return
        plan, reference, padded = step.plan, step.reference, step.padded
        others = "".join(f" and {limit:,} {name}" for name, limit in plan.limits.items())
        self._begin(plan.ranks, f"{plan.capacity:,}", plan.sync, others)
        if lost := lost_sequences(plan.statistics()):
            typer.echo(lost)
        rows = [["", plan.strategy, *([] if reference is None else [reference_name(reference)])]]
        rows[0] += [*([] if padded is None else ["padded"]), "lower bound", "ideal"]
        for each in figures(plan, reference):
            compared = [] if reference is None else [each.reference]
            unpacked = [] if padded is None else [padded.texts.get(each.name, "–")]
            rows.append([each.name, each.plan, *compared, *unpacked, each.bound, each.ideal])
        _print_table(rows)
        typer.echo(step_sentence(step))

    def sweep(self, rows: Sequence[tuple[int, Any]], settings: dict[str, Any]) -> None:
        """A row for each capacity: all steps in sum, or why that capacity cannot hold them. Raises where none can."""
        sums = [row for _, row in rows if not isinstance(row, UllageError)]
        if not sums:
            raise rows[-1][1]
        if self.as_json:
            listed = [
                {"capacity": capacity, "error": str(row)} if isinstance(row, UllageError) else dataclasses.asdict(row)
                for capacity, row in rows
            ]
            told = {"ranks": settings["ranks"], "sync": settings["sync"], "capacities": listed}
            typer.echo(json.dumps(self._source() | told, indent=2))
            return
        self._begin(settings["ranks"], f"{rows[0][0]:,}" if len(rows) == 1 else "each capacity's", settings["sync"])
        if several := max(row.num_steps for row in sums) > 1:
            typer.echo(f"{sums[0].num_steps:,} steps in sum; times are in ideal steps, of the worst one too")
        table = [["capacity", "microbatches", "bound", "ullage", "time", *["worst"] * several, "next_fit", "padded"]]
        for capacity, row in rows:
            if isinstance(row, UllageError):
                table.append([f"{capacity:,}", "–", *[""] * (len(table[0]) - 2)])
                continue
            times = [row.time, *[row.worst_time] * several, row.next_fit_time, row.padded_time]
            cells = [f"{row.num_microbatches:,}", f"{row.lower_bound:,}", f"{100 * row.ullage:.2f} %"]
            table.append([f"{capacity:,}", *cells, *("–" if time is None else f"{time:.3f}" for time in times)])
        _print_table(table)
        for capacity, row in rows:
            if isinstance(row, UllageError):
                typer.echo(f"{capacity:,}: {row}")
        best = min(sums, key=lambda row: (row.time, row.capacity))
        typer.echo(f"Shortest at capacity {best.capacity:,}: {best.time:.3f} of the ideal time.")

    def _source(self) -> dict[str, Any]:
        from ullage.report.figures import length_figures

        facts = {"name": self.name, "column": self.measured.column, "unit": self.measured.unit}
        facts |= {"num_empty": self.measured.num_empty}
        return {"source": facts | length_figures(self.measured.lengths)}

    def _begin(self, ranks: int, slots: str, sync: str, others: str = "") -> None:
        """Print the lines about the lengths and the ranks."""
        from ullage.core.display import quantity
        from ullage.report.figures import length_figures

        facts, measured = length_figures(self.measured.lengths), self.measured
        origin = self.name if measured.column is None else f"{self.name}, column {measured.column}"
        held = f"{quantity(int(facts['sequences']), 'sequence')}, {facts['tokens']:,} {measured.unit}"
        between = f"{facts['shortest']:,} to {facts['longest']:,} long, median {facts['median']:,.0f}"
        empty = f"; {quantity(measured.num_empty, 'empty row')} left out" if measured.num_empty else ""
        together = f"; they meet {'every microbatch' if sync == 'microbatch' else 'once a step'}" if ranks > 1 else ""
        typer.echo(f"{origin}: {held}, {between}{empty}")
        typer.echo(f"{quantity(ranks, 'rank')} of {slots} slots{others} a microbatch{together}")


def _print_table(rows: list[list[str]]) -> None:
    """The first row holds the headings. Names may be broken between words where there is no room, and no number."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, cells in enumerate(zip(*rows, strict=True)):
        # A heading such as "next_fit, degree 8" is broken into its words.
        words = [*cells[0].split(), *(" ".join(cells[1:]).split() if not place and not cells[0] else cells[1:])]
        justify = "right" if place or cells[0] else "left"
        table.add_column(cells[0], justify=justify, min_width=max(map(len, words), default=0))
    for row in rows[1:]:
        table.add_row(*row)
    Console(highlight=False).print(table, crop=False)
