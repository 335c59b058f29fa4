"""What a package index shows of the package, and the workflow of the forge."""

import re
import subprocess
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


def test_links_are_absolute_where_the_repository_is_known():
    found = metadata.readme_for_index(TEXT, REPOSITORY, "1.2")
    assert f"A [page]({REPOSITORY}/blob/v1.2/docs/a.md), [`code`]({REPOSITORY}/blob/v1.2/b.md#part), " in found
    assert f"![Boxes]({REPOSITORY}/raw/v1.2/docs/assets/a.svg)" in found
    assert "[there](https://x.example/y), [here](#limits), `[no](link.md)`." in found
    assert "ls [a](b)" in found


def test_links_are_text_where_it_is_not():
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


def test_urls_follow_from_the_repository():
    urls = metadata.project_urls(REPOSITORY, "1.2")
    assert urls["Changelog"] == f"{REPOSITORY}/blob/v1.2/CHANGELOG.md"
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert metadata.project_urls("", "1.2") == {}


def wheel(folder, monkeypatch, repository):
    """A wheel with the metadata that hatchling is told, as far as the release check reads it."""
    monkeypatch.setenv("ULLAGE_REPOSITORY", repository)
    found = {}
    metadata.MetadataHook(str(ROOT), {}).update(found)
    checks = release.Release()
    folder.mkdir()
    with zipfile.ZipFile(folder / f"ullage-{checks.version}-py3-none-any.whl", "w") as archive:
        lines = "".join(f"Project-URL: {name}, {url}\n" for name, url in found["urls"].items())
        archive.writestr(
            f"ullage-{checks.version}.dist-info/METADATA", f"Name: ullage\n{lines}\n{found['readme']['text']}"
        )
    monkeypatch.setattr(release, "BUILD", folder.parent)
    return checks


def test_the_release_check_takes_the_address_that_the_package_was_built_with(tmp_path, monkeypatch):
    assert wheel(tmp_path / "dist", monkeypatch, f"{REPOSITORY}/").address() == REPOSITORY


@pytest.mark.parametrize(
    ("given", "said"),
    [("", "no address; give one: "), ("forge.example/ullage", "the address is 'forge.example/ullage'; ")],
)
def test_the_release_check_says_what_address_is_missing(given, said, tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "repository_of", lambda root: given)
    with pytest.raises(release.Failed) as failed:
        wheel(tmp_path / "dist", monkeypatch, given).address()
    assert str(failed.value).startswith(said)
    assert "make release-check REPOSITORY=https://HOST/OWNER/ullage" in str(failed.value)


def test_make_hands_the_address_on():
    command = ["make", "--no-print-directory", "--dry-run", "release-check", f"REPOSITORY={REPOSITORY}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == f"ULLAGE_REPOSITORY='{REPOSITORY}'"


def test_the_workflow_runs_what_every_change_must_pass():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads the key `on` as true
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert runs == {"test": ["bash .ci/run"], "release": ["make release-check"]}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^release-check:", makefile, re.MULTILINE)
    versions = {
        step["with"]["python-version"]
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    }
    assert versions == {"3.11"}
    assert 0 < workflow["jobs"]["test"]["timeout-minutes"] <= 90
