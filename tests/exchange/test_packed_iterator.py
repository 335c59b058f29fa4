"""The packed iterator on real processes: every sequence once, equal totals, errors everywhere, resume, death."""

import functools

import pytest
import torch

from tests.support import exchange_cases as cases
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_sequence_arrives_once_and_steps_are_the_stream_in_order(world):
    """Also where there are fewer sequences than ranks, smaller steps than ranks, and none at all."""
    streams = [(41, 11, {"pad_to_multiple_of": 4}), *((*few, {"prefetch": 2}) for few in ((3, 7), (9, 2), (0, 4)))]
    for seen in values(run(cases.iterate, world, streams)):
        for (count, size, _), steps in zip(streams, seen, strict=True):
            want = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
            assert all(part == want for part in steps.values()), steps


SIZES = [10, 0, 3]


@pytest.fixture(scope="module")
def ranks():
    return values(run(cases.iterators, 3, SIZES))


@pytest.mark.slow
def test_readers_that_end_early_are_passed_over_and_steps_stay_full(ranks):
    for steps in (steps for rank in ranks for steps in rank["ends_unequally"]):
        assert [len(step) for step in steps] == [5, 5, 3]
        assert sorted(cases.flat(steps)) == list(range(sum(SIZES)))


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "worlds"), [("shared", (3, 2)), ("own", (2, 4)), ("iterable", (3, 3))])
def test_a_resumed_run_goes_on_exactly(kind, worlds):
    count, size = 37, 7
    turns = [(99, None), *((stop, None) for stop in (0, 1, 4))]
    parts = values(run(cases.resume, worlds[0], count, size, turns, kind))
    whole, _ = parts[0][0]
    assert sorted(cases.flat(whole)) == list(range(count))
    stops, states = [len(whole), 0, 1, 4], [state for _, state in parts[0]]
    assert all([state for _, state in part] == states for part in parts)
    assert [state["position"] for state in states] == [min(stop * size, count) for stop in stops]
    for rest in values(run(cases.resume, worlds[1], count, size, [(99, state) for state in states], kind)):
        assert [ids for ids, _ in rest] == [whole[stop:] for stop in stops]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("count", "size", "worlds", "stop"), [
    (83, 7, (4, 3, 5), 4),
    pytest.param(61, 3, (1, 7, 2, 5, 3), 4, marks=pytest.mark.slow),
    pytest.param(10_000, 96, (4, 3, 5), 40, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_all_ranks_hold_goes_on_at_any_dp_each_sample_once_in_the_steps_of_one_process(count, size, worlds, stop):
    trained, states, ends = {}, {}, len(worlds) - 1
    for turn, world in enumerate(worlds):
        seen = values(run(cases.life, world, count, size, None if turn == ends else stop, states))
        assert all(rank == seen[0] for rank in seen)
        for name, (steps, state) in seen[0].items():
            trained[name] = trained.get(name, []) + steps
            states[name] = state
    want = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
    for name, steps in trained.items():
        print(f"{name}: {count} samples on {worlds} ranks, the samples of every step: {steps}")
        assert [len(step) for step in steps] == [len(step) for step in want], name
        assert sorted(cases.flat(steps)) == list(range(count)), name
        assert states[name]["position"] == count
    assert trained["map"] == trained["stream"] == want
    # A sample of each shard in turn, those that have ended passed over.
    shards = [[i for shard in turn for i in shard] for turn in in_turn(count)]
    assert cases.flat(trained["shards"]) != cases.flat(want)
    assert trained["shards"] == [sorted(cases.flat(shards)[i : i + size]) for i in range(0, count, size)]


def in_turn(count):
    """The samples of each shard of ``cases.held_by_all``, by turn."""
    parts = [[s["input_ids"][0] for s in cases.counted([span])] for span in cases.spans_of(count)]
    return [[part[k : k + 1] for part in parts] for k in range(max(map(len, parts)))]


def test_iterables_of_ranks_own_at_another_dp_are_an_error_everywhere():
    [[_, state]] = values(run(cases.resume, 2, 20, 6, [(1, None)], "iterable"))[0]
    for outcome in run(cases.resume, 3, 20, 6, [(1, state)], "iterable"):
        assert outcome["error"].startswith("InputError: an iterable of each rank's own resumes only with as many ranks")
        assert "whose 2 shards are what the ranks had, in their order, with shared=True" in outcome["error"]


@pytest.fixture
def failures(ranks):
    return [rank["failures_of_iterator"] for rank in ranks]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "words"), [
    ("missing key 0", ["'labels'", "sample 19 of the stream"]),
    ("missing key 3", ["'labels'", "sample 19 of the stream"]),
    ("shape", ["'labels'", "shape [2]"]),
    ("required", ["'labels'"]),
    ("long", ["does not fit", "found 65"]),
    ("reader", ["the reader broke"]),
    ("no samples", ["must have samples"]),
    ("capacity", ["different capacity", "rank 1", "found 65"]),
    ("bad capacity", ["capacity must be an integer"]),
    ("size", ["global_batch_size must be an integer"]),
    ("option", ["no such option", "colour"]),
    ("kinds", ["different sources"]),
    ("random", ["cannot be told", "shared=True"]),
    ("not shared", ["not the same on every rank"]),
    ("cost", ["one number a sequence"]),
])  # fmt: skip
def test_an_error_on_one_rank_is_raised_on_every_rank(failures, name, words):
    for raised in failures:
        assert "Error: " in raised[name], raised
        assert all(word in raised[name] for word in words), raised[name]


