"""Sources and targets as one sequence each, and apart again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage import InputError, RaggedBatch
from ullage.training import RaggedCollator, Seq2SeqCollator
from ullage.training.batches.targets import is_joined, join_targets, num_tokens_each, placeholder, split_targets

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


def _batch(pairs, *, reads=False):
    samples = []
    for k, (source, target) in enumerate(pairs):
        sample = {"input_ids": range(10, 10 + source), "labels": range(50 + k, 50 + k + target), "kind": k}
        sample = {name: list(value) if isinstance(value, range) else value for name, value in sample.items()}
        samples.append({**sample, **({"decoder_input_ids": sample["labels"]} if reads else {})})
    return Seq2SeqCollator()(samples)


@settings(max_examples=30, deadline=None)
@given(pairs=PAIRS, reads=st.booleans())
def test_what_is_joined_comes_apart_again(pairs, reads):
    batch = _batch(pairs, reads=reads)
    whole = join_targets(batch)
    assert is_joined(whole)
    assert whole.layout.lengths.tolist() == num_tokens_each(batch).tolist() == [sum(pair) for pair in pairs]
    assert int((whole["labels"] != -100).sum()) == sum(target for _, target in pairs)
    again = split_targets(whole)
    assert (again.layout, set(again.names), set(again.per_sequence)) == (
        batch.layout,
        set(batch.names),
        set(batch.per_sequence),
    )
    for name in batch.names:
        values = (each[name] for each in (again, batch))
        mine, theirs = (value.unbind() if value.is_nested else [value] for value in values)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), name


def test_the_rest_stays_as_it_is():
    plain = RaggedCollator(labels_from="input_ids")([{"input_ids": [3, 4]}])
    assert join_targets(plain) is plain
    assert split_targets(plain) is plain
    assert num_tokens_each(plain).tolist() == [2]


def test_a_pair_of_one_token_each_has_the_same_fields():
    whole = join_targets(_batch([(3, 2), (1, 4)]))
    for label in (0, -100):
        pair = split_targets(placeholder(whole, counts=label == 0))
        assert set(pair.names) == {"input_ids", "labels", "kind"}
        assert [row.tolist() for row in pair["labels"].unbind()] == [[label]]
        assert pair["input_ids"].tolist() == [0]


def test_other_fields_with_lengths_of_their_own_are_refused():
    batch = RaggedCollator()([{"input_ids": [3, 4]}, {"input_ids": [5]}])
    rows = batch.to_nested("input_ids")
    strange = RaggedBatch({"input_ids": batch["input_ids"], "pixels": rows}, batch.layout, ["pixels"])
    with pytest.raises(
        InputError, match=r"only targets have lengths of their own beside the sources \(field 'pixels'\)"
    ):
        join_targets(strange)
