"""Whether ullage and each framework can be installed together: the resolver's verdict, before and after, and sizes.

A framework that is on the package index is asked for in its newest release; one that is not, by the requirements of a
checkout (``--checkout NAME=PATH``; without one its row is "not run"). The resolver is uv's, which reads metadata and
installs nothing: a set that pip would accept, it accepts, and where it refuses, it says why. Requirements by address
(git, paths, files of other indexes) are left out and listed, since they are no part of the question.

    python benchmarks/campaigns/resolver.py
    python benchmarks/campaigns/resolver.py --checkout slime=../slime --checkout nemo_rl=../RL
    python benchmarks/campaigns/resolver.py --before v0.1.0 --only verl --only swift

Before is the pyproject.toml of a commit, after that of the working tree.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"
#: A commit that asked for transformers 5.20 and accelerate 1.12, and for numba in the core.
BEFORE = "ff429fe"
#: What is asked for beside a framework: extras of ullage, in the order of the table.
EXTRAS = {"core": (), "[hf]": ("hf",), "[hf,trl,peft]": ("hf", "trl", "peft")}
#: The Pythons that ullage is for, in the order in which they are tried.
PYTHONS = ("3.11", "3.12", "3.13")
#: Of packages that have no wheel, or whose build asks for CUDA: what they require.
NO_WHEEL = {
    "deepspeed": [
        "einops",
        "hjson",
        "msgpack",
        "ninja",
        "numpy",
        "psutil",
        "py-cpuinfo",
        "pydantic>=2",
        "torch",
        "tqdm",
    ],
    "flash-attn": ["torch", "einops"],
    "fast-hadamard-transform": ["torch", "packaging", "ninja"],
    "ring-flash-attn": [],
}
#: What is known to be refused: AReaL asks for transformers 5.3 at most, ms-swift and LLaMA-Factory for TRL before 1.0.
REFUSED = {
    ("areal", "[hf]"),
    ("areal", "[hf,trl,peft]"),
    ("swift", "[hf,trl,peft]"),
    ("llama_factory", "[hf,trl,peft]"),
}


@dataclass(frozen=True)
class Framework:
    """A framework of docs/frameworks.md: its name on the index, or where its checkout says what it requires.

    Attributes:
        index: its name on the package index; empty where it is on none under its name.
        extras: of its own, that its training needs.
        without: requirements that the index cannot meet beside its others, which its lock file resolves by force.
    """

    index: str = ""
    extras: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


FRAMEWORKS = {
    "trl": Framework("trl"),
    "sentence_transformers": Framework("sentence-transformers"),
    "verl": Framework("verl"),
    "swift": Framework("ms-swift"),
    "axolotl": Framework("axolotl"),
    "openrlhf": Framework("openrlhf"),
    "llama_factory": Framework("llamafactory"),
    "unsloth": Framework("unsloth"),
    "nemo_rl": Framework(),
    "slime": Framework(),
    "miles": Framework(),
    "skyrl": Framework(extras=("skyrl-train",)),
    "prime_rl": Framework(without=("modelexpress",)),
    "areal": Framework(),
    "automodel": Framework(),
    "megatron_bridge": Framework(),
}


@dataclass
class Asked:
    """What a framework requires, and where that is said."""

    version: str
    source: str
    requirements: list[str]
    python: str
    overrides: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    prerelease: bool = False
    left_out: list[str] = field(default_factory=list)


class NotRun(Exception):
    """There is nothing to ask the resolver about."""


class Resolver:
    """uv, in a folder of its own."""

    def __init__(self, folder: Path, uv: str | None) -> None:
        self.folder = folder
        self.answers: dict[str, tuple[str, list[str]]] = {}
        if uv is None:
            subprocess.run([sys.executable, "-m", "venv", folder / "uv"], check=True)
            subprocess.run([folder / "uv" / "bin" / "pip", "install", "--quiet", "uv"], check=True)
            uv = str(folder / "uv" / "bin" / "uv")
        self.uv = uv
        known = "".join(
            f"[[dependency-metadata]]\nname = {json.dumps(name)}\nrequires-dist = {json.dumps(needs)}\n"
            for name, needs in NO_WHEEL.items()
        )
        (folder / "uv.toml").write_text(known, encoding="utf-8")
        # A package without wheels may have to be built for its metadata: none shall fetch gigabytes of CUDA for that.
        (folder / "builds.txt").write_text("torch<0\n", encoding="utf-8")

    def version(self) -> str:
        """The version of uv."""
        return subprocess.run([self.uv, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]

    def resolve(self, requirements: Sequence[str], asked: Asked | None = None, *options: str) -> tuple[str, list[str]]:
        """Why the requirements cannot be met, and "" if they can, with the packages that meet them; asked once each."""
        question = repr((sorted({*requirements}), asked, options))
        if question not in self.answers:
            self.answers[question] = self._resolve(requirements, asked, *options)
        return self.answers[question]

    def _resolve(self, requirements: Sequence[str], asked: Asked | None, *options: str) -> tuple[str, list[str]]:
        command = [self.uv, "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", *options]
        command += ["--config-file", self.folder / "uv.toml", "--build-constraint", self.folder / "builds.txt"]
        command += ["--python-platform", "x86_64-manylinux_2_39"]
        if asked is not None:
            command += ["--python-version", asked.python, *(["--prerelease", "allow"] if asked.prerelease else [])]
            for option, lines in (("--override", asked.overrides), ("--constraint", asked.constraints)):
                path = self.folder / f"{option.strip('-')}.txt"
                path.write_text("\n".join(lines), encoding="utf-8")
                command += [option, path]
        done = subprocess.run(
            list(map(str, command)), input="\n".join(requirements), capture_output=True, text=True, timeout=600
        )
        return (done.stderr or "no answer") if done.returncode else "", done.stdout.split()

    def newest(self, name: str) -> str:
        """The newest release of a package on the index."""
        why, found = self.resolve([name], None, "--no-deps", "--python-version", PYTHONS[0])
        if why:
            raise NotRun(f"the index has no wheel of it: {_line(why)}")
        return found[0].partition("==")[2]


def asked_of(name: str, resolver: Resolver, checkouts: dict[str, Path]) -> Asked:
    """What a framework requires: from its checkout if one is given, else from the index. Raises ``NotRun``."""
    framework = FRAMEWORKS[name]
    if name in checkouts:
        return _asked_of_checkout(framework, checkouts[name])
    if not framework.index:
        raise NotRun(f"no wheel under its name: --checkout {name}=PATH")
    version = resolver.newest(framework.index)
    return Asked(version, "index", [f"{framework.index}=={version}"], PYTHONS[0])


def _asked_of_checkout(framework: Framework, path: Path) -> Asked:
    """The requirements of a checkout's last commit; those by address are left out."""

    def show(*arguments: str) -> str:
        git = ["git", "-C", str(path), *arguments]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout

    table = tomllib.loads(show("show", "HEAD:pyproject.toml"))
    project, uv = table.get("project", {}), table.get("tool", {}).get("uv", {})
    if "dependencies" in project:
        lines = [*project["dependencies"]]
        for extra in framework.extras:
            lines += project["optional-dependencies"][extra]
        python, version = project.get("requires-python", ""), project.get("version", "")
    else:  # a setup.py that reads requirements.txt
        lines = [line.partition(" #")[0].strip() for line in show("show", "HEAD:requirements.txt").splitlines()]
        setup = show("show", "HEAD:setup.py")
        python, version = (_named(setup, each) for each in ("python_requires", "version"))
    # PyTorch has the same versions on the index; what else comes from elsewhere may have none there.
    elsewhere = {each.lower() for each in uv.get("sources", {})} - {"torch", "torchvision", "torchaudio", "triton"}
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    elsewhere |= {*framework.without}
    left_out = [each for each in parsed if each.url or each.name.lower() in elsewhere or "+" in str(each.specifier)]
    fits = next((each for each in PYTHONS if f"{each}.99" in SpecifierSet(python) or each in SpecifierSet(python)), "")
    # An override would replace what ullage asks for, too, instead of being compared with it.
    overrides, constraints = (
        [each for each in uv.get(f"{kind}-dependencies", []) if "@" not in each and "'never'" not in each]
        for kind in ("override", "constraint")
    )
    shared = {Requirement(each).name for extras in EXTRAS.values() for each in ours(PYPROJECT.read_text(), extras)}
    commit, day = show("log", "-1", "--format=%h %cs").split()
    return Asked(
        version=version or commit,
        source=f"checkout {commit} of {day}",
        requirements=[str(each) for each in parsed if each not in left_out],
        python=fits or PYTHONS[0],
        overrides=[each for each in overrides if Requirement(each).name not in shared],
        constraints=[*constraints, *(each for each in overrides if Requirement(each).name in shared)],
        prerelease=uv.get("prerelease") == "allow",
        left_out=sorted({each.name for each in left_out}),
    )


