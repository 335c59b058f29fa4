"""Every case of the tests' matrices, of which a run of the tests draws a part by its seed, and every long test.

python benchmarks/campaigns/matrices.py               # all of them
python benchmarks/campaigns/matrices.py -k resume     # options of pytest
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-n", "2", "--dist", "loadfile"]
        command += ["-m", "(matrix or long) and not gpu", "--matrix-seed", "whole", f"--junitxml={log}"]
        status = subprocess.run([*command, *options], cwd=ROOT).returncode
        suite = ElementTree.parse(log).getroot()[0]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    record = {"cases": int(suite.get("tests", 0)), "failed": failed, "seconds": round(float(suite.get("time", 0)))}
    target = ROOT / "benchmarks" / "results" / f"matrices_{date.today()}.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['cases']} cases, {len(failed)} failed; written to {target}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
