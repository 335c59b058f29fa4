"""A Hugging Face model made ready for a topology: :func:`parallelize`."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

import ullage.attention as packed_attention
from ullage.engines.fsdp import tensor_parallel
from ullage.engines.fsdp.mesh import device_of_rank, mesh_of
from ullage.errors import InputError, require_one_of
from ullage.ranks import Axis, Topology, together

_ATTRIBUTE = "_ullage_parallel"
Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass(frozen=True, eq=False)
class Parallel:
    """The distribution of a model over ranks.

    Attributes:
        topology: of all ranks, with its groups.
        device: on which this rank computes.
        mesh: of dp, cp and tp; ``None`` on one process.
        sharded: dp·cp of the mesh as one axis, over which parameters are sharded and gradients averaged; ``None`` on
            one process.
        cp_method, cp_fallback: as for ``ullage.attention.context_parallel``.
        autocast: dtype in which one process computes, where there is no FSDP to cast its weights.
    """

    topology: Topology
    device: torch.device
    mesh: DeviceMesh | None = None
    sharded: DeviceMesh | None = None
    cp_method: str = "auto"
    cp_fallback: bool = True
    autocast: torch.dtype | None = None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a forward of this model runs."""
        if self.autocast is not None:
            return torch.autocast(self.device.type, self.autocast)
        if self.mesh is None or self.topology.cp.size == 1:
            return contextlib.nullcontext()
        return packed_attention.context_parallel(self.cp, method=self.cp_method, fallback=self.cp_fallback)

    @cached_property
    def cp(self) -> Axis:
        """The context-parallel axis, on the mesh's own group."""
        return Axis.from_group(None if self.mesh is None else self.mesh.get_group("cp"), "cp")

    @property
    def averaged_over(self) -> int:
        """The ranks whose gradients are averaged, by which a loss is multiplied beforehand."""
        return self.topology.dp.size * self.topology.cp.size


def parallelize(
    model: Model,
    topology: Topology | None = None,
    *,
    dtype: torch.dtype | None = None,
    cp_method: str = "auto",
    cp_fallback: bool = True,
    reshard_after_forward: bool = True,
    sync_weights: bool = True,
) -> Model:
    """The same model, spread over ``topology``: FSDP2 over dp·cp, DTensor over tp, context parallel in its attention.

    Args:
        model: a causal language model with its weights; changed in place.
        topology: the ranks of dp, cp and tp; one process if None.
        dtype: what layers compute in, for example ``torch.bfloat16``. Parameters and the optimizer stay as they are,
            and gradients are summed in float32.
        cp_method: how cp shares attention: ``"ulysses"``, ``"gather"`` or ``"auto"``.
        cp_fallback: whether keys may be gathered where Ulysses cannot split the heads.
        reshard_after_forward: whether layers free their gathered weights between forward and backward.
        sync_weights: whether rank 0's weights are sent to all first; leave it on unless every rank loaded the same
            file.

    Make the optimizer after this call: the model's parameters are other tensors then.

    Collective over the world; changes the model in place. Raises ``InputError`` or ``DistributedError`` on every rank,
    before anything is changed, for a topology that is not the world's, a model that packed rows cannot be trained
    on, one without a tensor-parallel plan, or heads that tp or cp does not divide.
    """
    topology = topology or Topology.single()
    world = Axis.world()
    # All checks, on every rank together: what follows changes the model and is collective.
    with together(world, "preparing a model for its topology"):
        _check(model, topology, world.size)
        _put_attention(model)
        _require_context(model, topology, cp_method, cp_fallback)
    device = device_of_rank()
    # One process has no FSDP to cast its weights; autocast takes the place of its mixed precision.
    if world.size == 1:
        model.to(device)  # pyright: ignore[reportArgumentType]
        setattr(model, _ATTRIBUTE, Parallel(topology, device, autocast=dtype))
        return model
    mesh, sharded = mesh_of(topology)
    # A topology of numbers alone gets the mesh's process groups.
    if any(axis.size > 1 and axis.group is None for axis in topology.axes):
        topology = Topology.from_device_mesh(mesh)
    # In this order: whole weights are sent before they are cut, tp cuts them, and FSDP shards what tp left to each
    # rank.
    if sync_weights:
        _send_weights(model, device)
    if topology.tp.size > 1:
        tensor_parallel.apply(model, mesh["tp"])
        _share_seed(mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None)
    # Layers before the root, since fully_shard leaves out what a submodule manages already. Layers are gathered one at
    # a time; the root has the rest: embeddings, last norm and head.
    for layer in _layers(model):
        fully_shard(layer, mesh=sharded, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=sharded, mp_policy=policy)
    setattr(model, _ATTRIBUTE, Parallel(topology, device, mesh, sharded, cp_method, cp_fallback))
    return model


