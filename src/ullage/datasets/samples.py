"""Samples of Megatron's mock data, made from a length and a seed as its SFT dataset makes them.

A sequence of *L* tokens is 1, 2, ..., L − 1 and an end-of-document token. Its labels are the next tokens, its positions
0 to L − 1, its loss mask 1 everywhere but at the last token, which has no next one. Source: ``MockSFTDataset`` in
Megatron-LM, ``megatron/training/datasets/sft_dataset.py``. Two things differ on purpose: samples are not padded unless
asked, because a packed layout pads, and the mask goes by position, so that a token that happens to be the padding
token counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.datasets.lengths import mock_config, mock_lengths
from ullage.errors import InputError


class MockSamples:
    """Map-style dataset of Megatron-like samples, the same on every machine and at every reading.

    Args:
        config, n, seed: as for :func:`ullage.datasets.mock_lengths`, which gives the ``lengths``
        vocab_size: draw tokens from ``[1, vocab_size)``, by ``seed`` and index alone; ``None`` counts them up as
            upstream
        eod, pad: token ids of the end of a document and of padding
        max_length: tokens to which longer sequences are cut, end-of-document token included
        pad_to_multiple_of: pad each sample to such a length, as upstream does

    A sample has ``tokens``, ``labels``, ``position_ids`` int64 [length], ``loss_mask`` float32 [length], and
    ``original_seq_len``, ``padded_seq_len`` int32. Raises ``InputError`` for a configuration that cannot be used.

    >>> sample = MockSamples({"mode": "distribution", "type": "lognormal", "min_seq_len": 4, "max_seq_len": 4,
    ...                       "mean_seq_len": 4, "lognormal_sigma": 1.0}, n=1)[0]
    >>> sample["tokens"].tolist(), sample["labels"].tolist(), sample["loss_mask"].tolist()
    ([1, 2, 3, 0], [2, 3, 0, 0], [1.0, 1.0, 1.0, 0.0])
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        n: int | None = None,
        seed: int = 0,
        *,
        vocab_size: int | None = None,
        eod: int = 0,
        pad: int = 0,
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
    ) -> None:
        if mock_config(config)["mode"] == "verification":
            raise InputError(
                "mock samples are not read from data",
                where="mode verification",
                hint="use mode distribution, or mock_lengths for the lengths alone",
            )
        for name, value, least in (
            ("vocab_size", vocab_size, 2),
            ("max_length", max_length, 1),
            ("pad_to_multiple_of", pad_to_multiple_of, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is too small", expected=f">= {least}", found=value)
        # Each sample has its end-of-document token, so none is empty.
        lengths = np.maximum(mock_lengths(config, n, seed), 1)
        self.lengths = lengths if max_length is None else np.minimum(lengths, max_length)
        self._seed, self._vocab_size, self._eod, self._pad, self._multiple = (
            seed,
            vocab_size,
            eod,
            pad,
            pad_to_multiple_of,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, none at {index}")
        index %= len(self)
        length = int(self.lengths[index])
        padded = -(-length // self._multiple) * self._multiple
        # One element longer than the sample: tokens are the text without its last element, labels without its first.
        text = torch.full((padded + 1,), self._pad)
        text[: length - 1] = self._words(index, length - 1)
        text[length - 1] = self._eod
        loss_mask = torch.zeros(padded)
        loss_mask[: length - 1] = 1
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(padded),
            "original_seq_len": torch.tensor(length, dtype=torch.int32),
            "padded_seq_len": torch.tensor(padded, dtype=torch.int32),
        }

    def _words(self, index: int, count: int) -> Tensor:
        if self._vocab_size is None:
            return torch.arange(1, count + 1)
        # A generator per sample, so that it does not depend on the order of reading.
        return torch.from_numpy(np.random.default_rng([self._seed, index]).integers(1, self._vocab_size, count))
