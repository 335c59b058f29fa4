"""Routes: which sequences go from which rank to which, as a plan and the counts of the ranks say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ullage.exchange.lengths import Lengths
from ullage.layout import Int64, counting
from ullage.planning.plans import Plan


@dataclass(frozen=True, eq=False)
class Route:
    """Ids of the sequences that one rank sends and receives; a pure function of plan and counts.

    ``sends``: ids by destination, and for each destination in packing order; ``send_cuts`` [ranks + 1] cuts them.
    ``receives``: ids by source, and from each source in packing order; ``receive_cuts`` [ranks + 1] cuts them.
    """

    sends: Int64
    send_cuts: Int64
    receives: Int64
    receive_cuts: Int64

    def sent_to(self, rank: int) -> Int64:
        """The ids that go to ``rank``."""
        return self.sends[self.send_cuts[rank] : self.send_cuts[rank + 1]]

    def received_from(self, rank: int) -> Int64:
        """The ids that come from ``rank``."""
        return self.receives[self.receive_cuts[rank] : self.receive_cuts[rank + 1]]


def route(plan: Plan, gathered: Lengths, rank: int) -> Route:
    """The route of data-parallel ``rank``. No communication, no groups: works for any number of ranks."""
    # Ids are positions among the gathered lengths, so a rank's own are a range; dropped ones go nowhere.
    mine = np.arange(gathered.offsets[rank], gathered.offsets[rank + 1])
    mine = mine[plan.bins[mine] >= 0]
    degrees = plan.degrees.reshape(-1)[plan.bins[mine]]
    ids = np.repeat(mine, degrees)
    # A sequence of a microbatch of degree k goes to k consecutive ranks.
    destination = plan.bins[ids] % plan.ranks + counting(degrees)
    # By destination, then in packing order: ``lexsort`` sorts by its last key first.
    order = np.lexsort((plan.inverse[ids], destination))
    wanted = plan.all_members(rank)
    # The rank whose range of ids holds each wanted id: the last one that begins at or before it.
    source = np.searchsorted(gathered.offsets, wanted, side="right") - 1
    return Route(
        sends=ids[order],
        send_cuts=_cuts(destination, plan.ranks),
        receives=wanted[np.argsort(source, kind="stable")],
        receive_cuts=_cuts(source, plan.ranks),
    )


def _cuts(of: Int64, ranks: int) -> Int64:
    return np.concatenate([[0], np.cumsum(np.bincount(of, minlength=ranks))]).astype(np.int64)


def tokens_between(lengths: Int64, ids: Int64, cuts: Int64) -> Int64:
    """Tokens of each part that ``cuts`` makes of ``ids``."""
    return np.diff(np.concatenate([[0], np.cumsum(lengths[ids])])[cuts])
