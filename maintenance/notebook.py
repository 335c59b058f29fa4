"""Run the example notebook in a kernel, and keep what it shows in it: ``python maintenance/notebook.py``.

Needs nbclient and ipykernel. What is printed to standard error, and lines with a time of day, are left out. Cells whose
numbers depend on the machine have the tag ``varies``; the test compares the text of all others.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "13_first_look.ipynb"
#: Lines of libraries that say when they were printed.
_TIMED = re.compile(r"^\[\d{4}-\d\d-\d\d .*\n?", flags=re.MULTILINE)


def executed(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of a run in ``folder``, as plain data."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    made = json.loads(nbformat.writes(notebook))
    for cell in made["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["outputs"] = _kept(cell["outputs"])
    made["metadata"]["language_info"] = {"name": "python"}
    return made


def text_of(cell: dict[str, Any]) -> str:
    """What a cell shows as text: what it printed, and the line of its last value."""
    said = ""
    for output in cell["outputs"]:
        part = output.get("text") or output.get("data", {}).get("text/plain", "")
        said += part if isinstance(part, str) else "".join(part)
    return _TIMED.sub("", said).strip()


def _kept(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = []
    for output in outputs:
        if output.get("name") == "stdout":
            output["text"] = _TIMED.sub("", "".join(output["text"])).splitlines(keepends=True)
        if output.get("name") != "stderr" and output.get("text", [""]):
            kept.append(output)
    return kept


def main() -> None:
    """Run the notebook and write it back."""
    with tempfile.TemporaryDirectory() as folder:
        made = executed(NOTEBOOK, Path(folder))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
