"""A manifest beside the files of a checkpoint: every verb compares what lies there with it."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.test_manifest import list_folder
from tests.support import real_zero
from tests.support.checkpoints import flip
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.cli import main
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Trainer's folder with its manifest."""
    place = tmp_path / "checkpoint-1"
    place.mkdir()
    parameter = torch.nn.Parameter(torch.randn(40, 5))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(40, 5)
    optimizer.step()
    save_file({"w": parameter.data}, place / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    list_folder(place)
    return place


def refused(folder: Path, tmp_path: Path, match: str) -> None:
    assert any(match in str(problem) for problem in checkpoint.read(folder).problems())
    for format in ("safetensors", "universal", "dcp", "trainer"):
        with pytest.raises(CheckpointError, match=match):
            checkpoint.convert(folder, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=match):
        checkpoint.diff(folder, folder)
    assert any(match in str(problem) for problem in checkpoint.verify(folder, folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ullage", "inspect", str(folder)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1


@pytest.mark.parametrize(("name", "at"), [("model.safetensors", -3), ("trainer_state.json", 2), ("manifest.json", 60)])
def test_a_flipped_bit_of_a_file_without_sums_of_its_own_is_found_and_a_file_that_is_gone(folder, tmp_path, name, at):
    assert checkpoint.read(folder).problems() == []
    flip(folder / name, at)
    refused(folder, tmp_path, "a file is not what the manifest lists")
    if name == "model.safetensors":
        assert checkpoint.read(folder).problems(manifest=False) == []
        (folder / "manifest.json").unlink()
        assert checkpoint.read(folder).problems() == []
    elif name == "trainer_state.json":
        (folder / name).unlink()
        refused(folder, tmp_path, "a file that the manifest lists is missing")


def test_the_manifest_of_the_folder_around_the_shards(tmp_path):
    """A Trainer's folder under DeepSpeed: the manifest lies beside ``latest``, the shards in a folder."""
    written = real_zero.write(tmp_path / "run", Recipe(stage=2, dp=2, groups=[{"a.weight": (12, 5)}]))
    (written.folder / "config.json").write_text("{}")
    list_folder(written.folder)
    assert checkpoint.read(written.folder).problems() == []
    flip(written.folder / "config.json", 0)  # beside the shards: not of them
    assert checkpoint.read(written.folder).problems() == []
    shards = written.folder / written.recipe.tag
    flip(next(shards.glob("*_optim_states.pt")), 30)
    for folder in (written.folder, shards):
        problem = next(p for p in checkpoint.read(folder).problems() if p.what.endswith("not what the manifest lists"))
        assert problem.file is not None
        assert problem.file.endswith("_optim_states.pt")


def test_a_url_is_compared_too(folder, tmp_path):
    store = fsspec.filesystem("memory")
    for name in ("whole", "flipped"):
        if name == "flipped":
            flip(folder / "model.safetensors", -3)
        store.put(str(folder), f"/manifests/{name}", recursive=True)
    assert checkpoint.read("memory://manifests/whole").problems() == []
    problems = checkpoint.read("memory://manifests/flipped").problems()
    assert [(p.what, p.file) for p in problems] == [("a file is not what the manifest lists", "model.safetensors")]
    store.rm("/manifests", recursive=True)
    shutil.rmtree(folder)
