"""What a run is told that packing brings: the padding that it saves, by one rule for every model."""

import numpy as np
import pytest

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
    assert packing_advice(UNEQUAL, 8, packed=False, pads=False)[0].startswith(
        "nothing is packed, and nothing is padded"
    )
