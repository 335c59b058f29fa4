"""What a package index shows of the package, and the workflow of the forge."""

import re
import zipfile

import pytest
import yaml

from maintenance import metadata, release
from tests.support.launch import ROOT

REPOSITORY = "https://forge.example/them/ullage"
TEXT = """A [page](docs/a.md), [`code`](./b.md#part), [there](https://x.example/y), [here](#limits), `[no](link.md)`.

![Boxes](docs/assets/a.svg)

```sh
ls [a](b)
```
"""


def test_links_are_absolute_where_the_repository_is_known_and_text_where_it_is_not():
    found = metadata.readme_for_index(TEXT, REPOSITORY, "1.2")
    assert f"A [page]({REPOSITORY}/blob/v1.2/docs/a.md), [`code`]({REPOSITORY}/blob/v1.2/b.md#part), " in found
    assert f"![Boxes]({REPOSITORY}/raw/v1.2/docs/assets/a.svg)" in found
    assert "[there](https://x.example/y), [here](#limits), `[no](link.md)`." in found
    assert "ls [a](b)" in found
    # Without one they are text.
    found = metadata.readme_for_index(TEXT, "", "1.2")
    assert found.startswith("A page, `code`, [there](https://x.example/y), [here](#limits), `[no](link.md)`.\n")
    assert "svg" not in found
    assert "ls [a](b)" in found


def test_the_readme_has_no_link_that_the_rewriting_does_not_see():
    text = (ROOT / "README.md").read_text()
    for repository in ("", REPOSITORY):
        left = metadata.readme_for_index(text, repository, "1.2")
        left = re.sub(r"^```.*?^```|`[^`\n]*`", "", left, flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]*)", left, flags=re.MULTILINE)
        assert [t for one in targets for t in one if t and not re.match(r"https?://|#", t)] == []


def wheel(folder, monkeypatch, repository):
    """A wheel with the metadata that hatchling is told, as far as the release check reads it."""
    monkeypatch.setenv("ULLAGE_REPOSITORY", repository)
    found = {}
    metadata.MetadataHook(str(ROOT), {}).update(found)
    checks = release.Release()
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"ullage-{checks.version}-py3-none-any.whl", "w") as archive:
        lines = "".join(f"Project-URL: {name}, {url}\n" for name, url in found["urls"].items())
        archive.writestr(
            f"ullage-{checks.version}.dist-info/METADATA", f"Name: ullage\n{lines}\n{found['readme']['text']}"
        )
    monkeypatch.setattr(release, "BUILD", folder.parent)
    return checks


def test_the_release_check_takes_the_address_of_the_package_and_refuses_none(tmp_path, monkeypatch):
    checks = wheel(tmp_path / "one" / "dist", monkeypatch, f"{REPOSITORY}/")
    assert checks.address() == REPOSITORY
    assert metadata.project_urls(REPOSITORY, "1.2")["Changelog"] == f"{REPOSITORY}/blob/v1.2/CHANGELOG.md"
    monkeypatch.setattr(metadata, "repository_of", lambda root: "")
    with pytest.raises(release.Failed, match="make release-check REPOSITORY=https://HOST/OWNER/ullage"):
        wheel(tmp_path / "other" / "dist", monkeypatch, "").address()


def test_the_workflow_runs_what_every_change_must_pass():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads the key `on` as true
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert runs == {"test": ["bash .ci/run"], "release": ["make release-check"]}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^release-check:", makefile, re.MULTILINE)
