"""The rarer kinds of ZeRO run, written by real DeepSpeed, read exactly; those that cannot be read, refused by name.

The truth is what the ranks gather from their own memory before they save (``tests/support/zero_kinds.py``).
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.support import real_zero
from tests.support.checkpoints import edit, shard, universal
from tests.support.real_zero import Recipe
from tests.support.zero_kinds import RUNS, require_whole, run_kind
from ullage import checkpoint
from ullage.core.errors import CheckpointError


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RUNS][:9])
def test_a_run_is_read_as_its_ranks_hold_it(tmp_path, kind):
    source, truth, results = run_kind(tmp_path, kind)
    require_whole(source, truth, tmp_path)
    if "tensor parallel" in kind:
        _loads_by_deepspeeds_map(tmp_path / "universal", results, RUNS[kind][2]["options"]["tp"])


def _loads_by_deepspeeds_map(folder, results, tp):
    """What ours wrote, cut by DeepSpeed's own code by the map in its model states, is each rank's slice."""
    from deepspeed.checkpoint.affine import ParamAffineMap

    saved = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    maps = saved["universal_checkpoint_info"]["affine_map"]
    assert maps["version"] == 1
    named = {pattern[1:-1].replace("\\", ""): described for pattern, described in maps["params"].items()}
    assert named.keys() == results[0]["shapes"].keys()
    for name, described in named.items():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            content = torch.load(folder / "zero" / name / f"{key}.pt", weights_only=False)
            for rank in range(tp):
                part = ParamAffineMap.from_dict(described).extract(content["param"], rank)
                assert torch.equal(part, results[rank]["truth"][f"{name}/{key}"]), (name, key)


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_a_sequence_are_no_tensor_parallel_ranks(tmp_path, stage):
    """Ulysses. Shards were missed: ``tp_degree``, or the names of the files, give the ranks that share a sequence."""
    source, truth, _ = run_kind(tmp_path, f"sequence parallel, stage {stage}")
    folder = source / "global_step3"
    if stage == 1:
        aside = shard(folder, 2).rename(tmp_path / "aside")
        with pytest.raises(CheckpointError, match=r"a shard is missing .*zero_pp_rank_2_mp_rank_00_optim_states"):
            checkpoint.convert(source, tmp_path / "out")
        aside.rename(shard(folder, 2))
    for named in ("today", "before 0.19"):
        if named == "before 0.19":  # no dimensions, and the rank in the sequence in the name of every second file
            for path in folder.glob("*model_states.pt"):
                edit(path, lambda content: content.pop("checkpoint_parallel_dimensions"))
            for path in folder.glob("zero_pp_rank_[13]_*.pt"):
                path.rename(folder / path.name.replace("mp_rank_00", "mp_rank_01"))
        written = checkpoint.read(source).written_by
        assert (written.dp, written.tp, written.pp) == (4, 1, 1)
        require_whole(source, truth, tmp_path / named)


@pytest.mark.regression
def test_a_mesh_is_read_below_stage_3_and_what_lacks_the_names_of_its_parameters_is_said(tmp_path):
    """A mixture of experts of before 0.19 has no ``param_shapes``."""
    source, truth, _ = run_kind(tmp_path, "mesh, stage 2")
    require_whole(source, truth, tmp_path)
    edit(source / "global_step3" / "mp_rank_00_model_states.pt", lambda content: content.pop("param_shapes"))
    with pytest.raises(CheckpointError, match=r"nothing says which parameters .*param_shapes, which old versions"):
        checkpoint.read(source)


@pytest.mark.regression
def test_what_a_mesh_has_not_saved_at_stage_3_is_said(tmp_path):
    """Ranks of one sequence have parts of their own there, and write them to one file."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(run_kind(tmp_path, "mesh, stage 3")[0])
    assert re.match(
        r"the parameters were cut over 4 ranks, of which 2 have files \(.*optim_states.pt\)", str(caught.value)
    )
    assert "train with an mpu in place of mesh_param, or at stage 2" in str(caught.value)


