"""Every Python block of the README and of docs/ runs, top to bottom, page by page, in a folder of its own."""

import re
import subprocess
import sys

import pytest

from tests.support.browser import lay_out, needs_chromium
from tests.support.launch import ROOT, environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages that train for longer, or load an engine.
SLOW = {
    *("checkpoints.md", "metrics.md", "fsdp.md", "megatron.md", "trl.md", "adapters.md"),
    *("training.md", "recurrent.md", "generation.md", "pack_padded_sequence.md"),
}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW)) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
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


@pytest.mark.slow
@needs_chromium
def test_no_page_of_the_site_is_wider_than_its_window(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page for page in sorted((tmp_path / "site").rglob("*.html")) if page.name != "404.html"]
    assert len(pages) >= len(PAGES) - 1  # the README is no page of the site
    parts = ".md-content :is(h1, h2, h3, p, li, td, th, pre, img, svg.idea)"
    for width, dark in ((400, True), (1280, False)):
        for page, facts in lay_out(pages, tmp_path, parts=parts, width=width, dark=dark).items():
            assert (facts["width"], facts["dark"]) == (width, dark)
            assert facts["seen"] > 3, page
            assert facts["page"] <= width, page
            assert facts["wide"] == [], page
