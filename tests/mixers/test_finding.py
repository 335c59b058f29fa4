"""What the search finds in models that are made for it: what meets, what counts, and how far padding reaches."""

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM, LlamaForCausalLM

from maintenance.tiny import tiny_model
from tests.support import verify_script
from tests.support.own_models import alone, bert_config, llama_config, packed_row
from ullage import pack_model
from ullage.core.layout import Layout
from ullage.mixers import SequencesMeet, packed_model
from ullage.mixers.axes import Axes, Spec, axes_of, restarted, run_by_lengths
from ullage.mixers.by_lengths import PackedRow
from ullage.mixers.packed_model import copy_by_configuration, ways_of

WIDTH = 16


def row_of(*lengths):
    return PackedRow(Layout(list(lengths)), None, torch.device("cpu"))


class Around(nn.Module):
    """A part and what is made of its output."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *arguments, **keywords):
        return self.change(self, self.inner(*arguments, **keywords))


def llama(change, place="mlp", layer=1):
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config()).eval()
    holder = model.model.layers[layer] if place == "mlp" else model.model
    setattr(holder, place, Around(getattr(holder, place), change))
    return model


def assert_exact(model, limit=1e-5):
    with torch.no_grad():
        expected = alone(model)
        with pack_model(model) as packed:
            found = model(**packed_row(labelled=False)).logits[0]
    assert (found - expected).abs().max() < limit * expected.abs().max()
    return packed.way


# Dims of values.


@pytest.mark.parametrize(("sizes", "others", "expected"), [
    ((2, 4, 11, 11), (3, 4, 13, 13), Axes(((2, "sources"), (3, "sources")), 0)),
    ((11, 2, 8), (13, 3, 8), Axes(((0, "sources"),), 1)),
    ((22, 8), (39, 8), Axes(((0, "sources"),), 0)),  # flat
    ((1, 11, 8), (1, 13, 8), Axes(((1, "sources"),))),  # the same for all sequences
    ((8, 1, 11), (12, 1, 13), Axes(((2, "sources"),), 0)),  # four heads of each sequence
    ((2, 7, 11), (3, 5, 13), Axes(((1, "targets"), (2, "sources")), 0)),
    ((2, 12), (3, 14), Axes(is_odd=True)),  # a token more
])  # fmt: skip
def test_dims_are_told_by_two_batches(sizes, others, expected):
    assert axes_of(sizes, others) == expected


def test_a_function_runs_by_lengths_whatever_the_order_of_its_dims():
    row, random = row_of(3, 5, 3), torch.randn(11, 1, 4)
    spec = Spec({".0.0": Axes(((0, "sources"),), 1)}, {"": Axes(((2, "sources"),), 0)})
    calls = []

    def summed(rows):  # [L, n, d] to [n, d, L]
        calls.append(tuple(rows.shape))
        return rows.cumsum(0).permute(1, 2, 0)

    found = run_by_lengths(summed, row, ((random,), {}), spec)
    assert sorted(calls) == [(3, 2, 4), (5, 1, 4)]
    expected = torch.cat([part.cumsum(0) for part in random.split([3, 5, 3])])
    assert torch.allclose(found, expected.permute(1, 2, 0))
    padded = run_by_lengths(summed, row, ((random,), {}), spec, kind="one")
    assert torch.allclose(padded, found)
    assert calls[-1] == (5, 3, 4)


def test_what_counts_starts_again_and_pairs_keep_their_corner():
    row = row_of(2, 4)
    assert restarted(torch.arange(6)[None], Axes(((1, "sources"),)), row).tolist() == [[0, 1, 0, 1, 2, 3]]
    distances = torch.arange(6) - torch.arange(6)[:, None]
    corner = restarted(distances, Axes(((0, "sources"), (1, "sources"))), row)
    assert torch.equal(corner, distances[:4, :4])


# What meets.


def test_a_part_that_sees_no_later_token_takes_padding_and_another_does_not():
    causal = assert_exact(llama(lambda _, rows: rows + rows.cumsum(1)))
    both = assert_exact(llama(lambda _, rows: rows + rows.flip(1)))
    assert causal.paths == both.paths == ("model.layers.1.mlp",)
    assert causal.found is not None
    assert both.found is not None
    assert (causal.found.padded, both.found.padded) == ({"model.layers.1.mlp"}, set())


def test_what_acts_from_a_late_token_on_or_in_training_alone_is_found():
    def late(module, rows):
        return torch.cat([rows[:, :40], rows[:, 40:] + rows[:, :1]], 1) if rows.shape[1] > 40 else rows

    def in_training(module, rows):
        return rows + 0.1 * rows.mean(1, keepdim=True) if module.training else rows

    for change in (late, in_training):
        assert ways_of(llama(change))[0].paths == ("model.layers.1.mlp",)


class Gated(nn.Module):
    """A part behind a gate that is closed as training begins."""

    def __init__(self, inner, size):
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(size))

    def forward(self, rows):
        rows = self.inner(rows)
        return rows + self.gate * rows.cumsum(1)


@pytest.mark.parametrize("size", [(), (WIDTH,)])
def test_what_a_gate_of_zeros_hides_is_found_and_the_gate_stays_closed(size):
    model = LlamaForCausalLM(llama_config()).eval()
    model.model.layers[0].mlp = gated = Gated(model.model.layers[0].mlp, size)
    (gated.gate * 2).sum().backward()  # a graph that holds it is not disturbed
    kept, held = (gated.gate * gated.gate).sum(), gated.gate.data_ptr()
    with pack_model(model) as packed:
        assert packed.way.paths == ("model.layers.0.mlp",)
    kept.backward()
    assert gated.gate.data_ptr() == held
    assert not gated.gate.any()


def test_a_leak_below_the_rounding_of_other_shapes_is_found():
    found = ways_of(llama(lambda _, rows: rows + 1e-6 * rows.mean(1, keepdim=True)))
    assert found[0].paths == ("model.layers.1.mlp",)


def test_nan_that_reaches_a_neighbour_is_found():
    """Masked scores times zero: of numbers nothing is left, of nan all."""
    way = assert_exact(tiny_model("squeezebert", "masked"))
    assert way.kind == "mixers"


def test_a_mean_over_all_rows_of_a_call_takes_one_sequence_at_a_time():
    way = assert_exact(llama(lambda _, rows: rows + rows.mean((0, 1)), "norm"))
    assert way.found is not None
    assert way.found.single == {"model.norm"}


def test_a_module_that_breaks_on_a_row_is_tried_by_lengths():
    def short(module, rows):
        assert rows.shape[1] <= 72, "longer than its table"
        return rows + rows.cumsum(1)

    assert assert_exact(llama(short)).paths == ("model.layers.1.mlp",)


def test_parts_of_other_functions_are_other_parts():
    assert assert_exact(llama(lambda _, rows: 2 * rows)).kind == "native"
    assert assert_exact(llama(lambda _, rows: rows.cumsum(1))).kind == "mixers"


# What counts.


def test_a_table_that_counts_is_called_on_the_longest_sequence():
    model = tiny_model("roformer", "masked")
    way = assert_exact(model)
    assert (way.found is not None and way.found.once == {"roformer.embed_positions"}) or way.found.once
    with torch.no_grad(), pack_model(model):  # more tokens than the table has
        assert model(**packed_row((60,) * 9, labelled=False)).logits.shape[1] == 540


def test_positions_of_the_caller_reach_a_model_that_is_given_positions():
    model = tiny_model("bloom", "causal")
    row = packed_row(labelled=False)
    with torch.no_grad(), pack_model(model):
        model(**row)
        row["position_ids"] = row["position_ids"] + 3
        with pytest.raises(Exception, match="counts positions by itself"):
            model(**row)


# What is asked of it.


def test_the_table_says_module_finding_and_what_runs():
    with pack_model(tiny_model("bart", "seq2seq")) as packed:
        lines = str(packed).splitlines()
    assert lines[0] == "PackedModel(BartForConditionalGeneration, native)"
    assert any("embed_positions" in line and "of the longest sequence" in line for line in lines)
    assert lines[-1].split() == ["attention", "tokens", "meet", "ullage's,", "by", "the", "lengths", "of", "the", "row"]


def test_a_search_is_made_once_for_models_of_one_kind(monkeypatch):
    monkeypatch.setattr(packed_model, "_KNOWN", {})
    searched = []
    monkeypatch.setattr(packed_model, "_searched", lambda model: searched.append(model) or ())
    for _ in range(2):
        ways_of(LlamaForCausalLM(llama_config()))
    ways_of(LlamaForCausalLM(llama_config(rms_norm_eps=1e-4)))
    assert len(searched) == 2


def test_what_no_way_keeps_apart_is_refused_but_where_it_is_believed():
    model = LlamaForCausalLM(llama_config()).eval()
    verify_script.put_meeting(model)
    with pytest.raises(SequencesMeet, match=r"model\.layers\.1\.mlp \(Meeting\)"):
        pack_model(model)
    with pack_model(model, verify=False) as packed:
        assert packed.way.kind == "whole"


def test_dropout_may_stand_between_two_parts():
    model = tiny_model("squeezebert", "masked").train()
    with pack_model(model):
        model(**packed_row()).loss.backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if "query" in name)


def test_a_copy_by_configuration_has_fewer_layers_of_the_same_kinds():
    model = LlamaForCausalLM(llama_config(num_hidden_layers=6))
    small = copy_by_configuration(model, layers=2)
    assert small is not None
    assert len(small.model.layers) == 2
    assert model.config.num_hidden_layers == 6
    model.model.layers[4].mlp = nn.Linear(WIDTH, WIDTH)
    assert copy_by_configuration(model, layers=2) is None


def test_both_attentions_of_a_masked_model_give_the_same_way():
    for implementation in ("eager", "sdpa"):
        model = BertForMaskedLM._from_config(bert_config(), attn_implementation=implementation).eval()
        assert ways_of(model)[0].kind == "native"
        assert_exact(model)
