"""What a user without an extra reads, in an environment that holds the packages of the core alone."""

import importlib.metadata
import json
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.launch import ROOT
from ullage.core import extras
from ullage.core.errors import InputError, UllageError
from ullage.core.extras import MODULES, MissingExtraError, install_command, needed_by


def run(folder, *arguments):
    """Run Python with the packages of ``folder`` and our sources, and without the packages that are installed."""
    start = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'src')!r}, {str(folder)!r}]; sys.argv = ['ullage', *sys.argv[1:]]\n"
    )
    code, *rest = arguments
    command = [sys.executable, "-I", "-S", "-c", start + code, *rest]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    return make_core_folder(tmp_path_factory.mktemp("core"))


CALLS = {
    "from ullage.training import Trainer": f"ullage.training.Trainer needs transformers: {install_command('hf')}",
    "import ullage; ullage.models": f"ullage.models needs transformers: {install_command('hf')}",
    "from ullage import pack_model": f"ullage.pack_model needs transformers: {install_command('hf')}",
    "from ullage.training.trl import SFTTrainer": "ullage.training.trl.SFTTrainer needs",
    "from ullage.engines.fsdp import parallelize": "ullage.engines.fsdp.parallelize needs",
    "from ullage.datasets.tables import load_rows; load_rows([path])": f"reading data files needs datasets: {install_command('hf')}",
    "from ullage.checkpoint import read; read('s3://bucket/a')": "the driver of this URL is not installed",
}
SCRIPT = """
import sys
path = sys.argv[1]
for call in sys.argv[3:]:
    try:
        exec(call)
    except ImportError as error:
        print(type(error).__name__, isinstance(error, ValueError), error)
    except ValueError as error:
        print(type(error).__name__, True, error)
    else:
        print("nothing raised")
from ullage import Layout, plan  # which the core has
print(Layout([3, 1]).num_tokens, plan([5, 3, 9], ranks=2, capacity=16).num_microbatches)
print(sorted({"transformers", "accelerate", "datasets", "safetensors"} & sys.modules.keys()))
import importlib, importlib.util, pkgutil, ullage
from ullage.core.extras import MODULES
whole, bare = 0, []
def touch(what, load, *, inner):
    # inner: a module within a room, whose import may fail as any other's does
    global whole
    try:
        load()
        whole += 1
    except ImportError as error:
        if type(error).__name__ != "MissingExtraError" and not (inner and error.name.partition(".")[0] in MODULES):
            bare.append(f"{what}: {error}")
faces = {"ullage", "ullage.training.trl", "ullage.engines.fsdp", *(f"ullage.{name}" for name in ullage.__all__)}
for name in ["ullage", *(found.name for found in pkgutil.walk_packages(ullage.__path__, "ullage."))]:
    if name == "ullage.engines.plugins.swift_external":  # changes ms-swift when it is imported
        continue
    touch(name, lambda: importlib.import_module(name), inner=name not in faces)
    for public in getattr(sys.modules.get(name), "__all__", ()):
        touch(f"{name}.{public}", lambda: getattr(sys.modules[name], public), inner=False)
print(whole > 200, bare)
try:  # what is none of ours fails as ever
    import transformers
except ImportError as error:
    print(type(error).__name__, error, importlib.util.find_spec("transformers"))
try:
    import ullage.training.mixin
except ImportError as error:
    print(type(error).__name__, error)
sys.path.insert(0, sys.argv[2])  # the old transformers
for call in ("from ullage.training import Trainer", "from ullage.training import TrainingArguments"):
    try:
        exec(call)
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_is_missing_is_said_with_the_extra_that_brings_it(core, tmp_path):
    """For every module and public name, and what is too old with its version: one process, since torch loads slowly."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    site = tmp_path / "old"
    (site / "transformers").mkdir(parents=True)
    (site / "transformers" / "__init__.py").write_text("class PreTrainedModel: ...\n")
    (site / "transformers-4.57.1.dist-info").mkdir()
    (site / "transformers-4.57.1.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.57.1\n")
    done = run(core, SCRIPT, str(tmp_path / "a.jsonl"), str(site), *CALLS)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(CALLS) + 7
    for line, (call, said) in zip(lines, CALLS.items(), strict=False):
        kind = "InputError" if "URL" in said else "MissingExtraError"
        assert line.startswith(f"{kind} True {said}"), (call, line)
    old = f"needs transformers 5.4 or newer, found 4.57.1: {install_command('hf', '--upgrade')}"
    names = ("ullage.training.Trainer", "ullage.training.TrainingArguments")
    assert lines[-7:] == [
        "4 1",
        "[]",
        "True []",
        "ModuleNotFoundError No module named 'transformers' None",
        "ModuleNotFoundError No module named 'transformers'",
        *(f"{name} {old}" for name in names),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", pytest.param("audit", marks=pytest.mark.slow)])
def test_a_command_without_its_extra_says_so_in_one_line(core, verb, tmp_path):
    done = run(core, "from ullage.cli import main; main()", verb, *["llama"] * (verb == "audit"))
    assert (done.returncode, done.stdout) == (2 if verb == "audit" else 1, "")  # 1 is a model that is not exact
    assert done.stderr == f"ullage: ullage {verb} needs transformers: {install_command('hf')}\n"


@pytest.mark.parametrize(("origin", "said"), [
    (None, "pip install 'ullage[hf]'"),
    ({"url": "file://{tree}", "dir_info": {}}, "pip install '{tree}[hf]'"),
    ({"url": "file:///gone/ullage.whl", "archive_info": {}}, "pip install 'ullage[hf]'"),
    ({"url": "https://host/ullage", "vcs_info": {"vcs": "git"}}, "pip install 'ullage[hf] @ git+https://host/ullage'"),
])  # fmt: skip
def test_the_hint_can_be_typed_where_ullage_was_installed(origin, said, tmp_path, monkeypatch):
    site = tmp_path / "packages"
    (site / "ullage-1.dist-info").mkdir(parents=True)
    (site / "ullage-1.dist-info" / "METADATA").write_text("Name: ullage\nVersion: 1\n")
    if origin is not None:
        text = json.dumps(origin).replace("{tree}", str(tmp_path))
        (site / "ullage-1.dist-info" / "direct_url.json").write_text(text)
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(extras, "__file__", str(site / "ullage" / "core" / "extras.py"))
    assert install_command("hf") == said.replace("{tree}", str(tmp_path))


def test_the_hint_of_a_clone_is_the_clone(monkeypatch):
    monkeypatch.chdir("/")
    assert install_command("hf") == f"pip install -e '{ROOT}[hf]'"
    monkeypatch.chdir(ROOT)
    assert install_command("hf", "--upgrade") == "pip install --upgrade -e '.[hf]'"


def test_the_error_is_an_import_error_and_crosses_processes():
    with pytest.raises(MissingExtraError) as raised, needed_by("this"):
        raise ModuleNotFoundError("No module named 'trl'", name="trl")
    error = raised.value
    assert isinstance(error, InputError)
    assert isinstance(error, ModuleNotFoundError)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, UllageError)
    assert (str(copy), copy.what, copy.name) == (str(error), f"this needs trl: {install_command('trl')}", "trl")


