"""A name that two pipeline stages hold is one parameter only if their values are equal."""

import re
import shutil

import numpy as np
import pytest
import torch

from tests.support import real_zero
from tests.support.checkpoints import contents, edit
from tests.support.real_zero import Recipe
from tests.support.zero_kinds import require_whole, run_kind
from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression

STAGES = [[{"embed.weight": (8, 6), "first": (5,)}], [{"second": (7,), "embed.weight": (8, 6)}]]
PATTERNS = {"universal_checkpoint_version": 0.2, "pipeline_replicated_parameter_patterns": ["embed.*"]}
DEGREES = {"tp_degree": 1, "pp_degree": 2}


@pytest.fixture
def tied(tmp_path):
    """Two stages that hold the tied embedding alike, first in the one and last in the other."""
    written = real_zero.write(tmp_path / "run", Recipe(stage=1, dp=2, pp=2, per_rank=STAGES, info=PATTERNS))
    for path in written.tag_folder.glob("*model_states.pt"):
        edit(path, lambda content: content.update(checkpoint_parallel_dimensions=DEGREES))
    return written


@pytest.mark.parametrize("declared", [True, False])
def test_a_tied_weight_that_is_equal_in_both_stages_is_converted_and_said(tied, tmp_path, declared):
    if not declared:
        forget(tied)
    report = checkpoint.convert(tied.folder, tmp_path / "out")
    said = [note for note in report.notes if "embed.weight is in 2 pipeline stages" in note]
    assert said == ["embed.weight is in 2 pipeline stages; they are compared, and the first is taken"]
    for key in ("fp32", "exp_avg"):
        found = torch.load(tmp_path / "out" / "zero" / "embed.weight" / f"{key}.pt", weights_only=True)["param"]
        assert np.array_equal(found.numpy(), tied.tensor("embed.weight", key))
    assert checkpoint.verify(tied.folder, tmp_path / "out") == []


def forget(written):
    """As if no description said which names are tied."""
    for path in written.tag_folder.glob("*.pt"):

        def change(content):
            content.pop("universal_checkpoint_info", None)
            content.get("optimizer_state_dict", {}).pop("universal_checkpoint_info", None)

        edit(path, change)


@pytest.mark.parametrize("key", ["fp32", "exp_avg_sq"])
def test_two_values_of_one_name_are_refused(tied, tmp_path, key):
    """The first stage's was taken and the other dropped, whatever it was."""
    wanted = tied.tensor("embed.weight", key).tobytes()[40:80]
    for path in tied.tag_folder.glob("*_mp_rank_01_optim_states.pt"):

        def drift(content):
            optimizer = content["optimizer_state_dict"]
            flat = optimizer["single_partition_of_fp32_groups"][0]
            flat = flat if key == "fp32" else optimizer["base_optimizer_state"]["state"][0][key]
            at = flat.detach().numpy().tobytes().find(wanted)
            if at >= 0:
                flat.data[at // 4] += 1

        edit(path, drift)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.convert(tied.folder, tmp_path / "out")
    assert re.match(
        rf"pipeline stages hold different values of one parameter \(.*parameter embed.weight\): "
        rf"found {key} differs in 1 of 48 elements, first in 10\.",
        str(caught.value),
    )
    assert contents(tmp_path) == before
    if key != "fp32":  # the weights agree
        checkpoint.convert(tied.folder, tmp_path / "st", format="safetensors")
        assert checkpoint.verify(tied.folder, tmp_path / "st") == []


def test_two_shapes_of_one_name_are_refused(tmp_path):
    stages = [[{"w": (8, 6)}], [{"w": (6, 8)}]]
    written = real_zero.write(tmp_path / "run", Recipe(stage=1, dp=1, pp=2, per_rank=stages))
    for path in written.tag_folder.glob("*model_states.pt"):
        edit(path, lambda content: content.update(checkpoint_parallel_dimensions=DEGREES))
    with pytest.raises(CheckpointError, match=r"pipeline stages hold different tensors of one name .*parameter w"):
        checkpoint.convert(written.folder, tmp_path / "out")


# Pipelines on DeepSpeed's own topology


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A real pipeline of two stages with frozen weights and running means; see ``run_kind``."""
    return run_kind(tmp_path_factory.mktemp("grid"), "grid pipeline")


@pytest.mark.parametrize("described", [True, False], ids=["as written today", "without parallel dimensions"])
def test_a_pipeline_keeps_what_no_optimizer_holds(grid, tmp_path, described):
    """Frozen weights and buffers vanished: the layers' files have no tensor-parallel rank in their names."""
    source, truth = copied(grid, tmp_path)
    if not described:  # as before 0.19
        for path in source.rglob("mp_rank_*_model_states.pt"):
            edit(path, lambda content: content.pop("checkpoint_parallel_dimensions"))
    inventory = checkpoint.read(source)
    assert (inventory.written_by.tp, inventory.written_by.pp) == (1, 2)
    assert {f"{t.name}/{t.key}" for t in inventory.tensors} == set(truth)
    assert {t.name for t in inventory.tensors if t.kind == "buffer"} == {"1.mean", "4.mean"}
    require_whole(source, truth, tmp_path)


def unlink(*paths):
    for path in paths:
        path.unlink()


@pytest.mark.parametrize(("damage", "said"), [
    (lambda step: unlink(step / "layer_01-model_states.pt"), "the file of a layer is missing .*layer_01-model_states"),
    (lambda step: unlink(step / "layer_04-model_states.pt"), "the file of a layer is missing .*layer_04-model_states"),
    # A layer of the shapes of a tied one, which nothing else tells from it, has other values.
    (lambda step: edit(step / "layer_00-model_states.pt", lambda content: content["weight"].add_(1)),
     "different values of one parameter .*tied_modules.embed.weight"),
    # The ranks of a stage without files are not taken for ranks that share the sequences of the first.
    (lambda step: unlink(*step.glob("*mp_rank_01*")), "the files say that 2 model ranks|is missing"),
], ids=["a layer", "a layer of the last stage", "a frozen layer", "a stage"])  # fmt: skip
def test_damage_to_a_pipeline_is_noticed(grid, tmp_path, damage, said):
    source, _ = copied(grid, tmp_path)
    damage(source / "global_step3")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(source, tmp_path / "out")


def test_layers_without_a_file_are_said(grid, tmp_path):
    """Nothing tells a layer of frozen weights alone from a function, so that is said."""
    source, _ = copied(grid, tmp_path)
    (source / "global_step3" / "layer_03-model_states.pt").unlink()
    assert [note for note in checkpoint.read(source).notes if "have no file" in note] == [
        "layers [2, 3] of the pipeline have no file: right for functions and tied layers; of a layer of frozen weights "
        "alone, nothing else would tell"
    ]


def copied(run, tmp_path):
    folder, truth, _ = run
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", truth
