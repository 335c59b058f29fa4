"""``ullage plan LENGTHS``: where each sequence would go, in figures, as a page, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from ullage.core.errors import InputError, UllageError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ullage.core.layout import Int64
    from ullage.datasets.files import Measured
    from ullage.planning import Plan
    from ullage.report.figures import Padded, PlannedStep, StepTotals

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
        list[str] | None,
        typer.Option(
            "--capacity",
            "-c",
            metavar="N[,N...]|NAME=N",
            help="Tokens a rank holds in a microbatch. Several, such as 4096,8192,16384, are compared, a row for each. "
            "NAME=N, such as patches=16384, also limits what the file's column of that name holds.",
        ),
    ] = None,
    amount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A column of the file with what each sequence takes besides tokens, a number or a list of sizes, such "
            "as patches: counted by the --model's tower, and shown.",
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
    from ullage.report.figures import cut, planned

    name, measured, suggested = _measured(lengths, n, seed, column, tokenizer)
    tokens, limits = _capacities(capacity or [])
    capacities = tokens or ([suggested] if suggested else [])
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
    settings |= {"cost": _cost(linear, quadratic, model), "capacities": limits}
    settings |= {"microbatch_multiple": microbatch_multiple, "max_sequences": max_sequences, "oversize": oversize}
    amounts = _amounts(lengths, measured, [*limits, *(amount or [])])
    batches = [
        _Sequences(each, dict(zip(amounts, others, strict=True)))
        for each, *others in zip(
            *(cut(values, global_batch_size, steps) for values in (measured.lengths, *amounts.values())), strict=True
        )
    ]
    shown = _Shown(name, measured, as_json)
    if len(capacities) == len(batches) == 1:
        settings |= {"capacity": capacities[0], "amounts": batches[0].amounts}
        step = planned(batches[0].lengths, strategy, settings)
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


class _Sequences(NamedTuple):
    """The sequences of a step: their lengths, and what they take besides tokens."""

    lengths: Int64
    amounts: dict[str, Any]


def _capacities(texts: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Capacities of tokens from numbers with commas between them, without repetitions, and those of other resources by
    name."""
    tokens: list[int] = []
    limits: dict[str, int] = {}
    for word in (word for text in texts for word in text.split(",")):
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
        raise UsageError(
            f"only a file has columns of {names[0]}", expected="a file with that column", found=f"{source!r}"
        )
    found = {}
    for name in dict.fromkeys(names):
        values = amounts_in_file(source, name)
        if measured.num_empty:
            raise InputError(
                f"{measured.num_empty} rows have no tokens, and {name} for each row",
                where=source,
                hint="leave them out",
            )
        found[name] = values[: len(measured.lengths)]
    return found


def _require_possible(outputs: dict[str, Path], source: str, strategy: str) -> None:
    """Raise for what would be refused after a plan that may take minutes."""
    from ullage.cli.writing import require_ours
    from ullage.planning import strategy_names

    if strategy not in strategy_names():
        raise UsageError("no such strategy", expected=" or ".join(strategy_names()), found=strategy)
    for kind, path in outputs.items():
        require_ours(kind, path, [source])


