"""Models that see images train packed as they train padded: losses, norms, evaluation; on one process and on two."""

import pytest
import torch

from tests.support import picture_parts, picture_script
from tests.support.small_runs import said_by_ullage
from ullage.core.batch import RaggedBatch
from ullage.training import RaggedCollator

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
