"""ZeRO stage 0, which is DeepSpeed without ZeRO: its weights are converted, its optimizer where it has names."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support import real_zero
from tests.support.checkpoints import contents
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression

#: two weights of one shape, so that shapes alone do not tell them apart
ALIKE = [{"embed.weight": (10, 3), "layers.0.weight": (7, 3)}, {"layers.1.weight": (7, 3), "norm.weight": (5,)}]
DISTINCT = [{"embed.weight": (10, 3), "layers.0.weight": (7, 3)}, {"norm.weight": (5,)}]
EXTRAS = {"frozen": {"base": (6, 5)}, "buffers": {"mean": (5,)}, "tied": {"lm_head.weight": "embed.weight"}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_weights_of_stage_0_are_converted(tmp_path, dtype):
    """The folder was refused as one that holds no ZeRO shard."""
    written = real_zero.write(tmp_path / "run", Recipe(stage=0, dp=1, dtype=dtype, groups=ALIKE, **EXTRAS))
    inventory = checkpoint.read(written.folder)
    assert inventory.problems() == []
    assert (inventory.written_by.stage, inventory.written_by.dp) == (0, 1)
    assert inventory.aliases == {"lm_head.weight": "embed.weight"}
    held = torch.bfloat16 if dtype == "bf16" else torch.float32
    checkpoint.convert(inventory, tmp_path / "st", format="safetensors")
    checkpoint.convert(inventory, tmp_path / "dcp", format="dcp", optimizer=False)
    found = load_file(tmp_path / "st" / "model.safetensors")
    assert set(found) == {*written.shapes(), "base", "mean"}
    for name in written.shapes():
        assert torch.equal(found[name], torch.from_numpy(written.tensor(name)).to(held))
    assert torch.equal(found["base"], torch.from_numpy(written.frozen("base")).to(held))
    for format in ("st", "dcp"):
        assert checkpoint.verify(inventory, tmp_path / format) == []


def test_state_that_is_saved_by_number_only_is_refused_by_name(tmp_path):
    written = real_zero.write(tmp_path / "run", Recipe(stage=0, dp=1, groups=ALIKE))
    before = contents(tmp_path)
    for options in ({"format": "dcp"}, {"format": "safetensors", "optimizer": True}):
        with pytest.raises(
            CheckpointError, match=r"saved by number, and nothing says which parameter has which.*2 weights of shape"
        ) as caught:
            checkpoint.convert(written.folder, tmp_path / "out", **options)
        assert "--weights-only" in str(caught.value)
    with pytest.raises(CheckpointError, match="saved by number"):
        checkpoint.convert(written.folder, tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("recipe", [Recipe(stage=0, dp=1, groups=ALIKE, named=True), Recipe(0, 1, groups=DISTINCT)])
def test_state_that_is_saved_by_name_or_told_by_its_shape_is_carried(tmp_path, recipe):
    written = real_zero.write(tmp_path / "run", recipe)
    inventory = checkpoint.read(written.folder)
    assert inventory.optimizer_problems == ()
    checkpoint.convert(inventory, tmp_path / "st", format="safetensors", optimizer=True)
    states = load_file(tmp_path / "st" / "optimizer" / "optimizer.safetensors")
    for name in written.shapes():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[f"{key}:{name}"], torch.from_numpy(written.tensor(name, key)))
    assert set(inventory.steps.values()) == {real_zero.STEP}
    assert inventory.tensor("norm.weight").group == 1
    for format, options in {"dcp": {}, "universal": {}, "trainer": {}, "zero2": {"ranks": 3}}.items():
        checkpoint.convert(inventory, tmp_path / format, format=format, **options)
    for format in ("st", "dcp", "universal", "trainer", "zero2"):
        assert checkpoint.verify(inventory, tmp_path / format) == []


def test_a_zero_folder_that_lost_its_shards_is_not_taken_for_stage_0(tmp_path):
    written = real_zero.write(tmp_path / "run", Recipe(stage=1, dp=1, groups=DISTINCT))
    for path in written.tag_folder.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="the folder holds no readable ZeRO shard"):
        checkpoint.read(written.folder)


def test_a_checkpoint_of_stage_0_is_read_by_a_run_without_deepspeed(tmp_path):
    from ullage.training.deepspeed.continuing import ZeroConfig, conversion_for

    written = real_zero.write(tmp_path / "run", Recipe(stage=0, dp=1, groups=DISTINCT))
    conversion = conversion_for(written.folder, ZeroConfig(0, 1))
    assert conversion is not None
    assert str(conversion).endswith("for 1 process, without DeepSpeed every process reads it whole")


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_that_were_left_out_are_said(tmp_path, stage):
    recipe = Recipe(stage=stage, dp=1, groups=DISTINCT, frozen={"base": (6, 5)}, exclude_frozen=True)
    written = real_zero.write(tmp_path / "run", recipe)
    report = checkpoint.convert(written.folder, tmp_path / "out")
    assert any("frozen parameters were left out when this was saved" in note for note in report.notes)
    assert not (tmp_path / "out" / "zero" / "base").exists()
    whole = real_zero.write(tmp_path / "whole", Recipe(stage=stage, dp=1, groups=DISTINCT, frozen={"base": (6, 5)}))
    assert not any("left out" in note for note in checkpoint.read(whole.folder).notes)
