"""Where the sequences of one step go, on how many microbatches, and how near the ideal that is.

    python examples/03_plan_a_step.py --html plan.html

A plan is data: every rank computes the same one by itself from the lengths, and any trainer can carry it out.
"""

import argparse
from pathlib import Path

import ullage
from ullage.datasets import WORKLOADS

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--html", type=Path, help="draw the plan on this page")
html = parser.parse_args().html

lengths = WORKLOADS["chat"](512, 0)  # conversations: most are short, a few are very long
plan = ullage.plan(lengths, ranks=8, capacity=32768)
arrival = ullage.plan(lengths, ranks=8, capacity=32768, strategy="next_fit")

for name, one in (("ullage's plan", plan), ("order of arrival", arrival)):
    found = one.statistics()
    print(
        f"{name:<17}{found.num_microbatches} microbatches a rank (at least {found.lower_bound}), "
        f"ullage {found.ullage:.1%}, critical path {found.critical_path:.3f}"
    )
print(f"microbatch 0 of rank 3 holds {len(plan.members(0, 3))} sequences, {lengths[plan.members(0, 3)].sum()} tokens")

# Nobody has to take our word for it, or our machine: a plan checks itself, and travels as JSON.
assert plan.problems() == []
assert ullage.Plan.from_json(plan.to_json()) == plan

# A sequence longer than a rank can hold is shared by several, where context parallelism is left to the plan.
shared = ullage.plan(WORKLOADS["pareto"](256, 0), ranks=8, capacity=65536, context_parallel="auto")
print("degrees in use:", sorted({shared.degree(m, r) for m in range(shared.num_microbatches) for r in range(8)}))

if html is not None:
    plan.to_html(html, reference=arrival, source="chat")
    print(f"drawn on {html}")
