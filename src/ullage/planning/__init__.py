"""Where each sequence goes: lengths in, a plan out.

Pure: no process group, no device, no torch. ``plan`` spreads a global batch over microbatches and ranks;
``pack_dataset`` fills bins for a whole dataset.
"""

from ullage.planning.cost import TransformerCost
# packing
from ullage.planning.plan import Plan, Statistics
from ullage.planning.planner import plan

__all__ = ["Plan", "Statistics", "TransformerCost", "plan"]
