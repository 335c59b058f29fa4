"""Plans drawn by a seed over every argument of ``ullage.plan``: digests of their JSON."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.unchanged.forks import Task, run_all
from benchmarks.unchanged.records import Cases, digest, said

PLANS = 250


def draw(seed: int, number: int) -> dict[str, Any]:
    """The arguments of one plan, as JSON; costs by name."""
    chance = random.Random(f"plan {seed} {number}")
    shape = chance.choice(["short", "long tail", "alike", "giants", "few", "some empty"])
    count = chance.choice([0, 1, 3, 17, 60, 60, 150]) if shape != "few" else chance.randrange(5)
    capacity = chance.choice([64, 96, 1000, 4096])
    lengths = [_length(chance, shape, capacity) for _ in range(count)]
    ranks = chance.choice([1, 2, 3, 4, 6, 8, 16])
    options: dict[str, Any] = {"ranks": ranks, "capacity": capacity}
    options["strategy"] = chance.choice(["balanced", "balanced", "next_fit", "dp_balanced", "default_dynamic_cp"])
    options["sync"] = chance.choice(["microbatch", "step"])
    options["cost"] = chance.choice(["default", "default", "linear", "steep", "squares"])
    options["context_parallel"] = chance.choice([1, 1, "auto", 2 if ranks % 2 == 0 else 1, ranks])
    if options["strategy"] == "next_fit" and chance.random() < 0.9:
        options["context_parallel"] = 1  # it knows no other, and says so
    if options["context_parallel"] == "auto" and chance.random() < 0.3:
        options["min_context_parallel"] = chance.choice([1, 2, ranks])
    for name, values in (
        ("microbatch_multiple", [1, 1, 2, 3]),
        ("pad_to_multiple_of", [1, 1, 8, 16]),
        ("max_sequences", [None, None, None, 1, 4]),
        ("oversize", ["error", "truncate", "drop", "truncate", "drop"]),
    ):
        options[name] = chance.choice(values)
    if chance.random() < 0.2 and count:
        options["keep_together"] = [chance.randrange(count) if chance.random() < 0.3 else -1 for _ in range(count)]
    if chance.random() < 0.08 and count:
        options |= _assigned(chance, count, ranks)
    return {"lengths": lengths, **options}


def _length(chance: random.Random, shape: str, capacity: int) -> int:
    if shape == "long tail":
        return min(int(chance.lognormvariate(3.0, 1.2)) + 1, 2 * capacity)
    if shape == "alike":
        return capacity // 4
    if shape == "giants" and chance.random() < 0.1:
        return chance.randrange(capacity, 4 * capacity)
    if shape == "some empty" and chance.random() < 0.2:
        return 0
    return chance.randrange(1, capacity // 2)


def _assigned(chance: random.Random, count: int, ranks: int) -> dict[str, Any]:
    """Microbatches of ids, a list per rank."""
    microbatches = max(1, count // (2 * ranks))
    bins: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(microbatches)]
    for i in range(count):
        bins[chance.randrange(microbatches)][chance.randrange(ranks)].append(i)
    free = {"keep_together": None, "max_sequences": None, "context_parallel": 1, "min_context_parallel": 1}
    return {"strategy": "preassigned", "assignment": bins, "capacity": 1 << 20, **free}


def _squares(lengths: Any) -> Any:
    return lengths * lengths + 3 * lengths


def one(drawn: dict[str, Any]) -> dict[str, Any]:
    """The digest of a plan and the figures that a person would ask for first, or what was said of its arguments."""
    import ullage

    options = dict(drawn)
    costs = {
        "default": None,
        "linear": ullage.TransformerCost(linear=1, quadratic=0),
        "steep": ullage.TransformerCost(linear=1, quadratic=1),
        "squares": _squares,
    }
    try:
        plan = ullage.plan(options.pop("lengths"), **{**options, "cost": costs[options["cost"]]})
        statistics = plan.statistics()
    except ullage.core.errors.UllageError as error:
        return {"error": said(error)}
    members = [plan.members(m, r).tolist() for m in range(plan.num_microbatches) for r in range(plan.ranks)]
    return {
        "json": digest(plan.to_json()),
        "members": digest(repr(members)),
        "microbatches": plan.num_microbatches,
        "statistics": digest(repr(statistics)),
        "problems": digest(repr(plan.problems())),
        "again": digest(ullage.Plan.from_json(plan.to_json()).to_json()),
    }


def packed(seed: int, number: int) -> dict[str, Any]:
    """Lengths laid into bins of one capacity, without ranks."""
    import ullage

    chance = random.Random(f"bins {seed} {number}")
    capacity = chance.choice([16, 100, 2048])
    lengths = [chance.randrange(1, capacity + 1) for _ in range(chance.choice([0, 1, 30, 400]))]
    try:
        bins = ullage.pack_lengths(lengths, capacity)
    except ullage.core.errors.UllageError as error:
        return {"error": said(error)}
    return {"bins": digest(*(repr(list(map(int, part))) for part in bins))}


def run(folder: Path, seed: int, jobs: int, only: str = "") -> Cases:
    """All plans, in as many forks as there are ``jobs``."""
    import ullage.core.errors
    import ullage.planning

    for degree in (1, "auto"):  # compiled once, before the forks
        ullage.plan([3, 5], ranks=2, capacity=8, context_parallel=degree)

    def share(which: int) -> dict[str, Any]:
        found = {f"plan {i:03}": one(draw(seed, i)) for i in range(which, PLANS, jobs)}
        return found | {f"bins {i:02}": packed(seed, i) for i in range(which, 20, jobs)}

    tasks = [Task(f"share {i}", lambda _, i=i: share(i), folder / f"share{i}") for i in range(jobs)]
    cases: Cases = {}
    for values in run_all(tasks, jobs, "plans").values():
        cases |= values[0] if "error" not in values[0] else {"(all)": values[0]}
    return dict(sorted(cases.items()))