def test_nothing_is_raised_without_a_fault(failures):
    for name, steps in (("nothing", 5), ("truncated", 5), ("random, shared", 2)):
        assert [raised[name] for raised in failures] == [f"{steps} steps"] * 3


def test_closing_early_joins_and_lends_the_groups_again(ranks):
    lengths = cases.lengths_of(cases.dataset(60))
    totals = [int(lengths[i : i + 6].sum()) for i in range(0, 18, 6)]
    for seen in zip(*(rank["closes_early"] for rank in ranks)):
        assert seen[0] == seen[1] == seen[2]
        assert seen[0].count("the iterator is closed") == 4
        assert [x for x in seen[0] if isinstance(x, int)] == totals[:1] + totals[:2] + totals


def test_two_iterators_do_not_disturb_each_other_or_the_main_thread(ranks):
    lengths = cases.lengths_of(cases.dataset(60))
    want = [[int(lengths[i : i + 6].sum()), int(lengths[::-1][i : i + 6].sum())] for i in range(0, 60, 6)]
    assert [rank["two_at_once"] for rank in ranks] == [want] * 3


#: By number of ranks: sizes, who owns data, order of slices.
GRIDS = {
    4: [({"dp": 2, "cp": 2}, "every", "zigzag"), ({"dp": 2, "cp": 2}, "every", "contiguous"),
        ({"tp": 2, "dp": 2}, "ends", "zigzag")],
    8: [({"pp": 4, "tp": 2}, "ends", "zigzag"), ({"dp": 2, "pp": 2, "tp": 2}, "stages", "zigzag")],
    16: [({"dp": 2, "pp": 2, "tp": 2, "cp": 2}, "ends", "zigzag"),
         ({"tp": 2, "cp": 2, "pp": 2, "dp": 2}, "stages", "contiguous")],
}  # fmt: skip
#: Where one rank's sample is broken, on eight ranks.
BROKEN = [
    ({"dp": 2, "tp": 2, "pp": 2}, "ends", [1, 0, 0, 0]),
    ({"dp": 2, "tp": 2, "pp": 2}, "ends", [0, 0, 0, 1]),
    ({"dp": 2, "cp": 2, "tp": 2}, "every", [1, 1, 0, 0]),
    ({"dp": 2, "pp": 2, "tp": 2}, "stages", [0, 0, 0, 1]),
]


