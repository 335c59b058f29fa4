"""Sources of lengths, samples and text: mock distributions, the benchmarks' workloads, files, and docstrings.

Names load when they are used: lengths need only numpy, samples torch, text and packing torch and the ``hf`` extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.core.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.datasets.lengths import (
        CAPACITIES as CAPACITIES,
        WORKLOADS as WORKLOADS,
        MockSamples as MockSamples,
        mock_lengths as mock_lengths,
    )
    from ullage.datasets.packing import pack_dataset as pack_dataset
    from ullage.datasets.picture_chats import PictureEncoder as PictureEncoder
    from ullage.datasets.pictures import PictureReader as PictureReader, load_processor as load_processor
    from ullage.datasets.text import (
        TokenDataset as TokenDataset,
        byte_tokenizer as byte_tokenizer,
        docstrings as docstrings,
        split_held_out as split_held_out,
        tokenize as tokenize,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "lengths": ["CAPACITIES", "WORKLOADS", "MockSamples", "mock_lengths"],
            "packing": ["pack_dataset"],
            "picture_chats": ["PictureEncoder"],
            "pictures": ["PictureReader", "load_processor"],
            "text": ["TokenDataset", "byte_tokenizer", "docstrings", "split_held_out", "tokenize"],
        },
    )
