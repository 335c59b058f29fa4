"""TRL's SFT and DPO on conversations with images: packed they have the numbers that TRL has on padded rows."""

import pytest
import torch

from tests.support import trl_pictures
from tests.support.small_runs import on_ranks
from tests.support.trl_preferences import build
from ullage import InputError
from ullage.core.batch import RaggedBatch

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # what TRL will take away


def assert_same(found, wanted):
    """Every number that TRL logs, of each step and of the evaluation."""
    assert len(found["logged"]) == len(wanted["logged"])
    for mine, theirs in zip([*found["logged"], found["eval"]], [*wanted["logged"], wanted["eval"]], strict=True):
        assert {key: mine[key] for key in theirs} == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def compare(name, kind, folder, capacity, **options):
    found = trl_pictures.run(name, kind, folder, capacity=capacity, **options)
    assert all(len(step) > 1 and max(step) > name.count("DPO") + 1 for step in found["sequences"])
    assert_same(found, trl_pictures.run(name, kind, folder, **options))


@pytest.mark.slow
def test_sft_with_images_is_that_of_padded_rows(tmp_path):
    compare("SFT", "qwen2_5_vl", tmp_path, 96, max_steps=3)


@pytest.mark.matrix
@slow
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("SFT", "llava", {}),
        ("SFT", "qwen2_5_vl", {"completions": True, "activation_checkpointing": True}),
        ("SFT", "llava", {"assistant_only_loss": True, "loss_type": "dft"}),
        ("DPO", "llava", {}),
        ("DPO", "qwen2_5_vl", {"lora": True, "activation_checkpointing": True}),
    ],
)
def test_five_steps_are_those_of_padded_rows(name, kind, options, tmp_path):
    compare(name, kind, tmp_path, 180 if name == "DPO" else 96, **options)


#: Steps in which one rank has images and the other none, and one of text alone.
RANKS = {
    "sft": ["SFT", "qwen2_5_vl", {"capacity": 96}],
    "dpo adapters": ["DPO", "llava", {"capacity": 180, "lora": True}],
}


@slow
@pytest.mark.distributed
def test_two_ranks_train_as_one_process_on_padded_rows(tmp_path):
    ranks = on_ranks(2, trl_pictures, tmp_path, list(RANKS.values()))
    for at, (name, kind, options) in enumerate(RANKS.values()):
        alone = {key: value for key, value in options.items() if key != "capacity"}
        wanted = trl_pictures.run(name, kind, tmp_path / "alone", **alone)
        for rank in ranks:
            assert_same(rank[at], wanted)
        of_steps = [sum(step) for rank in ranks for step in rank[at]["items"]]
        assert 0 in of_steps, "no rank was without images"
        assert any(of_steps)


def test_pairs_come_with_the_images_of_each_sequence(tmp_path):
    trainer = trl_pictures.build("DPO", "qwen2_5_vl", tmp_path, capacity=180)
    rows = list(trainer.train_dataset)
    batch = trainer.data_collator(rows)
    assert batch["cu_seq_items"]["image_grid_thw"].diff().tolist() == [len(row["images"]) for row in rows] * 2
    ragged = trainer._packer.padded_loss.to_ragged(batch)
    assert isinstance(ragged, RaggedBatch)
    assert ragged.items["image_grid_thw"].lengths.tolist() == [len(row["images"]) for row in rows for _ in "cr"]
    chosen, rejected = ragged.samples()[4:6]
    assert torch.equal(chosen["pixel_values"], rejected["pixel_values"])
    theirs = {name: value for name, value in batch.items() if name != "cu_seq_items"}
    with pytest.raises(InputError, match="nobody says which images belong to which sequence"):
        trainer._packer.padded_loss.to_ragged(theirs)


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_a_cut_image_is_named(name, tmp_path):
    trainer = trl_pictures.build(name, "qwen2_5_vl", tmp_path, capacity=180, completions=True, max_length=10)
    with pytest.raises(InputError, match=r"max_length cuts an image \(sample 1 of the batch\): .*max_length=10"):
        trainer.data_collator([trainer.train_dataset[at] for at in (1, 0)])


@slow
def test_other_trainers_refuse_images_under_packing(tmp_path):
    trainer = build("KTO", tmp_path, capacity=80)
    trainer._packer.require_packable()
    trainer._is_vision_dataset = True  # as TRL marks a trainer whose data have a column of images
    with pytest.raises(InputError, match=r"data with images cannot be packed .*SFTTrainer and DPOTrainer take images"):
        trainer._packer.require_packable()
