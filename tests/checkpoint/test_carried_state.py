"""Optimizer state that is not cut like the weights is carried where that is true, and refused by name where it is not."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import contents, edit, shard
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression

RECIPE = Recipe(stage=2, dp=3, groups=[{"embed.weight": (60, 30), "head.weight": (20, 30)}])
PARTITION = 800


def change_state(run, change, ranks=(0, 1, 2)):
    """``change(state, rank)`` on the state of the one group in each rank's file."""
    for rank in ranks:
        edit(
            shard(run, rank), lambda c, r=rank: change(c["optimizer_state_dict"]["base_optimizer_state"]["state"][0], r)
        )


def to_8bit(state, rank):
    """A code per element and a scale per block of a size that no optimizer has, a code book."""
    del state["exp_avg"], state["exp_avg_sq"]
    random = torch.Generator().manual_seed(rank)
    for number in (1, 2):
        state[f"state{number}"] = torch.randint(0, 255, (PARTITION,), generator=random).to(torch.uint8)
        state[f"absmax{number}"] = torch.rand(6, generator=random)
        state[f"qmap{number}"] = torch.linspace(-1, 1, 256)


def test_block_wise_8_bit_state_is_refused_by_name_and_the_weights_are_not(run, written, tmp_path):
    change_state(run, to_8bit)
    inventory = checkpoint.read(run)
    assert inventory.problems() == []  # the weights are whole
    assert "state1 is quantised in a way that is not known" in str(inventory.optimizer_problems[0])
    before = contents(tmp_path)
    for options in ({"format": "universal"}, {"format": "safetensors", "optimizer": True}, {"format": "dcp"}):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.convert(inventory, tmp_path / "out", **options)
        said = str(caught.value)
        assert "optimizer state state1 is quantised in a way that is not known" in said
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt, rank 0, group 0" in said
        assert "found 800 elements of uint8" in said
        assert "--weights-only" in said
        assert contents(tmp_path) == before
    checkpoint.convert(inventory, tmp_path / "st", format="safetensors")
    weights = load_file(tmp_path / "st" / "model.safetensors")
    for name in written.shapes():
        assert torch.equal(weights[name], torch.from_numpy(written.tensor(name)))
    assert checkpoint.verify(inventory, tmp_path / "st") == []
    checkpoint.convert(inventory, tmp_path / "dcp", format="dcp", optimizer=False)
    assert checkpoint.verify(inventory, tmp_path / "dcp") == []


def test_a_conversion_that_lost_8_bit_state_is_not_called_equal(run, tmp_path):
    checkpoint.convert(run, tmp_path / "out")
    change_state(run, to_8bit)
    assert any("absmax1" in str(problem) for problem in checkpoint.verify(run, tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, r: s.update(gain=torch.tensor(r / 7)), r"optimizer state gain differs between ranks.*rank 1"),
        (
            lambda s, r: s.update(extra=torch.ones(PARTITION)) if r else None,
            r"optimizer state extra is not on all ranks",
        ),
        (lambda s, r: s.update(book=torch.ones(9)), r"optimizer state book is no partition.*found 9 elements"),
    ],
    ids=["number", "missing on rank 0", "length"],
)
def test_state_that_is_no_partition_or_differs_between_ranks_is_refused(run, tmp_path, change, said):
    change_state(run, change)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(run, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_adafactors_rms_is_left_out_where_it_differs_and_said(run, tmp_path):
    """transformers' Adafactor computes it again in each step before it reads it."""
    change_state(run, lambda state, rank: state.update(RMS=0.1 + rank))
    report = checkpoint.convert(run, tmp_path / "out")
    assert "state RMS differs between ranks; the optimizer computes it again, so it is left out" in report.notes
    held = torch.load(tmp_path / "out" / "zero" / "optimizer_state.pt", weights_only=False)
    assert "RMS" not in held["optimizer_state_dict"]["state"][0]


def test_numbers_of_the_state_are_carried_to_every_format(run, tmp_path):
    change_state(run, lambda state, rank: state.update(momentum_cache=0.75))
    for format in ("universal", "safetensors", "dcp"):
        checkpoint.convert(run, tmp_path / format, format=format, optimizer=True)
        assert checkpoint.verify(run, tmp_path / format) == []
    held = torch.load(tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False)
    assert held["optimizer_state_dict"]["state"][0]["momentum_cache"] == 0.75
    index = json.loads((tmp_path / "safetensors" / "optimizer" / "optimizer.safetensors.index.json").read_text())
    assert json.loads(index["metadata"]["numbers"]) == {"0": {"momentum_cache": 0.75}}
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert "optim.state.head.weight.momentum_cache" in names


def test_a_universal_checkpoint_keeps_its_steps_and_settings_as_dcp(run, tmp_path):
    """They were left out without a word."""
    checkpoint.convert(run, tmp_path / "universal")
    checkpoint.convert(tmp_path / "universal", tmp_path / "dcp", format="dcp")
    checkpoint.convert(run, tmp_path / "direct", format="dcp")
    assert checkpoint.verify(run, tmp_path / "dcp") == []
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = [set(FileSystemReader(tmp_path / f).read_metadata().state_dict_metadata) for f in ("dcp", "direct")]
    assert names[0] == names[1]
    assert "optim.state.head.weight.step" in names[0]
    assert "optim.param_groups.0.lr" in names[0]
