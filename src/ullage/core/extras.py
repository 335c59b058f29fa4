"""The packages that the extras bring, and the error where one is missing or too old.

What needs one imports it under :func:`needed_by`::

    with needed_by("a .parquet file"):
        import pyarrow

and a user without it reads ``a .parquet file needs pyarrow: pip install 'ullage[hf]'``, or, where ullage itself was
not taken from an index, what can be typed there: ``pip install -e '.[hf]'`` in a clone. An import at the top of a
module of ours needs no such block where users reach it by a package's name or by a verb: these are such blocks already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ullage.core.errors import InputError


class MissingExtraError(InputError, ModuleNotFoundError):
    """A package that what was called needs is not installed, or is too old."""

    @classmethod
    def of(cls, what: str, module: str) -> MissingExtraError:
        """The error for a module that :data:`MODULES` lists."""
        package = MODULES[module]
        if is_too_old(module):
            needs = f"{what} needs {package.name} {package.least} or newer, found {installed_version(module)}"
            error = cls(f"{needs}: {install_command(package.extra, '--upgrade')}")
        else:
            error = cls(f"{what} needs {package.name}: {install_command(package.extra)}")
        error.name = module
        return error


class Package(NamedTuple):
    """A package of an extra: its name on the index, the extra that installs it, the least version that works."""

    name: str
    extra: str
    least: str | None = None


#: Module -> the package that it comes with. pyproject.toml says the same of each extra; the rest is what those install.
MODULES = {
    "transformers": Package("transformers", "hf", "5.4"),
    "accelerate": Package("accelerate", "hf", "1.10"),
    "datasets": Package("datasets", "hf", "4"),
    "safetensors": Package("safetensors", "hf", "0.5"),
    "huggingface_hub": Package("huggingface_hub", "hf"),
    "tokenizers": Package("tokenizers", "hf"),
    "psutil": Package("psutil", "hf"),
    "yaml": Package("pyyaml", "hf"),
    "pyarrow": Package("pyarrow", "hf"),
    "PIL": Package("pillow", "hf", "10"),
    "deepspeed": Package("deepspeed", "deepspeed", "0.19.4"),
    "megatron": Package("megatron-core", "megatron", "0.16"),
    "trl": Package("trl", "trl", "1"),
    "peft": Package("peft", "peft", "0.17"),
    "numba": Package("numba", "fast", "0.61"),
    "ray": Package("ray", "ray", "2.50"),
    "fsspec": Package("fsspec", "remote", "2024.6"),
    "upath": Package("universal_pathlib", "remote", "0.3"),
    "s3fs": Package("s3fs", "remote", "2024.6"),
}


@contextmanager
def needed_by(what: str, modules: Sequence[str] = ()) -> Iterator[None]:
    """Raise ``MissingExtraError`` for ``what`` where the block fails to import a module of an extra.

    Args:
        what: the name that the user has called, for the message.
        modules: modules whose version is looked at before the block runs.
    """
    for module in modules:
        if is_too_old(module):
            raise MissingExtraError.of(what, module)
    try:
        yield
    except ImportError as error:
        # ``name`` is that of the module that is missing, or of the one that lacks a name. An error of a block within
        # this one is said again with the name that the user has called.
        module = (error.name or "").partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module
        if module in MODULES and (is_missing or is_too_old(module)):
            missing = MissingExtraError.of(what, module)
            missing.exit_status = getattr(error, "exit_status", missing.exit_status)
            raise missing from error
        raise


def install_command(extra: str, *options: str) -> str:
    """The command that brings an extra to this installation of ullage, from where ullage itself came."""
    return " ".join(["pip install", *options, *_source(extra)])


def _source(extra: str) -> list[str]:
    """What ``pip install`` takes: the tree that this file lies in, what pip has recorded, or the package's name."""
    import json
    import shlex
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    tree = Path(__file__).parents[3]
    if (tree / "pyproject.toml").is_file() and Path(__file__).parents[2].name == "src":  # a clone, perhaps editable
        return ["-e", shlex.quote(f"{'.' if Path.cwd() == tree else tree}[{extra}]")]
    # pip writes this file for what it did not take from an index (PEP 610).
    try:
        origin = json.loads(metadata.distribution("ullage").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return [shlex.quote(f"ullage[{extra}] @ {origin['vcs_info'].get('vcs', 'git')}+{url}")]
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if path is not None and path.exists():  # a folder or a wheel
        return [shlex.quote(f"{path}[{extra}]")]
    return [shlex.quote(f"ullage[{extra}]")]


def installed_version(module: str) -> str | None:
    """The version of the package that a module of :data:`MODULES` comes with; ``None`` if it is not installed."""
    from importlib import metadata  # which takes as long to load as all of ``import ullage``

    try:
        return metadata.version(MODULES[module].name)
    except metadata.PackageNotFoundError:
        return None


def is_too_old(module: str) -> bool:
    """Whether the package of a module is installed in a version that is not supported."""
    least, found = MODULES[module].least, installed_version(module)
    return least is not None and found is not None and _release(found) < _release(least)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a pre-release: ``5.20.0.dev0`` is 5.20.0."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]|\.(?=\D)", version)[0])))
