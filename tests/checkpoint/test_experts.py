"""Experts of DeepSpeed's own layers, by its own writer: what lies where, and what is refused."""

import json
import re
import shutil

import pytest
import torch

from tests.support import real_zero
from tests.support.real_zero import SENTINEL, Recipe
from ullage import checkpoint
from ullage.cli.inspect import inspect
from ullage.core.errors import CheckpointError

#: Two layers, whose experts divide nothing; one parameter is of one element.
EXPERTS = {"first": (4, {"w": (3, 5), "b": (7,)}), "second": (8, {"w": (5, 3), "one": (1,)})}


def recipe(dp, ep, **more):
    return Recipe(dp=dp, ep=ep, groups=[{"w": (5, 7)}, {"b": (3,)}], experts=EXPERTS, **more)


def differences(truth, folder):
    """Every tensor of a universal folder that is not what was written, bit for bit, and every name too many."""
    held = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    found = sorted(held ^ truth.shapes().keys())
    for name in held & truth.shapes().keys():
        for key in truth.keys:
            got = torch.load(folder / "zero" / name / f"{key}.pt", weights_only=True)["param"]
            if (got == SENTINEL).any() or not torch.equal(got, torch.from_numpy(truth.tensor(name, key))):
                found.append(f"{name} {key}")
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return real_zero.write(tmp_path_factory.mktemp("experts") / "run", recipe(4, 2))


def test_experts_come_back_under_their_numbers_among_all(written, tmp_path, capsys):
    inventory = checkpoint.read(written.folder)
    assert inventory.problems() == []
    assert inventory.notes == ()
    assert (inventory.written_by.ep, inventory.written_by.experts) == ((2,), (4, 8))
    # Two groups of all ranks, and two of experts, each of which is one per expert-parallel rank, cut over two ranks.
    cuts = [(g.index, g.ep_rank, g.num_shards) for g in inventory.groups]
    assert cuts == [(0, None, 4), (1, None, 4), (2, 0, 2), (2, 1, 2), (3, 0, 2), (3, 1, 2)]
    checkpoint.convert(inventory, tmp_path / "universal")
    assert differences(written, tmp_path / "universal") == []
    assert checkpoint.verify(written.folder, tmp_path / "universal") == []
    inspect(written.folder, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["ep"], said["experts"], said["groups"][3]["ep_rank"]) == ([2], [4, 8], 1)
    inspect(written.folder)
    assert "4 or 8 in each of 2 layers, ep 2" in capsys.readouterr().out


@pytest.mark.regression
@pytest.mark.parametrize("format", ["zero1", "zero2", "zero3"])
def test_shards_of_experts_are_refused_from_every_format_that_can_hold_them(written, tmp_path, format):
    """An engine asks for a file of each expert, which these shards would not have."""
    sources = [written.folder]
    for held in ("universal", "safetensors", "dcp"):
        sources.append(tmp_path / held)
        checkpoint.convert(written.folder, sources[-1], format=held, optimizer=None if held == "universal" else True)
    for source in sources:
        for optimizer in (None, False):
            with pytest.raises(CheckpointError, match=r"shards of experts are not written: .*Use --to universal"):
                checkpoint.convert(source, tmp_path / "out", format=format, ranks=4, optimizer=optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "latest_universal", "safetensors", "universal"]


# Bad input: one clear error each, and nothing written


def _edited(truth, tmp_path, name, edit):
    folder = tmp_path / "edited"
    shutil.copytree(truth.tag_folder, folder)
    content = torch.load(folder / name, weights_only=False)
    edit(content)
    torch.save(content, folder / name)
    return folder