def _named(text: str, name: str) -> str:
    found = re.search(rf"{name}=\"([^\"]+)\"", text)
    return found[1] if found else ""


def ours(pyproject: str, extras: Sequence[str]) -> list[str]:
    """What ullage requires with some extras; those that it did not have then are left out."""
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for each in extras for line in optional.get(each, []))]


def verdict(resolver: Resolver, asked: Asked, requirements: Sequence[str]) -> dict[str, Any]:
    """Whether a framework's requirements and ours can be met together, and by which versions of what both want."""
    why, found = resolver.resolve([*asked.requirements, *requirements], asked)
    names = {Requirement(each).name for each in requirements}
    met = dict(each.split("==") for each in found if "==" in each)
    return {
        "accepted": not why,
        "why": _line(why),
        "meets": {name: version for name, version in met.items() if name in names},
        "in_the_way": sorted(_refused(resolver, asked, requirements)),
    }


def _refused(resolver: Resolver, asked: Asked, requirements: Sequence[str]) -> set[str]:
    """Our requirements that are refused by themselves; the resolver names one conflict at a time."""
    refused: set[str] = set()
    while True:
        rest = [each for each in requirements if each not in refused]
        why, _ = resolver.resolve([*asked.requirements, *rest], asked)
        named = [each for each in rest if re.search(rf"\b{re.escape(Requirement(each).name)}\b", why)]
        found = {each for each in named if resolver.resolve([*asked.requirements, each], asked)[0]}
        if not found:
            return refused
        refused |= found


