"""Every fenced block of the README, of CONTRIBUTING and of docs/ runs, or says in the page's source why not.

The Python blocks of a page are one script; its shell blocks run one after the other in a folder with the files that
they name, small ones. What a page shows as output is compared with the real one.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from maintenance import drawings
from tests.support import forked
from tests.support.browser import lay_out, needs_chromium
from tests.support.forked import server, variables
from tests.support.launch import ROOT, environment
from tests.support.page_blocks import (
    LANGUAGES,
    OUTPUT,
    PAGES,
    PYTHON,
    SHELL,
    added,
    blocks_of,
    commands_of,
    differences,
    python_script,
)
from tests.support.page_files import run_shell

#: Pages whose Python trains for longer, or loads an engine.
SLOW = {
    "README.md", "adapters.md", "checkpoints.md", "command.md", "fsdp.md", "generation.md", "index.md", "loop.md",
    "losses.md", "megatron.md", "memory.md", "metrics.md", "pack_padded_sequence.md", "recurrent.md", "report.md",
    "saving.md", "start.md", "training.md", "trl.md",
}  # fmt: skip
DOCS = ROOT / "docs"
BLOCKS = {page: blocks_of(page) for page in PAGES}
#: Warnings that are others' and that a page cannot prevent.
OTHERS_WARNINGS = {
    "is deprecated and will be removed in v6": "transformers renames gradient_checkpointing, which TRL and PEFT use",
    "torch.distributed": "torch renames collectives that DeepSpeed uses",
    "Transformer Engine and Apex are not installed": "megatron-core says so at import",
    "is_fx_tracing will return true": "torch's own nested tensors ask",
    "Setting accelerator to CPU": "DeepSpeed, which accelerate imports when a Trainer is made",
}
#: What begins like a value in a comment behind ``print(...)``, and is then held to be the output.
_VALUE = re.compile(r"^(\d|\[|\{|tensor\(|torch\.Size\(|[A-Z]\w*\()")


def pages_with(condition, slow=()):
    """Pages as parameters of a test."""
    pages = [page for page in PAGES if any(condition(block) for block in BLOCKS[page])]
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * (page.name in slow))
        for page in pages
    ]


def run_python(page, folder):
    """What each line of the page's Python printed, and stderr."""
    script, notes = folder / "page.py", folder / ".prints"
    # The first line of a page is never code.
    script.write_text("from tests.support.page_prints import print" + python_script(page))
    notes.touch()
    done = forked.run(
        [sys.executable, str(script)],
        cwd=folder, env=environment(PAGE_PRINTS=str(notes)), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[int, list[str]] = {}
    for line, text in map(json.loads, notes.read_text().splitlines()):
        printed.setdefault(line, []).append(text)
    return printed, done.stderr


@pytest.mark.slow
@pytest.mark.matrix(keep=0.2)
@pytest.mark.parametrize("page", [page for page in pages_with(commands_of) if page.id != "README.md"])
def test_a_page_runs_as_pasted_in_an_empty_folder(page, tmp_path):
    """Python and commands in the order of the page, in one folder, which is empty at first."""
    script, folder = tmp_path / "page.py", tmp_path / "pasted"
    folder.mkdir()
    start = "from tests.support.page_prints import print; from tests.support.page_files import run_pasted"
    script.write_text(start + python_script(page, with_shell=True))
    settings = {"PAGE_PRINTS": str(tmp_path / "prints"), **variables(server())}
    done = forked.run(
        [sys.executable, str(script)],
        cwd=folder, env=environment(**settings), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("block", [
    pytest.param(block, id=f"line {block.line}") for block in BLOCKS[ROOT / "README.md"]
    if (block.language == "python" or commands_of(block)) and not block.why_not and "pip install" not in block.text
])  # fmt: skip
def test_a_block_of_the_readme_runs_if_it_is_copied_alone(block, tmp_path):
    folder = tmp_path / "alone"
    folder.mkdir()
    text = block.text if block.language in SHELL else f"cat > block.py <<'END'\n{block.text}END\npython block.py"
    done = run_shell(text, folder, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Traceback" not in done.stdout


def test_the_table_of_the_readme_is_that_of_the_first_page():
    tables = [
        [line for line in (ROOT / name).read_text().splitlines() if line.startswith("| ")]
        for name in ("README.md", "docs/index.md")
    ]
    ours, first = tables
    assert len(first) == 9
    assert [line.replace("](docs/", "](") for line in ours] == first


def test_the_front_page_is_read_in_a_minute():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 160] == []
    assert "```python" in lines[:30]
    assert any(line.startswith("![") for line in lines[:10])  # what it is, as a picture, before anything else
    rows = (DOCS / "models.md").read_text().splitlines()
    exact = {
        row.split(" | ")[0].strip("| "): int(row.split(" | ")[2]) for row in rows if re.match(r"\| \w[^|]* \| \d", row)
    }
    images = exact.pop("Models that take images")
    del exact["Recurrent models of ullage"]
    assert f"[{sum(exact.values())} model types](docs/models.md), {images} with images" in "\n".join(lines)
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120


def test_the_site_has_a_short_list_of_pages_in_four_groups_and_no_long_page():
    groups = yaml.safe_load(
        re.split(r"^nav:$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)[1].split("\n#")[0]
    )
    names = [name for group in groups for name in group]
    assert names == ["Start", "Tasks", "Explained", "Reference"]
    listed = [page for group in groups for pages in group.values() for entry in pages for page in entry.values()]
    assert len(listed) + len(groups) <= 25
    # Any other page is linked from one that is listed.
    linked = {
        (page.parent / target).resolve()
        for page in (DOCS / name for name in listed)
        for target in re.findall(r"\]\(([\w/.]+\.md)", page.read_text())
    }
    assert set(DOCS.rglob("*.md")) - linked - {DOCS / name for name in listed} == set()
    assert {page.name: lines for page in PAGES if (lines := len(page.read_text().splitlines())) > 250} == {}


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_of_the_front_page_shows_what_its_plan_gives(name):
    assert (drawings.ASSETS / name).read_text() == drawings.DRAWINGS[name](), "python -m maintenance.drawings"


def wrong_comments(page, printed):
    """Lines of the page with ``print(...)  # VALUE`` that printed something else."""
    lines = page.read_text().splitlines()
    for number, texts in sorted(printed.items()):
        found = re.search(r"\)  # (.*)$", lines[number - 1])
        if not found or not _VALUE.match(found[1]):
            continue
        said, text = (" ".join(value.split()) for value in (found[1], texts[0]))
        head, dots, _ = said.partition("...")
        if not (text.startswith(head.strip()) if dots else re.match(re.escape(text) + r"($|[:;,]? )", said + " ")):
            yield f"line {number} says {said!r} and prints {text!r}"


@pytest.mark.parametrize("page", pages_with(lambda block: block.language == "python" and not block.why_not, SLOW))
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path):
    printed, errors = run_python(page, tmp_path)
    assert list(wrong_comments(page, printed)) == []
    for block, output in zip(BLOCKS[page], BLOCKS[page][1:]):
        if block.language == "python" and output.language in OUTPUT and not output.why_not:
            last = block.line + block.text.count("\n") + 1
            text = "".join("".join(printed[line]) for line in sorted(printed) if block.line < line < last)
            assert differences(output.text, text) == [], output.place
    warnings = [line for line in errors.splitlines() if re.search(r"Warning:|WARNING|^W\d{4} ", line)]
    assert [line for line in warnings if not any(known in line for known in OTHERS_WARNINGS)] == []


def test_every_block_runs_or_says_why_not():
    """No fence is misspelt, no output hangs in the air, and what is not run gives a reason."""
    blocks = [block for page in PAGES for block in BLOCKS[page]]
    fences = sum(len(re.findall(r"^ *```", page.read_text(), flags=re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES
    alone = []
    for page in PAGES:
        for before, block in zip([None, *BLOCKS[page]], BLOCKS[page]):
            runs = before is not None and before.language in ("python", *SHELL)
            if block.language in OUTPUT and not block.why_not and not runs:
                alone.append(block.place)
            if block.language == "py" and not block.why_not:
                alone.append(block.place)
    assert alone == [], "outputs of nothing that is run, and Python that is not run, without a reason"
    # A reason is for whoever edits the page; a test that it names is there.
    whys = {block.place: block.why_not for block in blocks if block.why_not}
    assert [place for place, why in whys.items() if len(why) < len("a drawing")] == []
    assert [
        why for why in whys.values() for test in re.findall(r"tests/\S+\.py", why) if not (ROOT / test).exists()
    ] == []
    run = Counter(block.language for block in blocks if not block.why_not)
    assert run["python"] > 50
    assert run["sh"] + run["bash"] > 10


def test_blocks_that_are_not_run_can_be_read():
    """Python compiles, a diff's new side too; bash parses; YAML and JSON load, and a config file's names are known."""
    for page in PAGES:
        for block in BLOCKS[page]:
            new = added(block.text) if block.language == "diff" else block.text
            if block.language in PYTHON or (block.language == "diff" and not commands_of(block)):
                check_python(new, block)
            elif block.language in SHELL:
                subprocess.run(["bash", "-n", "-c", block.text], check=True)
            elif block.language == "json":
                json.loads(block.text)
            elif block.language == "yaml":
                assert isinstance(yaml.safe_load(block.text), dict), block.place


def check_python(text, block):
    """It compiles, and what it imports of ullage is there."""
    for node in ast.walk(ast.parse(text, block.place)):
        if block.language != "python" and isinstance(node, ast.ImportFrom) and str(node.module).startswith("ullage"):
            module = find_spec(str(node.module))
            assert module is not None, f"{block.place}: {node.module}"
            assert module.origin is not None, f"{block.place}: {node.module}"
            source = Path(module.origin).read_text()
            for name in (alias.name for alias in node.names):
                known = re.search(rf"\b{name}\b", source) or find_spec(f"{node.module}.{name}")
                assert known, f"{block.place}: {node.module}.{name}"


@pytest.mark.slow
@needs_chromium
def test_no_page_of_the_site_is_wider_than_its_window(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page for page in sorted((tmp_path / "site").rglob("*.html")) if page.name != "404.html"]
    assert len(pages) >= len(PAGES) - 2  # the README and CONTRIBUTING are no pages of the site
    parts = ".md-content :is(h1, h2, h3, p, li, td, th, pre, img, svg.idea)"
    # What fits a telephone may be too wide beside the lists that a large window shows, on one page as on another.
    for shown, width, dark in ((pages, 400, True), (pages[::5], 1280, False)):
        for page, facts in lay_out(shown, tmp_path, parts=parts, width=width, dark=dark).items():
            assert (facts["width"], facts["dark"]) == (width, dark)
            assert facts["seen"] > 3, page
            assert facts["page"] <= width, page
            assert facts["wide"] == [], page