GROUPS = [{"enter.weight": (5, 6), "middle.weight": (7, 9), "leave.weight": (3, 4)}, {"norm": (11,)}]
RECIPE = Recipe(stage=2, dp=4, groups=GROUPS)


def set_config(folder, **zero):
    for path in folder.glob("*_states.pt"):
        edit(path, lambda content: content["ds_config"].setdefault("zero_optimization", {}).update(zero))


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "said"), [
    ({"zenflow": {"topk_ratio": 0.1}}, "a ZenFlow run is not supported: its weights are saved transposed"),
    ({"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "state was offloaded to NVMe"),
])  # fmt: skip
def test_a_kind_that_cannot_be_read_is_refused_by_its_name(run, tmp_path, zero, said):
    checkpoint.read(run)
    set_config(run, **zero)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(run, tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_superoffload_has_weights_and_no_moments(run, written, tmp_path):
    set_config(run, offload_optimizer={"device": "cpu", "super_offload": True})
    with pytest.raises(CheckpointError, match="SuperOffload run keeps the optimizer's state in a process of its own"):
        checkpoint.convert(run, tmp_path / "out")
    checkpoint.convert(run, tmp_path / "out", format="safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], torch.from_numpy(written.tensor(name))) for name in written.shapes())


@pytest.mark.slow
def test_mics_shards_are_those_of_its_first_group(tmp_path):
    """Layout by source: DeepSpeed 0.19 has no MiCS any more. The first group's files are those of a smaller run."""
    written = real_zero.write(tmp_path / "run", Recipe(stage=3, dp=3, groups=GROUPS, frozen={"base": (13,)}))
    folder = written.tag_folder
    for path in folder.glob("*_model_states.pt"):
        edit(path, lambda content: content.update(dp_world_size=6))
    assert any("world size disagrees" in str(p) for p in checkpoint.read(folder).problems())
    set_config(folder, mics_shard_size=3)
    inventory = checkpoint.read(folder)
    assert inventory.problems() == []
    assert any("MiCS: 2 groups of 3 ranks hold the same shards" in note for note in inventory.notes)
    checkpoint.convert(folder, tmp_path / "out")
    for name in written.shapes():
        for key in written.keys:
            assert torch.equal(universal(tmp_path / "out", name, key), torch.from_numpy(written.tensor(name, key)))


@pytest.mark.slow
def test_muons_momentum_is_whole_on_each_rank(run, written, tmp_path):
    """Each rank has the whole momentum of every matrix of which its partition has elements; they are compared."""
    group = checkpoint.read(run).groups[0]

    def with_muon(content, rank):
        held = sorted(set(group.pieces.item[group.pieces.shard == rank].tolist()))
        parts = [torch.from_numpy(written.tensor(group.names[i], "momentum")).reshape(-1) for i in held]
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][0]["use_muon"] = True
        state = base["state"][0]
        del state["exp_avg"], state["exp_avg_sq"]
        if parts:
            state["momentum_buffer"] = torch.cat(parts)

    for rank in range(4):
        edit(shard(run, rank), lambda c, r=rank: with_muon(c, r))
    assert len(set(zip(group.pieces.item.tolist(), group.pieces.shard.tolist()))) > len(group.names)  # some are cut
    checkpoint.convert(run, tmp_path / "out")
    for name in group.names:
        found = universal(tmp_path / "out", name, "momentum_buffer")
        assert torch.equal(found, torch.from_numpy(written.tensor(name, "momentum")))
    found = universal(tmp_path / "out", "norm", "exp_avg")
    assert torch.equal(found, torch.from_numpy(written.tensor("norm", "exp_avg")))
    assert checkpoint.verify(run, tmp_path / "out") == []
    with pytest.raises(CheckpointError, match=r"Muon's momentum are not written below stage 3.*zero3"):
        checkpoint.convert(run, tmp_path / "shards", format="zero2", ranks=2)

    def drift(content):
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"][0] += 1

    edit(shard(run, 1), drift)
    with pytest.raises(CheckpointError, match="ranks hold different values of one parameter"):
        checkpoint.convert(run, tmp_path / "drifted")
