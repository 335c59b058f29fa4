"""Wrong inputs: what wrong commands and wrong calls of newcomers are answered, one table each of input and line.

A good answer of a command is a line without a traceback that says what to do, a status that is not 0, and no file left
behind; of a call an error whose last line does. The tables are ``tests/support/wrong_inputs.py``.

    python benchmarks/campaigns/wrong_inputs.py
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tables are those of the tests

from tests.support.wrong_inputs import CALLS, COMMANDS, answer, problems, write_files  # noqa: E402


def main(out: Path = ROOT / "benchmarks" / "results") -> None:
    """Run all, print both tables, and write dated JSON. Exit status 1 if an answer is none that helps."""
    record: dict[str, Any] = {
        "campaign": "wrong_inputs",
        "date": date.today().isoformat(),
        "ullage": ullage.__version__,
        "python": platform.python_version(),
    }
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        for kind, inputs in {"command": COMMANDS, "call": CALLS}.items():
            record[f"{kind}s"] = []
            table = Table("input", "status", "line", title=f"{len(inputs)} wrong {kind}s")
            for what, words in inputs.items():
                found = answer(kind, what, folder)
                row = {key: found[key] for key in ("input", "status", "line")}
                row["problems"] = problems(kind, words, found)
                record[f"{kind}s"].append(row)
                table.add_row(row["input"], str(row["status"]), row["line"], style="red" if row["problems"] else "")
            console.print(table)
    bad = [row for kind in ("commands", "calls") for row in record[kind] if row["problems"]]
    path = out / f"wrong_inputs_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)
    for row in bad:
        print(f"{row['input']}: {'; '.join(row['problems'])}")
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
