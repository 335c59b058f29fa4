"""verl adapter: its balancing functions and its dynamic context-parallel scheduler, over ullage's plan.

In verl every data-parallel rank holds its own rows, and balancing divides them into partitions and microbatches. The
functions here have the names, arguments and results of verl's, so one line per function puts them in place::

    verl.utils.seqlen_balancing.rearrange_micro_batches = ullage.engines.verl.rearrange_micro_batches

or ``ullage.engines.verl.install()`` all of them, in every module that has imported them by name.

Partitions are never less even than by verl's Karmarkar-Karp, and take less time. A microbatch never exceeds its tokens,
unless one group of rows does. A failure on one rank raises on all.

Shown with verl's tests/utils/test_seqlen_balancing.py, test_prepare_micro_batches_with_group_size.py and
test_dynamic_cp_scheduler.py of 22 August 2026 over these functions. verl is not installed where this project is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ullage.core.errors import InputError, require_int
from ullage.core.layout import Int64, as_lengths
from ullage.engines.replacing import Replacements, replace
from ullage.planning.cost import LINEAR_7B
from ullage.planning.lists import Filling, partitions
from ullage.planning.placement import free_degrees, slots_of
from ullage.planning.planner import plan
from ullage.planning.plans import Plan
from ullage.planning.request import refuse_oversize
from ullage.ranks import Axis, agree, tried
from ullage.ranks.wire import gather_int64

MODULE = "verl.utils.seqlen_balancing"


def calculate_workload(seqlen_list: Tensor) -> Tensor:
    """Work of sequences of these lengths, int64: ``24576·L + L²``, verl's, which is that of a 7B transformer.

    Does not wait for the device.
    """
    length = seqlen_list.long()
    return length * (LINEAR_7B + length)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Indices of ``k_partitions`` parts whose sums are as equal as can be found; each part ascending, none empty.

    ``seqlen_list``: numbers >= 0, lengths or work, integers of any size or floats. ``equal_size``: whether all parts
    have as many items. See :func:`ullage.planning.lists.partitions`.

    >>> get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    [[2, 3, 4], [0, 1]]
    """
    k_partitions = require_int(k_partitions, "k_partitions", least=1)
    return partitions(seqlen_list, k_partitions, equal_size=equal_size, name="seqlen_list")


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    oversize: str = "alone",
) -> tuple[list[Any], list[list[int]]]:
    """Microbatches of equal work with at most ``max_token_len`` tokens, and the row indices of each.

    Args:
        batch: a ``TensorDict`` or a mapping of columns. ``input_ids`` is a jagged nested tensor, or padded [N, L]
            beside an ``attention_mask``.
        max_token_len: most tokens in a microbatch.
        dp_group: data-parallel process group.
        num_batches_divided_by: the number of microbatches is a multiple of this (virtual pipeline stages).
        same_micro_num_in_dp: whether all ranks of ``dp_group`` get as many microbatches as the rank that needs most.
        min_num_micro_batch: least number of microbatches. As few as hold the rows otherwise.
        use_dynamic_bsz_balance: whether the light microbatches run first and last, where a pipeline fills and drains.
        force_group_size: this many consecutive rows stay together.
        oversize: for a group of several rows above ``max_token_len``: ``"alone"``, it has a microbatch of its own, with
            a warning, or ``"error"``, the rule of verl since 25 August 2026.

    Collective over ``dp_group``. Waits for the device once. Raises ``InputError`` for a row above ``max_token_len``,
    and if there are fewer rows than microbatches: on every rank, if there is a process group.
    """
    size = max(1, int(force_group_size))
    axis = Axis.from_group(dp_group, "dp") if dp_group is not None and same_micro_num_in_dp else None
    # How many microbatches this rank needs; if that fails, the other ranks learn it below.
    read, failure = tried(lambda: _read_items(batch, max_token_len, size, oversize))
    if failure is not None and axis is None:
        raise failure
    # The number of microbatches: the largest that any rank needs, rounded up to the multiple.
    count, available = (max(read[0].needed, min_num_micro_batch or 0), read[2]) if read is not None else (0, 0)
    if axis is not None:
        # -1 tells the other ranks of a failure, in the collective that is needed anyway.
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
    assert read is not None
    filling, work, _ = read
    parts = filling.into(count)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda ids: (int(work[ids].sum()), ids[0]), reverse=True)
        # From heaviest first to light, heavy, light: the even places backwards, then the odd ones.
        parts = parts[::2][::-1] + parts[1::2]
    return [select_rows(batch, part) for part in parts], parts


