"""NeMo-RL adapter: its packer interface and its sharding of packed batches, over ullage's plan.

NeMo-RL packs on the driver, which holds every row: a packer makes bins, and bin *k* goes to data-parallel shard
``k % shards``. The bins of a plan, listed in the order of microbatches and then ranks, therefore arrive at the ranks
that the plan chose, without a change to NeMo-RL. One line puts it in place::

    nemo_rl.distributed.batched_data_dict.get_packer = ullage.engines.nemo_rl.get_packer

or ``ullage.engines.nemo_rl.install()``, wherever it was imported.

Shown with NeMo-RL's tests/unit/data/packing/test_algorithms.py and tests/unit/distributed/test_batched_data_dict.py of
22 August 2026 over this factory. NeMo-RL is not installed where this project is tested.
"""

from __future__ import annotations

import enum
import statistics
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ullage.engines.lists.packers import BinPacker, stand_for
from ullage.engines.replacing import Replacements, replace
from ullage.errors import InputError
from ullage.layout import Int64, Integers, as_lengths
from ullage.planning.cost import Cost

MODULE = "nemo_rl.data.packing"
#: NeMo-RL's names of algorithms, and ``BALANCED``. The first keeps arrival order; all others are the plan.
ARRIVAL = "CONCATENATIVE"
ALGORITHMS = (ARRIVAL, "FIRST_FIT_DECREASING", "FIRST_FIT_SHUFFLE", "MODIFIED_FIRST_FIT_DECREASING", "BALANCED")


