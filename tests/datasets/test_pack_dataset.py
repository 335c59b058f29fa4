"""Packing a data set: every token conserved, and as few rows as TRL's packing makes, or fewer."""

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage import InputError
from ullage.datasets import pack_dataset


def made(lengths):
    """Sequence ``i`` holds ``1000 * i`` upwards; the mask tells even positions."""
    ids = [list(range(1000 * i, 1000 * i + length)) for i, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, "mask": [[k % 2 for k in range(len(one))] for one in ids]})


def sequences(packed):
    """The sequences of packed rows, sorted."""
    found = []
    for row in packed:
        ends = np.cumsum(row["seq_lengths"])
        assert ends[-1] == len(row["input_ids"]) == len(row["mask"])
        for start, stop in zip(ends - row["seq_lengths"], ends):
            found.append((row["input_ids"][start:stop], row["mask"][start:stop]))
    return sorted(found)


@pytest.mark.parity
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sequences_are_trls_in_no_more_rows(seed):
    import trl

    dataset = made(np.random.default_rng(seed).integers(0, 70, 200).tolist())
    ours = pack_dataset(dataset, 64, oversize="truncate")
    theirs = trl.pack_dataset(dataset, seq_length=64, strategy="bfd")
    assert set(ours.column_names) == set(theirs.column_names)
    assert ours.features["input_ids"] == dataset.features["input_ids"]
    assert max(map(len, ours["input_ids"])) <= 64
    assert sequences(ours) == sequences(theirs)
    assert len(ours) <= len(theirs)


def test_what_cannot_be_packed_is_named_and_longer_sequences_are_refused_cut_or_dropped():
    dataset = made([5, 0, 9, 8])
    with pytest.raises(InputError, match=r"longer than the capacity \(sequence 2\)"):
        pack_dataset(dataset, 8)
    assert [len(ids) for ids, _ in sequences(pack_dataset(dataset, 8, oversize="truncate"))] == [5, 8, 8]
    assert [len(ids) for ids, _ in sequences(pack_dataset(dataset, 8, oversize="drop"))] == [5, 8]
    with pytest.raises(InputError, match="no sequence is left to pack"):
        pack_dataset(made([9, 0]), 8, oversize="drop")
    with pytest.raises(InputError, match=r"a column cannot be packed \(text\)"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}), 8)
    with pytest.raises(InputError, match=r"lists have other lengths \(labels, row 1\)"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}), 8)
    with pytest.raises(InputError, match="no data set that can be packed"):
        pack_dataset([{"input_ids": [1]}], 8)
    with pytest.raises(InputError, match=r"no such strategy: expected .*'bfd_split'.* found 'best'"):
        pack_dataset(made([3]), 8, "best")
    with pytest.raises(InputError, match="the strategy says what becomes of longer sequences"):
        pack_dataset(made([3]), 8, "bfd", oversize="drop")
    with pytest.raises(InputError, match=r"longer than the capacity \(sequence 2\)"):
        list(pack_dataset(made([5, 0, 9]).to_iterable_dataset(), 8))


def test_splits_selections_and_formats_stay():
    split = DatasetDict({"train": made([3, 4, 5]), "test": made([2])})
    packed = pack_dataset(split, 8)
    assert {name: len(part) for name, part in packed.items()} == {"train": 2, "test": 1}
    chosen = made([3, 4, 5]).select([2, 0]).with_format("numpy")
    [row] = pack_dataset(chosen, 8)
    assert isinstance(row["input_ids"], np.ndarray)
    assert row["input_ids"].tolist() == [2000, 2001, 2002, 2003, 2004, 0, 1, 2]


def rows(packed):
    return {name: list(packed[name]) for name in packed.column_names}


LONG = [[1, 2, 3, 4, 5], [6, 7], [], [8, 9, 10, 11], [12]]


@pytest.mark.parity
@pytest.mark.parametrize(("strategy", "ids", "lengths"), [
    ("bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 12]], [[4], [4], [2, 1]]),
    ("bfd_split", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 5, 12]], [[4], [4], [2, 1, 1]]),
    ("wrapped", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], None),
])  # fmt: skip
def test_trls_strategies_mean_what_they_do_there(strategy, ids, lengths):
    import trl

    dataset = Dataset.from_dict({"input_ids": LONG, "mask": LONG})
    ours = pack_dataset(dataset, 4, strategy)
    theirs = trl.pack_dataset(dataset, 4, strategy)
    assert rows(ours) == rows(theirs)
    assert ours["input_ids"][:] == ours["mask"][:] == ids
    assert lengths is None or ours["seq_lengths"][:] == lengths
    # Through map, all at once and in batches of two rows.
    assert rows(pack_dataset(dataset, 4, strategy, {"desc": "pack"})) == rows(ours)
    by_two = pack_dataset(dataset, 4, strategy, {"batch_size": 2})
    assert rows(by_two) == rows(trl.pack_dataset(dataset, 4, strategy, {"batch_size": 2}))


@pytest.mark.parity
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_formats_and_streams_stay_as_with_trl(strategy):
    import trl

    dataset = Dataset.from_dict({"input_ids": LONG, "mask": LONG}).with_format("numpy", ["input_ids"], dtype="float32")
    ours, theirs = (pack(dataset, 4, strategy) for pack in (pack_dataset, trl.pack_dataset))
    assert ours.format["columns"] == ["input_ids"] + ["seq_lengths"] * (strategy != "wrapped")
    assert ours.format == theirs.format or strategy == "wrapped"
    stream = Dataset.from_dict({"input_ids": LONG, "mask": LONG}).to_iterable_dataset()
    assert list(pack_dataset(stream, 4, strategy)) == list(trl.pack_dataset(stream, 4, strategy))
    parts = pack_dataset(IterableDatasetDict({"train": stream}), 4, strategy, {"batch_size": 2})
    assert list(parts["train"]) == list(trl.pack_dataset(stream, 4, strategy, {"batch_size": 2}))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 9))
def test_split_sequences_keep_every_token_in_order(lengths, most):
    if not sum(lengths):
        return
    packed = pack_dataset(made(lengths), most, "bfd_split")
    pieces = [piece for piece, _ in sequences(packed)]
    assert max(map(len, packed["input_ids"])) <= most
    assert [token for piece in pieces for token in piece] == [t for row in made(lengths)["input_ids"] for t in row]
    assert len(pieces) == sum(-(-length // most) for length in lengths)
