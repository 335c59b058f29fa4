"""verl's balancing, planned: partitions of equal work, microbatches that respect their cap, a dynamic-CP scheduler.

In verl every data-parallel rank holds its rows, and balancing chooses among them. Its functions take lists and tensors
and give index lists; those here have the same names, arguments and results, so they go where verl's are::

    verl.utils.seqlen_balancing.rearrange_micro_batches = ullage.engines.verl.rearrange_micro_batches

What differs is what is inside. Partitions are never less even than by verl's Karmarkar-Karp, and are made in a part of
its time; a microbatch never holds more tokens than it may, where verl balances after it has counted and does not look
again; a rank that cannot go on says so on every rank. Signatures are those of ``verl/utils/seqlen_balancing.py`` and,
for the scheduler, of what ``verl/utils/dynamic_cp_scheduler.py`` calls (August 2026). verl need not be installed.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ullage.engines.dealing import bins_of, fill_empty
from ullage.errors import InputError
from ullage.layout import Int64, as_lengths
from ullage.planning.planner import plan
from ullage.planning.plans import Plan, slots_of
from ullage.planning.request import as_positive
from ullage.ranks import Axis, agree, tried
from ullage.ranks.wire import gather_int64

#: A largest partition this near the bound that holds for every division is not tried to be improved.
_LEVEL = 1.0002
#: Up to so many items it is, because differencing takes no time.
_FEW = 1024


def calculate_workload(seqlen_list: Tensor) -> Tensor:
    """Work of sequences of these lengths: ``24576·L + L²``, a 7B transformer's, int64. Does not wait for the device."""
    length = seqlen_list.long()
    return length * (24576 + length)


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The indices of ``k_partitions`` parts with sums as equal as can be found, each part in rising order, none empty.

    ``seqlen_list``: integers >= 0, lengths or work. ``equal_size``: the parts have equally many items. The largest sum
    is at most that of Karmarkar-Karp's differencing, or within 0.02 % of what no division can beat. Raises
    ``InputError``, a ``ValueError``, for fewer items than parts, and for numbers that ``equal_size`` cannot divide.

    >>> get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    [[2, 3, 4], [0, 1]]
    """
    values, k = as_lengths(seqlen_list, "seqlen_list"), as_positive(k_partitions, "k_partitions")
    if len(values) < k:
        raise InputError("there are fewer items than partitions", expected=f"at least {k}", found=len(values))
    if equal_size and len(values) % k:
        raise InputError("equal_size must divide the items", expected=f"a multiple of {k}", found=len(values))
    # Every item takes one slot, so that a capacity of n/k slots makes the parts equally long.
    made = plan(
        np.ones(len(values), np.int64),
        ranks=k,
        capacity=len(values) // k if equal_size else len(values),
        cost=lambda _: values,
    )
    parts = fill_empty(bins_of(made), values.tolist(), "partitions")
    largest, least = _largest(values, parts), max(-(-int(values.sum()) // k), int(values.max()))
    if largest > least and (len(values) <= _FEW or largest > least * _LEVEL):
        others = fill_empty(_differencing(values.tolist(), k, equal_size), values.tolist(), "partitions")
        parts = min(parts, others, key=lambda each: _largest(values, each))
    return [sorted(part) for part in parts]


def _largest(values: Int64, parts: Sequence[Sequence[int]]) -> int:
    return max(int(values[list(part)].sum()) for part in parts)


def _differencing(values: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """Karmarkar and Karp's differencing for ``k`` parts: of two partial divisions with the widest spread, the large
    parts of one are joined with the small parts of the other, until one division is left.

    A part is (sum, number of items, items as (index, value)); ties go by these, so that the outcome is one.
    """
    order = sorted((value, i) for i, value in enumerate(values))
    size = k if equal_size else 1
    empty = (0, 0, [])
    heap: list[Any] = []

    def push(parts: list[tuple[int, int, list[tuple[int, int]]]]) -> None:
        parts.sort(reverse=True)
        total, count, items = parts[0]
        tie = [(-i, -value) for i, value in items]
        heapq.heappush(heap, (parts[-1][0] - total, -total, -count, tie, parts))

    for begin in range(0, len(order), size):
        parts = [(value, 1, [(i, value)]) for value, i in order[begin : begin + size]]
        push(parts + [empty] * (k - len(parts)))
    while len(heap) > 1:
        wide, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        push([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(wide, reversed(other))])
    return [[i for i, _ in items] for _, _, items in heap[0][-1]]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """A batch cut into microbatches of equal work that hold at most ``max_token_len`` tokens, and the rows of each.

    ``batch``: a ``TensorDict`` or a mapping of columns. ``input_ids`` is a jagged nested tensor, or padded [N, L]
    beside an ``attention_mask``. As few microbatches as hold the rows, but at least ``min_num_micro_batch``, a multiple
    of ``num_batches_divided_by`` (virtual pipeline stages), and with a ``dp_group`` as many as its neediest rank has.
    ``force_group_size``: so many consecutive rows stay together. With ``use_dynamic_bsz_balance`` the light
    microbatches run first and last, where a pipeline fills and drains.

    Collective over ``dp_group``. Waits for the device, once. Raises ``InputError`` for a row or group above
    ``max_token_len``, and if there are fewer rows than microbatches: on every rank, if there is a group.
    """
    size = max(1, int(force_group_size))
    axis = Axis.from_group(dp_group, "dp") if dp_group is not None and same_micro_num_in_dp else None
    read, failure = tried(lambda: _read_items(batch, max_token_len, size))
    if failure is not None and axis is None:
        raise failure
    tokens, work, needed = read if read is not None else (np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    count, available = max(needed, min_num_micro_batch or 0), len(tokens)
    if axis is not None:
        rows = gather_int64(np.array([-1 if failure else count, available]), axis)
        if (rows[:, 0] < 0).any():
            agree(failure, axis, "reading the rows of its batch")
        count, available = int(rows[:, 0].max()), int(rows[:, 1].min())
    multiple = num_batches_divided_by or 1
    count = -(-count // multiple) * multiple
    if count > available:
        raise InputError(
            "there are fewer rows than microbatches",
            where="on some rank" if axis is not None else None,
            expected=f"at least {count * size}",
            found=available * size,
            hint="raise max_token_len, or lower min_num_micro_batch",
        )
    items = _even_bins(tokens, work, max_token_len, count)
    if use_dynamic_bsz_balance:
        items.sort(key=lambda ids: (int(work[ids].sum()), ids[0]), reverse=True)
        items = items[::2][::-1] + items[1::2]
    parts = [[i * size + k for i in ids for k in range(size)] for ids in items]
    return [select_rows(batch, part) for part in parts], parts


def _read_items(batch: Any, max_token_len: int, size: int) -> tuple[Int64, Int64, int]:
    """Tokens and work of each group of ``size`` rows, and the microbatches that they need."""
    ids = batch["input_ids"]
    given = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = as_lengths(given.tolist(), "lengths of the rows")
    if len(lengths) % size:
        raise InputError("force_group_size must divide the batch", expected=f"a divisor of {len(lengths)}", found=size)
    work = (lengths * (24576 + lengths)).reshape(-1, size).sum(1)
    tokens = lengths.reshape(-1, size).sum(1)
    return tokens, work, plan(tokens, ranks=1, capacity=max_token_len, cost=lambda _: work).num_microbatches


def _even_bins(tokens: Int64, work: Int64, capacity: int, count: int) -> list[list[int]]:
    """``count`` bins of even work, none empty, none above ``capacity``, each in rising order."""
    if not count:
        return []
    made = plan(tokens, ranks=count, capacity=capacity, cost=lambda _: work)
    if made.num_microbatches > 1:  # no even division was found within the capacity; this one is known
        made = plan(tokens, ranks=1, capacity=capacity, cost=lambda _: work)
    bins = bins_of(made)
    return [sorted(ids) for ids in fill_empty(bins + [[] for _ in range(count - len(bins))], work.tolist())]


def select_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Some rows of a batch, in the order given: a ``TensorDict`` of a ``TensorDict``, a dict of any other mapping.

    Tensors, nested ones too, arrays and lists are columns; anything else is about the whole batch and is kept.
    """
    tensordict = sys.modules.get("tensordict")  # who has none of its batches need not have it installed
    if tensordict is None or not isinstance(batch, tensordict.TensorDictBase):
        return {name: _select(column, rows) for name, column in batch.items()}
    index = torch.tensor(rows, dtype=torch.long)
    columns = {
        # What is no tensor is a stack with a row for each, or, without a shape, about the whole batch.
        name: _select(column, rows) if isinstance(column, Tensor) else column[index] if column.shape else column
        for name, column in batch.items()
    }
    return tensordict.TensorDict(columns, batch_size=[len(rows)], device=batch.device)


