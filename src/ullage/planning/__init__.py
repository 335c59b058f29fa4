"""Where each sequence goes: lengths in, a plan out.

Pure: no process group, no device, no torch. ``plan`` spreads a global batch over microbatches and ranks;
``pack_dataset`` fills bins for a whole dataset. Compiled code is loaded when one of them is called.
"""

from ullage.planning.cost import RecurrentCost, TransformerCost
from ullage.planning.dataset import PackedBins, pack_dataset
from ullage.planning.plan import Plan, Statistics
from ullage.planning.planner import plan
from ullage.planning.problem import Assignment, Problem, Strategy
from ullage.planning.strategies import names, register

__all__ = [
    "Assignment",
    "PackedBins",
    "Plan",
    "Problem",
    "RecurrentCost",
    "Statistics",
    "Strategy",
    "TransformerCost",
    "names",
    "pack_dataset",
    "plan",
    "register",
]