@pytest.mark.parametrize("error", [
    ModuleNotFoundError("No module named 'torchvision'", name="torchvision"),
    ModuleNotFoundError("No module named 'transformers.gone'", name="transformers.gone"),
    ImportError("cannot import name 'Gone' from 'transformers'", name="transformers"),
    ImportError("no name at all"),
], ids=str)  # fmt: skip
def test_another_import_error_stays_as_it_is(error):
    """A module of ours or theirs that is broken is no missing extra."""
    with pytest.raises(ImportError) as raised, needed_by("this"):
        raise error
    assert raised.value is error


def test_the_table_says_what_pyproject_says():
    extras = {
        name: [re.sub(r"\[.*?\]", "", line) for line in lines]  # without the extras of the packages themselves
        for name, lines in project()["optional-dependencies"].items()
    }
    for module, package in MODULES.items():
        lines = [line for line in extras[package.extra] if re.match(re.escape(package.name) + r"\b", line)]
        assert lines == ([f"{package.name}>={package.least}"] if package.least else []), module
    named = {package.name for package in MODULES.values()}
    for extra in {package.extra for package in MODULES.values()}:
        assert {re.split(r"[>=\[]", line)[0] for line in extras[extra]} <= named


def test_the_core_brings_the_command_line_and_no_transformers():
    brought = core_packages()
    assert {"torch", "numpy", "typer", "rich", "jinja2"} <= brought
    assert not {"tqdm", "pyyaml", "psutil"} & brought  # those of [hf] bring them
    assert (
        not {package.name for package in MODULES.values() if package.name != "fsspec"} & brought
    )  # torch needs fsspec
    assert (project()["optional-dependencies"]["cli"], project()["optional-dependencies"]["report"]) == ([], [])


def project():
    """The table ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def core_packages():
    """Names of the packages that an installation without extras brings, as they are installed here."""
    found, open_ = set(), [Requirement(line) for line in project()["dependencies"]]
    while open_:
        requirement = open_.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        open_ += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return found


def make_core_folder(folder):
    """Fill a folder with links to the installed packages of the core, and no others: a ``site-packages`` of its own."""
    for name in sorted(core_packages()):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder
