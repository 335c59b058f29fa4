"""Next microbatch of a rank (``get_batch_on_this_rank_for_sequence_packing``): sliced over cp and shared over tp.

A call has two collective steps over the tensor-parallel ranks: they exchange whether each has what it needs, so that an
error on one is an error on all; then rank 0 sends the fields that this pipeline stage needs. Where every rank has its
own microbatches (``wrap_data_iterator(owners="every")``) nothing is sent. Slicing is :func:`ullage.exchange.shard`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ullage.core.batch import RaggedBatch
from ullage.core.errors import DistributedError, InputError
from ullage.core.layout import ORDERS, Layout
from ullage.engines.megatron.dynamic import group_of
from ullage.engines.megatron.params import RowFacts, core_takes_groups, packed_seq_params
from ullage.engines.megatron.samples import FIELDS
from ullage.engines.megatron.settings import order_of, tail_of
from ullage.engines.megatron.wrapping import Microbatch, home_device, padding_mask
from ullage.exchange.sharding import shard, shard_index
from ullage.exchange.sharing import share_or_fail
from ullage.ranks import Axis, Topology, gather_agreed, tried
from ullage.ranks.wire import settling

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup

#: Field that is sent beside those of the model, int64 [sequences, 8]: length, slot, the length that ``cu_seqlens_q``
#: shows, and, the same for all sequences, the longest slot, the context-parallel degree (0 if it is fixed), whether the
#: fields lie on a GPU, whether the last stage rolls its labels, and the number of the order in which the row is cut.
_DESCRIPTION = "length, slot, shown, longest, degree, on a GPU, rolled, order"

Batch = tuple[Tensor | None, Tensor | None, Tensor | None, None, Tensor | None, "PackedSeqParams", Tensor]


@dataclass(frozen=True)
class _Slice:
    """This rank's part of a row.

    Attributes:
        size: number of parts.
        rank: number of this part.
        group: process group of the parts where it varies by microbatch; None for the model's own.
    """

    size: int
    rank: int
    group: ProcessGroup | None = None


def get_batch_on_this_rank_for_sequence_packing(
    data_iterator: Any,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    dynamic_cp: Any = False,
    pg_collection: Any = None,
    config: Any = None,
) -> Batch:
    """(tokens, labels, loss_mask, None, position_ids, PackedSeqParams, padding_mask) of the next microbatch.

    Args:
        data_iterator: from ``wrap_data_iterator``, or any iterator of dicts with ``cu_seqlens``,
            ``cu_seqlens_padded``, ``max_seqlen`` and the fields; ``None`` on tensor-parallel ranks other than 0.
        vpp_size: number of virtual pipeline stages, ``None`` without.
        mtp_on_this_rank: whether a multi-token-prediction layer is on this stage, which then gets all four fields.
        vp_stage: the virtual stage of this call.
        dynamic_cp: whether the microbatch must have a ``local_cp_size``; one that is there is honoured anyway.
        pg_collection: process groups; Megatron's parallel state if ``None``.
        config: has the way in which rows are cut and filled up; without one, the microbatch has that of the config that
            ``wrap_data_iterator`` was given.

    Megatron-LM's dev branch has ``dynamic_cp`` in the fifth place, and its main branch ``pg_collection``: what is given
    there by position is read by its type.

    Tensors are [1, T], T being the padded tokens of the row divided by cp: tokens and positions on the first stage,
    labels and mask on the last, ``None`` elsewhere; ``padding_mask`` (bool, true on padding) everywhere.

    Collective over tp. Waits for the device if ``cu_seqlens`` lie on one. If a rank of tp lacks something, it raises
    ``InputError`` and the others ``DistributedError``.
    """
    if not (dynamic_cp is None or isinstance(dynamic_cp, (bool, np.bool_))):
        # The fifth argument of Megatron-LM's main branch.
        if pg_collection is not None:
            raise InputError("dynamic_cp must be a bool", found=type(dynamic_cp).__name__)
        dynamic_cp, pg_collection = False, dynamic_cp
    # The fields that this stage needs.
    topology = _inner_axes(pg_collection)
    first = topology.is_first_stage and vp_stage in (None, 0)
    last = topology.is_last_stage and (vp_stage is None or vpp_size is None or vp_stage == vpp_size - 1)
    wanted = [name for name in FIELDS if mtp_on_this_rank or (first if name in ("tokens", "position_ids") else last)]
    # All ranks of tp go on, or all raise.
    keys = [*wanted, "local_cp_size"] if dynamic_cp else wanted
    given, failure = tried(lambda: _take(data_iterator, keys, topology))
    everywhere = given is not None and given.everywhere
    _agree(topology.tp, failure, everywhere)
    # Rank 0 cuts the slice of this context-parallel rank and sends it.
    mine: RaggedBatch | None = None
    if given is not None:
        mine, failure = tried(lambda: _cut_slice(given, wanted, topology, pg_collection, config))
        if everywhere and failure is not None:
            raise failure
    # Where every rank has its own microbatches the axis is one of a single rank, on which nothing is sent.
    axis = Axis("tp") if everywhere else topology.tp
    [part] = share_or_fail(None if mine is None else [mine], failure, axis, 0, None)
    return _finish(part, wanted, topology, pg_collection, mtp_on_this_rank)


def _inner_axes(groups: Any) -> Topology:
    """The axes cp, tp and pp; a collection need not have any other group."""
    if groups is None:
        return Topology.from_megatron()
    cp, tp, pp = (Axis.from_group(getattr(groups, name, None), name) for name in ("cp", "tp", "pp"))
    return Topology(cp=cp, tp=tp, pp=pp)


def _take(data_iterator: Any, keys: list[str], topology: Topology) -> Microbatch | None:
    """The next microbatch, checked; ``None`` on a rank that has no iterator and needs none."""
    tp = topology.tp
    if data_iterator is None:
        if tp.rank == 0:
            raise InputError("tensor-parallel rank 0 must have a data iterator", found="None")
        return None
    try:
        given = next(data_iterator)
    except StopIteration:
        raise InputError("the data iterator has no further microbatch") from None
    if tp.rank and not (isinstance(given, Microbatch) and given.everywhere):
        raise InputError(
            "this rank should have no data iterator",
            where=f"tp rank {tp.rank} of {tp.size}",
            expected="None, except on tensor-parallel rank 0",
            hint='for iterators on every rank make them with wrap_data_iterator(..., owners="every")',
        )
    if not isinstance(given, Mapping):
        raise InputError("a microbatch must be a mapping", found=type(given).__name__)
    needed = [*keys, *(() if isinstance(given, Microbatch) else ("cu_seqlens", "cu_seqlens_padded"))]
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        raise InputError(
            "a microbatch lacks a key",
            where=f"{missing[0]!r} on pipeline stage {topology.pp.rank}",
            found=", ".join(name for name, value in given.items() if value is not None),
            hint="a middle stage gets fields if the config that wrap_data_iterator was given places a "
            "multi-token-prediction layer there",
        )
    return given if isinstance(given, Microbatch) else Microbatch(dict(given), _layout(given), clean=False)


def _layout(given: Mapping[str, Any]) -> Layout:
    """The layout that cumulated lengths describe; waits for the device if they lie on one."""
    lengths, slots = (
        np.diff(torch.as_tensor(given[name]).reshape(-1).cpu().numpy().astype(np.int64))
        for name in ("cu_seqlens", "cu_seqlens_padded")
    )
    if not len(lengths):
        raise InputError("a microbatch holds no sequence", expected="cu_seqlens of at least two numbers")
    return Layout.from_slots(lengths, slots)


def _agree(axis: Axis, failure: Exception | None, everywhere: bool) -> None:
    """Raise on every rank if one has no microbatch, or if only some of them have their own."""
    answers = gather_agreed(everywhere, axis, "taking its next microbatch", failure)
    if len(set(answers)) > 1:
        with settling(axis):
            raise DistributedError(
                "some tensor-parallel ranks have microbatches of their own and some have none", found=answers
            )


def _degree(given: Microbatch) -> int:
    """Context-parallel degree of the microbatch, 0 if it is fixed. Raises ``InputError`` for several."""
    local = given.get("local_cp_size")
    if local is None:
        return 0
    degrees = sorted(set(torch.as_tensor(local).reshape(-1).tolist()))
    if len(degrees) != 1:
        raise InputError(
            "a microbatch has one context-parallel degree",
            where="local_cp_size",
            found=degrees,
            hint="give sequences of another degree a microbatch of their own",
        )
    return int(degrees[0])


def _slice_of(degree: int, topology: Topology, pg_collection: Any) -> _Slice:
    """This rank's part, in the fixed context-parallel group or in the group of this microbatch's own degree."""
    if degree == 0:
        return _Slice(topology.cp.size, topology.cp.rank)
    whole = Topology.from_megatron(pg_collection, flatten_cp=True).dp
    # A model that takes the group of its microbatch takes its own for lack of one, so it gets one of this rank too.
    group = group_of(whole, degree) if degree != 1 or (core_takes_groups() and whole.group is not None) else None
    # Blocks of ranks are aligned to their size, so the remainder is the rank within the block.
    return _Slice(degree, whole.rank % degree, group)


def _cut_slice(
    given: Microbatch, wanted: list[str], topology: Topology, pg_collection: Any, config: Any
) -> RaggedBatch:
    """Slice of a microbatch for this rank and its tensor-parallel peers, with ``_DESCRIPTION`` per sequence."""
    degree = _degree(given)
    part = _slice_of(degree, topology, pg_collection)
    order = given.order if config is None else order_of(config)
    tail = given.tail if config is None else tail_of(config, topology.tp.size)
    layout, shown = given.layout, given.layout.lengths
    if tail is not None:
        layout, shown = tail.filled(layout, part.size, order)
    piece, on_gpu = cut_row(given, layout, wanted, part.size, part.rank, order, home_device(topology))
    # The receivers get a slice, and need the layout of the whole row and five facts about it. share() sends tensors
    # with one entry per token or per sequence, so the facts are repeated for each sequence.
    fixed = tail is not None and tail.max_sequences is not None
    longest = layout.size if fixed else int(layout.slots.max(initial=0))
    rows = np.empty((len(layout), 8), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = layout.lengths, layout.slots, shown
    rows[:, 3:] = (longest, degree, on_gpu, given.rolled, ORDERS.index(order))
    described = torch.from_numpy(rows)
    values = {name: piece[name] for name in wanted}
    return RaggedBatch({**values, _DESCRIPTION: described}, piece.layout, (_DESCRIPTION,))


def cut_row(
    given: Microbatch, layout: Layout, wanted: list[str], size: int, rank: int, order: str, home: torch.device | None
) -> tuple[RaggedBatch, bool]:
    """One slice of the wanted fields of a microbatch, and whether they lie on a GPU.

    ``layout``: of the row with its tail, which the fields do not have yet. Raises ``InputError`` for a field that does
    not fit the lengths of its microbatch.
    """
    # Padding from wrap_data_iterator holds zeros; that of other iterators may hold ids that a kernel cannot take.
    own = given.layout
    clean = None if given.clean or own.num_tokens == own.size else padding_mask(own)
    values: dict[str, Tensor] = {}
    for name in wanted:
        value = given[name].reshape(-1)
        value = value if home is None else value.to(home, non_blocking=True)
        if value.numel() != own.size or value.dtype != FIELDS[name]:
            raise InputError(
                "a field of a microbatch does not fit its cu_seqlens_padded",
                where=repr(name),
                expected=f"{str(FIELDS[name])[6:]} [{own.size}]",
                found=f"{str(value.dtype)[6:]} [{value.numel()}]",
            )
        value = value if clean is None else value.masked_fill(clean.to(value.device), 0)
        values[name] = F.pad(value, (0, layout.size - own.size))
    # Megatron's labels are the next tokens already.
    piece = shard(RaggedBatch(values, layout), size, rank, order, shift_labels=False).batch
    return piece, any(value.is_cuda for value in values.values())


def _finish(part: RaggedBatch, wanted: list[str], topology: Topology, pg_collection: Any, mtp: bool) -> Batch:
    rows = part[_DESCRIPTION].cpu().numpy()
    layout = Layout.from_slots(rows[:, 0], rows[:, 1])
    # There is a first row: an empty microbatch was filled up with a slot of padding.
    longest, degree, on_gpu, rolled, order = rows[0, 3:].tolist()
    cut = _slice_of(degree, topology, pg_collection)
    device = home_device(topology)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    fields = {name: part[name].to(device)[None] for name in wanted}
    mask = padding_mask(layout)
    if cut.size > 1:
        mask = mask[torch.from_numpy(shard_index(layout, cut.size, cut.rank, ORDERS[order]))]
    facts = RowFacts(rows[:, 2], longest, degree, mtp or bool(rolled), ORDERS[order])
    params = packed_seq_params(layout, facts, len(mask), device, cut.group)
    return (
        fields.get("tokens"),
        fields.get("labels"),
        fields.get("loss_mask"),
        None,
        fields.get("position_ids"),
        params,
        mask.to(device)[None],
    )
