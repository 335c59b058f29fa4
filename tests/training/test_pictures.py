"""Models that see images train packed as on each sequence alone: losses and norms, on one process and on two."""

import pytest
import torch

from tests.support import picture_leaks, picture_parts, picture_types
from tests.support.small_runs import on_ranks, quiet, said_by_ullage
from ullage.core.batch import RaggedBatch
from ullage.mixers.ways import CompetingSequences
from ullage.training import RaggedCollator, Trainer


def assert_as_alone(ranks, model_type, options):
    """The steps of a loop by hand, one sequence after another."""
    parts = {name: value for name, value in options.items() if name in ("seed", "trains", "text_step")}
    expected = picture_types.by_hand(model_type, **parts)
    assert max(picture_types.difference(found, expected) for found in ranks) <= 1e-5


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_packed_steps_are_those_of_each_sequence_alone(kind, tmp_path):
    with said_by_ullage() as said:
        assert_as_alone([picture_types.run(kind, tmp_path, text_step=True)], kind, {"text_step": True})
    assert not any("weak" in line for line in said)


def test_the_collator_gives_each_sample_what_it_gets_alone():
    collator = RaggedCollator(processor=picture_parts.processor("qwen2_5_vl"))
    batch = collator(picture_parts.ROWS)
    assert isinstance(batch, RaggedBatch)
    assert set(batch.per_item) == {"pixel_values", "image_grid_thw"}
    for row, sample in zip(picture_parts.ROWS, batch.samples(), strict=True):
        (alone,) = collator([row]).samples()
        assert alone.keys() == sample.keys()
        assert all(torch.equal(alone[name], sample[name]) for name in alone)
    flat = RaggedCollator(processor=collator.processor, flattened=True)(picture_parts.ROWS[:3])
    assert flat["cu_seq_items"]["image_grid_thw"].tolist() == [0, 1, 1, 3]


#: Steps in which each rank has images, one has none, or (under DDP and FSDP) none has any.
CASES = {
    "ddp": ["qwen2_5_vl", {"text_step": True}],
    "ddp llava": ["llava", {"text_step": True}],
    "ddp frozen tower": ["qwen2_5_vl", {"trains": "text", "text_step": True}],
    "ddp adapters of the tower": ["qwen2_5_vl", {"trains": "adapters of the tower"}],
    "ddp adapters of text": ["llava", {"trains": "adapters of text", "text_step": True}],
    "fsdp": ["qwen2_5_vl", {"fsdp": "full_shard", "text_step": True}],
}
#: Where ranks gather a tower: rows with images and clips beside rows with one, and parts that see each other both ways.
#: ZeRO updates what has no gradient as if it were zero, so no step is of text alone.
SHARDED = {f"zero 2 {kind}": [kind, {"stage": 2}] for kind in ("qwen2_5_vl", "llava")}
SHARDED |= {
    f"zero 3 {kind}": [kind, {"stage": 3, "seed": s}] for kind, s in (("qwen2_5_vl", 1), ("gemma3", 0), ("llava", 0))
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cases", [CASES, SHARDED], ids=["ddp and fsdp", "zero"])
def test_two_ranks_train_as_on_each_sequence_alone(cases, tmp_path):
    ranks = on_ranks(2, picture_types, tmp_path, list(cases.values()), timeout=500)
    for at, (name, (kind, options)) in enumerate(cases.items()):
        assert_as_alone([rank[at] for rank in ranks], kind, options)
        assert picture_types.texts_beside_images([rank[at]["images"] for rank in ranks]), (
            f"{name}: no rank had text alone"
        )


# Planted: features of images that depend on the other images of their call. Whatever the first batch has, a run trains as
# on each sequence alone, or not at all.
@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize(("kind", "leak", "first", "capacity"), [
    ("llava", "mean, backward", "one image", 256),
    # Each sequence with images takes more than its share of the trial.
    pytest.param("llava", "std", "images", 86, marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", "sort", "images", 256, marks=pytest.mark.slow),
    ("qwen2_5_vl", "max in training", "text", 49),
])  # fmt: skip
def test_images_that_meet_train_as_each_sequence_alone_from_whatever_step_they_come_in(
    kind, leak, first, capacity, tmp_path
):
    found = picture_leaks.run(kind, leak, first, tmp_path, packing_capacity=capacity)
    assert picture_leaks.off(found, kind, leak, first) < 1e-6, found
    assert found["ways"][-1] == "whole by lengths, images by sequences"
    assert found["ways"][0].startswith("native" if first == "text" else "whole")


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize(("kind", "part", "first"), [("llava", "own mean", "text"), ("qwen2_5_vl", None, "one image")])
def test_images_that_do_not_meet_stay_in_the_row(kind, part, first, tmp_path):
    found = picture_leaks.run(kind, part, first, tmp_path)
    assert picture_leaks.off(found, kind, part, first) < 1e-6, found
    assert found["ways"] == ["native, images by row"] * picture_leaks.STEPS


@pytest.mark.regression
def test_a_norm_over_the_images_of_a_batch_is_refused(tmp_path):
    found = picture_leaks.run("llava", "batch norm", "text", tmp_path)
    assert found["error"].startswith(f"{CompetingSequences.__name__}: ")
    assert "model.norm (BatchNorm1d)" in found["error"]


@pytest.mark.slow
@pytest.mark.regression
def test_images_that_first_come_in_an_evaluation_are_evaluated_as_each_alone(tmp_path):
    found = []
    for capacity in (256, None):
        size = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4 if capacity else 1}
        options = {"max_steps": 1, "remove_unused_columns": False, "train_sampling_strategy": "sequential", **size}
        options |= {"eval_strategy": "steps", "eval_steps": 1}
        data = [picture_leaks.samples("llava", first)[:4] for first in ("text", "images")]
        model = picture_leaks.make("llava", "mean")
        trainer = Trainer(model, quiet(tmp_path, packing_capacity=capacity, **options), RaggedCollator(), *data)
        trainer.train()
        found += [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.regression
# Under ZeRO a step of text alone counts as one of zeros for the tower, unlike in a loop by hand.
@pytest.mark.parametrize(("way", "first"), [({"stage": 3}, "one image"), ({"fsdp": "full_shard"}, "text")], ids=str)
def test_ranks_that_gather_a_tower_prove_it_with_images(way, first, tmp_path):
    cases = [["llava", "mean", "text", way], ["llava", "mean", "images", way], ["llava", "own mean", first, way]]
    for *meeting, exact in on_ranks(2, picture_leaks, tmp_path, cases, timeout=500):
        assert all("SequencesMeet" in each["error"] and "first in model (Own)" in each["error"] for each in meeting)
        assert picture_leaks.off(exact, "llava", "own mean", first) < 1e-6
        assert exact["ways"] == ["native, images by row"] * picture_leaks.STEPS
