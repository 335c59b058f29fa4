"""``ullage report RUN``: the picture of a run, as a page, a table or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ullage.cli.options import AsJson, print_table

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run, or one of its checkpoints.")],
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="[OTHER]...", help="Other runs, drawn over it and compared with it.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="The page. Default: report.html in RUN, comparison.html with others.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run: loss, speed, padding, imbalance and the layouts that it was trained on.

    RUN is the output folder of `ullage train`, of the Trainer, or of any Trainer of transformers. With --json a page
    is written only if --html says where.
    """
    from ullage.cli.writing import require_ours, write_output
    from ullage.report.run import COMPARISON, PAGE, read_run, run_figures, run_page, run_record, short_names

    if html is not None:
        require_ours("page", html)
    runs = [read_run(folder) for folder in (run, *(others or ()))]
    if as_json:
        typer.echo(json.dumps({"runs": [run_record(each) for each in runs]}, indent=2))
        if html is None:
            return
    else:
        names = short_names(runs)
        for each in runs:
            typer.echo(f"{each.folder}: {each.progress}")
        beside = ["difference"] if len(runs) == 2 else [f"{name}, difference" for name in names[1:]]
        print_table([["", *names, *beside], *run_figures(runs)])
    text = run_page(runs)
    page = html or run / (COMPARISON if others else PAGE)
    hint = None if html is not None else "--html FILE writes the page elsewhere"
    write_output("page", page, lambda file: file.write(text), hint=hint)
    typer.echo(f"report: {page}", err=as_json)
