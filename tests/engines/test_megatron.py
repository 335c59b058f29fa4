"""The parts of the Megatron engine that need one process: samples, settings, slots, FLOPs."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import megatron_samples
from tests.support.megatron_samples import pack, sample
from ullage import InputError, RaggedBatch
from ullage.engines.megatron import (
    get_batch_on_this_rank_for_sequence_packing,
    transformer_terms,
    wrap_data_iterator,
)
from ullage.engines.megatron.samples import read_rows
from ullage.engines.megatron.scheduling import find_owners
from ullage.engines.megatron.settings import Settings
from ullage.engines.megatron.wrapping import _fill_up
from ullage.ranks import Topology

pytest.importorskip("megatron.core")


config = partial(megatron_samples.config, max_seqlen_per_dp_cp_rank=64)


def read_items(items):
    return [sequence for row in read_rows(items) for sequence in row]


def packed_sample(lengths, slots, first=1):
    return pack([sample(n, slot, first + 1000 * i) for i, (n, slot) in enumerate(zip(lengths, slots))])


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=6)


@given(LENGTHS)
@settings(max_examples=30)
def test_pre_packed_samples_hold_the_same_sequences(drawn):
    lengths, slots = [n for n, _ in drawn], [n + extra for n, extra in drawn]
    one_each = read_items([sample(n, slot, 1 + 1000 * i) for i, (n, slot) in enumerate(zip(lengths, slots))])
    several = read_items([packed_sample(lengths, slots)])
    as_lists = read_items([[sample(n, slot, 1 + 1000 * i) for i, (n, slot) in enumerate(zip(lengths, slots))]])
    for found in (several, as_lists):
        assert len(found) == len(one_each)
        for mine, other in zip(found, one_each):
            assert all(torch.equal(mine[name], other[name]) for name in ("tokens", "labels", "loss_mask"))
    assert [len(one["tokens"]) for one in one_each] == lengths


@given(LENGTHS, st.integers(20, 80), st.sampled_from(["balanced", "dp_balanced"]))
@settings(max_examples=30)
def test_every_real_token_arrives_once_and_is_counted(drawn, capacity, scheduler):
    lengths = [n for n, _ in drawn]
    samples = [sample(n, n + extra, 1 + 1000 * i) for i, (n, extra) in enumerate(drawn)]
    made = config(max_seqlen_per_dp_cp_rank=capacity, sequence_packing_scheduler=scheduler)
    iterator, count, tokens, squares = wrap_data_iterator(iter(samples), made, len(samples))
    seen = []
    for _ in range(count):
        row, *_, padding = get_batch_on_this_rank_for_sequence_packing(iterator)
        assert row is not None
        assert row.shape[1] <= capacity
        seen += row[~padding].tolist()
    assert sorted(seen) == sorted(k for s, n in zip(samples, lengths) for k in s["tokens"][:n].tolist())
    assert (tokens, squares) == (sum(lengths), sum(n * n for n in lengths))


def test_lists_arrays_and_a_collate_dimension_are_samples_too():
    plain = sample(5, 8)
    as_lists = {name: value.tolist() for name, value in plain.items()}
    as_arrays = {name: value.numpy() for name, value in plain.items()}
    collated = {name: value[None] for name, value in plain.items()}
    for other in (as_lists, as_arrays, collated, {**plain, "labels": plain["labels"].int()}):
        [mine], [expected] = read_items([other]), read_items([plain])
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(mine[name], expected[name])
            assert mine[name].dtype == expected[name].dtype


@pytest.mark.parametrize(("change", "words"), [
    ({"cu_seqlens": torch.tensor([0, 5])}, "says twice"),
    ({"original_seq_len": 0}, "expected 1 to 8, found 0"),
    ({"original_seq_len": 9}, "expected 1 to 8, found 9"),
    ({"labels": torch.arange(7)}, "disagree in length"),
    ({"reward": torch.ones(3)}, "neither one entry per token nor one per sequence"),
    ({"note": "text"}, "'note'"),
])  # fmt: skip
def test_a_sample_that_contradicts_itself_is_named(change, words):
    with pytest.raises(InputError, match=words) as caught:
        read_items([sample(4, 4), {**sample(5, 8), **change}])
    assert "sample 1" in str(caught.value)


@pytest.mark.parametrize("ends", [[0, 5, 3], [1, 5], [0, 99], [0, -1]])
def test_cu_seqlens_that_bound_nothing_are_refused(ends):
    bad = {**packed_sample([4, 4], [4, 4]), "cu_seqlens": torch.tensor(ends), "cu_seqlens_padded": None}
    with pytest.raises(InputError, match="do not bound"):
        read_items([bad])


@pytest.mark.parametrize(("fields", "tp", "cp", "expected"), [
    ({}, 1, 1, 1),
    ({}, 2, 1, 1),
    ({"sequence_parallel": True}, 2, 1, 2),
    ({}, 1, 2, 4),
    ({"sequence_parallel": True}, 4, 2, 16),
    ({"fp8": "e4m3"}, 1, 1, 16),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 1, 2, 64),
    ({"fp8": "e4m3", "fp8_recipe": "blockwise", "sequence_parallel": True}, 2, 1, 128),
    ({"fp4": "e2m1"}, 1, 2, 256),
    ({"pad_packed_seq_alignment": 64}, 1, 2, 4),  # of the row, and not of each sequence
])  # fmt: skip
def test_slots_are_multiples_of_what_all_ranks_can_share(fields, tp, cp, expected):
    assert Settings.of(config(**fields)).pad_to_multiple_of(Topology.grid(0, tp=tp, cp=cp)) == expected


@pytest.mark.parametrize("lengths", [[], [3], [5, 8, 1]])
@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_a_row_is_filled_up_with_padding_alone(lengths, multiple):
    samples = [{"tokens": torch.arange(n), "reward": 0.5} for n in lengths]
    empty = RaggedBatch.from_samples([{"tokens": torch.arange(1), "reward": 0.5}])
    batch = (
        RaggedBatch.from_samples(samples)
        if lengths
        else RaggedBatch({k: empty[k][:0] for k in empty}, empty.layout.__class__([]), ("reward",))
    )
    full = _fill_up(batch, multiple)
    assert full.layout.size % multiple == 0
    assert 0 <= full.layout.size - batch.layout.size < multiple + (not lengths)
    assert full.layout.num_tokens == sum(lengths)
    assert full["tokens"][: batch.layout.size].tolist() == batch["tokens"].tolist()


def test_the_rows_of_a_degree_can_be_cut_for_sequence_parallelism():
    made = Settings.of(
        config(sequence_parallel=True, sequence_packing_scheduler="default_dynamic_cp", attention_takes_cp_group=True)
    )
    topology = Topology.grid(0, dp=8, tp=4)
    for degree in (1, 2, 4, 8):
        assert made.row_multiple(topology, degree) % (degree * 4) == 0


def test_the_scheduler_may_be_an_enum_and_a_registered_strategy():
    scheduler = SimpleNamespace(value="dp_balanced")
    assert Settings.of(config(sequence_packing_scheduler=scheduler)).scheduler == "dp_balanced"
    assert Settings.of(config(sequence_packing_scheduler="DP_BALANCED")).scheduler == "dp_balanced"
    assert Settings.of(config(sequence_packing_scheduler="empty")).packed_already
    with pytest.raises(InputError, match="balanced or default or default_dynamic_cp or dp_balanced"):
        Settings.of(config(sequence_packing_scheduler="preassigned"))


def test_flops_are_those_of_the_same_hugging_face_model():
    from ullage.planning.cost import _forward_terms

    megatron = SimpleNamespace(
        hidden_size=64, num_layers=3, num_attention_heads=8, num_query_groups=2, kv_channels=8, ffn_hidden_size=160,
        gated_linear_unit=True,
    )  # fmt: skip
    llama = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 160, "hidden_act": "silu", "vocab_size": 1000,
    }  # fmt: skip
    linear, quadratic = _forward_terms(llama)
    assert transformer_terms(megatron, 1000) == (linear, quadratic // 2)  # the causal half of the pairs
    assert transformer_terms(SimpleNamespace(**vars(megatron), num_moe_experts=8)) is None


def test_stages_of_prediction_layers_are_read_from_megatron_s_layout():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout("Et|t|m|tL", 4)
    made = config(mtp_num_layers=1, pipeline_model_parallel_layout=layout)
    assert Settings.of(made).mtp_stages == {2}
    assert Settings.of(config(mtp_num_layers=1)).mtp_stages == {-1}
    assert Settings.of(config(pipeline_model_parallel_layout=layout)).mtp_stages == set()


def test_a_collection_without_a_group_is_named():
    with pytest.raises(InputError, match="lacks one"):
        Topology.from_megatron(SimpleNamespace(tp=None, pp=None, dp=None))
    assert Topology.from_megatron().world_size == 1


def test_layers_that_carry_a_state_from_one_sequence_into_the_next_are_refused():
    class MambaMixer(torch.nn.Module):
        def forward(self, hidden, packed_seq_params=None):
            return hidden

    MambaMixer.__module__ = "megatron.core.ssm.mamba_mixer"
    mixer, asked = MambaMixer(), SimpleNamespace(calculate_per_token_loss=True)
    assert find_owners([torch.nn.Sequential(mixer)], asked, True, None) == "ends"
    mixer.use_mem_eff_path = False
    with pytest.raises(InputError, match=r"memory-efficient path .*\(0\)"):
        find_owners([torch.nn.Sequential(mixer)], asked, True, None)
    MambaMixer.forward = lambda self, hidden: hidden
    with pytest.raises(InputError, match="carry their state from one sequence of a row into the next"):
        find_owners([torch.nn.Sequential(mixer)], asked, True, None)