def _read_items(batch: Any, max_token_len: int, size: int, oversize: str) -> tuple[Filling, Int64, int]:
    """The rows as a question for bins, the work of each, and the number of groups of ``size`` rows."""
    ids = batch["input_ids"]
    given = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = as_lengths(given.tolist(), "lengths of the rows")
    if len(lengths) % size:
        raise InputError("force_group_size must divide the batch", expected=f"a divisor of {len(lengths)}", found=size)
    refuse_oversize(lengths, max_token_len, 1)  # a row alone is refused by verl too, whatever is asked for groups
    work = lengths * (LINEAR_7B + lengths)
    groups = np.arange(len(lengths)) // size if size > 1 else None
    return Filling.read(lengths, max_token_len, work=work, groups=groups, oversize=oversize), work, len(lengths) // size


def select_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Rows of a batch, in the order given: a ``TensorDict`` from a ``TensorDict``, a dict from any other mapping.

    Tensors (nested ones too), arrays and lists are columns; anything else belongs to the whole batch and is kept.
    """
    tensordict = sys.modules.get("tensordict")  # not imported: without it there can be no TensorDict
    if tensordict is None or not isinstance(batch, tensordict.TensorDictBase):
        return {name: _select(column, rows) for name, column in batch.items()}
    index = torch.tensor(rows, dtype=torch.long)
    columns = {
        # Other values of a TensorDict are stacks with one entry per row, or, without a shape, for the whole batch.
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
    """Outputs of the microbatches, one after another, in the order of the batch.

    ``data`` [rows, ...], or nested; ``batch_idx_list``: from :func:`rearrange_micro_batches`. Raises
    ``InputError`` if they disagree.
    """
    order = np.fromiter(chain.from_iterable(batch_idx_list), np.int64)
    if len(order) != data.size(0):
        raise InputError("outputs and indices disagree", expected=f"{len(order)} rows", found=data.size(0))
    return _select(data, np.argsort(order).tolist())


@dataclass
class _SharedBin:
    """Sequences that ``degree`` consecutive ranks run together."""

    degree: int
    ids: list[int]


class DynamicCPScheduler:
    """Scheduler of microbatches in which sequences run on 1, 2, 4, ... or all ranks, as verl calls Megatron-Core's.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that a rank holds in one microbatch.
        cp_size, dp_size: the scheduler divides work over ``dp_size · cp_size`` ranks.
        microbatch_group_size_per_vp_stage: the number of microbatches is a multiple of this.
        min_cp_size: least number of ranks per sequence.

    Raises ``InputError``, a ``ValueError``, for numbers that are not positive or do not divide.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        min_cp_size: int = 1,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = require_int(max_seqlen_per_dp_cp_rank, "max_seqlen_per_dp_cp_rank", least=1)
        self.ranks = require_int(cp_size, "cp_size", least=1) * require_int(dp_size, "dp_size", least=1)
        self.multiple = require_int(
            microbatch_group_size_per_vp_stage or 1, "microbatch_group_size_per_vp_stage", least=1
        )
        self.min_cp_size = require_int(min_cp_size, "min_cp_size", least=1)
        if self.ranks % self.min_cp_size:
            raise InputError("min_cp_size must divide the ranks", expected=f"a part of {self.ranks}", found=min_cp_size)

    def get_groups_and_subsamples(self, sample_id_seqlens: Iterable[tuple[Any, int]]) -> list[list[list[Any]]]:
        """Ids of the samples that each rank runs, by microbatch and rank.

        ``sample_id_seqlens``: pairs of an id and a length in tokens. Ranks that share samples are consecutive and begin
        at a multiple of their number; they list the same ids. No rank is without samples: where the plan leaves one
        idle, a bin is divided or shared by more ranks, at last by all of them. Raises ``InputError`` for an id that
        occurs twice, a sequence that all ranks together cannot hold, and too few sequences to keep every rank busy.
        """
        pairs = list(sample_id_seqlens)
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise InputError("an id occurs twice", found=next(name for name in names if names.count(name) > 1))
        lengths = as_lengths([length for _, length in pairs], "lengths")
        # Blocks of ``min_cp_size`` ranks are the ranks of the plan, which gives each bin 1, 2, 4, ... or all of them.
        num_blocks, capacity = self.ranks // self.min_cp_size, self.max_seqlen_per_dp_cp_rank * self.min_cp_size
        made = plan(
            lengths,
            ranks=num_blocks,
            capacity=capacity,
            context_parallel="auto",
            microbatch_multiple=self.multiple,
            pad_to_multiple_of=1 if self.min_cp_size == 1 else 2 * self.min_cp_size,
        )
        # Every microbatch must occupy every rank, and their number be a multiple.
        steps = [step for microbatch in range(made.num_microbatches) if (step := _occupied(made, microbatch))]
        steps += [[] for _ in range(-len(steps) % self.multiple)]
        _occupy_all(steps, made)
        # Largest degree first, so that each bin begins at a multiple of its degree.
        return [
            [
                [names[i] for i in part.ids]
                for part in sorted(step, key=lambda part: -part.degree)
                for _ in range(part.degree * self.min_cp_size)
            ]
            for step in steps
        ]


