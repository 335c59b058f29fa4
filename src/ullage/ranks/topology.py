"""Topologies: sizes of the four axes, the place of this process on each, their process groups, and who owns data.

A :class:`Topology` is a value. With groups it is what the collective steps run on; without them it describes one
rank of any machine, so that plans and transfers for hundreds of ranks are computed and tested in one process. Ranks
are never computed by arithmetic on global ids where groups are given: an axis lists the global ranks along it, in the
order of its coordinates, and that list is the truth. A device mesh may lay its ranks out in any order.

Axes: ``dp`` shards data, ``cp`` shards sequences, ``tp`` shards layers, ``pp`` shards depth. A rank that *owns* data
has samples of its own to bring. Three regimes are in use:

- ``"every"``: each rank has the samples of its data-parallel coordinate (NeMo-RL, verl, FSDP);
- ``"ends"``: tensor-parallel rank 0 of the first and of the last pipeline stage, in lock-step (Megatron-LM);
- ``"stages"``: tensor-parallel rank 0 of every pipeline stage, in lock-step (Megatron-LM's dev branch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ullage.core.errors import InputError, require_one_of
from ullage.ranks.ending import end_groups_at_exit
from ullage.ranks.groups import make_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp", "cp", "tp", "pp")
OWNERS = ("every", "ends", "stages")


@dataclass(frozen=True)
class Axis:
    """One axis of a topology as this rank sees it.

    Attributes:
        name: ``"dp"``, ``"cp"``, ``"tp"``, ``"pp"``, or another name for errors.
        size: number of ranks along it.
        rank: coordinate of this rank, in ``[0, size)``.
        ranks [size]: the global rank at each coordinate; empty where nobody knows.
        group: the process group of those ranks, in whatever order it numbers them; ``None`` without one, or where the
            size is 1.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: Sequence[int] = ()
    group: ProcessGroup | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_group(cls, group: ProcessGroup | None, name: str = "group") -> Axis:
        """The axis of a process group, or of this process alone for ``None``; coordinates are ranks in the group.

        Raises ``InputError`` for what is not a process group, and on a rank that is not in it.
        """
        ranks = _members(group, name)
        return cls(name, len(ranks), ranks.index(_global_rank()), tuple(ranks), group)

    @classmethod
    def world(cls) -> Axis:
        """The axis of all ranks; of this process alone without ``torch.distributed``."""
        return cls.from_group(dist.group.WORLD if _initialized() else None, "world")

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise InputError(
                f"a rank does not lie on its {self.name} axis", expected=f"0 to {self.size - 1}", found=self.rank
            )

    @property
    def global_rank(self) -> int:
        """This rank among all, where it is known, else its coordinate: what an error calls it."""
        return self.ranks[self.rank] if self.ranks else self.rank

    @property
    def order(self) -> list[int]:
        """The rank within the group of each coordinate: what collectives, which count by group, are read with."""
        if self.group is None:
            return list(range(self.size))
        return [dist.get_group_rank(self.group, rank) for rank in self.ranks]

    def require_group(self) -> ProcessGroup:
        """The group. Raises ``InputError`` where a collective is asked of a topology that is only a value."""
        if self.group is None:
            raise InputError(
                f"the {self.name} axis has no process group",
                found=f"{self.size} ranks in a topology that is only a value",
                hint="make the topology with from_groups or from_device_mesh",
            )
        end_groups_at_exit()  # every collective of ours asks for its group here
        return self.group


def require_axis(axis: object) -> Axis:
    """The same axis. Raises ``InputError`` for a process group or anything else that is not an :class:`Axis`."""
    if isinstance(axis, Axis):
        return axis
    raise InputError(
        "ranks are given as an axis of a topology",
        found=type(axis).__name__,
        hint="pass an axis such as topology.cp, or Axis.from_group(group)",
    )


