"""Planning: the lengths of a global batch in, a plan out.

Pure: no process group, no device, no torch. ``plan`` spreads a global batch over microbatches and ranks;
``pack_lengths`` fills bins for a whole dataset. What a plan is stands in this folder, how a good one is found in
``solver``. numba is imported when a problem is large enough for compiled code.
"""

from ullage.planning.cost import MultimodalCost, RecurrentCost, TransformerCost
from ullage.planning.lists import PackedBins, pack_lengths
from ullage.planning.planner import plan
from ullage.planning.plans import Plan, ResourceUse, Statistics
from ullage.planning.strategies import Assignment, Strategy, Task, register_strategy, strategy_names

__all__ = [
    "Assignment",
    "MultimodalCost",
    "PackedBins",
    "Plan",
    "RecurrentCost",
    "ResourceUse",
    "Statistics",
    "Strategy",
    "Task",
    "TransformerCost",
    "pack_lengths",
    "plan",
    "register_strategy",
    "strategy_names",
]