class SequencePacker(BinPacker):
    """Packer of sequences into as few bins as possible, with balanced work.

    Args:
        bin_capacity: most tokens in a bin; never exceeded.
        collect_metrics: whether :meth:`pack` keeps figures for :meth:`get_aggregated_metrics`.
        min_bin_count: least number of bins.
        bin_count_multiple: the number of bins is a multiple of this; each group of that many bins
            runs at the same time, one per rank.
        cost: cost model, as for ``ullage.plan``.
        order: ``"balanced"``, or ``"next_fit"`` for arrival order.

    Raises ``InputError``, a ``ValueError``, for numbers out of range.

    >>> SequencePacker(8, bin_count_multiple=2).pack([5, 3, 4, 4])
    [[2, 3], [0, 1]]
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        cost: Cost | None = None,
        order: str = "balanced",
    ) -> None:
        super().__init__(bin_capacity, min_bin_count, bin_count_multiple, cost=cost, order=order)
        self.collect_metrics = collect_metrics
        self._packed: list[dict[str, float]] = []

    def pack(self, sequence_lengths: Integers) -> list[list[int]]:
        """Ids of each bin, none of them empty; ``[]`` without sequences, unless a number of bins is required.

        Raises ``InputError``, a ``ValueError``, for a sequence above the capacity, and for fewer sequences than bins.
        """
        bins = super().pack(sequence_lengths)
        if self.collect_metrics:
            self._packed.append(self.compute_metrics(sequence_lengths, bins))
        return bins

    def compute_metrics(self, sequence_lengths: Integers, bins: Sequence[Sequence[int]]) -> dict[str, float]:
        """Fill of ``bins``, as a dict with NeMo-RL's keys."""
        lengths = as_lengths(sequence_lengths, "sequence_lengths")
        # NeMo-RL's definitions: utilization is tokens per slot, balance 1 less the coefficient of variation of the
        # fills.
        filled = [int(lengths[list(ids)].sum()) / self.bin_capacity for ids in bins]
        tokens = int(lengths.sum()) if bins else 0
        room = len(bins) * self.bin_capacity
        least = -(-tokens // self.bin_capacity)
        mean = tokens / room if room else 0.0
        spread = statistics.stdev(filled) / mean if len(filled) > 1 and mean else 0.0
        return {
            "num_sequences": len(lengths) if bins else 0,
            "num_bins": len(bins),
            "total_sequence_length": tokens,
            "total_bin_capacity": room,
            "total_waste": room - tokens,
            "average_utilization": mean,
            "waste_ratio": 1.0 - mean if room else 0.0,
            "bin_balance": 1.0 - spread if bins else 0.0,
            "theoretical_min_bins": least,
            "bin_efficiency": least / len(bins) if bins else 0.0,
        }

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Metrics over all calls of :meth:`pack` since the last :meth:`reset_metrics`; ``{}`` if there was none."""
        if not self._packed:
            return {}
        total = {name: sum(each[name] for each in self._packed) for name in self._packed[0]}
        each = [one["average_utilization"] for one in self._packed]
        mean = total["total_sequence_length"] / max(1, total["total_bin_capacity"])
        return {
            "total_sequences": total["num_sequences"],
            "total_bins": total["num_bins"],
            "average_utilization": mean,
            "min_utilization": min(each),
            "max_utilization": max(each),
            "average_waste_ratio": 1.0 - mean,
            "min_waste_ratio": 1.0 - max(each),
            "max_waste_ratio": 1.0 - min(each),
            "average_bin_count": total["num_bins"] / len(each),
            "bin_efficiency": -(-total["total_sequence_length"] // self.bin_capacity) / max(1, total["num_bins"]),
        }

    def reset_metrics(self) -> None:
        """Forget the collected metrics."""
        self._packed.clear()

    def print_metrics(self) -> None:
        """Print :meth:`get_aggregated_metrics`, one per line."""
        for name, value in self.get_aggregated_metrics().items():
            print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")


def get_packer(
    algorithm: enum.Enum | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """Packer for an algorithm's name; replaces NeMo-RL's factory of this name.

    Args:
        algorithm: one of NeMo-RL's names in any case, or a member of its enum. ``concatenative`` keeps arrival order;
            the others, and ``balanced``, are the plan.
        bin_capacity, collect_metrics, min_bin_count, bin_count_multiple: as for :class:`SequencePacker`.

    Raises ``InputError``, a ``ValueError``, for another name.
    """
    name = algorithm.name if isinstance(algorithm, enum.Enum) else str(algorithm)
    if name.upper() not in ALGORITHMS:
        raise InputError("Unknown packing algorithm", expected=" or ".join(ALGORITHMS), found=name)
    stand_for(SequencePacker, f"{MODULE}.algorithms", "SequencePacker")
    order = "next_fit" if name.upper() == ARRIVAL else "balanced"
    return SequencePacker(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, order=order)


@runtime_checkable
class RowSelectable(Protocol):
    """Batch with NeMo-RL's ``BatchedDataDict.select_indices``, which gives some of its rows as a batch."""

    def select_indices(self, indices: list[int]) -> Any: ...


class PackedShard(UserDict):
    """Rows of one data-parallel rank in the order in which it runs them, with NeMo-RL's attributes.

    Each attribute is a list with one entry per global batch.

    Attributes:
        micro_batch_indices: ``[begin, end]`` rows of each microbatch.
        micro_batch_lengths: padded tokens of each microbatch.
        elem_counts_per_gb: number of rows.
    """

    micro_batch_indices: list[list[list[int]]]
    micro_batch_lengths: list[list[int]]
    elem_counts_per_gb: list[int]

    def microbatches(self) -> Iterator[dict[str, Any]]:
        """Columns of the rows of each microbatch, in the order in which they run."""
        start = 0
        # ``begin`` and ``end`` count from the first row of their global batch.
        for cuts, count in zip(self.micro_batch_indices, self.elem_counts_per_gb):
            for begin, end in cuts:
                yield {name: column[start + begin : start + end] for name, column in self.data.items()}
            start += count


def shard_by_batch_size(
    batch: Mapping[str, Any] | RowSelectable,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic_batching_args: None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
) -> tuple[list[Any], list[int]]:
    """Rows of each shard, and for each of them, shard after shard, its row in ``batch``.

    Args:
        batch: columns of equal length (tensors, arrays or lists), or a ``BatchedDataDict``.
        shards: number of data-parallel ranks.
        batch_size: rows of one optimizer step; each step is planned separately. All rows if None.
        allow_uneven_shards: accepted and ignored: shards may differ in rows, and need not divide them.
        dynamic_batching_args: must be None: dynamic batching pads, and is left to NeMo-RL.
        sequence_packing_args: NeMo-RL's ``max_tokens_per_microbatch``, ``input_lengths_key``, ``algorithm``,
            ``sequence_length_pad_multiple``, ``microbatch_order``.

    Every shard gets as many microbatches as the others, none of them empty. Shards are :class:`PackedShard`, or of
    ``batch``'s own type with the same attributes; :func:`reorder_data` puts results back into the order of ``batch``.

    Waits for the device if the lengths are on one. Raises ``InputError`` for a batch that ``batch_size`` does not
    divide, columns of unequal length, a sequence above the capacity, and fewer rows than shards.
    """
    if dynamic_batching_args is not None or sequence_packing_args is None:
        raise InputError("only sequence packing is planned", expected="sequence_packing_args alone")
    options = _PackingOptions.read(sequence_packing_args)
    columns: Mapping[str, Any] = batch  # type: ignore[assignment]  # a BatchedDataDict is a mapping too
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) != 1:
        raise InputError("the columns of a batch must have one length", found=sizes)
    total = next(iter(sizes.values()))
    step = total if batch_size is None else batch_size
    if step < 1 or total % step:
        raise InputError("batch_size must divide the batch", expected=f"a divisor of {total}", found=step)
    # One plan per optimizer step.
    slots = options.slots(columns)
    packer = get_packer(options.algorithm, options.capacity, min_bin_count=shards, bin_count_multiple=shards)
    bins = [packer.pack(slots[start : start + step]) for start in range(0, total, step)]
    # Bins are dealt as NeMo-RL deals them, bin k to shard k % shards.
    made, rows = [], []
    for shard in range(shards):
        mine = []
        for start, each in zip(range(0, total, step), bins):
            ids = [[start + i for i in part] for part in each[shard::shards]]
            if options.largest_first:
                ids.sort(key=lambda part: -int(slots[part].sum()))
            mine.append(ids)
        rows.append([i for ids in mine for part in ids for i in part])
        made.append(_shard(batch, rows[-1], mine, slots))
    return made, [i for each in rows for i in each]


