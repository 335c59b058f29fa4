"""Packing a data set: every token conserved, and as few rows as TRL's packing makes, or fewer."""

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

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


def test_longer_sequences_are_refused_cut_or_dropped():
    dataset = made([5, 0, 9, 8])
    with pytest.raises(InputError, match=r"longer than the capacity \(sequence 2\)"):
        pack_dataset(dataset, 8)
    assert [len(ids) for ids, _ in sequences(pack_dataset(dataset, 8, oversize="truncate"))] == [5, 8, 8]
    assert [len(ids) for ids, _ in sequences(pack_dataset(dataset, 8, oversize="drop"))] == [5, 8]
    with pytest.raises(InputError, match="no such oversize"):
        pack_dataset(dataset, 8, oversize="split")
    with pytest.raises(InputError, match="no sequence is left to pack"):
        pack_dataset(made([9, 0]), 8, oversize="drop")


def test_splits_selections_and_formats_stay():
    split = DatasetDict({"train": made([3, 4, 5]), "test": made([2])})
    packed = pack_dataset(split, 8)
    assert {name: len(part) for name, part in packed.items()} == {"train": 2, "test": 1}
    chosen = made([3, 4, 5]).select([2, 0]).with_format("numpy")
    [row] = pack_dataset(chosen, 8)
    assert isinstance(row["input_ids"], np.ndarray)
    assert row["input_ids"].tolist() == [2000, 2001, 2002, 2003, 2004, 0, 1, 2]


def test_what_cannot_be_packed_is_named():
    with pytest.raises(InputError, match=r"a column cannot be packed \(text\)"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}), 8)
    with pytest.raises(InputError, match=r"lists have other lengths \(labels, row 1\)"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}), 8)
    with pytest.raises(InputError, match="no data set that can be packed"):
        pack_dataset([{"input_ids": [1]}], 8)


def test_the_format_stays_as_with_trl():
    import trl

    rows = [[1, 2, 3, 4, 5], [6, 7], [], [8, 9, 10, 11], [12]]
    dataset = Dataset.from_dict({"input_ids": rows, "mask": rows}).with_format("numpy", ["input_ids"], dtype="float32")
    ours, theirs = pack_dataset(dataset, 4, oversize="truncate"), trl.pack_dataset(dataset, 4, "bfd")
    assert ours.format == theirs.format
    assert [row["input_ids"].tolist() for row in ours] == [row["input_ids"].tolist() for row in theirs]
    assert [row["seq_lengths"].tolist() for row in ours] == [[4], [4], [2, 1]]
