"""Ulysses: ranks that share sequences hold the same weights, whatever the files call those ranks. Real DeepSpeed."""

import re

import pytest

from tests.support.checkpoints import edit
from tests.support.zero_kinds import require_whole, run_kind
from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("named", ["today", "before 0.19"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_a_sequence_are_no_tensor_parallel_ranks(tmp_path, stage, named):
    """Shards were missed: ``tp_degree``, or the names of the files, give the ranks that share a sequence."""
    source, truth = run_kind(tmp_path, f"sequence parallel, stage {stage}")
    if named == "before 0.19":
        as_before(source / "global_step3")
    written = checkpoint.read(source).written_by
    assert (written.dp, written.tp, written.pp) == (4, 1, 1)
    require_whole(source, truth, tmp_path)


def as_before(folder):
    """No parallel dimensions, and the rank in the sequence in the name of every second file."""
    for path in folder.glob("*model_states.pt"):
        edit(path, lambda content: content.pop("checkpoint_parallel_dimensions"))
    for path in folder.glob("zero_pp_rank_[13]_*.pt"):
        path.rename(folder / path.name.replace("mp_rank_00", "mp_rank_01"))


def test_a_shard_of_them_that_is_missing_is_noticed(tmp_path):
    source, _ = run_kind(tmp_path, "sequence parallel, stage 1")
    (source / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"a shard is missing .*zero_pp_rank_2_mp_rank_00_optim_states"):
        checkpoint.convert(source, tmp_path / "out")


def test_a_mesh_is_read_below_stage_3(tmp_path):
    source, truth = run_kind(tmp_path, "mesh, stage 2")
    require_whole(source, truth, tmp_path)


def test_what_a_mesh_has_not_saved_at_stage_3_is_said(tmp_path):
    """Ranks of one sequence have parts of their own there, and write them to one file."""
    source, _ = run_kind(tmp_path, "mesh, stage 3")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(source)
    assert re.match(
        r"the parameters were cut over 4 ranks, of which 2 have files \(.*optim_states.pt\)", str(caught.value)
    )
    assert "train with an mpu in place of mesh_param, or at stage 2" in str(caught.value)


def test_shards_without_the_names_of_their_parameters_are_said(tmp_path):
    """A mixture of experts of before 0.19 has no ``param_shapes``."""
    source, _ = run_kind(tmp_path, "mesh, stage 2")
    edit(source / "global_step3" / "mp_rank_00_model_states.pt", lambda content: content.pop("param_shapes"))
    with pytest.raises(CheckpointError, match=r"nothing says which parameters .*param_shapes, which old versions"):
        checkpoint.read(source)
