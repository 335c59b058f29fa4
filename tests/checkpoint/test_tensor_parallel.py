"""Tensor and pipeline parallel checkpoints with Megatron-DeepSpeed's patterns, against DeepSpeed's own converter."""

import numpy as np
import pytest
import torch

from tests.support import real_zero
from tests.support.checkpoints import convert_with_deepspeed
from tests.support.real_zero import Recipe
from ullage import checkpoint

pytestmark = pytest.mark.parity

INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 13,
    "vocabulary_parameter_patterns": [r"word_embeddings\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*dense\.bias"],
    "parameter_to_average_patterns": [r".*router\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu\.weight"],
    "parameter_with_sub_params": [{"patterns": [r".*qkv\.weight"], "shape": [3, -1], "partition_dim": 0}],
}
#: shapes of one tensor-parallel rank of two
EMBEDDING = {"word_embeddings.weight": (8, 6)}
LAYER = {
    "dense.weight": (6, 5),
    "swiglu.weight": (10, 6),
    "qkv.weight": (9, 6),
    "norm.weight": (6,),
    "dense.bias": (6,),
}


def stage(index, *, embedding=False, average=True):
    more = {f"l{index}.router.weight": (4, 6)} if average else {}
    layer = {f"l{index}.{n}": s for n, s in LAYER.items()}
    return [{**(EMBEDDING if embedding else {}), **layer, **more}, {f"l{index}.column.bias": (7,)}]


@pytest.mark.slow
def test_every_pattern_gives_what_deepspeed_gives(tmp_path):
    info = {**INFO, "pipeline_replicated_parameter_patterns": [r"word_embeddings\.weight"]}
    per_rank = [stage(p, embedding=True) for p in (0, 1) for _ in (0, 1)]
    recipe = Recipe(stage=1, dp=2, tp=2, pp=2, dtype="bf16_optimizer", per_rank=per_rank, info=info)
    # equal moments on both ranks for what is replicated; the averaged ones differ
    truth = real_zero.write(tmp_path / "run", recipe)
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert (inventory.written_by.dp, inventory.written_by.tp, inventory.written_by.pp) == (2, 2, 2)
    checkpoint.convert(inventory, tmp_path / "ours")
    status, output = convert_with_deepspeed(truth.tag_folder, tmp_path / "theirs")
    assert status == 0, output[-2000:]
    compared = 0
    for path in sorted((tmp_path / "theirs" / "zero").glob("*/*.pt")):
        theirs = torch.load(path, weights_only=False)
        ours = torch.load(tmp_path / "ours" / "zero" / path.parent.name / path.name, weights_only=False)
        if path.stem == "step":
            assert ours == theirs
            continue
        assert set(ours) == set(theirs), path
        assert torch.equal(ours.pop("param"), theirs.pop("param")), path
        assert ours == theirs, path
        compared += 1
    assert compared == 3 * len(inventory.parameters)
    assert inventory.tensor("word_embeddings.weight").shape == (13, 6)
    assert checkpoint.verify(truth.folder, tmp_path / "ours") == []
    # The model states of all ranks tell the groups, so the optimizer comes along where the ranks are no longer cut.
    for name, source in {"back": tmp_path / "ours", "straight": truth.folder}.items():
        checkpoint.convert(source, tmp_path / name, format="zero1", ranks=1)
    assert not checkpoint.diff(tmp_path / "back", tmp_path / "straight")


def test_replicas_that_drifted_apart_are_refused(tmp_path):
    recipe = Recipe(stage=2, dp=1, tp=2, groups=[{"norm.weight": (6,)}], info=INFO)
    truth = real_zero.write(tmp_path / "run", recipe)
    path = truth.tag_folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    shard = torch.load(path, weights_only=False)
    shard["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][4] += 1
    torch.save(shard, path)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"replicas of exp_avg differ \(parameter norm.weight, element 4, model ranks 0 and 1\)",
    ):
        checkpoint.convert(truth.folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_tensor_parallel_without_patterns_is_refused(tmp_path):
    truth = real_zero.write(tmp_path / "run", Recipe(stage=2, dp=1, tp=2, groups=[{"w": (6, 2)}]))
    with pytest.raises(checkpoint.CheckpointError, match="universal_checkpoint_info is missing"):
        checkpoint.convert(truth.folder, tmp_path / "out")


def test_uneven_fused_parameters_of_version_0_4(tmp_path):
    """Query heads 4 + 2 over two ranks, key heads 1 + 1, as ``sub_param_shard_widths`` records them."""
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["qkv.weight"], "shape": [[6, 2, 2], 3], "partition_dim": 0}],
        "sub_param_shard_widths": {"qkv.weight": [[4, 2], [1, 1], [1, 1]]},
    }
    per_rank = [[{"qkv.weight": (6, 3)}], [{"qkv.weight": (4, 3)}]]
    truth = real_zero.write(tmp_path / "run", Recipe(stage=1, dp=2, tp=2, per_rank=per_rank, info=info))
    checkpoint.convert(truth.folder, tmp_path / "out")
    a, b = truth.tensor("qkv.weight", "fp32", 0), truth.tensor("qkv.weight", "fp32", 1)
    wanted = np.concatenate([a[:4], b[:2], a[4:5], b[2:3], a[5:], b[3:]])
    held = torch.load(tmp_path / "out" / "zero" / "qkv.weight" / "fp32.pt", weights_only=False)
    assert torch.equal(held["param"], torch.from_numpy(wanted))
    assert held["sub_param_shape"].shape == ((6, 2, 2), 3)