def _select(column: Any, rows: Sequence[int]) -> Any:
    if isinstance(column, Tensor) and column.is_nested:
        parts = column.unbind()
        return torch.nested.as_nested_tensor([parts[i] for i in rows], layout=torch.jagged)
    if isinstance(column, Tensor) and not column.dim():
        return column
    if isinstance(column, Tensor):
        return column[torch.tensor(rows, dtype=torch.long, device=column.device)]
    if isinstance(column, np.ndarray):
        return column[list(rows)]
    if isinstance(column, list):
        return [column[i] for i in rows]
    return column


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Outputs that were collected microbatch by microbatch, back in the order of the batch.

    ``data`` [rows, ...], or nested; ``batch_idx_list``: what :func:`rearrange_micro_batches` gave. Raises
    ``InputError`` if they disagree.
    """
    order = np.fromiter(chain.from_iterable(batch_idx_list), np.int64)
    if len(order) != data.size(0):
        raise InputError("outputs and indices disagree", expected=f"{len(order)} rows", found=data.size(0))
    return _select(data, np.argsort(order).tolist())


@dataclass
class _Bin:
    """Sequences that ``degree`` consecutive ranks run together."""

    degree: int
    ids: list[int]


class DynamicCPScheduler:
    """Sequences to microbatches in which each has 1, 2, 4, ... ranks: what verl asks of a Megatron-Core scheduler.

    ``max_seqlen_per_dp_cp_rank``: tokens a rank holds; ``dp_size`` · ``cp_size`` ranks; the number of microbatches is a
    multiple of ``microbatch_group_size_per_vp_stage``; no sequence gets fewer than ``min_cp_size`` ranks. Raises
    ``InputError``, a ``ValueError``, for numbers that are not positive or do not divide.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        min_cp_size: int = 1,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = as_positive(max_seqlen_per_dp_cp_rank, "max_seqlen_per_dp_cp_rank")
        self.ranks = as_positive(cp_size, "cp_size") * as_positive(dp_size, "dp_size")
        self.multiple = as_positive(microbatch_group_size_per_vp_stage or 1, "microbatch_group_size_per_vp_stage")
        self.min_cp_size = as_positive(min_cp_size, "min_cp_size")
        if self.ranks % self.min_cp_size:
            raise InputError("min_cp_size must divide the ranks", expected=f"a part of {self.ranks}", found=min_cp_size)

    def get_groups_and_subsamples(self, sample_id_seqlens: Iterable[tuple[Any, int]]) -> list[list[list[Any]]]:
        """For each microbatch and each rank, the ids of the samples that it runs.

        ``sample_id_seqlens``: pairs of an id and a length in tokens. Ranks that share samples are consecutive and begin
        at a multiple of their number; they list the same ids. No rank is without samples: where the plan leaves one
        idle, samples are split off, or shared by more ranks. Raises ``InputError`` for an id that is there twice, a
        sequence that all ranks together cannot hold, and too few sequences for that.
        """
        pairs = list(sample_id_seqlens)
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise InputError("an id is there twice", found=next(name for name in names if names.count(name) > 1))
        lengths = as_lengths([length for _, length in pairs], "lengths")
        hosts, capacity = self.ranks // self.min_cp_size, self.max_seqlen_per_dp_cp_rank * self.min_cp_size
        made = plan(
            lengths,
            ranks=hosts,
            capacity=capacity,
            context_parallel="auto",
            microbatch_multiple=self.multiple,
            pad_to_multiple_of=1 if self.min_cp_size == 1 else 2 * self.min_cp_size,
        )
        steps = [step for microbatch in range(made.num_microbatches) if (step := _occupied(made, microbatch))]
        steps += [[] for _ in range(-len(steps) % self.multiple)]
        _occupy_all(steps, made)
        return [
            [
                [names[i] for i in part.ids]
                for part in sorted(step, key=lambda part: -part.degree)
                for _ in range(part.degree * self.min_cp_size)
            ]
            for step in steps
        ]