def parallel_of(model: nn.Module) -> Parallel:
    """The distribution that :func:`parallelize` gave the model. Raises ``InputError`` if it did not."""
    found = getattr(model, _ATTRIBUTE, None)
    if found is None:
        raise InputError("this model was not made parallel", found=type(model).__name__, hint="parallelize it first")
    return found


def tied_names(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _check(model: Any, topology: Topology, world: int) -> None:
    if not isinstance(model, PreTrainedModel):
        raise InputError("a Hugging Face model is needed", expected="a PreTrainedModel", found=type(model).__name__)
    if getattr(model, _ATTRIBUTE, None) is not None:
        raise InputError("this model is parallel already", found=type(model).__name__)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("this model has no weights yet", found="parameters on the meta device")
    # A loss that transformers lists for another task is refused. One that it does not list is the model's own, and is
    # taken for a next-token loss.
    loss = model.loss_function
    if "labels" not in inspect.signature(model.forward).parameters or (
        loss is not ForCausalLMLoss and loss in LOSS_MAPPING.values()
    ):
        raise InputError(
            "only causal language models are trained by this engine",
            expected="a model whose loss predicts the next token",
            found=type(model).__name__,
            hint="ullage.training.Trainer trains the others",
        )
    if topology.pp.size > 1:
        raise InputError("FSDP takes no pipeline stages", expected="pp 1", found=f"pp {topology.pp.size}")
    if topology.world_size != world:
        raise InputError(
            "the topology is not the world's",
            expected=f"{world} ranks",
            found=" × ".join(f"{axis.name} {axis.size}" for axis in topology.axes) + f" = {topology.world_size}",
        )
    if topology.tp.size > 1:
        tensor_parallel.require_tensor_parallel(model, topology.tp.size)


def _require_context(model: Any, topology: Topology, method: str, fallback: bool) -> None:
    require_one_of(method, ("auto", "ulysses", "gather"), "cp_method")
    cp = topology.cp.size
    if cp == 1:
        return
    packed_attention.require_context_parallel(model)
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if fallback or method == "gather" or not isinstance(heads, int):
        return
    # Ulysses divides the heads that tp leaves to a rank: a share of them only where the plan splits the projections.
    own = heads // topology.tp.size if tensor_parallel.splits(model, "q_proj") else heads
    if own % cp:
        raise InputError(
            "cp does not divide the model's attention heads",
            where=type(model).__name__,
            expected=f"a multiple of cp = {cp}",
            found=f"{own} on each rank of tp",
            hint="allow cp_fallback, which gathers keys and values instead",
        )


def _put_attention(model: Any) -> None:
    """Set the attention that keeps packed sequences apart, unless the model's forward takes their lengths itself."""
    if "cu_seq_lens_q" not in inspect.signature(model.forward).parameters:
        if model.config._attn_implementation != "ullage":
            with contextlib.suppress(KeyError, ValueError):  # no hook to put it in: the check says so
                model.set_attn_implementation("ullage")
        packed_attention.require_packing(model)


@torch.no_grad()
def _send_weights(model: nn.Module, device: torch.device) -> None:
    """Send rank 0's parameters and buffers to all ranks, so that a random start is the same everywhere."""
    for tensor in (*model.parameters(), *model.buffers()):
        # NCCL sends from the device only; one tensor at a time, so that the device holds one beside the model.
        there = tensor.data.to(device).contiguous()
        dist.broadcast(there, src=0)
        tensor.data.copy_(there)


def _share_seed(mesh: DeviceMesh) -> None:
    """Give the ranks of tp one random seed, so that dropout masks alike what they all hold."""
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, group=mesh.get_group(), group_src=0)
    torch.manual_seed(seed[0])


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that are sharded each by itself: what the model says is not to be split."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds and module is not model]