@dataclass(frozen=True)
class _PackingOptions:
    """NeMo-RL's ``sequence_packing_args``, read and checked.

    Attributes:
        capacity: most padded tokens in a microbatch.
        lengths_key: column with the length of each row.
        algorithm: name of the packing algorithm.
        multiple: each row is padded to a multiple of this many tokens.
        largest_first: whether a rank runs its largest microbatch first.
    """

    capacity: int
    lengths_key: str
    algorithm: str
    multiple: int
    largest_first: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> _PackingOptions:
        names = ("max_tokens_per_microbatch", "input_lengths_key", "algorithm")
        for name in names:
            if name not in given:
                raise InputError("sequence_packing_args lacks a key", where=name)
        order = given.get("microbatch_order")
        if order not in (None, "packer", "largest_first"):
            raise InputError("no such microbatch_order", expected="'packer' or 'largest_first'", found=repr(order))
        multiple = int(given.get("sequence_length_pad_multiple") or 1)
        capacity, key, algorithm = (given[name] for name in names)
        return cls(capacity, key, algorithm, multiple, order == "largest_first")

    def slots(self, columns: Mapping[str, Any]) -> Int64:
        """Padded length of each row, int64 [rows]."""
        if self.lengths_key not in columns:
            raise InputError("the batch lacks its lengths", expected=self.lengths_key, found=sorted(columns))
        given = columns[self.lengths_key]
        host = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
        # Rounded up to the multiple to which each sequence is padded when it is packed.
        return -(-as_lengths(host, self.lengths_key) // self.multiple) * self.multiple


def _shard(batch: Any, rows: list[int], steps: list[list[list[int]]], slots: Int64) -> Any:
    """One shard with NeMo-RL's attributes. ``steps``: for each global batch, the rows of each microbatch."""
    if isinstance(batch, RowSelectable):
        shard = batch.select_indices(rows)
    else:
        shard = PackedShard({name: _select(column, rows) for name, column in batch.items()})
    # A shard's rows lie in the order of its microbatches, so the bounds are cumulated numbers of rows.
    ends = [list(accumulate(map(len, parts), initial=0)) for parts in steps]
    shard.micro_batch_indices = [[list(pair) for pair in pairwise(each)] for each in ends]
    shard.micro_batch_lengths = [[int(slots[part].sum()) for part in parts] for parts in steps]
    shard.elem_counts_per_gb = [each[-1] for each in ends]
    return shard


def _select(column: Any, rows: list[int]) -> Any:
    if isinstance(column, Tensor):
        return column[torch.tensor(rows, dtype=torch.long, device=column.device)]
    if isinstance(column, np.ndarray):
        return column[rows]
    return [column[i] for i in rows]


def reorder_data(values: Any, reordered_indices: Sequence[int]) -> Any:
    """Results that were computed shard after shard, in the order of the batch.

    ``values``: a tensor, array or list of rows, or a mapping of them, in the order of the shards;
    ``reordered_indices``: from :func:`shard_by_batch_size`. Raises ``InputError`` if their lengths disagree.
    """
    if isinstance(values, Mapping):
        return {name: reorder_data(column, reordered_indices) for name, column in values.items()}
    if len(values) != len(reordered_indices):
        raise InputError("rows and indices disagree", expected=f"{len(reordered_indices)} rows", found=len(values))
    return _select(values, np.argsort(np.asarray(reordered_indices, np.int64)).tolist())


def install() -> Replacements:
    """Replace the factory, wherever it was imported."""
    return replace({f"{MODULE}.algorithms.get_packer": get_packer})
