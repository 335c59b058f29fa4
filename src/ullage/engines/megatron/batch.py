"""``get_batch_on_this_rank_for_sequence_packing``: one microbatch, sliced for cp and given to the ranks of tp.

Per call two small steps: the tensor-parallel ranks tell each other whether they have what they need, so that an error
on one is an error on all; then rank 0 shares what this stage wants. Where every rank has its own microbatches
(``wrap_data_iterator(owners="every")``) nothing is shared. Slicing is :func:`ullage.exchange.shard` and stands alone.
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

#: What travels beside the fields: for each sequence its length, its slot, the degree (0 if fixed), whether the fields
#: lie on a GPU, and whether the last stage rolls its labels.
_ROWS = "length, slot, degree, on a GPU, rolled"

Batch = tuple[Tensor | None, Tensor | None, Tensor | None, None, Tensor | None, "PackedSeqParams", Tensor]


@dataclass(frozen=True)
class _Slice:
    """Which part of the row is this rank's."""

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

    Tensors are [1, T], T the row's slots divided by cp: tokens and positions on the first stage, labels and mask on
    the last, all four where there is a multi-token-prediction layer, ``None`` elsewhere; ``padding_mask`` (bool, true
    on padding) everywhere. ``data_iterator``: as ``wrap_data_iterator`` gave it, or any iterator of dicts with
    ``cu_seqlens``, ``cu_seqlens_padded``, ``max_seqlen`` and the fields; ``None`` on tensor-parallel ranks but 0.

    Collective over tp. Raises on every rank of tp if one has not what it needs: ``InputError`` there,
    ``DistributedError`` on the others.
    """
    topology = _inner_axes(pg_collection)
    first = topology.is_first_stage and vp_stage in (None, 0)
    last = topology.is_last_stage and (vp_stage is None or vpp_size is None or vp_stage == vpp_size - 1)
    wanted = [name for name in FIELDS if mtp_on_this_rank or (first if name in ("tokens", "position_ids") else last)]
    given, failure = tried(lambda: _take(data_iterator, wanted, topology))
    everywhere = given is not None and given.everywhere
    _agree(topology.tp, failure, everywhere)
    mine: RaggedBatch | None = None
    if given is not None:
        mine, failure = tried(lambda: _sliced(given, wanted, topology, pg_collection))
        if everywhere and failure is not None:
            raise failure
    axis = Axis("tp") if everywhere else topology.tp
    [part] = share_or_fail(None if mine is None else [mine], failure, axis, 0, None)
    return _finish(part, wanted, topology, pg_collection, mtp_on_this_rank)


def _inner_axes(groups: Any) -> Topology:
    """The axes within one data-parallel coordinate; a collection need not have more than these."""
    if groups is None:
        return Topology.from_megatron()
    return Topology(**{name: Axis.from_group(getattr(groups, name, None), name) for name in ("cp", "tp", "pp")})


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
    """This rank's part: of the fixed context-parallel group, or of the group of this microbatch's own degree."""
    if degree == 0:
        return _Slice(topology.cp.size, topology.cp.rank)
    whole = Topology.from_megatron(pg_collection, flatten_cp=True).dp
    group = degree_groups(whole).get(degree)
    if degree > 1 and group is None:
        raise InputError("there is no group of this local_cp_size", expected="a power of two", found=degree)
    return _Slice(degree, whole.rank % degree, group)


def _sliced(given: Microbatch, wanted: list[str], topology: Topology, pg_collection: Any) -> RaggedBatch:
    """What this rank and its tensor-parallel peers run."""
    layout, local = given.layout, given.get("local_cp_size")
    degree = 0 if local is None else int(local)
    part = _slice_of(degree, topology, pg_collection)
    home = home_device(topology)
    # What wrap_data_iterator made is clean; anyone else's padding may hold what a kernel cannot take.
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
    piece = shard(RaggedBatch(values, layout), part.size, part.rank, shift_labels=False).batch
    on_gpu = any(value.is_cuda for value in values.values())
    rows = np.empty((len(layout), 5), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2:] = layout.lengths, layout.slots, (degree, on_gpu, given.rolled)
    described = torch.from_numpy(rows)
    values = {name: piece[name] for name in wanted}
    return RaggedBatch({**values, _ROWS: described}, piece.layout, (_ROWS,))


def _finish(part: RaggedBatch, wanted: list[str], topology: Topology, pg_collection: Any, mtp: bool) -> Batch:
    rows = part[_ROWS].cpu().numpy()
    layout = Layout.from_slots(rows[:, 0], rows[:, 1])
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
    """Lengths and places, each under its own name.

    Two consumers take ``cu_seqlens_q`` for places in the row: megatron-core's roll of multi-token-prediction labels,
    and Transformer Engine under context parallelism. For them it holds the places too, which under a causal mask is
    exact: padding stands behind every token of its sequence.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = torch.from_numpy(layout.cu_seqlens_padded).to(device)
    places = rolled or layout.num_tokens == layout.size or _has_transformer_engine()
    real = padded if places else torch.from_numpy(layout.cu_seqlens).to(device)
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
