"""verl's balancing functions, over ullage's plan.

In verl every data-parallel rank holds its own rows, and balancing divides them into partitions and microbatches.
Partitions are never less even than by verl's Karmarkar-Karp, and take less time. A microbatch never exceeds its tokens,
unless one group of rows does. A failure on one rank raises on all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from ullage.planning.request import refuse_oversize
from ullage.ranks import Axis, agree, tried
from ullage.ranks.wire import gather_int64


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """:func:`ullage.planning.lists.partitions`: indices of parts whose sums are as equal as can be found.

    >>> get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    [[1, 3, 4], [0, 2]]
    """
    k_partitions = require_int(k_partitions, "k_partitions", least=1)
    return partitions(seqlen_list, k_partitions, equal_size=equal_size, name="seqlen_list")


def rearrange_micro_batches(
    batch: Any, max_token_len: int, dp_group: ProcessGroup | None = None, num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True, min_num_micro_batch: int | None = None, use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1, *, oversize: str = "alone",
) -> tuple[list[Any], list[list[int]]]:  # fmt: skip
    """Microbatches of equal work with at most ``max_token_len`` tokens, and the row indices of each.

    Arguments are verl's; ``batch``: a ``TensorDict`` or a mapping of columns, ``input_ids`` nested, or padded beside an
    ``attention_mask``. ``oversize``: what a group of several rows above ``max_token_len`` is: ``"alone"`` in a
    microbatch, with a warning, or an ``"error"``, the rule of verl since 25 August 2026.

    Collective over ``dp_group``. Waits for the device once. Raises ``InputError`` for a row above ``max_token_len``,
    and for fewer rows than microbatches: on every rank of the group.
    """
    size = max(1, int(force_group_size))
    axis = Axis.from_group(dp_group, "dp") if dp_group is not None and same_micro_num_in_dp else None
    # How many microbatches this rank needs; if that fails, the other ranks learn it below.
    read, failure = tried(lambda: _read_rows(batch, max_token_len, size, oversize))
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
            "there are fewer rows than microbatches", where="on some rank" if axis is not None else None,
            expected=f"at least {count * size}", found=available * size,
            hint="raise max_token_len, or lower min_num_micro_batch",
        )  # fmt: skip
    assert read is not None
    filling, work, _ = read
    parts = filling.into(count)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda ids: (int(work[ids].sum()), ids[0]), reverse=True)
        # From heaviest first to light, heavy, light: the even places backwards, then the odd ones.
        parts = parts[::2][::-1] + parts[1::2]
    return [select_rows(batch, part) for part in parts], parts


def _read_rows(batch: Any, max_token_len: int, size: int, oversize: str) -> tuple[Filling, Int64, int]:
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
    if isinstance(column, (Tensor, np.ndarray)):
        return column[list(rows)] if column.ndim else column
    return [column[i] for i in rows] if isinstance(column, list) else column


#: What stands in the place of verl's.
REPLACED = {
    "verl.utils.seqlen_balancing.get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
    "verl.utils.seqlen_balancing.rearrange_micro_batches": rearrange_micro_batches,
}


def install() -> Replacements:
    """Replace verl's functions, wherever they were imported."""
    return replace(REPLACED)