def _occupied(made: Plan, microbatch: int) -> list[_Bin]:
    found, rank = [], 0
    while rank < made.ranks:
        degree = made.degree(microbatch, rank)
        ids = made.members(microbatch, rank).tolist()
        if ids:
            found.append(_Bin(degree, ids))
        rank += degree
    return found


def _occupy_all(steps: list[list[_Bin]], made: Plan) -> None:
    """Gives every rank of every microbatch something to do: halves the dearest bin that can be halved into the idle
    ranks, or doubles its degree, or takes a sequence from another bin."""
    costs = made.costs.tolist()

    def each(part: _Bin) -> float:
        return sum(costs[i] for i in part.ids) / part.degree

    for step in steps:
        while idle := made.ranks - sum(part.degree for part in step):
            fitting = [
                part
                for part in step
                if part.degree <= idle and (len(part.ids) > 1 or _fits(made, part.ids[0], 2 * part.degree))
            ]
            if not fitting:
                step.append(_taken(steps, idle, made, each))
                continue
            dearest = max(fitting, key=each)
            if len(dearest.ids) > 1:
                step.append(_Bin(dearest.degree, _halve(dearest.ids, costs)))
            else:
                dearest.degree *= 2


def _fits(made: Plan, i: int, degree: int) -> bool:
    return int(slots_of(made.lengths[i : i + 1], made.pad_to_multiple_of, degree)[0]) <= made.capacity * degree


def _halve(ids: list[int], costs: list[int]) -> list[int]:
    """Takes about half of the work, and at least one of several sequences, out of ``ids``."""
    kept, taken, balance = [], [], 0
    for i in sorted(ids, key=lambda i: -costs[i]):
        lighter = kept if balance < 0 or not kept else taken
        lighter.append(i)
        balance += costs[i] if lighter is kept else -costs[i]
    ids[:] = kept
    return taken


def _taken(steps: list[list[_Bin]], idle: int, made: Plan, each: Callable[[_Bin], float]) -> _Bin:
    """A sequence that fits on at most ``idle`` ranks, taken from the dearest bin that has several."""
    rich = [part for step in steps for part in step if len(part.ids) > 1]
    for part in sorted(rich, key=each, reverse=True):
        for i in sorted(part.ids, key=lambda i: -int(made.costs[i])):
            degree = 1
            while degree <= idle and not _fits(made, i, degree):
                degree *= 2
            if degree <= idle:
                part.ids.remove(i)
                return _Bin(degree, [i])
    raise InputError(
        "there are too few sequences to keep every rank busy",
        expected="for each rank of each microbatch a sequence, or a power-of-two share of one",
        found=f"{made.num_sequences} sequences",
    )
