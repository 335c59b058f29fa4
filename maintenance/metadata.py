"""What hatchling is told of the package beside pyproject.toml: the project's URLs, and the README for a package index.

On an index a relative link leads nowhere and a picture of the repository is not there. With the address of the
repository (``[tool.ullage] repository`` in pyproject.toml, or ``ULLAGE_REPOSITORY``) links and pictures become
absolute, at the tag of the version; without it a link becomes its text and a picture is left out. hatchling runs this
for wheels, sdists and editable installations.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Names of the project's URLs as indexes know them, and where each leads in the repository.
URLS = {
    "Homepage": "",
    "Documentation": "/tree/v{version}/docs",
    "Source": "",
    "Changelog": "/blob/v{version}/CHANGELOG.md",
    "Issues": "/issues",
}
# A block or a span of code, which stays as it is, or a link or a picture: [text](target) or ![text](target).
_CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]*`)|(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def repository_of(root: Path) -> str:
    """The address of the repository, without a slash at its end; empty if nobody has said it."""
    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("tool", {}).get("ullage", {})
    return (os.environ.get("ULLAGE_REPOSITORY") or table.get("repository", "")).rstrip("/")


def project_urls(repository: str, version: str) -> dict[str, str]:
    """The project's URLs; none without a repository."""
    return {name: repository + at.format(version=version) for name, at in URLS.items()} if repository else {}


def readme_for_index(text: str, repository: str, version: str) -> str:
    """The README with no relative link or picture left in it."""

    def absolute(found: re.Match[str]) -> str:
        target, text = found["target"], found["text"]
        # Code, addresses, and places in the page itself (``#limits``) stay.
        if found["code"] or re.match(r"[a-z]+:|#", target):
            return found[0]
        if not repository:
            return "" if found["picture"] else text
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{text}]({repository}/{kind}/v{version}/{target.removeprefix('./')})"

    return _CODE_OR_LINK.sub(absolute, text)


class MetadataHook(MetadataHookInterface):
    """The hook that hatchling calls, see ``[tool.hatch.metadata.hooks.custom]``."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        version = _version(root)
        repository = repository_of(root)
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme_for_index(text, repository, version),
        }
        metadata["urls"] = project_urls(repository, version)


def _version(root: Path) -> str:
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/ullage/__init__.py").read_text(encoding="utf-8"), re.M)
    assert found is not None, "src/ullage/__init__.py has no __version__"
    return found[1]
