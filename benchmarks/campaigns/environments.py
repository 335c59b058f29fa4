"""The quick tests on other releases of PyTorch, and on another Python.

Each environment is made under ``build/environments`` and keeps what was compiled for it apart. A release of PyTorch
goes over the packages that are there; another Python gets the packages that it can have. Whatever a test cannot import
is named. ``docs/compatibility.md`` has the table. Results are kept after each environment.

    python benchmarks/campaigns/environments.py                                  # torch 2.14.1 and 2.15.0
    python benchmarks/campaigns/environments.py --torch 2.15.0 --python "chroot /forky /usr/bin/python3"

``--python``: a command that runs a Python which sees this folder under the same path. Index settings are pip's own
(``PIP_CONFIG_FILE``, ``PIP_INDEX_URL``). A chroot of Debian's next release: ``debootstrap --variant=minbase
--include=python3-venv,python3-dev,git,g++ forky FOLDER``, then this folder, /proc and /dev bound into it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import typer

ROOT = Path(__file__).resolve().parents[2]
#: Beside what this project needs itself. Of the rest each is installed by itself, so that one takes no other with it.
NEEDED = ("pytest", "pytest-xdist", "hypothesis", "hatchling", "editables", "setuptools")
#: pytest in this folder: a chroot begins in its own root.
PYTEST = "import os, sys; os.chdir(sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
LACKS = re.compile(r"(?:ModuleNotFoundError|ImportError): (.*)")


def environment(torch: str, python: str) -> tuple[list[str], dict[str, str]]:
    """The command of an environment's Python, and the packages that could not be installed, with pip's last line."""
    name = f"torch{torch}" if not python else f"torch{torch}-{re.sub(r'[^a-z0-9.]+', '-', python).strip('-')}"
    folder, lacking = ROOT / "build" / "environments" / name, {}
    *prefix, base = shlex.split(python) or [sys.executable]
    command = [*prefix, str(folder / "bin" / "python")]
    pip = [*command, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not (folder / "made").exists():
        subprocess.run([*prefix, base, "-m", "venv", "--clear", str(folder)], check=True)
        if not python:
            site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
            (site / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([*pip, f"torch=={torch}"], check=True)
        if python:
            lacking = packages(pip, folder)
        (folder / "made").write_text(json.dumps(lacking))
    return command, json.loads((folder / "made").read_text())


def packages(pip: list[str], folder: Path) -> dict[str, str]:
    """This project and its extras as constraints.txt has them, beside the torch that is there; what did not install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    others = sorted({each for each in extras if not each.startswith("ullage[")} - set(NEEDED))
    pinned = [each for each in (ROOT / "constraints.txt").read_text().splitlines() if not each.startswith("torch==")]
    (folder / "constraints.txt").write_text("\n".join(pinned))
    as_pinned = ["--no-build-isolation", "--constraint", str(folder / "constraints.txt")]
    subprocess.run([*pip, *as_pinned, *NEEDED], check=True)
    subprocess.run([*pip, *as_pinned, "--editable", str(ROOT)], check=True)
    lacking = {}
    for each in others:
        # Where this Python cannot have the pinned release, the newest that it can.
        for options in (as_pinned, ["--no-build-isolation"]):
            command, settings = [*pip, *options, each], os.environ | {"DS_BUILD_OPS": "0"}
            done = subprocess.run(command, capture_output=True, text=True, env=settings)
            if not done.returncode:
                break
        else:
            lacking[each] = (done.stderr.strip().splitlines() or [""])[-1][:300]
    return lacking


def tested(python: list[str], tests: list[str], jobs: int) -> dict[str, Any]:
    """What passed, what failed and why, and what is not applicable and why."""
    folder = Path(python[-1]).parents[1]
    report, began = folder / "report.xml", time.monotonic()
    report.unlink(missing_ok=True)
    settings = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "TOKENIZERS_PARALLELISM": "false",
        "DS_BUILD_OPS": "0",
    }
    options = ["-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "loadfile", "-m", "not slow and not gpu"]
    options += ["--continue-on-collection-errors", f"--junitxml={report}"]
    command = [*python, "-c", PYTEST, str(ROOT), *options, *tests]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if not cases:
        raise SystemExit(f"no test ran: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = {"passed": 0, "failed": {}, "not applicable": {}, "lacks": {}}
    lacks = Counter[str]()
    for case in cases:
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        told = next((part for kind in ("failure", "error", "skipped") if (part := case.find(kind)) is not None), None)
        if told is None:
            found["passed"] += 1
            continue
        missing = LACKS.search(told.text or "") if told.tag == "error" else None
        if missing:
            lacks[missing[1][:120]] += 1
            found["not applicable"][name] = missing[1][:120]
        else:
            said = told.get("message", "").strip().splitlines() or [""]
            found["not applicable" if told.tag == "skipped" else "failed"][name] = said[0][:300]
    return {**found, "lacks": dict(lacks), "seconds": round(time.monotonic() - began)}


def main(
    torch: str = "2.14.1,2.15.0",
    python: str = "",
    tests: str = "",
    jobs: int = 2,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print what failed, and write dated JSON. Exit status 1 if a test fails."""
    path = out / f"environments_{date.today().isoformat()}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"campaign": "environments"}
    failed = 0
    for each in torch.split(","):
        command, lacking = environment(each, python)
        asked = "import sys, torch, transformers as t; print(sys.version.split()[0], torch.__version__, t.__version__)"
        told = subprocess.run([*command, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
        found = tested(command, tests.split(), jobs)
        row = {"python": told[0], "torch": told[1], "transformers": told[2], "not installed": lacking, **found}
        record.setdefault("environments", {})[f"Python {told[0]}, torch {told[1]}"] = row
        path.write_text(json.dumps(record, indent=1) + "\n")
        failed += len(found["failed"])
        print(f"Python {told[0]}, torch {told[1]}: {found['passed']} passed, {len(found['failed'])} failed,")
        print(f"{len(found['not applicable'])} not applicable, {found['seconds']} s; lacks {found['lacks']}")
        for name, why in found["failed"].items():
            print("FAILED", name, why)
    print(path)
    raise typer.Exit(int(failed > 0))


if __name__ == "__main__":
    typer.run(main)
