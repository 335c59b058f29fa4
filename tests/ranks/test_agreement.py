"""One rank failed, so all raise: with real processes, every kind of error, blocks within blocks, several axes."""

import pytest

from tests.support import processes, ranks_cases
from ullage.core.errors import DistributedError, InputError
from ullage.ranks import Axis, Topology, agree, gather_agreed, raise_failures, report, together, tried
from ullage.ranks.groups import PeerLost
from ullage.ranks.topology import require_axis


@pytest.fixture(scope="module")
def ranks():
    return processes.values(processes.run(ranks_cases.blocks, 4))


@pytest.fixture
def lines(ranks):
    """What each of four ranks raised, by case and rank."""
    return {name: [each["lines"][name] for each in ranks] for name in ranks[0]["lines"]}


def others(lines, case, failed):
    """What the ranks raised that did not fail themselves: one line, the same on all of them."""
    found = {line for rank, line in enumerate(lines[case]) if rank not in failed}
    assert len(found) == 1
    return found.pop()


@pytest.mark.distributed
def test_one_rank_fails_and_the_others_name_it_and_its_cause(lines):
    assert lines["nobody"] == [None] * 4
    assert lines["one"][1] == "InputError: no such file"
    assert others(lines, "one", [1]) == (
        "DistributedError: another rank failed while reading (rank 1): found InputError: no such file. "
        "The log of rank 1 has the whole error"
    )


@pytest.mark.distributed
def test_two_ranks_fail_and_the_others_name_both(lines):
    assert (lines["two"][0], lines["two"][3]) == ("ValueError: zero", "OSError: last")
    assert others(lines, "two", [0, 3]) == (
        "DistributedError: another rank failed while reading (ranks 0, 3): found on rank 0 ValueError: zero; "
        "on rank 3 OSError: last. The log of rank 0 has the whole error"
    )
    assert "(ranks 1, 2, 3): found ValueError: full. " in lines["alike"][0]
    assert lines["all"] == [f"ValueError: {rank}" for rank in range(4)]


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "own", "quoted"), [
    ("interrupt", "KeyboardInterrupt: ", "found KeyboardInterrupt. "),
    ("exit", "SystemExit: 3", "found SystemExit: 3. "),
    ("stop", "StopIteration: ", "found StopIteration. "),
    ("without words", "KeyError: ", "found KeyError. "),
    ("long", "ValueError: " + "x" * 5000, "found ValueError: " + "x" * (2000 - len("ValueError: ")) + "…. "),
])  # fmt: skip
def test_every_kind_of_error_is_told(lines, case, own, quoted):
    assert lines[case][1] == own
    assert quoted in others(lines, case, [1])


@pytest.mark.distributed
def test_blocks_within_blocks_and_an_error_in_a_header(lines):
    assert lines["nested"][1] == "ValueError: inside"
    assert "failed while the inner work (rank 1)" in others(lines, "nested", [1])
    assert lines["handled"] == [None] * 4
    assert lines["header"][1].startswith("ZeroDivisionError")
    assert "failed while counting (rank 1): found ZeroDivisionError" in others(lines, "header", [1])


@pytest.mark.distributed
def test_along_several_axes_the_sentence_names_the_rank_where_the_error_arose(lines):
    row = [line and line.split(":")[0] for line in lines["row"]]
    assert row == [None, None, "DistributedError", "ValueError"]
    failed = "another rank failed while the grid's work (rank 3): found ValueError: row"
    assert all(failed in line for line in (*lines["grid"][:3], *lines["both"][:2]))
    assert "a row's work (rank 3)" in lines["both"][2]
    assert {lines[case][3] for case in ("row", "grid", "both")} == {"ValueError: row"}


@pytest.mark.distributed
def test_a_block_costs_one_collective_and_keeps_nothing_of_what_it_held(ranks):
    """None on a single rank. A cycle of error, traceback and frame would keep a step's tensors until a collection."""
    assert [each["meetings"] for each in ranks] == [[1, 0]] * 4
    for alive in (each["alive"] for each in ranks):
        assert len(alive) == 5
        assert not any(alive.values()), alive


@pytest.mark.distributed
def test_a_rank_that_is_gone_keeps_nobody_waiting():
    told = processes.run(ranks_cases.death, 3, deaths=[1])
    assert told[0]["value"] == "InputError: mine"
    assert told[2]["value"].startswith("PeerLost: a collective failed")


@pytest.mark.parametrize("ranks", [Axis("dp"), Topology.single(), Axis.world()], ids=["axis", "topology", "world"])
def test_a_single_rank_raises_its_own_error_and_meets_nobody(ranks):
    own = ValueError("own")
    with pytest.raises(ValueError) as raised, together(ranks, "reading"):
        raise own
    assert raised.value is own
    with pytest.raises(SystemExit), together(ranks, "reading"):
        raise SystemExit(3)
    with together(ranks, "reading"):
        pass
    agree(None, ranks, "reading")
    if isinstance(ranks, Axis):
        assert gather_agreed({"n": 1}, ranks, "counting") == [{"n": 1}]
        with pytest.raises(ZeroDivisionError):
            gather_agreed({"n": 1}, ranks, "counting", ZeroDivisionError())
    with pytest.raises(ValueError, match="own"):
        agree(own, ranks, "reading")


def test_what_was_tried_is_a_value_or_an_error_but_a_lost_peer_is_raised():
    assert tried(lambda: 5) == (5, None)
    value, failure = tried(lambda: [][1])
    assert value is None
    assert isinstance(failure, IndexError)

    def lost():
        raise PeerLost("gone")

    with pytest.raises(PeerLost):
        tried(lost)
    with pytest.raises(KeyboardInterrupt):
        tried(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_a_report_is_of_the_rank_where_the_error_arose():
    axis = Axis("tp", 2, 1, (4, 5))
    assert report(None, axis) == []
    assert report(InputError("two\nlines"), axis) == [(5, "InputError: two lines")]
    with pytest.raises(DistributedError) as raised:
        raise_failures(None, [[], report(InputError("lost"), axis)], "packing")
    assert raised.value.failures == ((5, "InputError: lost"),)
    assert report(raised.value, Axis("dp", 3, 0, (7, 8, 9))) == [(5, "InputError: lost")]


def test_many_errors_are_quoted_in_part():
    reports = [[(rank, f"ValueError: {rank}")] for rank in range(20)]
    with pytest.raises(DistributedError) as raised:
        raise_failures(None, reports, "packing")
    assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more)" in str(raised.value)
    assert "on rank 7 ValueError: 7; and 12 more. " in str(raised.value)


def test_an_axis_of_one_process_and_what_is_no_axis():
    assert (Axis.world().size, Axis.world().global_rank, Axis.from_group(None).group) == (1, 0, None)
    assert Axis("tp", 2, 1, (4, 5)).global_rank == 5
    assert Axis("tp", 2, 1).global_rank == 1
    with pytest.raises(InputError, match="group must be a process group: found str"):
        Axis.from_group("world")
    with pytest.raises(InputError, match=r"an axis of a topology: found Topology\. Pass an axis such as topology\.cp"):
        require_axis(Topology.single())
