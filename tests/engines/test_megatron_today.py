"""Megatron's newest calls in one process: argument orders, tails of rows, contiguous slices, parameters, packed rows."""

import dataclasses
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.test_megatron import config, packed_sample
from tests.support.megatron_samples import FIELDS, sample
from ullage import InputError, Layout, RaggedBatch, plan
from ullage.engines.megatron import (
    get_batch_on_this_rank_for_sequence_packing,
    packed_step,
    params,
    schedulers,
    wrap_data_iterator,
)
from ullage.engines.megatron.batch import cut_row
from ullage.engines.megatron.settings import Settings, Tail, tail_of
from ullage.engines.megatron.wrapping import Microbatch, microbatches_of
from ullage.exchange import materialize
from ullage.ranks import Topology

pytest.importorskip("megatron.core")


def row(lengths, slots=None, **more):
    """A microbatch of an iterator that is not ours; what lies in the padding is not zero."""
    layout = Layout.from_slots(lengths, slots or lengths)
    tokens = torch.arange(1, layout.size + 1)
    return {
        "tokens": tokens, "labels": tokens + 100, "loss_mask": torch.ones(layout.size),
        "position_ids": torch.from_numpy(layout.positions()), "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
        "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded),
        "max_seqlen": torch.tensor([max(slots or lengths)], dtype=torch.int32), **more,
    }  # fmt: skip


def test_main_and_dev_put_their_arguments_in_another_order():
    groups = SimpleNamespace(cp=None, tp=None, pp=None, dp=None, dp_cp=None)
    calls = {
        "main": ((None, False, None, groups), {}),
        "main, no groups": ((None, False, None, None), {}),
        "dev": ((None, False, None, False, groups, config()), {}),
        "dev, by name": ((), {"dynamic_cp": False, "pg_collection": groups, "config": config()}),
        "numpy's bool": ((None, False, None, np.bool_(False), groups), {}),
    }
    for name, (args, options) in calls.items():
        tokens, *_ = get_batch_on_this_rank_for_sequence_packing(iter([row([3, 5])]), *args, **options)
        assert tokens.tolist() == [list(range(1, 9))], name
    with pytest.raises(InputError, match="dynamic_cp must be a bool"):
        get_batch_on_this_rank_for_sequence_packing(iter([row([3])]), None, False, None, groups, groups)


def test_the_sums_are_floats_for_megatron_and_integers_in_the_step():
    lengths = [3, 5]
    found = wrap_data_iterator(iter([sample(n, n) for n in lengths]), config(), 2)
    assert [type(value) for value in found[1:]] == [int, float, float]
    assert found[2:] == (8.0, 34.0)
    step = packed_step(iter([sample(n, n) for n in lengths]), config(), 2)
    assert [type(value) for value in (step.num_tokens, step.sum_squared_lengths)] == [int, int]


