"""Folders of safetensors of which a file, or a tensor of the index, is not there: never half a model without a word."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four weights in two files, with the index, as transformers writes them."""
    place = tmp_path / "model"
    place.mkdir()
    where = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        held = {f"layer{number}.{part}": torch.randn(3, 5) for part in ("weight", "bias")}
        save_file(held, place / name, {"format": "pt"})
        where |= dict.fromkeys(held, name)
    (place / INDEX).write_text(json.dumps({"metadata": {"total_size": 240}, "weight_map": where}))
    return place


def said(folder: Path) -> list[str]:
    return [str(problem) for problem in checkpoint.read(folder).problems()]


def change_index(folder: Path, change) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_file_is_found_with_and_without_the_index(folder, tmp_path, number, indexed):
    (folder / f"model-0000{number}-of-00002.safetensors").unlink()
    if not indexed:
        (folder / INDEX).unlink()
    by_name = [line for line in said(folder) if line.startswith(f"file {number} of 2 is missing")]
    by_index = [line for line in said(folder) if "a file that the index names is missing" in line]
    assert (len(by_name), len(by_index)) == (1, int(indexed))
    for format in ("safetensors", "dcp", "universal", "trainer"):
        with pytest.raises(CheckpointError, match="is missing"):
            checkpoint.convert(folder, tmp_path / "out", format=format)
        assert not (tmp_path / "out").exists()
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({f"layer{3 - number}.weight": torch.randn(3, 5)}, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.diff(folder, whole)
    assert checkpoint.verify(folder, whole) != []


@pytest.mark.parametrize(("change", "line"), [
    (lambda held: held.update({"layer3.weight": SECOND}), r"names a tensor that its file does not hold .*layer3"),
    (lambda held: held.update({"layer1.weight": SECOND}), r"names a tensor that its file does not hold .*layer1"),
    (lambda held: held.update({"layer1.weight": "/etc/passwd"}), r"a file that is none of the folder"),
    (lambda held: held.update({"layer1.weight": "../x.safetensors"}), r"a file that is none of the folder"),
    (lambda held: held.update({"layer1.weight": "other.safetensors"}), r"file that the index names is missing"),
    (lambda held: held.update({"layer1.weight": 5}), r"weight_map is malformed"),
])  # fmt: skip
def test_an_index_that_contradicts_the_files_is_a_problem(folder, change, line):
    change_index(folder, change)
    [problem] = checkpoint.read(folder).problems()
    assert re.search(line, str(problem)), problem


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', "[" * 100000])
def test_an_index_that_is_none_is_a_problem(folder, text):
    (folder / INDEX).write_text(text)
    [problem] = checkpoint.read(folder).problems()
    assert problem.file == INDEX


def test_a_whole_model_has_no_problem_and_tensors_that_the_index_does_not_list_are_noted_and_read(folder, tmp_path):
    assert said(folder) == []
    assert checkpoint.read(folder).notes == ()
    checkpoint.convert(folder, tmp_path / "out", format="safetensors")
    assert said(tmp_path / "out") == []
    change_index(folder, lambda held: held.pop("layer1.bias"))
    assert said(folder) == []
    [note] = checkpoint.read(folder).notes
    assert "does not list 1 of the tensors in its files, such as layer1.bias" in note
    assert "layer1.bias" in checkpoint.read(folder).parameters


def test_one_file_saved_over_several_counts_alone(folder):
    """transformers leaves the old index where it is, and its loader takes the one file."""
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
    save_file({"layer1.weight": torch.randn(3, 5)}, folder / "model.safetensors")
    inventory = checkpoint.read(folder)
    assert inventory.problems() == []
    assert any("is passed over beside model.safetensors" in note for note in inventory.notes)


def test_a_number_beyond_its_set_and_a_count_beyond_reason(folder):
    (folder / INDEX).unlink()
    (folder / SECOND).rename(folder / "model-00003-of-00002.safetensors")
    assert any(line.startswith("the file has a number beyond those of its set") for line in said(folder))
    (folder / "model-00003-of-00002.safetensors").rename(folder / "model-2-of-999999999999999999.safetensors")
    assert any(line.startswith("file 1 of 999999999999999999 is missing") for line in said(folder))


def test_a_missing_file_of_optimizer_state_is_found(tmp_path):
    place = tmp_path / "model"
    (place / "optimizer").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, place / "model.safetensors")
    save_file({"exp_avg:w": torch.ones(2)}, place / "optimizer" / "optimizer-00001-of-00002.safetensors")
    assert any("file 2 of 2 is missing" in line for line in said(place))
    (place / "optimizer" / "optimizer-00001-of-00002.safetensors").unlink()
    listed = {"weight_map": {"exp_avg:w": "optimizer.safetensors"}}
    (place / "optimizer" / "optimizer.safetensors.index.json").write_text(json.dumps(listed))
    missing = "a file that the index names is missing (optimizer/optimizer.safetensors"
    assert any(missing in line for line in said(place))
