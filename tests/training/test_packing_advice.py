"""What a run is told that packing brings: the padding that it saves, by one rule for every model."""

import numpy as np
import pytest
import torch

from ullage.training import RaggedCollator, Trainer, TrainingArguments
from ullage.training.run.beginning import capacity_for, packing_advice, padding_share

UNEQUAL = np.array([10, 100, 20, 90] * 8)


def test_padding_and_capacities_are_counted():
    assert padding_share(np.array([5, 5, 5]), 2) == 0
    assert padding_share(np.array([2, 4]), 2) == 0.25
    assert capacity_for(np.array([10, 30]), 4) == 128
    assert capacity_for(np.array([300, 1]), 1) == 512


@pytest.mark.parametrize(("lengths", "packed", "words", "urgent"), [
    (UNEQUAL, False, "nothing is packed: batches of 8 are 4", True),
    (UNEQUAL, True, "packed: batches of 8 would be 4", False),
    (np.full(16, 7), True, "packing brings nothing: padded batches of 8 would be 0.0% padding", True),
    (np.full(16, 7), False, "nothing is packed, and packing would bring nothing", False),
])  # fmt: skip
def test_the_line_follows_the_padding(lengths, packed, words, urgent):
    line, is_urgent = packing_advice(lengths, 8, packed=packed, pads=True, option="--packing_capacity {}")
    assert line.startswith(words)
    assert is_urgent is urgent
    assert ("--packing_capacity 512 would compute none" in line) is (not packed and lengths is UNEQUAL)


def test_a_model_that_takes_sequences_as_they_are_pads_nothing():
    line, _ = packing_advice(UNEQUAL, 8, packed=False, pads=False)
    assert line.startswith(
        "nothing is packed, and nothing is padded: the model takes sequences of these lengths (10 to"
    )


class Own(torch.nn.Module):
    """A model of one's own, of padded rows and their lengths."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 2)

    def forward(self, input_ids, lengths, labels=None):
        return {"loss": self.embed(input_ids).sum() / lengths.sum()}


def test_a_model_that_takes_no_capacity_is_advised_none(tmp_path):
    rows = [{"input_ids": [1] * int(n), "labels": [1] * int(n)} for n in UNEQUAL]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    line, urgent = Trainer(Own(), arguments, RaggedCollator(), rows).packing_advice()
    assert urgent
    assert "capacity" not in line
    assert "; a PackedSequence (docs/coming_from/pack_padded_sequence.md) would compute none" in line
