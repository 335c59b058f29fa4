"""Experts of DeepSpeed's own layers, by its own writer: what lies where, and what is refused."""

import json
import re
import shutil

import pytest
import torch

from tests.support import real_zero
from tests.support.checkpoints import assert_is_the_truth, edit, refused, universal
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.cli.inspect import inspect
from ullage.core.errors import CheckpointError

#: Two layers, whose experts divide nothing; one parameter is of one element.
EXPERTS = {"first": (4, {"w": (3, 5), "b": (7,)}), "second": (8, {"w": (5, 3), "one": (1,)})}


def recipe(dp, ep, **more):
    return Recipe(dp=dp, ep=ep, groups=[{"w": (5, 7)}, {"b": (3,)}], experts=EXPERTS, **more)


RECIPE = recipe(4, 2)


@pytest.mark.slow
def test_experts_come_back_under_their_numbers_among_all(written, tmp_path, capsys):
    inventory = checkpoint.read(written.folder)
    assert inventory.problems() == []
    assert inventory.notes == ()
    assert (inventory.written_by.ep, inventory.written_by.experts) == ((2,), (4, 8))
    # Two groups of all ranks, and two of experts, each of which is one per expert-parallel rank, cut over two ranks.
    cuts = [(g.index, g.ep_rank, g.num_shards) for g in inventory.groups]
    assert cuts == [(0, None, 4), (1, None, 4), (2, 0, 2), (2, 1, 2), (3, 0, 2), (3, 1, 2)]
    checkpoint.convert(inventory, tmp_path / "universal")
    assert_is_the_truth(tmp_path / "universal", written)
    assert checkpoint.verify(written.folder, tmp_path / "universal") == []
    inspect(written.folder, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["ep"], said["experts"], said["groups"][3]["ep_rank"]) == ([2], [4, 8], 1)
    inspect(written.folder)
    assert "4 or 8 in each of 2 layers, ep 2" in capsys.readouterr().out


@pytest.mark.matrix
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


EXPERT = "layer_1_expert_5_mp_rank_00_model_states.pt"
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def first_of(content):
    return next(iter(content))


def partition(content):
    return content["optimizer_state_dict"]["partition_count"]


def cut_by(run, counts):
    for path in run.glob("zero_pp_rank_*"):
        edit(path, lambda content: partition(content).__setitem__(slice(2, None), counts))


def reshape(content):
    content["param_shapes"][3].update({first_of(content["param_shapes"][3]): torch.Size([3, 5])})


UNTOLD = "do not tell the size of expert parallelism.*ep_size_2"
DAMAGE = {
    "a missing expert": (lambda run: (run / EXPERT).unlink(), f"the file of an expert is missing .*{EXPERT}"),
    "a shape": (
        lambda run: edit(run / EXPERT, lambda content: content.update({first_of(content): torch.zeros(3, 3)})),
        f"the experts of a layer differ in shape .*{EXPERT}",
    ),
    "shapes of the model states": (lambda run: edit(run / MODEL, reshape), "an expert of another shape"),
    "another expert": (
        lambda run: shutil.copy(run / EXPERT.replace("5", "6"), run / EXPERT),
        f"the file of an expert holds another one .*{EXPERT}",
    ),
    "shards that disagree": (
        lambda run: edit(run / SHARD, lambda content: partition(content).__setitem__(3, 4)),
        f"shards disagree on the world size .*{SHARD}",
    ),
    "a cut of 0": (lambda run: cut_by(run, [0, 0]), UNTOLD),
    "a cut of 3": (lambda run: cut_by(run, [3, 3]), UNTOLD),
    "a cut of 8": (lambda run: cut_by(run, [8, 8]), UNTOLD),
    "a cut that divides": (lambda run: cut_by(run, [1, 1]), "a rank holds more experts than its share"),
    "a group of both": (
        lambda run: edit(run / MODEL, lambda content: content["param_shapes"][2].update(stranger=torch.Size([2]))),
        "a group holds experts and other parameters",
    ),
}


@pytest.mark.parametrize("which", DAMAGE)
def test_damage_to_experts_is_refused_by_name(run, tmp_path, which):
    damage, said = DAMAGE[which]
    damage(run)
    refused(run, tmp_path / "out", said)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("expp_rank_0_mp_rank_00_optim_states.pt", {"optimizer": {"state": {}}}, "experts without ZeRO"),
    ("expert_0_mp_rank_00_model_states.pt", {}, "does not number its layers"),
    ("layer_7_expert_0_mp_rank_00_model_states.pt", {}, "that the model states do not know"),
])  # fmt: skip
def test_files_of_other_writers_are_refused_by_name(run, tmp_path, name, content, says):
    torch.save(content, run / name)
    assert name in str(refused(run, tmp_path / "out", says))


def test_empty_optimizer_files_of_old_versions_are_passed_over(run):
    torch.save({"optimizer": None}, run / "expp_rank_0_mp_rank_00_optim_states.pt")
    assert checkpoint.read(run).problems() == []


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("dp", "ep", "more"), [
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
])  # fmt: skip
def test_layouts(dp, ep, more, tmp_path):
    truth = real_zero.write(tmp_path / "run", recipe(dp, ep, **more))
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert inventory.written_by.ep == (ep,)
    checkpoint.convert(inventory, tmp_path / "universal")
    assert_is_the_truth(tmp_path / "universal", truth)


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
            got = universal(tmp_path / "universal", name, key)
            parts = [torch.from_numpy(truth.tensor(name, key, rank)) for rank in range(2)]
            whole = any(re.match(pattern, name) for pattern in REPLICATED)
            cut = 1 if name.startswith("second") and name.endswith(".w") else 0
            assert torch.equal(got, parts[0] if whole else torch.cat(parts, cut)), (name, key)


@pytest.mark.slow
def test_experts_divided_among_tensor_parallel_ranks_are_refused(tmp_path):
    truth = real_zero.write(tmp_path / "run", _sliced(slices_experts=False))
    with pytest.raises(CheckpointError, match="divided among tensor-parallel ranks are not supported"):
        checkpoint.read(truth.folder)
