"""Megatron's two entry points without a model: what every rank gets, and what every rank says of bad input."""

import pytest

pytest.importorskip("megatron.core")

from tests.support import megatron_cases as cases
from tests.support.processes import run, values

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# tp, pp, cp, virtual stages, form of the samples
SHAPES = [(1, 1, 1, None, "one"), (2, 1, 2, None, "packed"), (1, 4, 1, None, "one"), (2, 2, 1, 2, "packed")]


@pytest.fixture(scope="module")
def ranks():
    """What each of four ranks found, in one launch: it costs seconds to load megatron-core."""
    return values(run(cases.everything, 4, SHAPES, loads=("torch", "megatron")))


@pytest.fixture
def behaviours(ranks):
    return [behaviours for behaviours, _ in ranks]


def test_fewer_sequences_than_ranks_are_padding_that_counts_nothing(behaviours):
    found = [rank["few"] for rank in behaviours]
    assert {tuple(rank["two sequences on four ranks"][0]) for rank in found} == {(1, 11, 61)}
    rows = [rank["two sequences on four ranks"][1:] for rank in found]
    assert sorted(rows) == [[[0, 0], [0, 1]], [[0, 0], [0, 1]], [[0, 5], [0, 5]], [[0, 6], [0, 6]]]
    assert sorted(rank["two sequences, batch"][1] for rank in found)[-1] == [[True]]


def test_two_sequences_that_fit_one_microbatch_go_to_two_ranks(behaviours):
    """dp 2, lengths [4, 4], capacity 16: upstream packs both into one and finds none to move."""
    found = [rank["few"]["4 and 4, balanced"] for rank in behaviours]
    assert [step for step, _ in found] == [[1, 8, 32]] * 4
    assert [rows for _, rows in found] == [[[0, 4]], None, [[0, 4]], None]
    by_arrival = [rank["few"]["4 and 4, dp_balanced"] for rank in behaviours]
    assert [step for step, _ in by_arrival] == [[1, 8, 32]] * 4
    assert [rows for _, rows in by_arrival] == [[[0, 4, 8]], None, [[0, 0]], None]


def test_a_step_with_an_oversize_sequence_or_without_samples_is_an_error_everywhere(behaviours):
    for found in (rank["few"] for rank in behaviours):
        assert all(words in found["an oversize sequence"] for words in ("does not fit", "sequence 0", "found 40"))
        assert "no rank has any sample" in found["no sequence at all"]


