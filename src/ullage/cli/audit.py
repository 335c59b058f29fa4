"""``ullage audit``: whether a model keeps the sequences of a packed row apart, shown on the model itself.

Made for the CI of whoever writes models, too: a model of one's own is named as ``MODULE:NAME``, status 1 means that it
was audited and is not exact, and on GitHub the verdict stands beside the line of its class.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli.options import AsJson
from ullage.core.errors import UllageError, UsageError
from ullage.core.extras import needed_by

if TYPE_CHECKING:
    from ullage.proofs import Audit

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

#: A class, function or object of a module.
_OWN = re.compile(r"[\w.]+:[\w.]+")


@app.command()
def audit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a model, a name of the hub, a new one by type and sizes such as qwen3_next-64x4, or "
            "MODULE:NAME: your own model class, or a function without arguments that makes the model.",
        ),
    ],
    kind: Annotated[
        str | None, typer.Option(metavar="NAME", help="The head: causal, masked, seq2seq or image.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--pack/--as-is", help="Pack the model first, or audit it as transformers has it.")
    ] = True,
    attn_implementation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attention of the model before it is packed.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the folder of the model holds.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of tokens, and of weights where the model has none.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare each sequence of a packed row with the same sequence alone: outputs, loss, gradients, and what leaks.

    Exit status 1 for a model that is not exact, 2 where nothing was audited.
    """
    began = time.monotonic()
    try:
        with needed_by("ullage audit"):
            from ullage.proofs import audit as audited
            from ullage.proofs.given import named_model, own_model

        if not Path(model).exists() and _OWN.fullmatch(model):
            if kind or attn_implementation:
                raise UsageError("--kind and --attn_implementation are for models of transformers", where=model)
            made = own_model(model, seed)
        else:
            options: dict[str, Any] = {"attention": attn_implementation, "trusted": trust_remote_code}
            made = named_model(model, kind=kind, seed=seed, **options)
        report = audited(made, pack=packed, seed=seed)
    except Exception as error:
        # Status 2 for every error, since 1 says that a model was audited and is not exact.
        if not isinstance(error, UllageError):
            traceback.print_exc()
            error = UsageError("the model cannot be audited", found=f"{type(error).__name__}: {error}")
        error.exit_status = 2
        raise error from None
    if as_json:
        typer.echo(json.dumps(report.to_json() | {"seconds": time.monotonic() - began, "versions": _versions()}))
    else:
        _print(report)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _tell_github(report, made)
    if not report.passed:
        raise typer.Exit(1)


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    from ullage import __version__

    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"ullage": __version__, **packages, "python": platform.python_version()}


def _print(report: Audit) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(_head(report), soft_wrap=True, markup=False)
    if report.checks:
        table = Table(box=None, pad_edge=False)
        for name in ("check", "difference", "allowed", ""):
            table.add_column(name, justify="right" if name in ("difference", "allowed") else "left")
        for name, difference, allowed, told in _rows(report):
            table.add_row(name, difference, allowed, told, style=None if told == "ok" else "red")
        console.print(table)
    style = "green" if report.passed else "red"
    console.print(_verdict(report), style=style, soft_wrap=True, markup=False)


def _head(report: Audit) -> str:
    images = f"with {report.images}" if report.images else ""
    if report.without_images:
        images = f"on text alone ({report.without_images})"
    facts = [report.way, f"attention {report.attention}" if report.attention else "", f"on {report.device}", images]
    return f"{report.model} ({report.model_type}): {', '.join(fact for fact in facts if fact)}"


def _rows(report: Audit) -> Iterator[tuple[str, str, str, str]]:
    """The check, the difference, what is allowed, and ok, leak or differs."""
    for check in report.checks:
        told = "ok" if check.passed else "leak" if check.leaks else "differs"
        difference = f"{check.value:.1e}" if check.value else "0"
        yield check.name, difference, f"{check.limit:.0e}" if check.limit else "no bit", told


def _verdict(report: Audit) -> str:
    return f"{report.verdict}{f': {report.reason}' if report.reason else ''}"


def _tell_github(report: Audit, model: Any) -> None:
    """The table in the summary of the job; of a model that is not exact an annotation, at the class if it lies here."""
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(report))
        table = f"| check | difference | allowed | |\n|---|---|---|---|\n{rows}\n" if rows else ""
        with open(summary, "a", encoding="utf-8") as file:
            file.write(f"### ullage audit: {report.verdict}\n\n{_head(report)}\n\n{table}{report.reason}\n")
    if report.passed:
        return
    place = ""
    try:
        path = Path(inspect.getsourcefile(type(model)) or "").relative_to(Path.cwd())
        place = f"file={path},line={inspect.getsourcelines(type(model))[1]},"
    except (OSError, TypeError, ValueError):  # made at run time, or a class of a library
        pass
    line = str(report).replace("%", "%25")
    typer.echo(f"::error {place}title=ullage audit::{' '.join(line.split())}", err=True)