def test_an_iterator_that_ends_gives_a_short_step_and_then_ends_the_loop():
    mine = iter([sample(3, 4), sample(5, 8), sample(2, 2)])
    assert [packed_step(mine, config(), 2).num_tokens for _ in range(2)] == [8, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            wrap_data_iterator(mine, config(), 2)
    with pytest.raises(StopIteration):
        wrap_data_iterator(iter([]), config(), 4)


def test_rows_that_are_packed_already_pass_through_one_microbatch_each():
    assert "empty" in schedulers()
    made = config(sequence_packing_scheduler="empty")
    items = [packed_sample([20, 1, 9], [24, 4, 12]), [sample(6, 8, 9000), sample(64 - 6, 64, 9500)], sample(1, 1, 7000)]
    step = packed_step(iter(items), made, 3)
    assert (step.num_microbatches, step.num_tokens) == (3, 20 + 1 + 9 + 64 + 1)
    assert step.sum_squared_lengths == 400 + 1 + 81 + 36 + 58 * 58 + 1
    rows = [next(step.data_iterator) for _ in range(3)]
    assert [one["cu_seqlens"].tolist() for one in rows] == [[0, 20, 21, 30], [0, 6, 64], [0, 1]]
    assert rows[0]["tokens"].tolist() == [*range(1, 21), 1001, *range(2001, 2010)]
    # Each pre-packed sample of a list is a row of its own.
    both = packed_step(iter([[packed_sample([4], [4]), packed_sample([5, 2], [8, 2])]]), made, 1)
    assert [len(next(both.data_iterator)["cu_seqlens"]) - 1 for _ in range(both.num_microbatches)] == [1, 2]
    with pytest.raises(InputError, match="over capacity"):
        packed_step(iter([packed_sample([40, 25], [40, 25])]), made, 1)


def test_virtual_stages_round_packed_rows_up_to_their_multiple():
    made = config(
        sequence_packing_scheduler="empty", virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=4
    )
    step = packed_step([iter([packed_sample([4, 2], [4, 4])]), None], made, 1)
    assert step.num_microbatches == 4
    assert [next(step.data_iterator[1])["cu_seqlens"].tolist() for _ in range(4)] == [[0, 4, 6], *[[0, 0]] * 3]


def test_an_alignment_pads_the_tail_of_the_row_and_not_each_sequence():
    """Eight sequences of 8 tokens, capacity 64, alignment 48: one row of 64, whose tail makes it 96."""
    samples = [sample(8, 8, 1 + 100 * i) for i in range(8)]
    step = packed_step(iter(samples), config(pad_packed_seq_alignment=48), 8)
    assert step.num_microbatches == 1
    tokens, *_, facts, padding = get_batch_on_this_rank_for_sequence_packing(step.data_iterator)
    assert tokens.shape == (1, 96)
    assert facts.cu_seqlens_q_padded.tolist() == [*range(0, 65, 8), 96]
    assert facts.max_seqlen_q == 32
    assert padding[0].tolist() == [False] * 64 + [True] * 32


@pytest.mark.parametrize("policy", [None, "append_dummy_seq", "extend_last"])
@pytest.mark.parametrize("cp", [1, 2])
def test_every_step_has_the_same_shapes_for_a_captured_graph(policy, cp):
    """Tokens and cumulated lengths, over steps of few and many sequences, an empty microbatch and a full row."""
    made = config(
        pad_packed_seq_alignment="max",
        thd_max_packed_sequences=4,
        thd_tail_padding_policy=policy,
        cuda_graph_impl="local",
    )
    chosen = Settings.of(made)
    topology = Topology.grid(0, dp=2, cp=cp)
    most = 0
    for lengths in ([1], [64 * cp] * 3, [3, 4, 5, 6, 7, 8, 9], [5, 64 * cp - 8], [1] * 11):
        plan = chosen.planner(topology)(np.array(lengths))
        whole = [{"tokens": torch.arange(1, n + 1)} for n in lengths]
        for rank in range(2):
            here = Topology.grid(rank * cp, dp=2, cp=cp)
            tail = tail_of(made, 1)
            for one in microbatches_of(materialize(plan, whole, rank), plan, chosen, here, tail):
                layout, shown = tail.filled(one.layout, cp, "zigzag")
                assert (len(layout), layout.size) == (4, 64 * cp)
                most = max(most, np.count_nonzero(layout.lengths))
                parts = [cut_row(one, layout, ["tokens"], cp, part, "zigzag", None)[0] for part in range(cp)]
                assert {tuple(part["tokens"].shape) for part in parts} == {(64,)}
                assert sum(int((part["tokens"] > 0).sum()) for part in parts) == layout.num_tokens
                dummy = layout.size - one.layout.size if policy != "extend_last" and layout.num_tokens else 0
                if layout.num_tokens:
                    assert shown.sum() == layout.num_tokens + dummy
    assert most == (4 if policy == "extend_last" else 3)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=6), st.integers(1, 3),
    st.sampled_from(["zigzag", "contiguous"]), st.booleans(), st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=60)