@pytest.mark.parametrize(("fault", "words", "at_fault"), [
    ("no max_seqlen_per_dp_cp_rank", "max_seqlen_per_dp_cp_rank", "0123"),
    ("no max_seqlen_per_dp_cp_rank on rank 3", "max_seqlen_per_dp_cp_rank", "3"),
    ("no sequence_packing_scheduler", "Set one of balanced, default, default_dynamic_cp, dp_balanced", "0123"),
    ("no sequence_packing_scheduler on rank 3", "sequence_packing_scheduler", "3"),
    ("no virtual_pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "0123"),
    ("virtual without group size", "microbatch_group_size_per_vp_stage", "0123"),
    ("capacity 0", "max_seqlen_per_dp_cp_rank", "0123"),
    ("unknown scheduler", "expected balanced or default or default_dynamic_cp or dp_balanced", "0123"),
    ("no tokens", "'tokens'", "2"),
    ("no labels", "'labels'", "2"),
    ("no loss_mask", "'loss_mask'", "2"),
    ("no position_ids", "'position_ids'", "2"),
    ("no length", "original_seq_len or cu_seqlens", "2"),
    ("iterator on tp 1", "should have no data iterator", "1"),
    ("no iterator on tp 0", "must have a data iterator", "2"),
    ("no iterator but a list", "one entry per virtual stage: expected one iterator, found list of 2", "02"),
    ("longer than its tokens", "expected 1 to 8, found 99", "02"),
    ("dynamic without our attention", "attention_takes_cp_group", "0123"),
])  # fmt: skip
def test_a_fault_of_one_rank_is_an_error_on_every_rank(behaviours, fault, words, at_fault):
    for number, rank in enumerate(behaviours):
        line = rank["bad_input"][fault]
        assert line is not None, f"rank {number} went on"
        assert words in line
        assert line.startswith("InputError" if str(number) in at_fault else "DistributedError"), line


def test_ranks_that_do_not_agree_say_so_and_sound_steps_follow(behaviours):
    for rank in behaviours:
        assert "'reward'" in rank["bad_input"]["other fields"]
        assert "different plans" in rank["bad_input"]["another capacity"]
        for group in ("bad_input", "bad_batches"):
            assert (rank[group]["nothing"], rank[group]["still sound"]) == (None, None)


@pytest.mark.parametrize(("fault", "words", "at_fault"), [
    ("iterator on tp 1", "should have no data iterator", (1, 3)),
    ("none on tp 0", "must have a data iterator", (0, 2)),
    ("at its end", "no further microbatch", (0, 2)),
    ("no tokens", "lacks a key ('tokens'", (0, 2)),
    ("no loss_mask", "lacks a key ('loss_mask'", (0, 2)),
    ("no cu_seqlens", "lacks a key ('cu_seqlens'", (0, 2)),
    ("too short", "expected int64 [8], found int64 [7]", (0, 2)),
    ("float tokens", "found float32 [8]", (0, 2)),
    ("no sequence", "holds no sequence", (0, 2)),
])  # fmt: skip
def test_a_faulty_microbatch_is_an_error_on_all_tensor_parallel_ranks(behaviours, fault, words, at_fault):
    for number, rank in enumerate(behaviours):
        line = rank["bad_batches"][fault]
        assert words in line
        assert line.startswith("InputError" if number in at_fault else "DistributedError"), line


def test_a_middle_stage_with_a_prediction_layer_has_all_four_fields(behaviours):
    found = [rank["middle_stage_with_prediction"] for rank in behaviours]
    first, second, third, last = (rank["told"] for rank in found)
    assert [value is None for value in first] == [False, True, True, False]
    assert second == [None] * 4
    assert [value is None for value in last] == [True, False, False, True]
    assert third[0] == first[0]
    assert third[1:3] == last[1:3]
    assert third[3] == first[3]
    assert len({str(rank["params"]) for rank in found}) == 1
    assert [rank["not told"] is None for rank in found] == [True, True, False, True]
    assert "multi-token-prediction" in found[2]["not told"]


def test_every_stage_may_have_an_iterator(behaviours):
    """Read by all of them, or by the ends only: the same rows, and nothing read in the middle."""
    found = [rank["every_stage"] for rank in behaviours]
    lengths = [7, 12, 30, 4, 9]
    for rank in found:
        assert [rank[owners]["totals"] for owners in ("ends", "stages")] == [[62, 49 + 144 + 900 + 16 + 81]] * 2
        assert rank["ends"]["held"] == rank["stages"]["held"]
    assert [rank["ends"]["left"] for rank in found] == [0, 5, 5, 0]
    assert [rank["stages"]["left"] for rank in found] == [0] * 4
    assert len({str([row[2] for row in rank["stages"]["held"]]) for rank in found}) == 1
    first, second, third, last = ([row[:2] for row in rank["stages"]["held"]] for rank in found)
    assert second == third == [[None, None]] * len(first)
    tokens = sorted(token for row in first for token in row[0])
    assert tokens == sorted(100 * i + k for i, n in enumerate(lengths) for k in range(n))
    assert [[token + 1 for token in row[0]] for row in first] == [row[1] for row in last]


def test_a_stage_that_is_out_of_step_or_without_an_iterator_is_an_error_everywhere(behaviours):
    found = [rank["every_stage"] for rank in behaviours]
    assert all("rank 2 has other lengths" in rank["out of step"] for rank in found)
    assert all("must have a data iterator" in rank["one without"] for rank in found)
    assert [rank["one without"].startswith("InputError") for rank in found] == [False, True, False, False]
    assert [rank["unread"] for rank in found] == [None] * 4


def test_iterators_end_with_a_short_step_and_then_on_all_ranks_together(behaviours):
    """3, 4, 5 on one data-parallel rank and 3, 4, 5, 6 on the other, two at a time."""
    for rank in behaviours:
        found = rank["evaluation"]
        assert found["steps"] == [[14, 50], [16, 86]]
        assert [line.split(":")[0] for line in found["end"]] == ["StopIteration"] * 2
        assert found["again"] is None


def test_rows_that_are_packed_already_stay_as_they_are(behaviours):
    found = [rank["packed_already"] for rank in behaviours]
    assert [rank["totals"] for rank in found] == [[2, 25, 25 + 81 + 16 + 49]] * 4
    rows = {
        0: [[[*range(1, 6), *range(100, 109)], [0, 5, 14]], [[*range(1, 5)], [0, 4]]],
        1: [[[*range(1000, 1007)], [0, 7]], [[], [0, 0]]],
    }
    assert all(rank["held"] == rows[rank["dp"]] for rank in found)
    assert all("over capacity" in rank["too long"] for rank in found)
    assert all("samples or lists of samples" in rank["bad item"] for rank in found)


def test_a_microbatch_of_another_iterator_has_its_degree_at_tensor_parallel_ranks_too(behaviours):
    """Groups are made by the ranks that share them: tensor-parallel rank 0 is in one before its peer hears of it."""
    for rank in behaviours:
        found = rank["degrees"]
        _, cp = found["place"]
        assert found["1"] == [[0, 1, 2, 0, 4, 5, 6, 7], 1, None]
        parts = [[0, 0, 4, 7], [1, 2, 5, 6]]
        assert found["2"] == [parts[cp], 2, 2]
        assert "one context-parallel degree" in found["two degrees"]
        assert "no group of this local_cp_size" in found["no such degree"]
        assert "'local_cp_size'" in found["no degree"]
        assert found["theirs"]


@pytest.mark.parametrize("case", ["another_order", "everywhere"])
def test_every_token_arrives_once_whoever_brings_it(behaviours, case):
    found = [rank[case] for rank in behaviours]
    wanted = sorted(100 * i + k for i, n in enumerate(found[0]["lengths"]) for k in range(n))
    by_place = {}
    for rank in found:
        by_place.setdefault(rank["dp"], []).append(rank["tokens"])
    assert all(one == other for one, other in by_place.values())  # tensor-parallel peers have the same
    assert sorted(by_place[0][0] + by_place[1][0]) == wanted


def test_fields_of_ones_own_come_along_without_a_broadcast_and_groups_that_are_no_grid_are_refused(behaviours):
    found = [rank["everywhere"] for rank in behaviours]
    assert all(rank["agree"] for rank in found)
    assert sorted(found[0]["rewards"] + found[2]["rewards"]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all("ranks disagree on the dp axis" in rank["another_order"]["crooked"] for rank in behaviours)


@pytest.fixture
def layouts(ranks):
    return {shape: [found[i] for _, found in ranks] for i, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_has_its_part_and_nobody_another(layouts, shape):
    _, pp, _, vpp, _ = shape
    ranks = layouts[shape]
    lengths = ranks[0]["lengths"]
    for rank in ranks:
        assert rank["unchanged"]
        assert rank["totals"][1:] == [sum(lengths), sum(n * n for n in lengths)]
        assert rank["totals"][0] == ranks[0]["totals"][0]
        assert rank["nones"] == [rank["place"]["tp"] > 0] * (vpp or 1)
        check_stages(rank, pp, vpp)
    if vpp:
        assert ranks[0]["totals"][0] % pp == 0
    peers = {}
    for rank in ranks:
        place = rank["place"]
        peers.setdefault((place["dp"], place["cp"], place["pp"]), []).append(rank["batches"])
    assert all(batches == same[0] for same in peers.values() for batches in same)
    described = {}
    for rank in ranks:
        rows = [(b["cu_seqlens"], b["cu_seqlens_padded"], b["max_seqlen"]) for b in rank["batches"]]
        described.setdefault(rank["place"]["dp"], []).extend([rows[: len(rows) // (vpp or 1)]])
    assert all(rows == same[0] for same in described.values() for rows in same)
    tokens = {}
    for rank in ranks:
        if (rank["place"]["tp"], rank["place"]["pp"]) == (0, 0):
            for batch in (b for b in rank["batches"] if b["tokens"] is not None):
                real = [value for value, pad in zip(batch["tokens"][0], batch["padding"][0]) if not pad]
                tokens.setdefault(rank["place"]["dp"], []).extend(real)
    data = cases.mock()
    wanted = sorted(token for i in range(len(data)) for token in data[i]["tokens"][: int(data.lengths[i])].tolist())
    assert sorted(token for held in tokens.values() for token in held) == wanted


def check_stages(rank, pp, vpp):
    for batch in rank["batches"]:
        first = rank["place"]["pp"] == 0 and batch["stage"] == 0
        last = rank["place"]["pp"] == pp - 1 and batch["stage"] == (vpp or 1) - 1
        assert (batch["tokens"] is not None) == (batch["position_ids"] is not None) == first
        assert (batch["labels"] is not None) == (batch["loss_mask"] is not None) == last
        assert batch["dtypes"] == ["int32", "int32", "bool"]
        for name in cases.FIELDS:
            if batch[name] is not None:
                padding = [value for value, pad in zip(batch[name][0], batch["padding"][0]) if pad]
                assert not any(padding), f"{name} in the padding"
