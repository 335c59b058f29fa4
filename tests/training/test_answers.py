"""Question answering: the places of answers count from the first token of a sequence, wherever its padding was."""

import numpy as np
import pytest
import torch
from transformers import default_data_collator

from tests.support import packed_models
from tests.support.small_runs import logged, quiet
from ullage import RaggedBatch
from ullage.training import PackedSequenceCollator, RaggedCollator, Trainer

#: Width of padded rows; the lengths of the sequences in them.
WIDTH, LENGTHS = 52, (5, 24, 1, 9, 17, 3, 30, 2)
STARTS = [0, 3, 0, 8, 5, 1, 29, 1]


def samples_of(side):
    """The samples as a tokenizer pads them on a side, or does not (None); an answer of nothing is at the first token."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length, start in zip(LENGTHS, STARTS, strict=True):
        ids = torch.randint(3, packed_models.VOCAB, (length,), generator=generator).tolist()
        blank = 0 if side is None else WIDTH - length
        left, right = (blank, 0) if side == "left" else (0, blank)
        places = {"start_positions": start + left, "end_positions": length - 1 + left if start else left}
        if not start and side == "left" and length == 5:
            places = {"start_positions": 0, "end_positions": 0}  # as run_qa marks no answer for a tokenizer without CLS
        mask = [0] * left + [1] * length + [0] * right
        samples.append({"input_ids": [0] * left + ids + [0] * right, "attention_mask": mask, **places})
    return samples


def trained(folder, samples, collator, **options):
    torch.manual_seed(0)
    model = packed_models.make_model("llama_answers").double()
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "packing_capacity": 40, **options}
    arguments = quiet(folder, learning_rate=1e-2, train_sampling_strategy="sequential", **options)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=samples)
    trainer.train()
    return logged(trainer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses and norms of the samples as they are, packed."""
    return trained(tmp_path_factory.mktemp("plain"), samples_of(None), RaggedCollator())


@pytest.mark.regression
@pytest.mark.parametrize("collator", [RaggedCollator(), default_data_collator], ids=["ours", "transformers'"])
def test_padded_samples_train_as_plain_ones(tmp_path, plain, collator):
    found = trained(tmp_path, samples_of("left"), collator)
    assert min(norm for _, norm in found) > 0.1
    np.testing.assert_allclose(found, plain, rtol=1e-6)


@pytest.mark.regression
@pytest.mark.parametrize("capacity", [40, 4096])
def test_answers_behind_their_sequences_do_not_count(tmp_path, capacity):
    """As in padded rows of their length: the mean is over the others, where it was not a number."""
    samples = samples_of(None)
    for k in (1, 4, 5):
        samples[k] |= {"start_positions": 600, "end_positions": 601}
    model = packed_models.make_model("llama_answers").double()
    counted = [sample for k, sample in enumerate(samples[:4]) if k != 1]
    losses = [model(**RaggedCollator()([sample]).to_padded()).loss for sample in counted]
    torch.stack(losses).mean().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = trained(tmp_path, samples, RaggedCollator(), packing_capacity=capacity)
    assert found[0] == pytest.approx((float(sum(losses) / 3), float(torch.nn.utils.get_total_norm(grads))), rel=1e-6)
    assert found[1][0] > 0.1


@pytest.mark.regression
def test_every_collator_moves_places(tmp_path):
    plain, left = samples_of(None), samples_of("left")
    batch = RaggedCollator()(left)
    assert batch["start_positions"].tolist() == STARTS
    assert batch["end_positions"].tolist() == [sample["end_positions"] for sample in plain]
    assert PackedSequenceCollator()(left)["start_positions"].tolist() == STARTS
    # A list of one place, which transformers squeezes, in a row of one token too.
    rows = [{"input_ids": [0, 7], "attention_mask": [0, 1], "start_positions": [1], "end_positions": [1]}] * 2
    found = RaggedCollator(per_sequence=("start_positions", "end_positions"))(rows)
    assert found["start_positions"].tolist() == [[0]] * 2


@pytest.mark.parametrize("places", [[0, 4, 3], [[0], [4], [3]]])
def test_places_follow_the_side_of_padding(places):
    """What lies behind a row stays behind its sequence; what lies in the padding before it is its first token."""
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]])
    fields = {"input_ids": mask * 7, "start_positions": torch.tensor(places)}
    batch = RaggedBatch.from_padded(fields, mask, per_sequence=["start_positions"])
    assert batch["start_positions"].flatten().tolist() == [0, 3, 2]
    assert batch["start_positions"].shape == fields["start_positions"].shape
    assert batch.to_padded()["start_positions"] is batch["start_positions"]
    # Rows of width 3.
    assert batch.to_padded(side="left")["start_positions"].flatten().tolist() == [1, 3, 3]
