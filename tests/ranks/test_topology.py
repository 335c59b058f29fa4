"""A topology as a value: coordinates, ownership and errors, for any number of ranks in one process."""

import itertools

import pytest

import ullage
from ullage.exchange import gather_lengths
from ullage.ranks import Topology
from ullage.ranks.topology import Axis


def test_single_is_one_rank_that_owns_its_data():
    topology = Topology.single()
    assert topology.world_size == 1
    assert topology.owns_data
    assert gather_lengths([3, 5], topology).lengths.tolist() == [3, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(("dp", "cp", "tp", "pp"))))
def test_a_grid_lists_the_ranks_along_each_axis_whatever_the_order(order):
    sizes = {"dp": 3, "cp": 2, "tp": 4, "pp": 2}
    places = set()
    for rank in range(48):
        topology = Topology.grid(rank, **sizes, order=order)
        places.add(tuple(axis.rank for axis in topology.axes))
        for axis in topology.axes:
            assert axis.size == sizes[axis.name] == len(axis.ranks)
            assert axis.ranks[axis.rank] == rank
            for other in axis.ranks:
                there = Topology.grid(other, **sizes, order=order)
                assert [a.rank for a in there.axes if a.name != axis.name] == [
                    a.rank for a in topology.axes if a.name != axis.name
                ]
    assert len(places) == 48


def test_megatron_s_order_puts_tp_neighbours_side_by_side():
    topology = Topology.grid(rank=5, dp=4, tp=2)
    assert (topology.dp.rank, topology.tp.rank) == (2, 1)
    assert list(topology.tp.ranks) == [4, 5]
    assert list(topology.dp.ranks) == [1, 3, 5, 7]


@pytest.mark.parametrize(("owners", "count"), [("every", 768), ("ends", 768 // 4 // 8 * 2), ("stages", 768 // 4)])
def test_who_owns_data_among_768_ranks(owners, count):
    topologies = [Topology.grid(rank, dp=12, cp=2, tp=4, pp=8, owners=owners) for rank in range(768)]
    assert sum(topology.owns_data for topology in topologies) == count
    # A whole data-parallel group owns data, or none of it does.
    owners = {rank for rank, topology in enumerate(topologies) if topology.owns_data}
    for topology in topologies:
        assert owners & set(topology.dp.ranks) in (set(), set(topology.dp.ranks))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Topology.grid(8, dp=8), "no such rank"),
    (lambda: Topology.grid(0, dp=0), "dp must be at least 1"),
    (lambda: Topology.grid(0, dp=2, order=("dp", "tp")), "name every axis once"),
    (lambda: Topology(owners="someone"), "no such owners"),
    (lambda: Axis("dp", 2, 2), "does not lie on its dp axis"),
    (lambda: gather_lengths([1], Topology.grid(0, dp=2)), "no process group"),
    (lambda: Topology.from_groups(dp="world"), "dp must be a process group: found str"),
])  # fmt: skip
def test_what_cannot_be_is_an_error(make, words):
    with pytest.raises(ullage.InputError) as caught:
        make()
    assert words in str(caught.value)
