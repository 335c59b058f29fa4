"""``verify`` answers for every file that a loader reads; a conversion answers for every byte that it copies."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import contents, edit, flip
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.files import torchfile
from ullage.checkpoint.formats import dcp, safetensors
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression

GROUPS = [{"embed.weight": (10, 3), "layers.0.weight": (7, 3)}, {"norm.weight": (5,)}]
EXTRAS = {"frozen": {"base": (6, 5)}, "buffers": {"mean": (5,)}, "tied": {"lm_head.weight": "embed.weight"}}
RECIPE = Recipe(stage=1, dp=2, groups=GROUPS, **EXTRAS)
FORMATS = ("universal", "safetensors", "dcp")


@pytest.fixture(scope="module")
def converted(written, tmp_path_factory):
    """The source's inventory, and a conversion to each format, with a model's companions beside the source."""
    (written.folder / "config.json").write_text('{"model_type": "llama"}')
    folder = tmp_path_factory.mktemp("converted")
    inventory = checkpoint.read(written.folder)
    for format in FORMATS:
        checkpoint.convert(inventory, folder / format, format=format, optimizer=True)
        assert checkpoint.verify(inventory, folder / format) == []
    return inventory, folder


def told(inventory, target):
    """What ``verify`` says, by whichever way: a list of problems, or an error for what is no checkpoint any more."""
    try:
        return [str(problem) for problem in checkpoint.verify(inventory, target, workers=1)]
    except CheckpointError as error:
        return [str(error)]


@pytest.mark.parametrize("format", FORMATS)
def test_each_file_that_is_removed_is_told(converted, format):
    inventory, folder = converted
    target = folder / format
    paths = sorted(p for p in target.rglob("*") if p.is_file() and p.name != "ullage.json")
    expected = {"universal": 3 * 4 + 2 + 1 + 2, "safetensors": 2 * 2 + 1, "dcp": 2}
    assert len(paths) == expected[format]
    for path in paths:
        aside = path.rename(folder / "aside")
        said = told(inventory, target)
        aside.rename(path)
        assert said, path
        if path.name != ".metadata":
            assert any(path.name in line or path.parent.name in line for line in said), (path, said)
    assert told(inventory, target) == []


@pytest.mark.parametrize("format", FORMATS)
def test_each_changed_value_is_told(converted, format):
    """One bit of each record of each archive, of each tensor, of each small file: nothing of it is padding."""
    inventory, folder = converted
    target = folder / format
    compared = 0
    for path in sorted(p for p in target.rglob("*") if p.is_file() and p.name != "ullage.json"):
        data = path.read_bytes()
        # A folder of one file has hundreds of places: every eighth, the rest is left to the campaign below.
        for at in _places(path, data, target)[:: 8 if format == "dcp" else 1]:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert told(inventory, target), (path, at)
            compared += 1
        path.write_bytes(data)
    assert compared >= {"universal": 50, "safetensors": 15, "dcp": 15}[format]
    assert told(inventory, target) == []


def _places(path, data, target):
    """An offset in every value that a loader takes from the file."""
    if path.suffix == ".pt":
        described = torchfile.read_torch_file(path)
        records = {**described.records, **described.others}
        records.pop(".data/serialization_id", None)  # for torch's own statistics
        return [r.offset + r.num_bytes // 2 for r in records.values() if r.num_bytes]
    if path.suffix == ".safetensors":
        start, header, _ = safetensors.read_header(path)
        return [8, *(start + e["data_offsets"][0] for label, e in header.items() if label != "__metadata__")]
    if path.suffix == ".distcp":
        _, _, places = dcp.read_metadata(target)
        found = {(p.offset, p.length) for held in places.values() for p in held if p.file == path.name}
        files = [torchfile.read_torch_file(path, *place) for place in sorted(found)]
        return [r.offset for f in files for r in [*f.records.values(), *f.others.values()] if r.num_bytes]
    return [data.index(b'"') + 1] if path.suffix == ".json" else [data.index(b"embed.weight"), len(data) // 2]


def test_tensors_that_the_source_does_not_have_are_told(converted, tmp_path):
    from safetensors.torch import save_file

    inventory, folder = converted
    shutil.copytree(folder / "safetensors", tmp_path / "st")
    save_file({"stale": torch.ones(3)}, tmp_path / "st" / "model-old.safetensors")
    said = told(inventory, tmp_path / "st")
    assert said == ["in the target, not in the source (model-old.safetensors)"]
    (tmp_path / "st" / "ullage.json").unlink()  # as of another tool
    assert told(inventory, tmp_path / "st") == ["in the target, not in the source (parameter stale)"]


@pytest.mark.parametrize(
    "change", [{"format": ["dcp"]}, {"format": "gguf"}, {"dtype": 3}, {"ranks": "two"}, {"plan": 1}]
)
def test_options_that_were_changed_are_not_followed(converted, tmp_path, change):
    """The target is then compared as another tool's, or with the plan where the source is named."""
    inventory, folder = converted
    target = shutil.copytree(folder / "safetensors", tmp_path / "st")
    said = json.loads((target / "ullage.json").read_text())
    (target / "ullage.json").write_text(json.dumps(said | change))
    assert told(inventory, target) == []
    flip(target / "model.safetensors", -3)
    assert told(inventory, target) != []


