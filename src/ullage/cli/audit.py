"""``ullage audit``: whether a model keeps the sequences of a packed row apart, shown on the model itself."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def audit(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder or config file of a model, or a model type such as qwen3_next."),
    ],
    kind: Annotated[str | None, typer.Option(metavar="NAME", help="The head: causal, masked or seq2seq.")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare each sequence of a packed row with the same sequence alone: outputs, loss, gradients, and what leaks.

    Exit status 1 for a model that is not exact.
    """
    from ullage.proofs import audit as audited
    from ullage.proofs import tiny

    config = tiny.config_of(model, trust_remote_code=trust_remote_code)
    report = audited(
        tiny.tiny_like(config, kind=kind, seed=seed, attention=attn_implementation), pack=packed, seed=seed
    )
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


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
