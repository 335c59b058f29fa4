"""Where each sequence goes: lengths in, a plan out.

Pure: no process group, no device, no torch. ``plan`` spreads a global batch over microbatches and ranks;
``pack_lengths`` fills bins for a whole dataset. Compiled code is loaded when one of them is called.
"""

from ullage.planning.bins import PackedBins, pack_lengths
from ullage.planning.cost import RecurrentCost, TransformerCost
from ullage.planning.planner import plan
from ullage.planning.plans import Plan, Statistics
from ullage.planning.problem import Assignment, Problem, Strategy
from ullage.planning.strategies import register_strategy, strategy_names

__all__ = [
    "Assignment",
    "PackedBins",
    "Plan",
    "Problem",
    "RecurrentCost",
    "Statistics",
    "Strategy",
    "TransformerCost",
    "pack_lengths",
    "plan",
    "register_strategy",
    "strategy_names",
]
