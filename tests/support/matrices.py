"""Matrices of cases: a seeded part of each in every run of the tests, the whole in ``make campaign NAME=matrices``.

``@pytest.mark.matrix`` on a parametrised test says that its cases are a matrix: each checks one claim on other values.
Of every matrix a quarter is kept (``matrix(keep=0.5)``: half), drawn by the seed and the test's name. The seed is that of
``--matrix-seed``, by default the commit's, so that one commit always runs the same cases and the next one others.
"""

import math
import random
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

WHOLE = "whole"


def seed_of_commit(folder: Path) -> str:
    """The hash of the commit that is checked out; "0" where there is no repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"


def part(items: list[Any], seed: str) -> tuple[list[Any], list[Any]]:
    """``items`` that run, in their order, and those that are left out.

    Of 7 cases a quarter is ceil(7 / 4) = 2. Which two depends on the seed and on the name of the test alone, so every
    worker of one run draws the same.
    """
    matrices: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") is not None and seed != WHOLE:
            matrices[item.nodeid.partition("[")[0]].append(item)
    out = set()
    for name, cases in matrices.items():
        share = cases[0].get_closest_marker("matrix").kwargs.get("keep", 1 / 4)
        keep = math.ceil(len(cases) * share)
        out |= set(random.Random(f"{seed} {name}").sample(cases, len(cases) - keep))
    return [item for item in items if item not in out], [item for item in items if item in out]
