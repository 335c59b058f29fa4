"""Ranks and how they meet: topologies, the collectives that carry bytes, and errors that every rank raises.

A :class:`Topology` says where a process stands among the others; each of its axes is an :class:`Axis`. Within
:func:`together` either every rank along an axis comes through a block of code or every rank raises. The collectives
that samples travel by are in ``ranks.wire``, the making of process groups in ``ranks.groups``, their end in
``ranks.ending``.
"""

from ullage.ranks.agreement import agree, gather_agreed, raise_failures, report, together, tried
from ullage.ranks.topology import Axis, Topology

__all__ = ["Axis", "Topology", "agree", "gather_agreed", "raise_failures", "report", "together", "tried"]
