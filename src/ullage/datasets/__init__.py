"""Sources of lengths, samples, text and chats: mock distributions, the benchmarks' workloads, files, and docstrings.

Names load when they are used: lengths need only numpy, samples torch, text and packing torch and the ``hf`` extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.core.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.datasets.chats import tokenize_chats as tokenize_chats
    from ullage.datasets.chats import use_end_token as use_end_token, use_template as use_template
    from ullage.datasets.lengths import (
        CAPACITIES as CAPACITIES,
        WORKLOADS as WORKLOADS,
        MockSamples as MockSamples,
        mock_lengths as mock_lengths,
    )
    from ullage.datasets.packing import PackReport as PackReport, pack_dataset as pack_dataset, pack_file as pack_file
    from ullage.datasets.picture_chats import (
        PictureDataset as PictureDataset,
        PictureEncoder as PictureEncoder,
        tokenize_pictures as tokenize_pictures,
    )
    from ullage.datasets.pictures import PictureReader as PictureReader, load_processor as load_processor
    from ullage.datasets.tables import read_table as read_table
    from ullage.datasets.text import (
        TokenDataset as TokenDataset,
        byte_tokenizer as byte_tokenizer,
        docstrings as docstrings,
        load_text as load_text,
        split_held_out as split_held_out,
        tokenize as tokenize,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "chats": ["tokenize_chats", "use_end_token", "use_template"],
            "lengths": ["CAPACITIES", "WORKLOADS", "MockSamples", "mock_lengths"],
            "packing": ["PackReport", "pack_dataset", "pack_file"],
            "picture_chats": ["PictureDataset", "PictureEncoder", "tokenize_pictures"],
            "pictures": ["PictureReader", "load_processor"],
            "tables": ["read_table"],
            "text": ["TokenDataset", "byte_tokenizer", "docstrings", "load_text", "split_held_out", "tokenize"],
        },
    )
