"""``pack_training``: a Megatron script as it is, packed by one call, against one sequence at a time."""

import functools
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from tests.support.launch import ROOT, records
from tests.support.processes import run, values
from ullage import InputError
from ullage.engines.megatron.settings import flops_of_lengths
from ullage.engines.megatron.training import batch_values, read_script
from ullage.engines.replacing import Replacements

pytest.importorskip("megatron.core")

WORKER = ROOT / "tests" / "support" / "megatron_loop.py"


def get_batch(data_iterator, vp_stage=None):
    return ()


def release_16(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(data_iterator, 0)
    return model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed_seq_params), loss_mask


def release_18(data_iterator, model, return_schedule_plan=False):
    (
        attention_mask, cu_seqlens, cu_seqlens_padded, hybrid_cp_group, labels, local_cp_size, loss_mask, max_seqlen,
        position_ids, tokens,
    ) = get_batch(data_iterator, 0)  # fmt: skip
    params = (cu_seqlens[0], cu_seqlens_padded[0], int(max_seqlen.item()), local_cp_size, hybrid_cp_group)
    if return_schedule_plan:
        return model.build_schedule_plan(tokens, position_ids, attention_mask, labels=labels), loss_mask
    return model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=params), loss_mask


def hybrid_16(data_iterator, model):
    tokens, labels, _, attention_mask, position_ids, cu_seqlens, max_seqlen = get_batch(data_iterator)
    return model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=(cu_seqlens, max_seqlen))


def takes_packed_batches(data_iterator, model):
    batch = model.get_batch_on_this_rank_for_sequence_packing(data_iterator)
    return model(batch[0], packed_seq_params=batch[5])


def in_one(data_iterator, model):
    batch = get_batch(data_iterator)
    return model(batch, packed_seq_params=None)


def without_lengths(data_iterator, model):
    tokens, labels = get_batch(data_iterator)
    return model(tokens, labels=labels, packed_seq_params=None)


def unknown(data_iterator, model):
    tokens, images, packed_seq_params = get_batch(data_iterator)
    return model(tokens, images, packed_seq_params=packed_seq_params)


def drops_the_lengths(data_iterator, model):
    tokens, packed_seq_params = get_batch(data_iterator)
    return model(tokens), packed_seq_params


def test_what_a_forward_step_takes_is_read_from_it():
    assert read_script(release_16, None).returns == (
        *("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params"),
    )
    assert read_script(functools.partial(release_18, return_schedule_plan=False), None).returns[1] == "cu_seqlens"
    assert read_script(takes_packed_batches, None).returns is None
    assert read_script(in_one, ["tokens", "packed_seq_params"]).returns == ("tokens", "packed_seq_params")
    assert [read_script(step, None).plans_packed for step in (release_16, release_18)] == [True, False]


@pytest.mark.parametrize(
    ("forward_step", "words"),
    [
        (in_one, "does not show what it takes"),
        (without_lengths, "takes no lengths"),
        (unknown, "found images"),
        (drops_the_lengths, "does not pass packed_seq_params"),
        (print, "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_forward_step_that_cannot_be_packed_is_refused(forward_step, words):
    with pytest.raises(InputError, match=words):
        read_script(forward_step, None)


def test_a_batch_has_the_form_that_the_script_takes():
    real, places = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 12])
    params = SimpleNamespace(
        cu_seqlens_q=real, cu_seqlens_q_padded=places, max_seqlen_q=8, local_cp_size=2, cp_group="group"
    )
    batch = ("tokens", "labels", "loss_mask", None, "position_ids", params, "padding_mask")
    assert batch_values(batch, read_script(release_16, None).returns) == (*batch[:5], params)
    found = batch_values(batch, read_script(release_18, None).returns)
    assert [found[1].tolist(), found[2].tolist()] == [[[0, 3, 8]], [[0, 4, 12]]]
    assert (int(found[5].item()), int(found[7].item()), found[3]) == (2, 8, "group")
    hybrid = batch_values(batch, read_script(hybrid_16, None).returns)
    assert hybrid[2] is None  # it is not used
    assert (hybrid[5].tolist(), hybrid[6]) == ([0, 4, 12], 8)


def test_names_are_put_back_unless_they_changed_again():
    def original(): ...

    modules = {f"planted_{n}": types.ModuleType(f"planted_{n}") for n in range(3)}
    for module in modules.values():
        module.original = original
    modules["planted_2"].original = other = lambda: None
    put = Replacements()
    sys.modules.update(modules)
    try:
        put.put_everywhere(original, print)
    finally:
        for name in modules:
            del sys.modules[name]
    assert [module.original for module in modules.values()] == [print, print, other]
    modules["planted_1"].original = repr
    put.undo()
    assert [module.original for module in modules.values()] == [original, repr, other]


@pytest.mark.parametrize("lengths", [[1], [64, 64], [1, 2, 3, 500]])
def test_flops_of_unequal_lengths_by_a_formula_of_equal_ones(lengths):
    def one_sequence(length):
        return 3 * (1_000_003 * length + 517 * length**2)

    found = flops_of_lengths(one_sequence, 64, sum(lengths), sum(length**2 for length in lengths))
    assert found == pytest.approx(sum(one_sequence(length) for length in lengths), rel=1e-12)


def check(record, count=12):
    assert len(record["losses"]) == len(record["expected"]) == count
    assert record["error"] <= 2e-6, record
    assert record["losses"][3] < record["losses"][0]
    assert all(counts == record["counted"] for counts in record["counts"]), record
    assert record["evaluated"][0] == record["evaluated"][1]
    assert record["undone"]
    # Or the plan's number of microbatches would be the script's by chance.
    assert record["script's microbatches"] not in record["microbatches"]


@pytest.mark.distributed
def test_two_processes_and_what_every_rank_refuses():
    from tests.support import megatron_refusals

    ranks = values(run(megatron_refusals.everything, 2, loads=("torch", "megatron")))
    for found in ranks:
        check(found["packed"], count=5)
        said = found["refused"]
        assert "calculate_per_token_loss" in said["mean loss"]
        assert "--calculate-per-token-loss" in said["mean loss"]
        assert "megatron-core's own attention takes no packed rows" in said["own attention on one stage"]
        assert "max_seqlen_per_dp_cp_rank" in said["no capacity"]
        assert "collect_non_loss_data" in said["other data"]
        assert "packed already" in said["twice"]
        assert said["hybrid context parallel"].endswith("config.hybrid_context_parallel): found True")
        assert said["still sound"] is None
        assert found["one token and an empty rank"] == [1, 1, 1]
    # An evaluation set that has ended ends for all ranks together.
    ended = [found["refused"]["no samples left"].partition(":")[0] for found in ranks]
    assert ended in (["StopIteration"] * 2, ["InputError"] * 2)
    assert ranks[1]["refused"]["own attention on one stage"].startswith("InputError")
    assert ranks[0]["refused"]["own attention on one stage"].startswith("DistributedError")


@pytest.mark.slow
@pytest.mark.distributed
def test_four_processes():
    for record in records(4, WORKER, "tp2.cp2+sp", "pp2.vpp2.dp2"):
        check(record)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_hybrid_with_mamba_layers():
    """megatron-core's Mamba mixer hands the number of each token's sequence to its kernel, which a loop stands for."""
    pytest.importorskip("einops")
    from tests.support import megatron_hybrid

    [found] = values(run(megatron_hybrid.hybrid, 1, loads=("torch", "megatron")))
    assert found["losses"] == pytest.approx(found["expected"], rel=2e-6)
    assert found["kernel"] == [[True], [False]]
    assert "memory-efficient path" in found["said"]
