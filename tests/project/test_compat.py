"""``make compat`` finds what a release of transformers breaks."""

import inspect

from transformers.masking_utils import create_causal_mask

from benchmarks.campaigns import versions
from ullage.mixers import attending


def test_a_mask_that_is_asked_for_by_an_older_name_is_found(monkeypatch):
    """transformers 5.24 renamed the cache, and what named it by hand died at its first packed row."""
    other = {"past_key_values": "cache", "cache": "past_key_values"}
    name = next(each for each in inspect.signature(create_causal_mask).parameters if each in other)

    def by_hand(config, rows, window, *, may_skip):
        given = {"config": config, "inputs_embeds": rows, "attention_mask": None, other[name]: None}
        return inspect.unwrap(create_causal_mask)(**given)

    monkeypatch.setattr(attending, "causal_mask", by_hand)
    monkeypatch.setattr(versions, "QUICK_TYPES", {"causal": "llama bloom openai-gpt roformer"})
    found = versions.packed()
    assert found["passed"] == 1
    assert found["failed"].keys() == {"causal bloom", "causal openai-gpt", "causal roformer"}
    assert all(f"'{name}'" in why or f"'{other[name]}'" in why for why in found["failed"].values())


def test_every_family_of_forwards_has_a_type():
    """Of the releases that ``make compat`` tries; the scores of GPT-J are those of every attention since 5.24."""
    found = versions.packed()
    assert found["failed"] == {}
    assert versions.families() - set(found["families"]) <= {"ScoresForward"}