def test_a_tail_moves_no_sequence(drawn, parts, order, extend, alignment):
    unit = 2 * parts if parts > 1 else 1
    slots = [-(-(n + extra) // unit) * unit for n, extra in drawn]
    before = Layout.from_slots([n for n, _ in drawn], slots)
    after, shown = Tail(alignment, None, None, extend).filled(before, parts, order)
    part = after.size // parts
    assert part * parts == after.size
    assert part % alignment == 0
    assert 0 <= part - -(-before.size // parts) < 2 * alignment
    count = len(before)
    assert np.array_equal(after.starts[:count], before.starts)
    assert np.array_equal(after.lengths[:count], before.lengths)
    assert len(after) - count in (0, 1)
    assert not after.lengths[count:].any()
    assert np.all((shown == after.lengths) | (shown == after.slots))
    if extend:
        assert len(after) == count
        assert np.array_equal(shown, after.lengths)
    again, _ = Tail(alignment, None, None, extend).filled(after, parts, order)
    assert again == after


@pytest.mark.parametrize(("alignment", "graph", "cp", "total", "local", "policy"), [
    (4, "none", 1, 3, 4, "extend_last"),
    (4, "none", 2, 10, 8, "extend_last"),
    (8, "transformer_engine", 2, 10, 8, "extend_last"),
    (4, "none", 2, 10, 8, "append_dummy_seq"),
    (8, "transformer_engine", 2, 10, 8, "append_dummy_seq"),
])  # fmt: skip
def test_contiguous_rows_get_their_tail_before_they_are_cut(alignment, graph, cp, total, local, policy):
    made = config(
        cp_partition_mode="contiguous", pad_packed_seq_alignment=alignment, max_seqlen_per_dp_cp_rank=8,
        cuda_graph_impl=graph, thd_tail_padding_policy=policy,
    )  # fmt: skip
    given_row = row([total])
    layout, shown = tail_of(made, 1).filled(Layout([total]), cp, "contiguous")
    one = Microbatch(given_row, Layout([total]), clean=False)
    parts = [cut_row(one, layout, list(FIELDS), cp, rank, "contiguous", None)[0] for rank in range(cp)]
    assert torch.cat([part["tokens"] for part in parts]).tolist() == [*range(1, total + 1), *[0] * (local * cp - total)]
    assert {len(part["labels"]) for part in parts} == {local}
    ends = [0, total, local * cp] if policy == "append_dummy_seq" else [0, local * cp]
    assert layout.cu_seqlens_padded.tolist() == ends
    assert shown.tolist() == ([total, local * cp - total] if policy == "append_dummy_seq" else [total])
    assert int(layout.slots.max()) == (max(total, local * cp - total) if len(ends) == 3 else local * cp)


def test_a_longer_last_sequence_moves_the_zigzag_chunks():
    """Slots 4 and 8 at cp 2, padded to 8 each rank: the last slot is cut as one of 12."""
    layout, _ = Tail(4, None, None, True).filled(Layout([4, 8]), 2)
    part, _ = cut_row(Microbatch(row([4, 8]), Layout([4, 8])), layout, ["tokens"], 2, 0, "zigzag", None)
    assert part["tokens"].tolist() == [1, 4, 5, 6, 7, 0, 0, 0]


@pytest.mark.parametrize(("fields", "words"), [
    ({"pad_packed_seq_alignment": "most"}, "'max' or a positive integer"),
    ({"pad_packed_seq_alignment": 0}, "'max' or a positive integer"),
    ({"thd_tail_padding_policy": "drop"}, "thd_tail_padding_policy"),
    ({"thd_max_packed_sequences": 0}, "thd_max_packed_sequences"),
    ({"thd_max_packed_sequences": 1, "pad_packed_seq_alignment": 8}, "counts the dummy"),
    ({"cp_partition_mode": "spiral"}, "cp_partition_mode"),
])  # fmt: skip
def test_a_field_that_cannot_be_met_is_named(fields, words):
    with pytest.raises(InputError, match=words):
        wrap_data_iterator(iter([sample(4, 4)]), config(**fields), 1)


def test_the_limit_of_sequences_counts_the_dummy():
    for fields, most in (
        ({}, 3),
        ({"pad_packed_seq_alignment": 8}, 2),
        ({"pad_packed_seq_alignment": 8, "thd_tail_padding_policy": "extend_last"}, 3),
    ):
        step = packed_step(iter([sample(2, 2) for _ in range(12)]), config(thd_max_packed_sequences=3, **fields), 12)
        assert max(len(step.plan.members(k, 0)) for k in range(step.num_microbatches)) == most
    made = config(thd_max_packed_sequences=3, pad_packed_seq_alignment=16)
    with pytest.raises(InputError, match="more sequences than"):
        get_batch_on_this_rank_for_sequence_packing(iter([row([2, 2, 2])]), config=made)


def test_a_tail_can_be_divided_by_tensor_parallel_ranks_and_kernels():
    assert tail_of(config(pad_packed_seq_alignment=6, sequence_parallel=True), 4).filled(Layout([8]), 1)[0].size == 12
    assert tail_of(config(pad_packed_seq_alignment=6, fp8="e4m3"), 4).filled(Layout([8]), 2)[0].size == 96
    with pytest.raises(InputError, match="a multiple of 48"):
        tail_of(config(pad_packed_seq_alignment="max", fp8="e4m3", sequence_parallel=True), 3).filled(Layout([8]), 1)


def test_a_foreign_row_is_padded_by_the_config_of_the_call():
    made = config(pad_packed_seq_alignment="max", thd_max_packed_sequences=5)
    tokens, labels, mask, _, positions, facts, padding = get_batch_on_this_rank_for_sequence_packing(
        iter([row([3, 6], [4, 8])]), dynamic_cp=False, config=made
    )
    assert tokens[0].tolist() == [1, 2, 3, 0, *range(5, 11), *[0] * 54]
    assert int(mask.sum()) == 9
    assert not labels[padding].any()
    assert not positions[padding].any()
    assert facts.cu_seqlens_q.tolist() == [0, 3, 9, 61, 61, 61]
    assert facts.cu_seqlens_q_padded.tolist() == [0, 4, 12, 64, 64, 64]
    assert facts.max_seqlen_q == 64


@pytest.fixture
def newer_class(monkeypatch):
    """``PackedSeqParams`` with the fields of Megatron-LM's dev branch."""
    from megatron.core import packed_seq_params

    names = ("total_tokens", "seq_idx", "pad_between_seqs", "tokens_per_sample")
    fields = [(name, object, None) for name in names] + [("cp_partition_mode", str, "zigzag")]
    newer = dataclasses.make_dataclass("PackedSeqParams", fields, bases=(packed_seq_params.PackedSeqParams,))
    monkeypatch.setattr(packed_seq_params, "PackedSeqParams", newer)
    params._names.cache_clear()
    yield newer
    params._names.cache_clear()


def told(**options):
    """The parameters of a row of two sequences with a gap behind each."""
    *_, facts, _ = get_batch_on_this_rank_for_sequence_packing(iter([row([3, 6], [4, 8])]), **options)
    return facts


def test_newer_fields_of_the_parameters_are_filled(newer_class, monkeypatch):
    facts = told()
    assert facts.pad_between_seqs is True
    assert facts.cu_seqlens_q.tolist() == [0, 3, 9]
    assert facts.cu_seqlens_kv_padded.tolist() == [0, 4, 12]
    assert (facts.total_tokens, facts.tokens_per_sample, facts.cp_partition_mode) == (12, 12, "zigzag")
    assert facts.seq_idx.dtype == torch.int32
    assert facts.seq_idx.tolist() == [[0] * 4 + [1] * 8]
    # Transformer Engine is told of the gaps, too; a core that rolls labels by cu_seqlens_q gets places.
    monkeypatch.setattr(params, "_has_transformer_engine", lambda: True)
    assert told().cu_seqlens_q.tolist() == [0, 3, 9]
    facts = told(mtp_on_this_rank=True)
    assert facts.cu_seqlens_q.tolist() == [0, 4, 12]
    assert facts.pad_between_seqs is False
    assert told(config=config(cp_partition_mode="contiguous")).cp_partition_mode == "contiguous"


def test_the_older_class_gets_places_where_its_readers_want_them(monkeypatch):
    if "pad_between_seqs" in params._names():
        pytest.skip("this megatron-core has the newer class")
    assert told().cu_seqlens_q.tolist() == [0, 3, 9]
    monkeypatch.setattr(params, "_has_transformer_engine", lambda: True)
    assert told().cu_seqlens_q.tolist() == [0, 4, 12]


@pytest.mark.long
@pytest.mark.parametrize("scheduler", ["balanced", pytest.param("default_dynamic_cp", marks=pytest.mark.slow)])
def test_768_ranks_hold_every_token_of_a_step_once(scheduler):
    """dp 96 · cp 8 or a degree for each microbatch, without processes: plan, packing and slices of each coordinate."""
    lengths = np.random.default_rng(7).lognormal(3.2, 0.9, 1200).astype(np.int64).clip(1, 640)
    starts = np.cumsum([0, *lengths[:-1]])
    samples = [{"tokens": torch.arange(1 + a, 1 + a + n)} for a, n in zip(starts.tolist(), lengths.tolist())]
    sizes = {"dp": 96, "cp": 8} if scheduler == "balanced" else {"dp": 768}
    chosen = Settings.of(
        config(max_seqlen_per_dp_cp_rank=160, sequence_packing_scheduler=scheduler, attention_takes_cp_group=True)
    )
    # The same plan on every rank, whatever its coordinates.
    first, last = (chosen.planner(Topology.grid(rank, **sizes))(lengths) for rank in (0, 767))
    assert first.digest == last.digest
    seen, rows = np.zeros(lengths.sum() + 1, np.int64), {}
    for rank in range(768):
        place = Topology.grid(rank, **sizes)
        block = place.dp.rank - place.dp.rank % int(first.degrees[0, place.dp.rank])
        if block not in rows:
            rows[block] = materialize(first, samples, place.dp.rank)
        here = microbatches_of(rows[block], first, chosen, place, None)
        assert len(here) == first.num_microbatches
        for k, one in enumerate(here):
            degree, part = (8, place.cp.rank) if place.cp.size > 1 else (first.degree(k, rank), None)
            mine, _ = cut_row(
                one, one.layout, ["tokens"], degree, rank % degree if part is None else part, "zigzag", None
            )
            assert len(mine["tokens"]) <= 160
            np.add.at(seen, mine["tokens"].numpy(), 1)
    assert np.all(seen[1:] == 1)
    assert first.num_microbatches == 1
    assert chosen.dynamic == bool(np.any(first.degrees > 1))


@pytest.mark.skipif("min_context_parallel" not in inspect.signature(plan).parameters, reason="the planner has none")
def test_no_microbatch_has_less_than_the_least_degree():
    fields = {"sequence_packing_scheduler": "default_dynamic_cp", "attention_takes_cp_group": True}
    lengths = np.array([3, 60, 200, 9, 5, 31, 64, 100])
    for least in (1, 2, 4):
        made = Settings.of(config(**fields, min_dynamic_context_parallel_size=least))
        degrees = made.planner(Topology.grid(0, dp=8))(lengths).degrees
        assert degrees.min() >= least
    assert degrees.max() <= 8


def test_rows_of_a_batch_keep_fields_of_ones_own_beside_a_tail():
    samples = [{**sample(n, n), "advantage": torch.full((n,), float(n)), "reward": torch.tensor(1.0)} for n in (4, 9)]
    one = next(packed_step(iter(samples), config(pad_packed_seq_alignment="max"), 2).data_iterator)
    assert RaggedBatch({"a": one["advantage"]}, one.layout)["a"].sum() == 16 + 81
    tokens, *_ = get_batch_on_this_rank_for_sequence_packing(iter([one]))
    assert tokens.shape == (1, 64)
