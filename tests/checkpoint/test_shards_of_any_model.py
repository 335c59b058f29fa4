"""Shards made of models with buffers, without elements, of several dtypes; and what no target can be."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ullage import checkpoint
from ullage.core.errors import InputError

pytestmark = pytest.mark.regression

STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
MORE = {
    "normalised": {},
    "integers": {"codes": torch.ones(3, dtype=torch.int8), "mask": torch.zeros(2, dtype=torch.bool)},
    "empty": {"none": torch.empty(0, dtype=torch.int64)},
    "dtypes": {"double": torch.randn(7, dtype=torch.float64) / 3, "half": torch.randn(3).bfloat16()},
}


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))


def save(folder: Path, model: torch.nn.Module, more: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file({**model.state_dict(), **more}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("which", MORE)
def test_verify_agrees_with_the_conversion_of_any_model(model, tmp_path, which, stage):
    folder = save(tmp_path / "model", model, MORE[which])
    report = checkpoint.convert(folder, tmp_path / "shards", format=f"zero{stage}", ranks=3, optimizer=False)
    assert checkpoint.verify(folder, tmp_path / "shards") == []
    held = checkpoint.read(tmp_path / "shards")
    buffers = {tensor.name for tensor in held.tensors if tensor.kind == "buffer"}
    integers = {name for name, tensor in MORE[which].items() if not tensor.is_floating_point()}
    assert buffers == STATISTICS | integers
    rounded = [note for note in report.notes if "float64" in note]
    assert rounded == ["1 tensor of float64 rounded, such as double to float32: an engine has one dtype"] * (
        which == "dtypes"
    )
    assert any("taken for parameters" in note for note in report.notes) == (stage == 3)
    # And on from there, to another stage.
    again = 3 if stage < 3 else 1
    checkpoint.convert(tmp_path / "shards", tmp_path / "again", format=f"zero{again}", ranks=2, optimizer=False)
    assert checkpoint.verify(tmp_path / "shards", tmp_path / "again") == []
    next((tmp_path / "shards").rglob("zero_pp_rank_0_mp_rank_00_optim_states.pt")).unlink()
    assert checkpoint.verify(folder, tmp_path / "shards") != []


@pytest.mark.parametrize("format", ["zero1", "zero2", "zero3", "universal"])
def test_running_means_are_buffers_beside_an_optimizer(model, tmp_path, format):
    folder = save(tmp_path / "model", model, {})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = [name for name, _ in model.named_parameters()]
    torch.save(state, folder / "optimizer.pt")
    ranks = None if format == "universal" else 3
    checkpoint.convert(folder, tmp_path / "out", format=format, ranks=ranks)
    assert checkpoint.verify(folder, tmp_path / "out") == []
    held = checkpoint.read(tmp_path / "out")
    assert {tensor.name for tensor in held.tensors if tensor.kind == "buffer"} == STATISTICS
    assert set(held.parameters) == {name for name, _ in model.named_parameters()}


def test_more_ranks_than_a_run_has_are_answered_at_once(model, tmp_path):
    folder = save(tmp_path / "model", model, {})
    large = tmp_path / "large"
    large.mkdir()
    save_file({"w": torch.zeros(300, 300)}, large / "model.safetensors")
    began = time.process_time()
    for source, said in ((folder, "at most 1,024"), (large, "at most 65,536")):
        for dry in (True, False):
            with pytest.raises(InputError, match=f"too many ranks: expected {said}, found 1,000,000 for"):
                checkpoint.convert(
                    source, tmp_path / "out", format="zero2", ranks=1_000_000, optimizer=False, dry_run=dry
                )
    assert time.process_time() - began < 1
    assert not list(tmp_path.glob("out*"))


def test_the_root_and_names_that_are_too_long_are_one_line(model, tmp_path):
    folder = save(tmp_path / "model", model, {})
    with pytest.raises(InputError, match="the target is the root of the file system"):
        checkpoint.convert(folder, "/", format="safetensors")
    for length in (248, 250, 255, 256, 300):
        for target in (tmp_path / ("n" * length), tmp_path / ("n" * length) / "out"):
            if length < 256 and target.name == "out":
                continue
            with pytest.raises(InputError, match=r"the name of the target would be too long .*255 bytes"):
                checkpoint.convert(folder, target, format="safetensors")
    checkpoint.convert(folder, tmp_path / ("n" * 247), format="safetensors")
    assert checkpoint.verify(folder, tmp_path / ("n" * 247)) == []
