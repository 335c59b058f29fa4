"""What a package index shows of the package, and the workflow of the forge."""

import re

import yaml

from maintenance import metadata
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


def test_the_workflow_runs_what_every_change_must_pass():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads the key `on` as true
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert runs == {"test": ["bash .ci/run"], "release": ["make release-check"]}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^release-check:", makefile, re.MULTILINE)
