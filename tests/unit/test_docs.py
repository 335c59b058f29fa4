"""Every Python block of the README and of docs/ runs, top to bottom, page by page, in a folder of its own."""

import re
import subprocess
import sys

import pytest

from tests.launch import ROOT, environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_snippets_of_a_page_run(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    if not blocks:
        return
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_there_are_pages_to_run():
    """Below docs/ too, and no block that a misspelt fence would keep from running."""
    run = {page.parent.name for page in PAGES if "```python" in page.read_text()}
    assert {ROOT.name, "docs", "coming_from"} <= run
    fences = {word for page in PAGES for word in re.findall(r"^```(\S+)$", page.read_text(), flags=re.MULTILINE)}
    assert fences <= {"python", "py", "sh", "bash", "yaml", "text", "diff", "json"}
