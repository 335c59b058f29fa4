"""The distribution of a model over ranks, and the device meshes that FSDP2 and DTensor want of it.

They want their meshes cut from one mesh. A :class:`Topology` lists ranks along its axes in any order, so the mesh is
laid out by what the ranks themselves say: each tells its coordinates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ullage.core.errors import DistributedError, InputError
from ullage.ranks import Axis, Topology
from ullage.ranks.ending import end_groups_at_exit
from ullage.ranks.wire import gather_objects
from ullage.training.setup.sharding import sharding_of

AXES = ("dp", "cp", "tp")


@dataclass(frozen=True, eq=False)
class Parallel:
    """The distribution of a model over ranks.

    Attributes:
        topology: of all ranks, with its groups.
        device: on which this rank computes.
        mesh: of dp, cp and tp; ``None`` on one process.
        dtype: what layers compute in; ``None`` is that of their parameters.
        dp_replicate: groups of dp ranks that each hold all parameters.
    """

    topology: Topology
    device: torch.device
    mesh: DeviceMesh | None = None
    dtype: torch.dtype | None = None
    dp_replicate: int = 1

    @cached_property
    def cp(self) -> Axis:
        """The context-parallel axis, on the mesh's own group."""
        return Axis.from_group(None if self.mesh is None else self.mesh.get_group("cp"), "cp")


def parallel_of(model: nn.Module) -> Parallel:
    """The distribution that :func:`parallelize` gave the model. Raises ``InputError`` if it did not."""
    found: Any = sharding_of(model)
    if found is None:
        raise InputError("this model was not made parallel", found=type(model).__name__, hint="parallelize it first")
    return found


def make_topology(*, dp: int | None = None, cp: int = 1, tp: int = 1) -> Topology:
    """The topology of ``dp`` × ``cp`` × ``tp`` ranks; joins the processes of ``torchrun`` if that was not done.

    ``dp``: as many as there are, if ``None``. Neighbouring ranks share tp, then cp. One process without ``torchrun`` is
    a topology of one. Raises ``InputError`` on every rank for sizes that do not multiply to the world.
    """
    _join()
    world = dist.get_world_size() if dist.is_initialized() else 1
    dp = require_sizes(world, dp=dp, cp=cp, tp=tp)
    if world == 1:
        return Topology.single()
    end_groups_at_exit()
    return Topology.from_device_mesh(init_device_mesh(device_type(), (dp, cp, tp), mesh_dim_names=AXES))


def require_sizes(world: int, *, dp: int | None = None, cp: int = 1, tp: int = 1) -> int:
    """The size of dp, which is all that cp and tp leave if ``None``.

    Raises ``InputError`` for sizes that do not multiply to ``world``, the number of ranks.
    """
    for name, size in (("dp", dp), ("cp", cp), ("tp", tp)):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise InputError(f"{name} must be a positive integer", found=size)
    if dp is None:
        dp = max(world // (cp * tp), 1)
    if dp * cp * tp != world:
        raise InputError(
            "the sizes of the axes do not multiply to the world",
            expected=f"{world} {'process' if world == 1 else 'processes'}",
            found=f"dp {dp} × cp {cp} × tp {tp} = {dp * cp * tp}",
            hint="start as many with torchrun --nproc_per_node, or give other sizes",
        )
    return dp


def device_type() -> str:
    """``"cuda"`` where the process group can move what lies there, ``"cpu"`` otherwise."""
    if not torch.cuda.is_available():
        return "cpu"
    if dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        return "cpu"
    return "cuda"


def device_of_rank() -> torch.device:
    """The device on which this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def mesh_of(topology: Topology) -> tuple[DeviceMesh, DeviceMesh]:
    """A mesh of dp, cp and tp, laid out as the topology says, and dp·cp of it as one axis. Collective over the world.

    Raises ``DistributedError`` on every rank if ranks give the same coordinates or other sizes.
    """
    coordinates = [topology.dp.rank, topology.cp.rank, topology.tp.rank]
    sizes = [topology.dp.size, topology.cp.size, topology.tp.size]
    said: list[tuple[list[int], list[int]]] = gather_objects((coordinates, sizes), Axis.world())
    # layout[dp, cp, tp] is a global rank, as that rank says itself. A place that is left means that two ranks claimed
    # one place, or that one has other sizes.
    layout = torch.full(sizes, -1, dtype=torch.int64)
    for rank, (place, told) in enumerate(said):
        if told == sizes:
            layout[tuple(place)] = rank
    if (layout < 0).any():
        raise DistributedError(
            "the ranks do not agree on the topology",
            expected="every coordinate of dp × cp × tp once",
            found=f"coordinates {[place for place, _ in said]} of sizes {[told for _, told in said]}",
        )
    mesh = DeviceMesh(device_type(), layout, mesh_dim_names=AXES)
    # One dim: over two, fully_shard would shard the second and replicate over the first (HSDP).
    return mesh, mesh["dp", "cp"]._flatten("dp_cp")


def hybrid_mesh(mesh: DeviceMesh, dp_replicate: int) -> DeviceMesh:
    """The ranks of a mesh of dp, cp and tp as ``dp_replicate``, what shards within each group, and tp.

    A mesh of its own, since FSDP2 and DTensor want theirs cut from one. Collective over the world.
    """
    layout = mesh.mesh.reshape(dp_replicate, -1, mesh.mesh.shape[-1])
    return DeviceMesh(device_type(), layout, mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))


def _join() -> None:
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # gloo beside NCCL, because plans and samples are exchanged as host tensors.
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
