"""``--help``, near misses and shell completion of every verb, in this process as typer's own runner calls them."""

import os
import runpy
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.support.launch import ROOT
from ullage.cli import VERBS
from ullage.cli.group import app


def run(*arguments, columns=80, **environment):
    return CliRunner().invoke(
        app, [*arguments], prog_name="ullage", env={"COLUMNS": str(columns), "TERM": "dumb", **environment}
    )


def completed(line):
    """What the shell is told for the word under the cursor, which is at the end of ``line``."""
    words = line.split(" ")
    asked = {"_ULLAGE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return run(**asked).output.split()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])  # argparse's, as TRL's
def test_every_verb_has_the_same_look(verb):
    for flag, columns in (("--help", 80), ("-h", 130), ("--help-all", 80)):
        done = run(verb, flag, columns=columns)
        assert done.exit_code == 0, done.output
        assert done.output.splitlines()[1].startswith(f" Usage: ullage {verb} [OPTIONS]")
        assert "╭─ Options ─" in done.output
        assert "usage:" not in done.output
        assert "\x1b" not in done.output
        assert max(map(len, done.output.splitlines())) <= columns


@pytest.mark.parametrize(("arguments", "said"), [
    (["trian"], "Did you mean 'train'?"),
    (["plan", "chat", "--capacty", "5"], "--capacity"),
])  # fmt: skip
def test_near_misses_are_named(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(("line", "words"), [
    ("ullage ", list(VERBS)),
    ("ullage co", ["convert"]),
    ("ullage plan --cap", ["--capacity"]),
    ("ullage plan --sync ", ["microbatch", "step"]),
    ("ullage convert a b --to zero", ["zero1", "zero2", "zero3"]),
    # Nothing is what makes the shell offer files.
    ("ullage plan ", []),
])  # fmt: skip
def test_completion(line, words):
    assert completed(line) == words


def test_completing_loads_none_of_the_heavy_libraries():
    code = (
        "import sys\nfrom ullage.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numba', 'numpy', 'datasets'} & sys.modules.keys()))"
    )
    asked = {"_ULLAGE_COMPLETE": "complete_bash", "COMP_WORDS": "ullage plan --cap", "COMP_CWORD": "2"}
    called = [sys.executable, "-c", f"import sys; sys.argv = ['ullage']\n{code}"]
    done = subprocess.run(called, env={**os.environ, **asked}, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["--capacity", "[]"]


def test_the_reference_page_lists_the_options_of_today():
    lists = runpy.run_path(str(ROOT / "docs/site/list_options.py"))
    written = lists["written"]()
    assert lists["PAGE"].read_text(encoding="utf-8") == written, "python docs/site/list_options.py writes it anew"
    for verb in VERBS:
        assert f"\n## ullage {verb}\n" in written
    assert max(map(len, written.partition(lists["MARK"])[2].splitlines())) <= 120
