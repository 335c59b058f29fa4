"""An environment with the core of ullage only: the packages that pyproject.toml requires, and what those require."""

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.launch import ROOT


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