def _occupied(made: Plan, microbatch: int) -> list[_SharedBin]:
    found, rank = [], 0
    while rank < made.ranks:
        degree = made.degree(microbatch, rank)
        ids = made.members(microbatch, rank).tolist()
        if ids:
            found.append(_SharedBin(degree, ids))
        rank += degree
    return found


def _occupy_all(steps: list[list[_SharedBin]], made: Plan) -> None:
    """Occupy the idle ranks of every microbatch, most expensive bin first.

    A bin of several sequences is halved, and one half goes to the idle ranks; a bin of one sequence gets the next
    degree; where no bin fits the idle ranks, they get a sequence of another bin, of any microbatch, and where there is
    none, all ranks share the microbatch. Changes ``steps``.
    """
    costs, degrees = made.costs.tolist(), free_degrees(made.ranks)

    def cost_per_rank(part: _SharedBin) -> float:
        return sum(costs[i] for i in part.ids) / part.degree

    def wider(part: _SharedBin, idle: int) -> int | None:
        """The next degree of a bin of one sequence, if the idle ranks suffice for it."""
        following = next((degree for degree in degrees if degree > part.degree), None)
        if following is None or following - part.degree > idle or len(part.ids) > 1:
            return None
        return following if _fits(made, part.ids, following) else None

    for step in steps:
        while idle := made.ranks - sum(part.degree for part in step):
            fitting = [
                part for part in step if (len(part.ids) > 1 and part.degree <= idle) or wider(part, idle) is not None
            ]
            if fitting:
                expensive = max(fitting, key=cost_per_rank)
                following = wider(expensive, idle)
                if following is None:
                    step.append(_SharedBin(expensive.degree, _halve(expensive.ids, costs)))
                else:
                    expensive.degree = following
                continue
            spare = _taken(steps, idle, made, cost_per_rank)
            together = [i for part in step for i in part.ids]
            if spare is not None:
                step.append(spare)
            elif together and _fits(made, together, made.ranks):
                step[:] = [_SharedBin(made.ranks, together)]
            else:
                raise InputError(
                    "there are too few sequences to keep every rank busy",
                    expected="for each rank of each microbatch a sequence, or a share of one",
                    found=f"{made.num_sequences} sequences",
                )


def _fits(made: Plan, ids: list[int], degree: int) -> bool:
    return int(slots_of(made.lengths[ids], made.pad_to_multiple_of, degree).sum()) <= made.capacity * degree


def _halve(ids: list[int], costs: list[int]) -> list[int]:
    """Move sequences with about half of the work, at least one and not all, out of ``ids``; return them."""
    # Largest first, each to the lighter side; ``balance`` is the work kept less the work taken.
    kept, taken, balance = [], [], 0
    for i in sorted(ids, key=lambda i: -costs[i]):
        lighter = kept if balance < 0 or not kept else taken
        lighter.append(i)
        balance += costs[i] if lighter is kept else -costs[i]
    ids[:] = kept
    return taken


def _taken(
    steps: list[list[_SharedBin]], idle: int, made: Plan, cost_per_rank: Callable[[_SharedBin], float]
) -> _SharedBin | None:
    """Bin of one sequence that fits on at most ``idle`` ranks, from the most expensive bin that has several."""
    rich = [part for step in steps for part in step if len(part.ids) > 1]
    for part in sorted(rich, key=cost_per_rank, reverse=True):
        for i in sorted(part.ids, key=lambda i: -int(made.costs[i])):
            for degree in free_degrees(made.ranks):
                if degree <= idle and _fits(made, [i], degree):
                    part.ids.remove(i)
                    return _SharedBin(degree, [i])
    return None


def install() -> Replacements:
    """Replace verl's functions, wherever they were imported, and the scheduler that its dynamic context parallelism
    asks Megatron-Core for."""
    ours = (calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches, restore_dynamic_batch)
    table: dict[str, Any] = {f"{MODULE}.{function.__name__}": function for function in ours}
    table["verl.utils.dynamic_cp_scheduler.get_megatron_dynamic_cp_scheduler_cls"] = lambda: DynamicCPScheduler
    return replace(table)