def test_a_target_that_was_cast_is_equal_to_its_source(converted, tmp_path):
    inventory, _ = converted
    for format in ("safetensors", "dcp"):
        checkpoint.convert(inventory, tmp_path / format, format=format, dtype="bfloat16", optimizer=True)
        assert checkpoint.verify(inventory, tmp_path / format) == []
        said = json.loads((tmp_path / format / "ullage.json").read_text())
        assert (said["format"], said["dtype"], said["optimizer"]) == (format, "bfloat16", True)


@pytest.mark.parametrize("which", ["module", "description", "version"])
def test_model_states_that_are_copied_are_compared_with_their_checksums(run, tmp_path, which):
    """A weight of the module is read by no conversion: it is copied with its file, and was not looked at."""
    path = run / "mp_rank_00_model_states.pt"
    held = torchfile.read_torch_file(path)
    at = {
        "module": held.place(held.root["module"]["layers.0.weight"]) + 4 * 7,
        "description": held.others["data.pkl"].offset + 50,
        "version": held.others["version"].offset,
    }[which]
    flip(path, at)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"corrupted: .*fails its checksum.*mp_rank_00_model_states.pt") as caught:
        checkpoint.convert(run, tmp_path / "out")
    if which == "module":
        assert "layers.0.weight (module)" in str(caught.value)
    assert contents(tmp_path) == before


def test_one_weight_of_a_shared_storage_is_compared_with_the_whole_records_checksum(run, tmp_path):
    """Most of the storage is not read by the conversion; what is not read is summed all the same."""
    path = run / "mp_rank_00_model_states.pt"
    whole = torch.arange(400_000.0)
    edit(path, lambda content: content["module"].update(base=whole[:30].view(6, 5), tail=whole))
    edit(path, lambda content: content["module"].pop("tail"))
    checkpoint.convert(run, tmp_path / "good", format="safetensors")
    assert checkpoint.verify(run, tmp_path / "good") == []
    held = torchfile.read_torch_file(path)
    flip(path, held.place(held.root["module"]["base"]) + 3)
    with pytest.raises(CheckpointError, match=r"fails its checksum .*parameter base \(frozen\)"):
        checkpoint.convert(run, tmp_path / "out", format="safetensors")


def test_a_step_in_a_shard_is_compared_with_its_checksum(run, tmp_path):
    for path in run.glob("*optim_states.pt"):  # in all shards alike, so that they do not contradict one another
        held = torchfile.read_torch_file(path)
        for state in held.root["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            flip(path, held.place(state["step"]) + 2)
    with pytest.raises(CheckpointError, match=r"corrupted: the data fails its checksum"):
        checkpoint.convert(run, tmp_path / "out")


def test_deepspeeds_own_universal_checkpoint_is_not_missed_what_only_we_write(converted, tmp_path):
    """Without ``ullage.json``: steps beside stage 3, and the model states of the other stages."""
    inventory, folder = converted
    target = shutil.copytree(folder / "universal", tmp_path / "theirs")
    (target / "ullage.json").unlink()
    (target / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert told(inventory, target) == []
    flip(target / "zero" / "norm.weight" / "exp_avg.pt", -700)
    assert told(inventory, target) != []


def test_what_another_tool_made_is_compared_by_tensors_and_steps(converted, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    inventory, folder = converted

    def said(change, which="model.safetensors"):
        target = shutil.copytree(folder / "safetensors", tmp_path / "st")
        (target / "ullage.json").unlink()
        with safe_open(target / which, "pt") as opened:
            header = opened.metadata()
        tensors = load_file(target / which)
        change(tensors, header)
        save_file(tensors, target / which, header)
        found = told(inventory, target)
        shutil.rmtree(target)
        return found

    def step(tensors, header):
        header["steps"] = json.dumps({key: value + 1 for key, value in json.loads(header["steps"]).items()})

    assert said(lambda tensors, header: None) == []
    (shape,) = said(lambda tensors, _: tensors.update(base=tensors["base"].view(5, 6)))
    assert shape.startswith("weight has another shape (parameter base): expected [6, 5], found [5, 6]")
    (dtype,) = said(lambda tensors, _: tensors.update(base=tensors["base"].to(torch.int64)))
    assert dtype.startswith("weight has another dtype (parameter base): expected float32, found int64")
    (step,) = said(step, "optimizer/optimizer.safetensors")
    assert step.startswith("the optimizer is at another step: expected ")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_random_damage_is_refused_or_harmless(tmp_path, stage):
    """A small, seeded part of ``benchmarks/campaigns/fuzz_converter.py``."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "campaigns"))
    import fuzz_converter

    report = fuzz_converter.campaign(tmp_path, [stage], sources=30, targets=40, formats=6, seed=7)
    assert report["failures"] == []
    outcomes = [outcome for counts in report["outcomes"].values() for outcome in counts]
    assert {"refused", "told", "accepted, same content"} <= set(outcomes)
