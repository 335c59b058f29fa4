"""Next microbatch of a rank (``get_batch_on_this_rank_for_sequence_packing``): sliced over cp and shared over tp.

A call has two collective steps over the tensor-parallel ranks: they exchange whether each has what it needs, so that an
error on one is an error on all; then rank 0 sends the fields that this pipeline stage needs. Where every rank has its
own microbatches (``wrap_data_iterator(owners="every")``) nothing is sent. Slicing is :func:`ullage.exchange.shard`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.engines.megatron.dynamic import degree_groups
from ullage.engines.megatron.samples import FIELDS
from ullage.engines.megatron.wrapping import Microbatch, home_device, padding_mask
from ullage.errors import DistributedError, InputError
from ullage.exchange.sharding import shard, shard_index
from ullage.exchange.sharing import share_or_fail
from ullage.layout import Layout
from ullage.ranks import Axis, Topology, gather_agreed, tried
from ullage.ranks.wire import settling

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup

#: Field that is sent beside those of the model, int64 [sequences, 5]: length, slot, context-parallel degree (0 if it is
#: fixed), whether the fields lie on a GPU, and whether the last stage rolls its labels.
_DESCRIPTION = "length, slot, degree, on a GPU, rolled"

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
    pg_collection: Any = None,
) -> Batch:
    """(tokens, labels, loss_mask, None, position_ids, PackedSeqParams, padding_mask) of the next microbatch.

    Args:
        data_iterator: from ``wrap_data_iterator``, or any iterator of dicts with ``cu_seqlens``,
            ``cu_seqlens_padded``, ``max_seqlen`` and the fields; ``None`` on tensor-parallel ranks other than 0.
        vpp_size: number of virtual pipeline stages, ``None`` without.
        mtp_on_this_rank: whether a multi-token-prediction layer is on this stage, which then gets all four fields.
        vp_stage: the virtual stage of this call.
        pg_collection: process groups; Megatron's parallel state if ``None``.

    Tensors are [1, T], T being the padded tokens of the row divided by cp: tokens and positions on the first stage,
    labels and mask on the last, ``None`` elsewhere; ``padding_mask`` (bool, true on padding) everywhere.

    Collective over tp. Waits for the device if ``cu_seqlens`` lie on one. If a rank of tp lacks something, it raises
    ``InputError`` and the others ``DistributedError``.
    """
    # The fields that this stage needs.
    topology = _inner_axes(pg_collection)
    first = topology.is_first_stage and vp_stage in (None, 0)
    last = topology.is_last_stage and (vp_stage is None or vpp_size is None or vp_stage == vpp_size - 1)
    wanted = [name for name in FIELDS if mtp_on_this_rank or (first if name in ("tokens", "position_ids") else last)]
    # All ranks of tp go on, or all raise.
    given, failure = tried(lambda: _take(data_iterator, wanted, topology))
    everywhere = given is not None and given.everywhere
    _agree(topology.tp, failure, everywhere)
    # Rank 0 cuts the slice of this context-parallel rank and sends it.
    mine: RaggedBatch | None = None
    if given is not None:
        mine, failure = tried(lambda: _sliced(given, wanted, topology, pg_collection))
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


def _take(data_iterator: Any, wanted: list[str], topology: Topology) -> Microbatch | None:
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
    needed = [*wanted, *(() if isinstance(given, Microbatch) else ("cu_seqlens", "cu_seqlens_padded"))]
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


def _slice_of(degree: int, topology: Topology, pg_collection: Any) -> _Slice:
    """This rank's part, in the fixed context-parallel group or in the group of this microbatch's own degree."""
    if degree == 0:
        return _Slice(topology.cp.size, topology.cp.rank)
    whole = Topology.from_megatron(pg_collection, flatten_cp=True).dp
    group = degree_groups(whole).get(degree)
    if degree > 1 and group is None:
        raise InputError("there is no group of this local_cp_size", expected="a power of two", found=degree)
    # Blocks of ranks are aligned to their size, so the remainder is the rank within the block.
    return _Slice(degree, whole.rank % degree, group)


def _sliced(given: Microbatch, wanted: list[str], topology: Topology, pg_collection: Any) -> RaggedBatch:
    """Slice of a microbatch for this rank and its tensor-parallel peers, with ``_DESCRIPTION`` per sequence."""
    layout, local = given.layout, given.get("local_cp_size")
    degree = 0 if local is None else int(local)
    part = _slice_of(degree, topology, pg_collection)
    home = home_device(topology)
    # Padding from wrap_data_iterator holds zeros; that of other iterators may hold ids that a kernel cannot take.
    clean = None if given.clean or layout.num_tokens == layout.size else padding_mask(layout)
    values: dict[str, Tensor] = {}
    for name in wanted:
        value = given[name].reshape(-1)
        value = value if home is None else value.to(home, non_blocking=True)
        if value.numel() != layout.size or value.dtype != FIELDS[name]:
            raise InputError(
                "a field of a microbatch does not fit its cu_seqlens_padded",
                where=repr(name),
                expected=f"{str(FIELDS[name])[6:]} [{layout.size}]",
                found=f"{str(value.dtype)[6:]} [{value.numel()}]",
            )
        values[name] = value if clean is None else value.masked_fill(clean.to(value.device), 0)
    # Megatron's labels are the next tokens already.
    piece = shard(RaggedBatch(values, layout), part.size, part.rank, shift_labels=False).batch
    on_gpu = any(value.is_cuda for value in values.values())
    # The receivers get a slice, and need the layout of the whole row and three facts about it. share() sends tensors
    # with one entry per token or per sequence, so the facts are repeated for each sequence.
    rows = np.empty((len(layout), 5), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2:] = layout.lengths, layout.slots, (degree, on_gpu, given.rolled)
    described = torch.from_numpy(rows)
    values = {name: piece[name] for name in wanted}
    return RaggedBatch({**values, _DESCRIPTION: described}, piece.layout, (_DESCRIPTION,))


def _finish(part: RaggedBatch, wanted: list[str], topology: Topology, pg_collection: Any, mtp: bool) -> Batch:
    rows = part[_DESCRIPTION].cpu().numpy()
    layout = Layout.from_slots(rows[:, 0], rows[:, 1])
    # There is a first row: an empty microbatch was filled up with a slot of padding.
    cut = _slice_of(int(rows[0, 2]), topology, pg_collection)
    device = home_device(topology)
    if device is None:
        on_gpu = bool(rows[0, 3])
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    fields = {name: part[name].to(device)[None] for name in wanted}
    mask = padding_mask(layout)
    if cut.size > 1:
        mask = mask[torch.from_numpy(shard_index(layout, cut.size, cut.rank))]
    params = _packed_seq_params(layout, device, int(rows[0, 2]), cut.group, mtp or bool(rows[0, 4]))
    return (
        fields.get("tokens"),
        fields.get("labels"),
        fields.get("loss_mask"),
        None,
        fields.get("position_ids"),
        params,
        mask.to(device)[None],
    )


@cache
def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _packed_seq_params(
    layout: Layout, device: torch.device, degree: int, group: ProcessGroup | None, rolled: bool
) -> PackedSeqParams:
    """``PackedSeqParams`` with real lengths in ``cu_seqlens_q`` and padded ones in ``cu_seqlens_q_padded``.

    Args:
        layout: of the whole row.
        device: where the cumulated lengths are put.
        degree: context-parallel degree of this microbatch; 0 if it is fixed.
        group: process group of that degree.
        rolled: whether a multi-token-prediction layer rolls the labels.

    Two readers use ``cu_seqlens_q`` as positions in the row: megatron-core's roll of multi-token-prediction labels, and
    Transformer Engine under context parallelism. For them it holds the padded lengths as well, which is exact under a
    causal mask, because padding follows every token of its sequence.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = torch.from_numpy(layout.cu_seqlens_padded).to(device)
    places = rolled or layout.num_tokens == layout.size or _has_transformer_engine()
    real = padded if places else torch.from_numpy(layout.cu_seqlens).to(device)
    # Of the slots, since kernels read it beside padded lengths.
    longest = int(layout.slots.max(initial=0))
    own: dict[str, Any] = {"local_cp_size": degree, "cp_group": group} if degree else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **own,
    )
