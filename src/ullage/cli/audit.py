"""``ullage audit``: whether a model keeps the sequences of a packed row apart, shown on the model itself.

Made for the CI of whoever writes models, too: a model of one's own is named as ``MODULE:NAME``, status 1 means that it
was audited and is not exact, and on GitHub the verdict stands beside the line of its class.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.core.errors import InputError, UllageError, UsageError
from ullage.core.extras import needed_by

if TYPE_CHECKING:
    from ullage.proofs import Audit

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

#: A class, function or object of a module.
_OWN = re.compile(r"[\w.]+:[\w.]+")


@app.command()
def audit(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder or config file of a model, a model type such as qwen3_next, or MODULE:NAME: your own model "
            "class, or a function without arguments that makes the model.",
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="NAME", help="The head: causal, masked, seq2seq or image.")
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
    every: Annotated[
        bool,
        typer.Option("--all", help="Every type of the installed transformers, or of one --kind: takes a while."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare each sequence of a packed row with the same sequence alone: outputs, loss, gradients, and what leaks.

    Exit status 1 for a model that is not exact, 2 where nothing was audited.
    """
    began = time.monotonic()
    with _or_status_2():
        if every or model is None:
            if model is not None or not every:
                raise UsageError("name one MODEL, or ask for --all", found=model or "neither")
            raise typer.Exit(_all(kind, seed, as_json))
        from ullage.proofs import audit as audited
        from ullage.proofs import tiny

        if not Path(model).exists() and _OWN.fullmatch(model):
            if kind or attn_implementation:
                raise UsageError("--kind and --attn_implementation are for models of transformers", where=model)
            made = _own(model, seed)
        else:
            config = tiny.config_of(model, trust_remote_code=trust_remote_code)
            made = tiny.tiny_like(config, kind=kind, seed=seed, attention=attn_implementation)
        report = audited(made, pack=packed, seed=seed)
    if as_json:
        typer.echo(json.dumps(report.to_json() | {"seconds": time.monotonic() - began, "versions": _versions()}))
    else:
        _print(report)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _tell_github(report, made)
    if not report.passed:
        raise typer.Exit(1)


def _all(kind: str | None, seed: int, as_json: bool) -> int:
    """Audit every type, a line each, then their number; 1 if one leaks or differs, else 0."""
    import warnings
    from collections import Counter

    from transformers.utils import logging

    from ullage.core.errors import require_one_of
    from ullage.proofs import tiny
    from ullage.proofs.auditing import audit_type

    logging.set_verbosity_error()  # remarks on single types
    warnings.filterwarnings("ignore")
    verdicts: Counter[str] = Counter()
    with_images = 0
    for each in (require_one_of(kind, tiny.KINDS, "kind of model"),) if kind else tiny.KINDS:
        for name in tiny.model_types(each):
            report = audit_type(each, name, seed=seed)
            verdicts[report.verdict] += 1
            with_images += report.passed and bool(report.images)
            if as_json:
                typer.echo(json.dumps({"kind": each, **report.to_json()}))
                continue
            beside = f" with {report.images}" if report.images else ""
            reason = f": {' '.join(report.reason.split())}" if report.reason else ""
            typer.echo(f"{each} {name}: {report.verdict}{beside}{reason}")
    if not as_json:
        counted = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        typer.echo(f"{counted}; {with_images} exact with images")
    return int(bool(verdicts["leak"] or verdicts["differs"]))


@contextmanager
def _or_status_2() -> Iterator[None]:
    """Status 2 for every error, since 1 says that a model was audited and is not exact."""
    try:
        with needed_by("ullage audit"):
            yield
    except typer.Exit:
        raise
    except UllageError as error:
        typer.echo(f"ullage: {error}", err=True)
        raise typer.Exit(2) from error
    except Exception as error:
        traceback.print_exc()
        typer.echo(f"ullage: the model cannot be audited: found {type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from error


def _own(named: str, seed: int) -> Any:
    """The model that ``MODULE:NAME`` is or makes; as with ``python -m``, modules of the current folder are found."""
    import importlib

    import torch

    from ullage.proofs import tiny

    module_name, _, name = named.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that theirs imports
        hint = "it is looked for in the current folder and among what is installed"
        raise InputError("there is no such module", found=repr(error.name), hint=hint) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError("the module has no such name", where=module_name, found=repr(part))
        found = getattr(found, part)
    torch.manual_seed(seed)
    if isinstance(found, type):
        return tiny.tiny_of_class(found)
    if not isinstance(found, torch.nn.Module) and callable(found):
        found = found()
    if not isinstance(found, torch.nn.Module):
        expected = "a model class, or a function without arguments that returns a model"
        raise InputError("this is no model", where=named, expected=expected, found=type(found).__name__)
    return found


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
        images = f"on text alone, since no images can be made for it ({report.without_images})"
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
