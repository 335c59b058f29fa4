"""The fenced blocks of a page: what each is, what it needs, and why some are not run.

A block is Python, shell, a file's text (YAML, JSON), a change (diff) or, without a language, the output of the block
before it. ``<!-- not run: WHY -->`` in the line before a block keeps it from being run; it does not show on the page.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON, SHELL, OUTPUT = ("python", "py"), ("sh", "bash"), ("", "text")
#: A file's text, and a change to one.
DATA, CHANGE = ("yaml", "json"), ("diff",)
LANGUAGES = {*PYTHON, *SHELL, *OUTPUT, *DATA, *CHANGE}
#: What a shell block may consist of without being run, and why.
NEVER_RUN = {
    "make": "a target of the Makefile: it installs into .venv first, or runs these tests",
    ".ci/run": "it runs these tests",
    "git": "it asks a server",
}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!-- not run: (?P<why>[^>]+?) -->\n*\Z")
#: Times, rates and memory differ from run to run; losses from machine to machine.
_VARIES = re.compile(
    r"(?<![\w.])[\d.,]+(?:e[+-]?\d+)?(?= ?(?:s|ms|min|h|tokens/s|(?:k|M|G)?(?:B|iB|FLOP)/s|MB of memory)(?![\w/]))"
    r"|(?<=loss )[\d.]+(?: to [\d.]+)?|(?<=loss\": )[\d.]+"
)


@dataclass(frozen=True)
class Block:
    page: Path
    #: number of the fence's line in the page, counted from 1
    line: int
    language: str
    text: str
    #: why it is not run; empty where it is
    why_not: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path | str) -> list[Block]:
    """Every fenced block of a page, in order. An output of what is not run is not run either."""
    page, found = Path(page), []
    source = page.read_text()
    for fence in _FENCE.finditer(source):
        language = fence["language"]
        text = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        marker = _MARKER.search(source, 0, fence.start())
        why_not = marker["why"] if marker else ""
        if not why_not and language in SHELL:
            why_not = _never_run(text)
        if not why_not and language in OUTPUT and found:
            why_not = found[-1].why_not
        found.append(Block(page, source.count("\n", 0, fence.start()) + 1, language, text, why_not))
    return found


def commands_of(block: Block) -> str:
    """What a block runs in a shell; empty for one that is no shell's, or is not to be run."""
    if block.why_not:
        return ""
    if block.language in SHELL:
        return block.text
    new = added(block.text) if block.language == "diff" else ""
    return new if new.startswith("ullage ") else ""


def python_script(page: Path | str, *, with_shell: bool = False) -> str:
    """The Python blocks that run, each in its own lines, so that a traceback names the page's.

    ``with_shell``: the shell blocks between them too, each as a call of ``run_pasted`` with the line of its fence.
    """
    lines = [""] * (len(Path(page).read_text().splitlines()) + 1)
    for block in blocks_of(page):
        if block.language == "python" and not block.why_not:
            code = block.text.splitlines()
            lines[block.line : block.line + len(code)] = code
        elif with_shell and commands_of(block) and "pip install" not in block.text:
            lines[block.line] = f"run_pasted({str(page)!r}, {block.line})"
    return "\n".join(lines) + "\n"


def commands(text: str) -> list[str]:
    """The commands of a shell block, one a line as bash would see it, without comments."""
    joined = re.sub(r"\\\n", " ", text)
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines()) if line]


def added(text: str) -> str:
    """The new side of a diff."""
    return "".join(line[1:] + "\n" for line in text.splitlines() if not line.startswith("-"))


def differences(expected: str, found: str) -> list[str]:
    """Lines of a page's output that the real output lacks, in order. ``...`` stands for any number of lines.

    Runs of blanks count as one, and figures that vary match any figure.
    """
    lines, problems, anywhere = _shapes(found), [], False
    at = 0
    for line in _shapes(expected):
        if line == "...":
            anywhere = True
            continue
        places = range(at, len(lines)) if anywhere else range(at, min(at + 1, len(lines)))
        place = next((i for i in places if lines[i] == line), None)
        if place is None:
            problems.append(f"expected {line!r}, found {lines[at] if at < len(lines) else 'the end'!r}")
            anywhere = True
        else:
            at, anywhere = place + 1, False
    if not problems and not anywhere and at < len(lines):
        problems.append(f"the output goes on: {lines[at]!r}")
    return problems


def _shapes(text: str) -> list[str]:
    lines = (" ".join(_VARIES.sub("#", raw).split()) for raw in text.splitlines())
    return [re.sub("[─━]+", "─", line) for line in lines if line]


def _never_run(text: str) -> str:
    whys = {NEVER_RUN.get(command.split()[0]) for command in commands(text)}
    return "" if None in whys or not whys else "; ".join(sorted(filter(None, whys)))
