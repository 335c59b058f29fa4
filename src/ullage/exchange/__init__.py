"""The only folder that moves samples between ranks.

Each step stands alone: :func:`gather_lengths`, then ``ullage.plan`` (each rank by itself), then :func:`exchange` or
:func:`materialize`, then :func:`share` with the ranks that own no data, then :func:`shard` for context parallelism.
:class:`PackedIterator` composes them, one step ahead of the training loop.
"""

from ullage.exchange.iterator import PackedIterator
from ullage.exchange.lengths import Lengths, gather_lengths
from ullage.exchange.reroute import exchange, materialize
from ullage.exchange.transfer import Route, route
from ullage.exchange.sharding import Shard, shard, shard_index, unshard
from ullage.exchange.sharing import share
from ullage.exchange.steps import PackedStep

__all__ = [
    "Lengths",
    "PackedIterator",
    "PackedStep",
    "Route",
    "Shard",
    "exchange",
    "gather_lengths",
    "materialize",
    "route",
    "shard",
    "shard_index",
    "share",
    "unshard",
]
