"""Models that see images train packed as they train padded: losses, norms, evaluation; on one process and on two."""

import pytest
import torch

from tests.support import picture_leaks, picture_parts, picture_script, picture_types
from tests.support.small_runs import on_ranks, quiet, said_by_ullage
from ullage.core.batch import RaggedBatch
from ullage.mixers.ways import CompetingSequences
from ullage.training import RaggedCollator, Trainer

KINDS = ("qwen2_5_vl", "llava")


def assert_same(result, reference):
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-5)
    assert result["eval_loss"] == pytest.approx(reference["eval_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """What transformers' own Trainer makes of padded rows."""
    return {
        kind: picture_script.run(kind, tmp_path_factory.mktemp("padded"), packed=False, trains=trains)
        for kind, trains in [(kind, "all") for kind in KINDS]
    }


@pytest.mark.parametrize("kind", KINDS)
def test_packed_steps_are_the_padded_ones(kind, padded, tmp_path):
    with said_by_ullage() as said:
        assert_same(picture_script.run(kind, tmp_path), padded[kind])
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


#: Steps in which each rank has images, one has none, or (under DDP) none has any.
CASES = {
    "ddp": ["qwen2_5_vl", {}],
    "ddp llava": ["llava", {}],
    "ddp frozen tower": ["qwen2_5_vl", {"trains": "text"}],
    "ddp adapters of the tower": [
        "qwen2_5_vl",
        {"trains": "adapters of the tower", "rows": "mixed", "packing_capacity": 80},
    ],
    "ddp adapters of text": ["llava", {"trains": "adapters of text"}],
    "fsdp": ["qwen2_5_vl", {"fsdp": "full_shard"}],
}
SHARDED = {
    f"zero {stage} {kind}": [kind, {"stage": stage, "rows": "mixed", "packing_capacity": 80}]
    for stage in (2, 3)
    for kind in KINDS
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cases", [CASES, SHARDED], ids=["ddp and fsdp", "zero"])
def test_two_ranks_train_as_one_process_on_padded_rows(cases, tmp_path):
    ranks = on_ranks(2, picture_script, tmp_path, list(cases.values()), timeout=500)
    for at, (name, (kind, options)) in enumerate(cases.items()):
        alone = {key: value for key, value in options.items() if key in ("trains", "rows")}
        reference = picture_script.run(kind, tmp_path / "alone", packed=False, **alone)
        for rank in ranks:
            assert_same(rank[at], reference)
        assert any(count == 0 for rank in ranks for count in rank[at]["images"]), f"{name}: no rank was without images"


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_that_gather_a_tower_train_on_images_and_clips_as_on_each_sequence_alone(tmp_path):
    # Rows with both kinds beside rows with one; and parts that see each other both ways.
    cases = [["qwen2_5_vl", {"seed": 1, "stage": 3}], ["gemma3", {"seed": 0, "stage": 3}]]
    ranks = on_ranks(2, picture_types, tmp_path, cases, timeout=500)
    for at, (model_type, options) in enumerate(cases):
        alone = picture_types.by_hand(model_type, options["seed"])
        assert all(picture_types.difference(rank[at], alone) <= 1e-5 for rank in ranks)
        assert picture_types.texts_beside_images([rank[at]["images"] for rank in ranks])


# Planted: features of images that depend on the other images of their call. Whatever the first batch has, a run trains as
# on each sequence alone, or not at all.
@pytest.mark.regression
@pytest.mark.parametrize(("kind", "leak", "first", "capacity"), [
    ("llava", "mean", "text", 256),
    ("llava", "mean, backward", "one image", 256),
    ("llava", "std", "images", 86),  # each sequence with images takes more than its share of the trial
    ("qwen2_5_vl", "sort", "images", 256),
    ("qwen2_5_vl", "max in training", "text", 49),
])  # fmt: skip
def test_images_that_meet_train_as_each_sequence_alone_from_whatever_step_they_come_in(
    kind, leak, first, capacity, tmp_path
):
    found = picture_leaks.run(kind, leak, first, tmp_path, packing_capacity=capacity)
    assert picture_leaks.off(found, kind, leak, first) < 1e-6, found
    assert found["ways"][-1] == "backbone by lengths, images by sequences"
    assert found["ways"][0].startswith("native" if first == "text" else "backbone")


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


@pytest.mark.regression
def test_images_that_first_come_in_an_evaluation_are_evaluated_as_each_alone(tmp_path):
    found = []
    for leak in ("mean", "own mean"):
        for capacity in (256, None):
            trainer = Trainer(
                picture_leaks.make("llava", leak),
                quiet(
                    tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, packing_capacity=capacity,
                    per_device_train_batch_size=4, per_device_eval_batch_size=4 if capacity else 1,
                    train_sampling_strategy="sequential", remove_unused_columns=False,
                ),
                train_dataset=picture_leaks.samples("llava", "text")[:4],
                eval_dataset=picture_leaks.samples("llava", "images")[:4],
                data_collator=RaggedCollator(),
            )  # fmt: skip
            trainer.train()
            found.append(next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[2] == pytest.approx(found[3], rel=1e-6)


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
