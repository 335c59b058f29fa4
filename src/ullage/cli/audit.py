"""``ullage audit``: whether a model keeps the sequences of a packed row apart, shown on the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def audit(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder or config file of a model, or a model type such as qwen3_next."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Audit every text type of the installed transformers.")] = False,
    kind: Annotated[
        str | None, typer.Option(metavar="NAME", help="The head: causal, masked or seq2seq; also with --all.")
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Load the folder's weights, not tiny ones.")] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --weights: only the first layers.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--pack/--as-is", help="Pack the model first, or audit it as transformers has it.")
    ] = True,
    attn_implementation: Annotated[
        str | None,
        typer.Option("--attn_implementation", metavar="NAME", help="Attention of the model before it is packed."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust_remote_code", help="Run the code that the folder of the model holds.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights and tokens.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --all: also write the table to this page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare each sequence of a packed row with the same sequence alone: outputs, loss, gradients, and what leaks.

    Exit status 1 for a model that is not exact, and with `--all` if one leaks.
    """
    from ullage.errors import UsageError

    if every == (model is not None):
        raise UsageError("audit takes a model, or --all", hint="for example: ullage audit qwen3_next")
    if every:
        _audit_all(kind, seed, output, as_json)
        return
    if output is not None:
        raise UsageError("--output writes the table of --all", hint="for one model there is --json")
    assert model is not None
    report = _audit_one(
        model,
        kind=kind,
        weights=weights or layers is not None,
        layers=layers,
        packed=packed,
        attention=attn_implementation,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _audit_one(
    model: str, *, kind: str | None, weights: bool, packed: bool, attention: str | None, seed: int, **options: Any
) -> Any:
    from ullage.errors import UsageError
    from ullage.proofs import audit, tiny

    config = tiny.config_of(model, trust_remote_code=options["trust_remote_code"])
    if not weights:
        return audit(tiny.tiny_like(config, kind=kind, seed=seed, attention=attention), pack=packed, seed=seed)
    if isinstance(config, str):
        raise UsageError("a model type has no weights", expected="a folder", found=model, hint="leave --weights out")
    size = tiny.num_bytes(config, kind=kind, **options)
    typer.echo(f"the audit of these weights needs about {size / 2**30:.1f} GiB of memory", err=True)
    whole = tiny.with_weights(model, config, kind=kind, attention=attention, **options)
    return audit(whole, pack=packed, seed=seed)


def _audit_all(kind: str | None, seed: int, output: Path | None, as_json: bool) -> None:
    from datetime import date

    import torch
    from tqdm import tqdm

    from ullage.cli.writing import require_ours, write_output
    from ullage.errors import require_one_of
    from ullage.proofs import catalogue
    from ullage.proofs.tiny import KINDS

    if output is not None:
        require_ours("table", output)  # before the minutes that it takes
    kinds = (*KINDS, catalogue.RECURRENT)
    if kind is not None:
        kinds = (require_one_of(kind, kinds, "kind"),)
    audits: list[tuple[str, Any]] = []
    _quieten()
    torch.set_num_threads(1)  # tiny models lose more to a second thread than it gives
    for each, name in tqdm(catalogue.entries(kinds), unit="type", disable=None):
        audits.append((each, catalogue.audit_entry(each, name, seed=seed)))
    if output is not None:
        typer.echo(
            write_output("table", output, lambda file: file.write(catalogue.page(audits, date.today()))), err=True
        )
    if as_json:
        typer.echo(json.dumps([{"kind": each, **report.to_json()} for each, report in audits]))
    else:
        _print_all(audits)
    if any(report.verdict in ("leak", "differs") for _, report in audits):
        raise typer.Exit(1)


def _quieten() -> None:
    """Keep transformers' remarks on single types out of the progress bar."""
    import warnings

    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")


def _print(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    facts = [report.way, f"attention {report.attention}" if report.attention else "", f"on {report.device}"]
    console.print(f"{report.model} ({report.model_type}): {', '.join(fact for fact in facts if fact)}", soft_wrap=True)
    if report.checks:
        table = Table(box=None, pad_edge=False)
        for name in ("check", "difference", "allowed", ""):
            table.add_column(name, justify="right" if name in ("difference", "allowed") else "left")
        for check in report.checks:
            told = "[green]ok[/]" if check.passed else "[red]leak[/]" if check.leaks else "[red]differs[/]"
            allowed = f"{check.limit:.0e}" if check.limit else "no bit"
            table.add_row(check.name, f"{check.value:.1e}" if check.value else "0", allowed, told)
        console.print(table)
    style = "green" if report.passed else "red"
    console.print(f"{report.verdict}{f': {report.reason}' if report.reason else ''}", style=style, soft_wrap=True)


def _print_all(audits: list[tuple[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ullage.proofs.catalogue import told

    table = Table(box=None, pad_edge=False)
    for name in ("kind", "type", "verdict", "way", "difference or reason"):
        table.add_column(name, overflow="fold")
    for kind, report in audits:
        style = {"exact": "green", "leak": "red", "differs": "red"}.get(report.verdict, "yellow")
        table.add_row(kind, report.model_type, Text(report.verdict, style=style), report.way, Text(told(report)))
    console = Console(highlight=False)
    console.print(table)
    exact = sum(report.passed for _, report in audits)
    console.print(f"{exact} of {len(audits)} exact")
