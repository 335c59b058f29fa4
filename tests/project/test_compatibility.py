"""docs/compatibility.md says what the newest record of ``make campaign NAME=versions`` says, and nothing there is unexplained."""

import json
import re

from benchmarks.campaigns import versions
from tests.support.launch import ROOT
from ullage.core.extras import MODULES


def test_the_page_of_releases_has_the_newest_record():
    newest = max((ROOT / "benchmarks" / "results").glob("versions_*.json"))
    record = json.loads(newest.read_text())
    page = (ROOT / "docs" / "compatibility.md").read_text()
    found = re.search(r"<!-- versions: begin -->\n(.*?)\n<!-- versions: end -->", page, re.DOTALL)
    assert found is not None
    assert found[1].strip() == versions.section(record)
    assert newest.name in page
    assert [each for each in versions.failures(record) if versions.explanation(each[0], *each[2:]) is None] == []
    assert max(versions.differences(record).values()) <= versions.BOUND


def test_the_oldest_release_that_is_taken_is_the_oldest_that_is_run():
    assert f"{MODULES['transformers'].least}.0" == versions.VERSIONS[0] == next(iter(versions.QUICK))
