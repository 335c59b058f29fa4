"""Process groups of our own where ranks are in unequal numbers of groups: with real processes, every place that makes one."""

import pytest

from tests.support import processes, ranks_cases

pytestmark = [pytest.mark.distributed, pytest.mark.regression]


def test_groups_are_made_by_members_that_are_in_unequal_numbers_of_groups():
    told = processes.values(processes.run(ranks_cases.groups, 4))
    for rank, each in enumerate(told):
        everyone = [1111, [0, 1, 2, 3], rank]
        half = [[101, [0, 2]], [1010, [1, 3]]][rank % 2]
        expected = [everyone, everyone, everyone, [*half, rank // 2]]
        assert each["found"] == (expected if rank else [*expected, [1, [0], 0]])
        assert each["ours"] == 4
        names = each["names"]
        assert len(set(names)) == len(names)
        # Those of all ranks have one name everywhere, also after one of them is gone.
        assert [*names[:3], names[-1]] == [*told[0]["names"][:3], told[0]["names"][-1]]


def test_a_store_that_outlives_its_world_names_no_group_twice():
    for each in processes.values(processes.run(ranks_cases.worlds, 2)):
        assert each == [[[0, 1], "_0"], [[0, 1], "_1"]]


@pytest.mark.slow
def test_a_member_that_does_not_come_is_an_error_on_the_others():
    first, *others = processes.values(processes.run(ranks_cases.absent, 3))
    assert first[0] is None
    for rank, (said, seconds) in enumerate(others, 1):
        assert said.startswith(
            "PeerLost: a process group for a test could not be made, for example because another rank ended "
            f"(rank {rank}): expected ranks [0, 1, 2], found "
        )
        assert seconds < 30


def test_a_packed_stream_begins_after_a_group_of_some_ranks():
    told = processes.values(processes.run(ranks_cases.iterate, 2, timeout=30))
    assert sorted(told[0] + told[1]) == list(range(12))
