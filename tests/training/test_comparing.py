"""What ranks compare before the first step: what a data set is told by, and what reading it must not change."""

import random

import numpy as np
import pytest
import torch

from tests.support.story import Stream
from ullage import DistributedError
from ullage.training.run.beginning import describe_data, require_same_run

SAMPLES = [{"input_ids": [i] * (i + 1), "text": f"no. {i}"} for i in range(30)]


class Drawn(torch.utils.data.Dataset):
    """Samples that are drawn anew at each reading."""

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return {"input_ids": torch.rand(4) + random.random() + np.random.rand()}  # noqa: NPY002


class Broken(Drawn):
    def __getitem__(self, i):
        raise OSError("the disk is gone")


def compare(*datasets):
    require_same_run([{}] * len(datasets), [describe_data(dataset, "input_ids") for dataset in datasets])


def test_equal_data_are_let_through_and_other_text_is_not():
    compare(SAMPLES, list(SAMPLES), [dict(sample) for sample in SAMPLES])
    with pytest.raises(
        DistributedError, match=r"found rank 0, 2: 30 samples of 1, 2, 3, ..., 28, 29, 30 tokens, .*; rank 1: 30"
    ):
        compare(SAMPLES, [{**sample, "text": "other"} for sample in SAMPLES], SAMPLES)


def test_what_cannot_be_told_is_not_compared():
    """Samples that change, or cannot be read; a stream, of which nothing is read; but lengths always are."""
    compare(Drawn(), Drawn(), Broken())
    compare(Stream(SAMPLES), Stream(SAMPLES[:3]))
    with pytest.raises(DistributedError, match=r"found rank 0: 9 samples; rank 1: 30 samples of 1, 2, 3"):
        compare(Broken(), SAMPLES)
    with pytest.raises(DistributedError, match=r"found rank 0: 30 samples .*; rank 1: iterable without a length"):
        compare(SAMPLES, Stream(SAMPLES))


def test_reading_samples_leaves_the_random_states_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = Drawn()[0]["input_ids"]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    describe_data(Drawn(), "input_ids")
    assert torch.equal(Drawn()[0]["input_ids"], expected)