@dataclass(frozen=True)
class Topology:
    """Sizes, coordinates and groups of the axes ``dp``, ``cp``, ``tp``, ``pp``, and which ranks own data.

    ``owners``: ``"every"``, ``"ends"`` or ``"stages"``, as the module says. Raises ``InputError`` for
    another word.

    >>> topology = Topology.grid(rank=5, dp=4, tp=2)
    >>> topology.dp.rank, topology.tp.rank, topology.world_size, topology.owns_data
    (2, 1, 8, True)
    """

    dp: Axis = Axis("dp")
    cp: Axis = Axis("cp")
    tp: Axis = Axis("tp")
    pp: Axis = Axis("pp")
    owners: str = "every"

    def __post_init__(self) -> None:
        require_one_of(self.owners, OWNERS, "owners")

    @classmethod
    def single(cls) -> Topology:
        """One process, no groups, ``torch.distributed`` not needed."""
        return cls()

    @classmethod
    def grid(
        cls,
        rank: int,
        *,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        order: Sequence[str] = ("tp", "cp", "dp", "pp"),
        owners: str = "every",
    ) -> Topology:
        """The topology of one ``rank`` of a regular grid, as a value without groups.

        ``order``: the axes from the one whose neighbours have consecutive ranks to the one that strides farthest;
        Megatron-LM's order if none is given. Raises ``InputError`` for a rank or an order that the grid does not have.
        """
        sizes = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"{name} must be at least 1", found=size)
        if sorted(order) != sorted(AXES):
            raise InputError("order must name every axis once", expected=list(AXES), found=list(order))
        world = math.prod(sizes.values())
        if not 0 <= rank < world:
            raise InputError("no such rank", expected=f"0 to {world - 1}", found=rank)
        # Mixed radix: the first axis of ``order`` is the digit that changes fastest, and ``stride`` is the distance
        # of two neighbours along an axis.
        axes, stride = {}, 1
        for name in order:
            size = sizes[name]
            coordinate = rank // stride % size
            first = rank - coordinate * stride
            ranks = range(first, first + size * stride, stride)
            axes[name] = Axis(name, size, coordinate, ranks)
            stride *= size
        return cls(**axes, owners=owners)

    @classmethod
    def from_groups(
        cls,
        dp: ProcessGroup | None = None,
        cp: ProcessGroup | None = None,
        tp: ProcessGroup | None = None,
        pp: ProcessGroup | None = None,
        *,
        owners: str = "every",
    ) -> Topology:
        """The topology of the process groups that this rank belongs to; ``None`` is an axis of one rank.

        A coordinate is the rank within the group. Raises ``InputError`` on every rank if the sizes do not multiply to
        the world size, and on a rank that is not a member.
        """
        given = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
        topology = cls(**{name: Axis.from_group(group, name) for name, group in given.items()}, owners=owners)
        topology._require_world()
        return topology

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, *, dp: str = "dp", cp: str = "cp", tp: str = "tp", pp: str = "pp", owners: str = "every"
    ) -> Topology:
        """The topology of a device mesh, its ranks in any order.

        ``dp``, ``cp``, ``tp``, ``pp``: what the mesh calls these axes; those it does not have are of size 1. A mesh of
        one axis without a name is data-parallel. Raises ``InputError`` for an axis of another name, and if the mesh
        does not cover the world.
        """
        names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ())
        known = {dp: "dp", cp: "cp", tp: "tp", pp: "pp"} if mesh.mesh_dim_names else {"dp": "dp"}
        if len(names) != mesh.ndim or not set(names) <= set(known):
            raise InputError(
                "a device mesh has axes of unknown names",
                expected=f"some of {list(known)}",
                found=list(names) if names else f"{mesh.ndim} axes without names",
                hint="say what the mesh calls them, for example dp='data', or flatten several axes into one",
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise InputError("this rank is not in the device mesh", where=f"rank {_global_rank()}")
        axes: dict[str, Axis] = {}
        for dim, name in enumerate(names):
            # All ranks along this dimension of the mesh, at this rank's other coordinates.
            index: list[Any] = list(coordinate)
            index[dim] = slice(None)
            ranks = tuple(mesh.mesh[tuple(index)].tolist())
            group = mesh.get_group(dim) if len(ranks) > 1 else None
            axes[known[name]] = Axis(known[name], len(ranks), coordinate[dim], ranks, group)
        topology = cls(**axes, owners=owners)
        topology._require_world()
        return topology

    @classmethod
    def from_megatron(cls, groups: Any = None, *, owners: str = "ends", flatten_cp: bool = False) -> Topology:
        """The topology of Megatron-Core's process groups, their ranks in any order.

        ``groups``: a ``ProcessGroupCollection``, or whatever has its ``dp``, ``cp``, ``tp``, ``pp`` and ``dp_cp``;
        ``None`` asks ``parallel_state``, and without ``torch.distributed`` is one process. ``flatten_cp``: let the
        ``dp`` axis span dp·cp, in the order of the ``dp_cp`` group, as a context-parallel degree for each microbatch
        wants it. Raises ``InputError`` for a group that is not there, and as :meth:`from_groups` does.
        """
        if groups is None and not _initialized():
            return cls(owners=owners)
        found = _parallel_state() if groups is None else groups
        names = ("dp_cp", "tp", "pp") if flatten_cp else ("dp", "cp", "tp", "pp")
        held = {name: getattr(found, name, None) for name in names}
        # Some collections have no ``cp``. Where dp alone is as large as dp·cp, there is one rank along it.
        if held.get("cp", ...) is None and held["dp"] is not None:
            whole = getattr(found, "dp_cp", None)
            if whole is None or whole.size() == held["dp"].size():  # without context parallelism nobody needs it
                del held["cp"]
        missing = [name for name, group in held.items() if group is None]
        if missing:
            raise InputError("a collection of process groups lacks one", where=missing[0], expected=", ".join(names))
        if flatten_cp:
            held["dp"] = held.pop("dp_cp")
        return cls.from_groups(**held, owners=owners)

    @property
    def axes(self) -> tuple[Axis, Axis, Axis, Axis]:
        """``dp``, ``cp``, ``tp``, ``pp``."""
        return self.dp, self.cp, self.tp, self.pp

    @property
    def world_size(self) -> int:
        """Ranks in all: the product of the sizes."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers."""
        return self.pp.rank == self.pp.size - 1

    @property
    def owns_data(self) -> bool:
        """Whether this rank brings samples of its own, as all ranks of its data-parallel group do or none."""
        if self.owners == "every":
            return True
        at_end = self.is_first_stage or self.is_last_stage
        return self.tp.rank == 0 and (at_end or self.owners == "stages")

    def with_groups(self, groups: dict[str, ProcessGroup | None]) -> Topology:
        """The same coordinates on other process groups, by the name of the axis."""
        return replace(self, **{axis.name: replace(axis, group=groups.get(axis.name)) for axis in self.axes})

    def on_gloo(self, timeout: timedelta | None = None) -> Topology:
        """The same coordinates on new gloo groups of its own, which no other code uses: for a background thread.

        Every rank of the world must call it, in the same place of its program. Axes of one rank get no group.
        """
        groups: dict[str, ProcessGroup | None] = {
            axis.name: make_group(axis.ranks, name=f"exchange {axis.name}", timeout=timeout)
            for axis in self.axes
            if axis.size > 1
        }
        return self.with_groups(groups)

    def _require_world(self) -> None:
        world = dist.get_world_size() if _initialized() else 1
        # Whoever talks between ranks has groups that must end before the interpreter does.
        if world > 1:
            end_groups_at_exit()
        if self.world_size != world:
            raise InputError(
                "the sizes of the axes do not multiply to the world",
                expected=f"{world} ranks",
                found=" × ".join(f"{axis.name} {axis.size}" for axis in self.axes) + f" = {self.world_size}",
                hint="name the group of every axis that has more than one rank",
            )


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _global_rank() -> int:
    return dist.get_rank() if _initialized() else 0


def _parallel_state() -> Any:
    """The groups of Megatron-Core's global state, by the names of its collection."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise InputError("Megatron's parallel state is not initialised", hint="call initialize_model_parallel first")
    return SimpleNamespace(
        dp=state.get_data_parallel_group(),
        cp=state.get_context_parallel_group(),
        tp=state.get_tensor_model_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
    )


def _members(group: ProcessGroup | None, name: str) -> list[int]:
    if group is None:
        return [_global_rank()]
    rank = _global_rank()
    if not _initialized() or not isinstance(group, dist.ProcessGroup):
        raise InputError(f"{name} must be a process group", found=type(group).__name__)
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise InputError(f"this rank is not in its {name} group", where=f"rank {rank}", found=f"ranks {ranks}")
    return ranks