def _line(why: str) -> str:
    return " ".join(why.replace("╰─▶", "").replace("×", "").split())[:600]


def row(name: str, resolver: Resolver, checkouts: dict[str, Path], pyprojects: dict[str, str]) -> dict[str, Any]:
    """All verdicts for a framework; where its own requirements cannot be met or there are none, only that."""
    try:
        asked = asked_of(name, resolver, checkouts)
    except NotRun as reason:
        return {"framework": name, "not_run": str(reason)}
    alone, _ = resolver.resolve(asked.requirements, asked)
    found: dict[str, Any] = {"framework": name, **asdict(asked)}
    if alone:
        return {**found, "not_run": f"its own requirements are refused: {_line(alone)}"}
    for when, pyproject in pyprojects.items():
        found[when] = {extra: verdict(resolver, asked, ours(pyproject, each)) for extra, each in EXTRAS.items()}
    return found


def shown(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The cells of the table: framework, how obtained, and per set of extras before → after, and obstacles."""
    for each in rows:
        if "not_run" in each:
            yield [each["framework"], each.get("version", ""), *["not run"] * len(EXTRAS), "", each["not_run"]]
            continue
        cells = []
        for extra in EXTRAS:
            before, after = (each[when][extra] for when in ("before", "after"))
            cells.append(" → ".join("yes" if found["accepted"] else "no" for found in (before, after)))
        way = [f"{when}: {', '.join(names)}" for when in ("before", "after") if (names := _obstacles(each[when]))]
        met = each["after"]["[hf]"]["meets"].get("transformers", "")
        yield [each["framework"], each["version"], *cells, met, "; ".join(way)]


def _obstacles(found: dict[str, Any]) -> list[str]:
    """Our requirements that stand in the way, of all extras; where none does so by itself, the resolver's words."""
    names = sorted({each for extra in found.values() for each in extra["in_the_way"]})
    return names or [extra["why"][:200] for extra in found.values() if not extra["accepted"]][:1]


def main(
    checkout: Annotated[list[str] | None, typer.Option(help="NAME=PATH of a framework's checkout.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Frameworks to ask about.")] = None,
    before: Annotated[str, typer.Option(help="A commit whose pyproject.toml is the one before.")] = BEFORE,
    uv: Annotated[str | None, typer.Option(help="An installed uv; one is installed for the campaign without.")] = None,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Ask, print the table, and write dated JSON. Exit status 1 for a refusal after that is not known."""
    checkouts = {name: Path(path).resolve() for name, _, path in (each.partition("=") for each in checkout or [])}
    if unknown := {*checkouts, *(only or [])} - {*FRAMEWORKS}:
        sys.exit(f"no such framework: {', '.join(sorted(unknown))}; there are {', '.join(FRAMEWORKS)}")
    show = ["git", "-C", str(ROOT), "show", f"{before}:pyproject.toml"]
    pyprojects = {
        "before": subprocess.run(show, capture_output=True, text=True, check=True).stdout,
        "after": PYPROJECT.read_text(encoding="utf-8"),
    }
    with tempfile.TemporaryDirectory() as folder:
        resolver = Resolver(Path(folder), uv)
        rows = []
        for name in only or FRAMEWORKS:
            began = time.monotonic()
            rows.append(row(name, resolver, checkouts, pyprojects))
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        version = resolver.version()
    table = Table("framework", "version", *map(escape, EXTRAS), "transformers", "what stands in the way")
    for cells in shown(rows):
        table.add_row(*cells)
    Console(width=160).print(table)
    record = {
        "campaign": "resolver",
        "date": date.today().isoformat(),
        "ullage": ullage.__version__,
        "uv": version,
        "before": {"commit": before, **{name: ours(pyprojects["before"], each) for name, each in EXTRAS.items()}},
        "after": {name: ours(pyprojects["after"], each) for name, each in EXTRAS.items()},
        "rows": rows,
    }
    path = out / f"resolver_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)
    after = {(each["framework"], extra): each["after"][extra] for each in rows if "after" in each for extra in EXTRAS}
    if {name for name, found in after.items() if not found["accepted"]} - REFUSED:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
