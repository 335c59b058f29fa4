"""``make campaign`` lists what is in benchmarks/campaigns, and the README there has a sentence for each."""

import subprocess

from tests.support.launch import ROOT

FOLDER = ROOT / "benchmarks" / "campaigns"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def make_campaign(*arguments):
    command = ["make", "--silent", "campaign", *arguments]  # installs only for a campaign that there is
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_campaigns_are_listed_and_described_and_no_other_runs():
    told = make_campaign()
    assert told.returncode == 0, told.stderr
    assert [line.split("NAME=")[1].split()[0] for line in told.stdout.splitlines()] == NAMES
    readme = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"- `{name}`: " not in readme] == []
    told = make_campaign("NAME=no_such_thing")
    assert told.returncode != 0
    assert told.stdout.startswith("no such campaign: no_such_thing\n")
