"""Lists in, lists out: lengths to lists of ids, over the plan, as the balancing functions of other frameworks work.

``partitions`` divides values evenly, ``bins`` fills microbatches, ``schedule`` fills the microbatches of every rank.
Pure: no process group, no device, no data. The adapters of ``ullage.engines`` are tables of names over these three,
which ``ullage.engines.replacing`` puts in place of a framework's own functions.
"""

from ullage.engines.lists.filling import bins, schedule
from ullage.engines.lists.partitioning import partitions

__all__ = ["bins", "partitions", "schedule"]
