"""The only folder that moves samples between ranks.

Each step stands alone: :func:`gather_lengths`, then ``ullage.plan`` (each rank by itself), then :func:`exchange` or
:func:`materialize`, then :func:`share` over the ranks that own no data, then :func:`shard` for context parallelism.
:class:`PackedIterator` composes them, one step ahead of the training loop.
"""

from ullage.exchange.lengths import Lengths, gather_lengths
from ullage.exchange.reroute import exchange, materialize
from ullage.exchange.topology import Axis, Topology

__all__ = ["Axis", "Lengths", "Topology", "exchange", "gather_lengths", "materialize"]