def _refusal(folder, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.convert(folder, tmp_path / "target")
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    return str(caught.value)


EXPERT = "layer_1_expert_5_mp_rank_00_model_states.pt"
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def test_a_missing_expert_is_named(written, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(written.tag_folder, folder)
    (folder / EXPERT).unlink()
    message = _refusal(folder, tmp_path)
    assert "the file of an expert is missing" in message
    assert EXPERT in message


def test_an_expert_of_another_shape_is_named(written, tmp_path):
    def edit(content):
        name = next(iter(content))
        content[name] = torch.zeros(3, 3)

    message = _refusal(_edited(written, tmp_path, EXPERT, edit), tmp_path)
    assert "the experts of a layer differ in shape" in message
    assert EXPERT in message


def test_shapes_that_are_not_those_of_the_files_are_refused(written, tmp_path):
    def edit(content):
        shapes = content["param_shapes"][3]
        shapes[next(iter(shapes))] = torch.Size([3, 5])

    assert "an expert of another shape" in _refusal(_edited(written, tmp_path, MODEL, edit), tmp_path)


def test_the_file_of_another_expert_is_refused(written, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(written.tag_folder, folder)
    shutil.copy(folder / EXPERT.replace("5", "6"), folder / EXPERT)
    message = _refusal(folder, tmp_path)
    assert "the file of an expert holds another one" in message
    assert EXPERT in message


def test_optimizer_files_that_disagree_on_the_cut_are_refused(written, tmp_path):
    def edit(content):
        content["optimizer_state_dict"]["partition_count"][3] = 4

    message = _refusal(_edited(written, tmp_path, SHARD, edit), tmp_path)
    assert "shards disagree on the world size" in message
    assert SHARD in message


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_cut_that_does_not_tell_ep_is_refused(written, tmp_path, count):
    folder = tmp_path / "edited"
    shutil.copytree(written.tag_folder, folder)
    for path in folder.glob("zero_pp_rank_*"):
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"]["partition_count"][2:] = [count, count]
        torch.save(content, path)
    message = _refusal(folder, tmp_path)
    assert "the files do not tell the size of expert parallelism" in message
    assert "ep_size_2" in message


def test_a_wrong_cut_that_divides_the_ranks_is_refused(written, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(written.tag_folder, folder)
    for path in folder.glob("zero_pp_rank_*"):
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"]["partition_count"][2:] = [1, 1]
        torch.save(content, path)
    assert "a rank holds more experts than its share" in _refusal(folder, tmp_path)


def test_a_group_of_experts_and_others_is_refused(written, tmp_path):
    def edit(content):
        content["param_shapes"][2]["stranger"] = torch.Size([2])

    assert "a group holds experts and other parameters" in _refusal(_edited(written, tmp_path, MODEL, edit), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("expp_rank_0_mp_rank_00_optim_states.pt", {"optimizer": {"state": {}}}, "experts without ZeRO"),
        ("expert_0_mp_rank_00_model_states.pt", {}, "does not number its layers"),
        ("layer_7_expert_0_mp_rank_00_model_states.pt", {}, "that the model states do not know"),
    ],
)
def test_files_of_other_writers_are_refused_by_name(written, tmp_path, name, content, says):
    folder = tmp_path / "edited"
    shutil.copytree(written.tag_folder, folder)
    torch.save(content, folder / name)
    message = _refusal(folder, tmp_path)
    assert says in message
    assert name in message


def test_empty_optimizer_files_of_old_versions_are_passed_over(written, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(written.tag_folder, folder)
    torch.save({"optimizer": None}, folder / "expp_rank_0_mp_rank_00_optim_states.pt")
    assert checkpoint.read(folder).problems() == []


# Other sizes and layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "ep", "more"),
    [
        (1, 1, {}),
        (2, 2, {"stage": 2}),
        (4, 4, {"dtype": "bf16"}),
        (6, 2, {"dtype": "bf16_optimizer"}),
        (4, 2, {"data_before": True}),
        (4, 2, {"alignment": True}),
        (4, 1, {"elastic": True, "stage": 2}),
        (4, 2, {"optimizer": "sgd"}),
        (4, 2, {"round_robin": True, "stage": 2}),
        (24, 4, {}),  # most ranks hold padding alone of most groups
    ],
)
def test_layouts(dp, ep, more, tmp_path):
    truth = real_zero.write(tmp_path / "run", recipe(dp, ep, **more))
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert inventory.written_by.ep == (ep,)
    checkpoint.convert(inventory, tmp_path / "universal")
    assert differences(truth, tmp_path / "universal") == []


REPLICATED = [r".*gate.*", r"^[wb]$", r".*\.one$"]


def _sliced(**more):
    info = {"universal_checkpoint_version": 0.2, "tp_replicated_parameter_patterns": REPLICATED}
    info["parameter_with_row_parallelism_patterns"] = [r"second.*\.w$"]
    return recipe(4, 2, tp=2, info=info, **more)


@pytest.mark.slow
def test_slices_of_experts_are_joined(tmp_path):
    truth = real_zero.write(tmp_path / "run", _sliced())
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert (inventory.written_by.dp, inventory.written_by.tp, inventory.written_by.ep) == (4, 2, (2,))
    checkpoint.convert(inventory, tmp_path / "universal")
    for name in truth.shapes():
        for key in truth.keys:
            got = torch.load(tmp_path / "universal" / "zero" / name / f"{key}.pt", weights_only=True)["param"]
            parts = [torch.from_numpy(truth.tensor(name, key, rank)) for rank in range(2)]
            whole = any(re.match(pattern, name) for pattern in REPLICATED)
            cut = 1 if name.startswith("second") and name.endswith(".w") else 0
            assert torch.equal(got, parts[0] if whole else torch.cat(parts, cut)), (name, key)


@pytest.mark.slow
def test_experts_divided_among_tensor_parallel_ranks_are_refused(tmp_path):
    truth = real_zero.write(tmp_path / "run", _sliced(slices_experts=False))
    with pytest.raises(CheckpointError, match="divided among tensor-parallel ranks are not supported"):
        checkpoint.read(truth.folder)
