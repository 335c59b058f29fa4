"""Checks that a release could be cut: ``make release-check``. Everything that it writes lies in build/release.

Builds wheel and sdist, reads what they say of themselves, installs the wheel into two clean environments, the core
alone and with ``[hf]``, and uses it there as a user would. Takes minutes and a package index. Exit status 1 if a check
fails, each with its reason in one line; all checks run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "release"
TOOLS = ("hatchling", "twine", "readme-renderer[md]")
#: What the sdist must hold, beside the package.
IN_SDIST = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "maintenance/metadata.py", "constraints.txt")
IN_WHEEL = ("ullage/py.typed", "ullage/report/templates/base.html")

MAKE_CHECKPOINT = """
import json, sys, torch
from pathlib import Path
folder = Path(sys.argv[1]) / "trainer"
folder.mkdir(parents=True)
name, values = "a.weight", torch.arange(6.0).reshape(2, 3).numpy().tobytes()
head = json.dumps({name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
(folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + values)
"""
USE_CORE = """
import time
start = time.perf_counter()
import ullage
plan = ullage.plan([5, 3, 9], ranks=2, capacity=16)
assert plan.problems() == [] and ullage.Layout([3, 1]).num_tokens == 4
from ullage import RaggedBatch
import torch
batch = RaggedBatch.from_samples([{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(1)}])
assert batch.layout.lengths.tolist() == [3, 1]
print(f"the first plan of a new environment: {time.perf_counter() - start:.1f} s")
"""
USE_HF = """
import sys, torch
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer, TrainingArguments
samples = [{"input_ids": list(range(3, 3 + n))} for n in (2, 9, 1, 5)]
model = RecurrentForCausalLM(RecurrentConfig(cell="lstm", vocab_size=32, hidden_size=16, pad_token_id=0))
arguments = TrainingArguments(sys.argv[1], max_steps=2, use_cpu=True, disable_tqdm=True, report_to=[])
done = Trainer(model, arguments, RaggedCollator(labels_from="input_ids"), samples).train()
assert done.global_step == 2 and done.training_loss > 0
"""
RENDER = "import readme_renderer.markdown as m; print(m.render(open('description.md', encoding='utf-8').read()))"
GIVE_ADDRESS = "give one: make release-check REPOSITORY=https://HOST/OWNER/ullage, or repository in pyproject.toml"
#: In an environment that the wheel was installed into, the hint is the wheel.
NEEDS_HF = r"ullage\.training\.Trainer needs transformers: pip install '\S+\.whl\[hf\]'"


class Failed(Exception):
    """A check that failed, with the reason in one line."""


def run(*command: object, where: Path = BUILD, status: int = 0) -> str:
    """Run a command; returns what it printed. Raises ``Failed`` for another exit status, with its last line."""
    done = subprocess.run(
        list(map(str, command)), cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800
    )
    output = done.stdout + done.stderr
    if done.returncode != status:
        log = BUILD / "failed.log"
        log.write_text(f"{' '.join(map(str, command))}\n{output}", encoding="utf-8")
        last = (output.strip().splitlines() or ["no output"])[-1]
        raise Failed(f"exit status {done.returncode} instead of {status}: {last} ({log.relative_to(ROOT)})")
    return output


def require(condition: object, reason: str) -> None:
    if not condition:
        raise Failed(reason)


class Release:
    """The checks, in order. Each is a method that raises ``Failed``, or returns what it found."""

    def __init__(self) -> None:
        text = (ROOT / "src/ullage/__init__.py").read_text(encoding="utf-8")
        self.version = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]
        self.tools = BUILD / "tools" / "bin" / "python"

    def changelog(self) -> str:
        """CHANGELOG.md begins with the version."""
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        top = re.findall(r"^## (.+)$", text, re.MULTILINE)[0]
        form = re.fullmatch(r"(\S+) \((unreleased|\d{4}-\d\d-\d\d)\)", top)
        require(form and form[1] == self.version, f"the top heading is {top!r}, the version {self.version}")
        return top

    def address(self) -> str:
        """The package says where the project is published."""
        urls = dict(url.split(", ") for url in self.metadata("whl").get_all("Project-URL", []))
        require(urls, f"no address; {GIVE_ADDRESS}")
        home = urls["Homepage"]
        require(re.fullmatch(r"https://[^/\s]+(/[^/\s]+)+", home), f"the address is {home!r}; {GIVE_ADDRESS}")
        require(all(url.startswith(home) for url in urls.values()), f"addresses lead elsewhere than {home}: {urls}")
        return home

    def build(self) -> str:
        """The wheel and the sdist are built, and a wheel from the sdist is the same."""
        self.environment("tools", *TOOLS)
        run(self.tools, "-m", "hatchling", "build", "-d", BUILD / "dist", where=ROOT)
        sdist = self.file("tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(BUILD / "source", filter="data")
        folder = BUILD / "source" / sdist.name.removesuffix(".tar.gz")
        run(self.tools, "-m", "hatchling", "build", "-t", "wheel", "-d", BUILD / "again", where=folder)
        first, second = (zipfile.ZipFile(path) for path in (self.file("whl"), next((BUILD / "again").glob("*.whl"))))
        sums = [{one.filename: one.CRC for one in archive.infolist()} for archive in (first, second)]
        require(sums[0] == sums[1], f"they differ in {sorted(dict(sums[0].items() ^ sums[1].items()))[:3]}")
        built = sorted((BUILD / "dist").iterdir())
        return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in built)

    def contents(self) -> str:
        """Both hold what they must, and the wheel nothing else."""
        with tarfile.open(self.file("tar.gz")) as archive:
            there = {name.partition("/")[2] for name in archive.getnames()}
        require(there >= {*IN_SDIST}, f"the sdist lacks {sorted({*IN_SDIST} - there)}")
        names = zipfile.ZipFile(self.file("whl")).namelist()
        require({*names} >= {*IN_WHEEL}, f"the wheel lacks {sorted({*IN_WHEEL} - {*names})}")
        info = f"ullage-{self.version}.dist-info"
        require({name.split("/")[0] for name in names} == {"ullage", info}, "the wheel holds more than the package")
        require(f"{info}/licenses/LICENSE" in names, "the wheel lacks the licence")
        return f"{len(names)} files in the wheel, {len(there)} in the sdist"

    def description(self) -> str:
        """The description renders on an index, and no link of it is relative."""
        run(self.tools, "-m", "twine", "check", "--strict", *sorted((BUILD / "dist").iterdir()))
        text = self.metadata("whl").get_payload()
        (BUILD / "description.md").write_text(str(text), encoding="utf-8")
        page = run(self.tools, "-c", RENDER)
        links = Links()
        links.feed(page)
        relative = [link for link in links.found if not re.match(r"https?://|mailto:|#", link)]
        require(not relative, f"relative links: {relative[:3]}")
        require("<h1" in page and "<pre" in page, "no heading and no code in the page")
        return f"{len(links.found)} links, all absolute"

    def core(self) -> str:
        """An environment with the core alone: plan, inspect, help, and what is missing said in one line."""
        python = self.environment("core", self.file("whl"))
        ullage = python.with_name("ullage")
        said = run(python, "-c", USE_CORE).strip().splitlines()[-1]
        require(run(ullage, "--version").strip() == self.version, "another version is installed")
        require("convert" in run(ullage, "--help"), "help lists no convert")
        run(ullage, "plan", "chat", "--ranks", "8", "--capacity", "32768", "--html", BUILD / "plan.html")
        run(python, "-c", MAKE_CHECKPOINT, BUILD / "checkpoint")
        require("a.weight" in run(ullage, "inspect", BUILD / "checkpoint" / "trainer"), "inspect shows no tensor")
        for verb in (("train",), ("audit", "llama")):
            lines = run(ullage, *verb, status=1).splitlines()
            require(len(lines) == 1 and re.search(r"pip install '\S+\[hf\]'$", lines[0]), f"{verb[0]} says {lines[:2]}")
        last = run(python, "-c", "from ullage.training import Trainer", status=1).splitlines()[-1]
        require(re.search(NEEDS_HF + "$", last), f"an import says {last!r}")
        return said

    def hf(self) -> str:
        """An environment with [hf]: two steps of training, and two on the command line."""
        # The former names of what is core now must not be an error.
        python = self.environment("hf", f"{self.file('whl')}[hf,cli,report]")
        run(python, "-c", USE_HF, BUILD / "run")
        (BUILD / "a.jsonl").write_text('{"text": "one"}\n{"text": "one and two"}\n' * 20, encoding="utf-8")
        arguments = ["--data", "a.jsonl", "--output_dir", "run2", "--max_steps", "2", "--use_cpu"]
        run(python.with_name("ullage"), "train", *arguments)
        return "four steps"

    def environment(self, name: str, *packages: object) -> Path:
        """A new virtual environment with packages at the versions of constraints.txt; returns its Python."""
        run(sys.executable, "-m", "venv", BUILD / name)
        python = BUILD / name / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *packages)
        return python

    def file(self, ending: str) -> Path:
        """The one file of ``dist`` with an ending."""
        found = [*(BUILD / "dist").glob(f"*-{self.version}*.{ending}")]
        require(len(found) == 1, f"no {ending} of version {self.version} was built")
        return found[0]

    def metadata(self, ending: str):
        """The headers of the wheel; the text is the description."""
        with zipfile.ZipFile(self.file(ending)) as archive:
            text = archive.read(f"ullage-{self.version}.dist-info/METADATA").decode()
        return HeaderParser().parsestr(text)


class Links(HTMLParser):
    """The targets of links and pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if key in ("href", "src") and value]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="build and look, install nothing")
    quick = parser.parse_args().quick
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    release = Release()
    print(f"{pyproject['project']['name']} {release.version}", flush=True)
    checks = [release.changelog, release.build, release.address, release.contents, release.description]
    checks += [] if quick else [release.core, release.hf]
    sys.exit(1 if report(checks) else 0)


def report(checks: list[Callable[[], str]]) -> int:
    """Run the checks, a line each; returns the number of those that failed."""
    failed = 0
    for check in checks:
        begin = time.perf_counter()
        try:
            word, said = "ok", check()
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            word, said = "FAILED", str(error)
            failed += 1
        title = (check.__doc__ or "").strip().rstrip(".")
        print(f"  {word:<6} {title}: {said}  [{time.perf_counter() - begin:.0f} s]", flush=True)
    print(f"{len(checks) - failed} checks passed, {failed} failed")
    return failed


if __name__ == "__main__":
    main()
