"""A checkpoint of 768 ranks that DeepSpeed's converter cannot convert, and the failures that live next to it.

Symptom: ``RuntimeError: narrow(): length must be non-negative``. Cause: ``BF16_Optimizer`` books the whole padding of a
group, 1,024 elements, on the last rank, whose shard holds 348; the converter subtracts one from the other. The padding
really fills the last two shards and part of a third. Strategy: padding is what no fragment covers, so nothing is
subtracted; the offsets follow from ``param_shapes``, never from what the files book.
"""

import numpy as np
import pytest
import torch

from tests.support import real_zero
from tests.support.checkpoints import assert_is_the_truth, convert_with_deepspeed
from tests.support.real_zero import Recipe
from ullage import checkpoint

pytestmark = pytest.mark.regression


def test_a_padding_larger_than_the_last_shard(tmp_path):
    """26 elements on 12 ranks: shards of 4, padding of 22 over the last six, all of it booked on rank 11.

    ``make campaign NAME=zero_768`` does it on 768, at every stage.
    """
    recipe = Recipe(stage=1, dp=12, dtype="bf16_optimizer", groups=[{"norm.weight": (13,), "norm.bias": (13,)}])
    truth = real_zero.write(tmp_path / "run", recipe)
    inventory = checkpoint.read(truth.folder)
    (group,) = inventory.groups
    assert group.shard_size == 4
    assert group.booked == (*[0] * 11, 22)
    assert group.padding_of().tolist() == [*[0] * 6, 2, *[4] * 5]
    status, output = convert_with_deepspeed(truth.tag_folder, tmp_path / "theirs", "--inject_missing_state")
    assert status != 0
    assert "must be non-negative" in output
    checkpoint.convert(truth.folder, tmp_path / "universal")
    assert_is_the_truth(tmp_path / "universal", truth)


def test_round_robin_gradients_are_said_and_the_layout_is_followed(tmp_path):
    """DeepSpeed's converter exits 0 with wrong tensors here, for ``param_slice_mappings`` is in the wrong order."""
    groups = [{f"layers.{i}.weight": (5 + i, 7) for i in range(8)}]
    truth = real_zero.write(tmp_path / "run", Recipe(stage=2, dp=3, dtype="bf16", round_robin=True, groups=groups))
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert [n for n in inventory.notes if n.startswith("round_robin")]
    checkpoint.convert(inventory, tmp_path / "universal")
    assert_is_the_truth(tmp_path / "universal", truth)
    status, _ = convert_with_deepspeed(truth.tag_folder, tmp_path / "theirs", "--inject_missing_state")
    assert status == 0
    wrong = [
        name
        for name in truth.shapes()
        if not np.array_equal(torch.load(tmp_path / "theirs" / "zero" / name / "fp32.pt")["param"], truth.tensor(name))
    ]
    assert wrong, "the neighbour of the bug is gone from DeepSpeed: this test may go too"


def test_mappings_that_disagree_without_round_robin_are_refused(tmp_path):
    """If memory was not reordered, then one of the two descriptions is wrong, and we cannot know which."""
    truth = real_zero.write(tmp_path, Recipe(stage=1, dp=2, groups=[{"a": (4,), "b": (4,), "c": (8,)}]))
    path = next(truth.tag_folder.glob("*rank_0_*optim_states.pt"))
    shard = torch.load(path, weights_only=False)
    mappings = shard["optimizer_state_dict"]["param_slice_mappings"][0]
    mappings["a"].start, mappings["b"].start = mappings["b"].start, mappings["a"].start
    torch.save(shard, path)
    problems = checkpoint.read(tmp_path).problems()
    assert [p.what for p in problems] == [
        "param_slice_mappings and param_shapes disagree, and round_robin_gradients is off"
    ]
    with pytest.raises(checkpoint.CheckpointError, match="round_robin_gradients is off"):
        checkpoint.convert(tmp_path, tmp_path / "out")


def test_paddings_of_before_0_16_4(tmp_path):
    """Stages 1 and 2 used to book all padding on the last rank; here the fp32 copy is not stripped either."""
    truth = real_zero.write(tmp_path / "run", Recipe(stage=2, dp=5, groups=[{"a": (7,), "b": (2, 2)}]))
    for rank in range(5):
        path = truth.tag_folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shard = torch.load(path, weights_only=False)
        optimizer = shard["optimizer_state_dict"]
        optimizer["group_paddings"] = [9 if rank == 4 else 0]
        del optimizer["param_alignment_paddings"]
        full = optimizer["base_optimizer_state"]["state"][0]["exp_avg"].numel()
        master = torch.full((full,), real_zero.SENTINEL)
        held = optimizer["single_partition_of_fp32_groups"][0].detach()
        master[: held.numel()] = held
        optimizer["single_partition_of_fp32_groups"] = [master]
        torch.save(shard, path)
    checkpoint.convert(truth.folder, tmp_path / "universal")
    assert_is_the_truth(tmp_path / "universal", truth)


def test_stage_3_files_have_shapes_and_steps_and_no_shard_of_rank_0(tmp_path):
    """DeepSpeed writes bare flat tensors, no step, and leaves rank 0's whole shard in ``optimizer_state.pt``."""
    truth = real_zero.write(tmp_path / "run", Recipe(stage=3, dp=2, groups=[{"a": (300, 30)}, {"b": (31,)}]))
    checkpoint.convert(truth.folder, tmp_path / "universal")
    common = tmp_path / "universal" / "zero" / "optimizer_state.pt"
    assert common.stat().st_size < 10_000
    held = torch.load(common, weights_only=False)
    assert held["optimizer_state_dict"]["state"][0]["step"] == real_zero.STEP
    assert len(held["param_groups"]) == 2
    assert "fp32_flat_groups" not in held
    assert torch.load(tmp_path / "universal" / "zero" / "a" / "step.pt") == real_zero.STEP
    assert (tmp_path / "universal" / "mp_rank_00_model_states.pt").is_file()


def test_an_elastic_file_gives_every_group_to_the_loader(tmp_path):
    """An elastic file has no ``param_groups``; the loader walks them, and with an empty list would load nothing."""
    truth = real_zero.write(tmp_path / "run", Recipe(stage=2, dp=2, elastic=True, groups=[{"a": (9,)}, {"b": (5,)}]))
    checkpoint.convert(truth.folder, tmp_path / "universal")
    held = torch.load(tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False)
    assert len(held["param_groups"]) == 2
    assert_is_the_truth(tmp_path / "universal", truth)