def _sweep(
    batches: Sequence[_Sequences], capacities: Sequence[int], strategy: str, settings: dict[str, Any]
) -> Iterator[tuple[int, StepTotals | UllageError]]:
    """All steps at each capacity, or why a capacity cannot hold them. Raises where none can."""
    from tqdm import tqdm

    from ullage.report.figures import planned, summed

    failed: list[UllageError] = []
    for capacity in capacities:
        try:
            bar = tqdm(batches, desc=f"capacity {capacity:,}", unit="step", disable=None, leave=False)
            found = summed(
                [
                    planned(batch.lengths, strategy, settings | {"capacity": capacity, "amounts": batch.amounts})
                    for batch in bar
                ]
            )
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
    from ullage.datasets.files import Measured, read_lengths, read_stream, read_text
    from ullage.datasets.lengths import CAPACITIES, WORKLOADS, mock_config, mock_lengths

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
    try:
        config = json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, UllageError):
            raise
        raise InputError("a model's config is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(config, dict):
        raise InputError("a model's config must be a JSON object", where=str(path), found=type(config).__name__)
    kind = MultimodalCost if isinstance(config.get("vision_config"), dict) else TransformerCost
    return kind.from_config(config)


def _write(step: PlannedStep, outputs: dict[str, Path], name: str, source: str) -> list[str]:
    """Write what was asked for; returns a line for each."""
    from ullage.cli.writing import write_output
    from ullage.report.plan import plan_page

    fill: dict[str, Callable[[IO[str]], object]] = {
        "page": lambda file: file.write(plan_page(step.plan, reference=step.reference, source=name)),
        "plan": lambda file: file.write(step.plan.to_json()),
    }
    return [write_output(kind, path, fill[kind], [source]) for kind, path in outputs.items()]


# What is printed.


@dataclass(frozen=True)
class _Shown:
    """What is printed: the figures of a step, or a row per capacity, as a table or, for a machine, as JSON.

    ``name``: of what was planned. ``measured``: its lengths.
    """

    name: str
    measured: Measured
    as_json: bool

    def step(self, step: PlannedStep) -> None:
        """The figures of one step."""
        if self.as_json:
            typer.echo(json.dumps(self._source() | _record(step), indent=2))
            return
        from ullage.report.figures import figures, lost_sequences, reference_name

        plan, reference, padded = step.plan, step.reference, step.padded
        others = "".join(f" and {limit:,} {name}" for name, limit in plan.limits.items())
        console = self._begun(plan.ranks, f"{plan.capacity:,}", plan.sync, others)
        if lost := lost_sequences(plan.statistics()):
            console.print(lost, markup=False, soft_wrap=True)
        columns = [plan.strategy, *([] if reference is None else [reference_name(reference)])]
        table = _table(["", *columns, *([] if padded is None else ["padded"]), "lower bound", "ideal"])
        cells_of_padded = _cells(padded) if padded is not None else {}
        for figure in figures(plan, reference):
            cells = [figure.plan, *([figure.reference] if reference is not None else [])]
            cells += [cells_of_padded.get(figure.name, "–")] if padded is not None else []
            table.add_row(figure.name, *cells, figure.bound, figure.ideal)
        console.print(_unbroken(table), crop=False)
        console.print(_compared(step), soft_wrap=True)

    def sweep(self, rows: Iterable[tuple[int, StepTotals | UllageError]], settings: dict[str, Any]) -> None:
        """A row for each capacity: all steps in sum, or why that capacity cannot hold them."""
        found = list(rows)
        if self.as_json:
            told = {"ranks": settings["ranks"], "sync": settings["sync"]}
            listed = [
                {"capacity": capacity, "error": str(row)} if isinstance(row, UllageError) else dataclasses.asdict(row)
                for capacity, row in found
            ]
            typer.echo(json.dumps(self._source() | told | {"capacities": listed}, indent=2))
            return
        sums = [row for _, row in found if not isinstance(row, UllageError)]
        several = max(row.num_steps for row in sums) > 1
        capacities = f"{found[0][0]:,}" if len(found) == 1 else "each capacity's"
        console = self._begun(settings["ranks"], capacities, settings["sync"])
        if several:
            console.print(
                f"{sums[0].num_steps:,} steps in sum; times are in ideal steps, of the worst one too", soft_wrap=True
            )
        worst = ["worst"] if several else []
        table = _table(["capacity", "microbatches", "bound", "ullage", "time", *worst, "next_fit", "padded"])
        for capacity, row in found:
            if isinstance(row, UllageError):
                table.add_row(f"{capacity:,}", "–")
                continue
            cells = [f"{row.num_microbatches:,}", f"{row.lower_bound:,}", f"{100 * row.ullage:.2f} %", _time(row.time)]
            cells += [_time(row.worst_time)] if several else []
            table.add_row(f"{capacity:,}", *cells, _time(row.next_fit_time), _time(row.padded_time))
        console.print(_unbroken(table), crop=False)
        for capacity, row in found:
            if isinstance(row, UllageError):
                console.print(f"{capacity:,}: {row}", markup=False, soft_wrap=True)
        best = min(sums, key=lambda row: (row.time, row.capacity))
        console.print(f"Shortest at capacity {best.capacity:,}: {best.time:.3f} of the ideal time.")

    def _source(self) -> dict[str, Any]:
        from ullage.report.figures import length_figures

        facts = {"name": self.name, "column": self.measured.column, "unit": self.measured.unit}
        facts |= {"num_empty": self.measured.num_empty}
        return {"source": facts | length_figures(self.measured.lengths)}

    def _begun(self, ranks: int, slots: str, sync: str, others: str = "") -> Console:
        """The console, with the lines about the lengths and the ranks printed."""
        from rich.console import Console

        from ullage.core.display import quantity
        from ullage.report.figures import length_figures

        console = Console(highlight=False)
        facts, measured = length_figures(self.measured.lengths), self.measured
        origin = self.name if measured.column is None else f"{self.name}, column {measured.column}"
        held = f"{quantity(int(facts['sequences']), 'sequence')}, {facts['tokens']:,} {measured.unit}"
        between = f"{facts['shortest']:,} to {facts['longest']:,} long, median {facts['median']:,.0f}"
        meets = "every microbatch" if sync == "microbatch" else "once a step"
        empty = f"; {quantity(measured.num_empty, 'empty row')} left out" if measured.num_empty else ""
        console.print(f"{origin}: {held}, {between}{empty}", markup=False, soft_wrap=True)
        together = f"; they meet {meets}" if ranks > 1 else ""
        console.print(f"{quantity(ranks, 'rank')} of {slots} slots{others} a microbatch{together}", soft_wrap=True)
        return console


def _table(titles: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place or title else "left")
    return table


def _unbroken(table: Table) -> Table:
    """The table, whose names may be broken between words where there is no room, and no number."""
    for place, column in enumerate(table.columns):
        heading, cells = str(column.header), list(map(str, column.cells))
        numbers = cells if place or heading else " ".join(cells).split()
        # A heading such as "next_fit, degree 8" is broken into its words.
        column.min_width = max(map(len, [*heading.split(), *numbers]), default=0)
    return table


def _time(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _cells(padded: Padded) -> dict[str, str]:
    """The figures of padded batches by the names of the table's lines."""
    return {
        "microbatches per rank": f"{padded.num_microbatches:,}",
        "ullage": f"{100 * padded.ullage:.2f} %",
        "rank imbalance": f"{padded.rank_imbalance:.3f}",
        "critical path": f"{padded.critical_path:.3f}",
    }


def _compared(step: PlannedStep) -> str:
    """The time of the step beside next_fit's and that of padded batches, in one sentence; empty without any."""
    from ullage.report.figures import step_time

    time, parts = step_time(step.plan), []
    if step.reference is not None:
        parts.append(f"{100 * time / step_time(step.reference):.1f} % of next_fit's time")
    if step.padded is not None and step.padded_time:
        padding = f"{100 * step.padded.padding_computed:.1f} % padding"
        parts.append(f"{100 * time / step.padded_time:.1f} % of padded batches' ({padding})")
    return f"The step takes {' and '.join(parts)}." if parts else ""


def _record(step: PlannedStep) -> dict[str, Any]:
    """The figures of one step as plain data."""
    from ullage.report.figures import bound_ullage, ideal_microbatches, step_time

    def numbers(one: Plan) -> dict[str, Any]:
        return {"strategy": one.strategy, "step_time": step_time(one), **dataclasses.asdict(one.statistics())}

    plan, stats = step.plan, step.plan.statistics()
    ideal = {
        "num_microbatches": ideal_microbatches(plan, stats),
        "ullage": 0.0,
        "rank_imbalance": 1.0,
        "critical_path": 1.0,
    }
    bound = {
        "num_microbatches": stats.lower_bound,
        "ullage": bound_ullage(plan, stats),
        "rank_imbalance": stats.rank_imbalance_bound,
        "critical_path": stats.critical_path_bound,
    }
    padded = None if step.padded is None else {"step_time": step.padded_time, **dataclasses.asdict(step.padded)}
    return {
        "ranks": plan.ranks,
        "capacity": plan.capacity,
        "capacities": plan.capacities,
        "pad_to_multiple_of": plan.pad_to_multiple_of,
        "sync": plan.sync,
        "plan": numbers(plan),
        "next_fit": None if step.reference is None else numbers(step.reference),
        "padded": padded,
        "lower_bound": bound,
        "ideal": ideal,
    }
