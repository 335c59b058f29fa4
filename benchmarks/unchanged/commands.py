"""The command line's examples of the docs, and forty wrong commands: what each prints, and its exit status.

A command is the command line's own ``main`` in a fork that has everything loaded; what needs a shell (pipes, torchrun)
runs in one. Times, rates, dates, folders and progress bars are left out of what is compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.unchanged import training
from benchmarks.unchanged.forks import Task, run_all
from benchmarks.unchanged.records import Cases, digest, normal
from benchmarks.unchanged.wrong_commands import WRONG, make_files

#: What is no line of a command's own: progress bars, warnings of libraries that place them, and log times.
_NOISE = re.compile(
    r"\d%\||\w+ +━|it/s\]|s/it\]|^\s*warnings\.warn\(|^W?\d{4,} |Setting ds_accelerator|^\[20\d\d-|torch_dtype"
)
#: Characters of an output that are kept to be read; the digest is of all of it.
SHOWN = 1200
_SHELL = re.compile(r"[|;&<>]|^(torchrun|python|cut) ")


def shown(text: str) -> dict[str, str]:
    """An output as it is compared: its digest, and its beginning for people."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in normal(text).splitlines()]
    kept = "\n".join(line for line in lines if line and not _NOISE.search(line))
    return {"digest": digest(kept), "text": kept[:SHOWN]}


def call(arguments: list[str], place: Path, home: Path) -> dict[str, Any]:
    """``ullage`` with these arguments in a fork, in the folder ``place``."""
    logs = [home / ".stdout", home / ".stderr"]
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.chdir(place)
            os.environ["HOME"] = str(home)
            for log, target in zip(logs, (1, 2)):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
            sys.argv = ["ullage", *arguments]
            status = _status()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found(status, *(log.read_text(errors="replace") for log in logs))


def _status() -> int:
    from ullage.cli import main

    try:
        main()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def found(status: int, out: str, err: str = "") -> dict[str, Any]:
    """The fields of a command."""
    printed, errors = shown(out), shown(err)
    return {
        "status": status,
        "stdout": printed["digest"],
        "stdout begins": printed["text"],
        "stderr": errors["digest"],
        "stderr begins": errors["text"],
    }


def of_page(page: Path, folder: Path) -> dict[str, Any]:
    """The commands of a page in order, after its Python where they need what that makes."""
    from tests.support.launch import ROOT
    from tests.support.page_blocks import blocks_of, commands
    from tests.support.page_files import MADE_BY_PYTHON, commands_of, prepare, run_shell

    blocks, place, made = blocks_of(page), folder / "shell", folder / "python"
    place.mkdir()
    made.mkdir()
    if str(page.relative_to(ROOT)) in MADE_BY_PYTHON:
        _run_python(page, made)
    prepare(blocks, place, made)
    cases: dict[str, Any] = {}
    for block in blocks:
        text = commands_of(block)
        if not text or "pip install" in text or "compile_all" in text:
            continue
        lines = commands(text)
        if "<<" in text or any(line.count("'") % 2 for line in lines):  # one command over several lines
            lines = [text]
        for line in lines:
            name = f"{page.name}: {' '.join(line.split())[:110]}"
            if line == text or _SHELL.search(line) or not line.startswith("ullage "):
                try:
                    done = run_shell(line, place, folder, timeout=600)
                    cases[name] = found(done.returncode, done.stdout)
                except subprocess.TimeoutExpired:
                    cases[name] = {"error": "not done in ten minutes"}
            else:
                cases[name] = call(shlex.split(line)[1:], place, folder)
    return cases


def _run_python(page: Path, folder: Path) -> None:
    """A page's Python in a fork, as a script in ``folder``."""
    import runpy

    from tests.support.page_blocks import python_script

    script = folder / "page.py"
    script.write_text(python_script(page))
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            sys.argv = [str(script)]
            sys.path.insert(0, str(folder))
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)


def wrong(which: int, shares: int, place: Path) -> dict[str, Any]:
    """Every ``shares``-th wrong command, in a folder of small files."""
    work = place / "work"
    work.mkdir()
    make_files(work)
    found = {}
    for line in WRONG[which::shares]:
        found[f"wrong: {line}"] = call(shlex.split(line), work, place)
    return found


def run(folder: Path, seed: int, jobs: int, only: str = "") -> Cases:
    """A fork per page, and a few for the wrong commands."""
    training.load()
    import ullage.cli.group  # noqa: F401
    from tests.support.page_blocks import PAGES, blocks_of
    from tests.support.page_files import commands_of

    tasks = []
    for page in PAGES:
        if only in page.name and any(commands_of(block) for block in blocks_of(page)):
            place = folder / page.stem
            tasks.append(Task(page.name, lambda _, p=page, to=place: of_page(p, to), place))
    if only in "wrong":
        for i in range(4):
            place = folder / f"wrong{i}"
            tasks.append(Task(f"wrong {i}", lambda _, i=i, p=place: wrong(i, 4, p), place))
    cases: Cases = {}
    for name, values in run_all(tasks, jobs, "commands").items():
        cases |= values[0] if "error" not in values[0] else {name: values[0]}
    return dict(sorted(cases.items()))
