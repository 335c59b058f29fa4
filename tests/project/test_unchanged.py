"""The campaign ``unchanged``: what counts as a difference of two records, and what does not."""

import pytest

from benchmarks.unchanged import records

CASE = {"digest": "0123", "losses": [1.0, 2.0]}


def found(now, unstable=None):
    before = {"part": {"case": CASE}}
    return [each["field"] for each in records.differences(before, {"part": now}, unstable or {})]


def test_every_difference_is_named():
    assert found({"case": dict(CASE)}) == []
    assert found({"case": {**CASE, "digest": "0124"}}) == ["digest"]
    assert found({"case": {**CASE, "losses": [1.0, 2.0 + 1e-15]}}) == ["losses"]
    assert found({"case": {"digest": "0123"}}) == ["losses"]
    assert found({"case": {**CASE, "more": "1"}}) == ["more"]
    assert found({}) == found({"case": CASE, "another": CASE}) == ["(the case)"]


def test_unstable_numbers_have_a_tolerance_and_their_digests_none():
    unstable = {"part": {"case": ["digest", "losses"]}}
    assert found({"case": {"digest": "other", "losses": [1.0, 2.00001]}}, unstable) == []
    assert found({"case": {"digest": "other", "losses": [1.0, 2.1]}}, unstable) == ["losses"]
    assert found({"case": {"losses": [1.0, 2.0]}}, unstable) == ["digest"]
    first, second = {"part": {"case": CASE}}, {"part": {"case": {**CASE, "losses": [1.0, 3.0]}}}
    assert records.disagreements(first, second) == {"part": {"case": ["losses"]}}


@pytest.mark.parametrize(("text", "expected"), [
    ("done in 3.41 s at 2.1 GB/s, 72.2 kB", "done in # at #, #"),
    ("tokens per second, median   1,171   2,037   +73.9 %", "tokens per second, median#"),
    ("speed 1,620 tokens per second, loss 5.41", "speed #, loss 5.41"),
    ("/tmp/unchanged-ab12cd34/plans/x.json is missing", "FOLDER/x.json is missing"),
    ("found 3 sequences of 17 tokens", "found 3 sequences of 17 tokens"),
    ("at 2026-01-02 03:04:05 <f at 0x7f00aa11bb22>", "at DATE <f at ADDRESS>"),
])  # fmt: skip
def test_text_loses_only_what_differs_from_run_to_run(text, expected):
    assert records.normal(text) == expected


def test_a_record_comes_back_exactly(tmp_path):
    record = {"commit": "abc", "parts": {"part": {"case": {"losses": [0.1 + 0.2, 1e-300]}}}}
    records.write(tmp_path / "record.json", record)
    assert records.read(tmp_path / "record.json") == record
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="is no record of this campaign"):
        records.read(tmp_path / "other.json")