@pytest.fixture(scope="module")
def topologies():
    """``of(world)``: what each rank of that many found of all their topologies, in one world."""
    return functools.cache(lambda world: values(run(cases.topologies, world, GRIDS[world], BROKEN)))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("world", "number"), [
    *((4, number) for number in range(3)), (8, 0), (8, 1),
    *(pytest.param(16, number, marks=pytest.mark.slow) for number in range(2)),
])  # fmt: skip
def test_shares_and_slices_are_the_microbatch_on_every_topology(topologies, world, number):
    sizes, owners, _ = GRIDS[world][number]
    ranks = [rank["grids"][number] for rank in topologies(world)]
    totals = [[step[:4] for step in rank["steps"]] for rank in ranks]
    assert all(total == totals[0] for total in totals)
    assert [step[1] for step in totals[0]] == [
        int(cases.lengths_of(cases.dataset(30, seed=5))[i : i + 12].sum()) for i in (0, 12, 24)
    ]
    assert all(rank["state"] == ranks[0]["state"] for rank in ranks)
    assert ranks[0]["state"]["position"] == 30
    for step in range(3):
        by_dp = {}
        for rank in ranks:
            ids = rank["steps"][step][4]
            if ids is not None:
                assert by_dp.setdefault(rank["place"][0], ids) == ids
        want = list(range(12 * step, min(12 * step + 12, 30)))
        assert sorted(cases.flat(by_dp.values())) == want
    if owners == "ends":
        stages = sizes.get("pp", 1)
        for rank in ranks:
            stage = rank["place"][3]
            want = ["id", "input_ids"] if stage == 0 and stages > 1 else ["id", "labels"]
            if 0 < stage < stages - 1:
                want = ["id"] if stage == 1 else []
            assert rank["fields"] == want


def test_one_broken_sample_raises_on_every_rank_of_a_topology(topologies):
    for lines in zip(*(rank["broken"] for rank in topologies(8)), strict=True):
        assert all("'id'" in line for line in lines), lines
        assert sum(line.startswith("InputError") for line in lines) == 1


def test_stages_out_of_step_and_a_topology_that_does_not_cover_the_world_raise_on_every_rank(topologies):
    words = ["multiply", "multiply", "multiply", "unknown names", "", "no such owners", "no process group", "owners"]
    for rank in topologies(4):
        assert "out of step" in rank["out of step"]
        for word, line in zip(words, rank["bad"], strict=True):
            assert line is not None
            assert word in line


@pytest.mark.slow
def test_a_rank_that_stalls_ends_everyone_after_the_timeout_of_the_topology_s_group():
    timeout = 3
    for error, seconds in values(run(cases.stalls, 3, 1, 2 * timeout, timeout=timeout)):
        assert "a collective failed" in error
        assert seconds < 4 * timeout


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_resumes_without_loss(tmp_path):
    timeout, world, victim = 20, 4, 2
    outcomes = run(cases.dies, world, str(tmp_path), victim, 2, timeout=timeout, deaths=[victim])
    alive = [outcome["value"] for outcome in outcomes if outcome is not None]
    assert len(alive) == world - 1
    for error, _, seconds in alive:
        assert error is not None
        assert "a collective failed" in error
        assert seconds < timeout
    # The last step that every rank had: prefetch may have let some take one more.
    last = min(len(list(tmp_path.glob(f"{rank}-*.pt"))) for rank in range(world))
    assert last >= 1
    saved = [torch.load(tmp_path / f"{rank}-{last}.pt") for rank in range(world)]
    assert all(one["state"] == saved[0]["state"] for one in saved)
    before = sorted(i for one in saved for step in one["steps"] for i in step)
    assert before == list(range(3 * world * last))
    [[rest, _]] = values(run(cases.resume, world, 60, 3 * world, [(99, saved[0]["state"])], "iterable"))[0]
    assert sorted(before + cases.flat(rest)) == list(range(60))
