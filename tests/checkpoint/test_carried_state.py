"""Optimizer state that is not cut like the weights is carried where that is true, and refused by name where it is not."""

import json

import pytest
import torch

from tests.support.checkpoints import edit, shard
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


def test_a_conversion_that_lost_8_bit_state_is_not_called_equal(run, tmp_path):
    checkpoint.convert(run, tmp_path / "out")
    change_state(run, to_8bit)
    assert any("absmax1" in str(problem) for problem in checkpoint.verify(run, tmp_path / "out"))


@pytest.mark.parametrize(("change", "said"), [
    (lambda s, r: s.update(gain=torch.tensor(r / 7)), r"optimizer state gain differs between ranks.*rank 1"),
    (lambda s, r: s.update(extra=torch.ones(PARTITION)) if r else None, r"optimizer state extra is not on all ranks"),
    (lambda s, r: s.update(book=torch.ones(9)), r"optimizer state book is no partition.*found 9 elements"),
], ids=["number", "missing on rank 0", "length"])  # fmt: skip
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
