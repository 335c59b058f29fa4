"""A Hugging Face model made ready for a topology, :func:`parallelize`, and what it is to ``ullage.training.Trainer``.

:class:`TrainedParallel` is what the Trainer leaves to FSDP2, DTensor and cp.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

import ullage.attention as packed_attention
from ullage.attention.heads import loss_name, works_by_sequence
from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.engines.fsdp.checkpoint import gather_weights, load, save
from ullage.engines.fsdp.optimizer import clip_grad_norm, require_optimizer
from ullage.engines.fsdp.parallel import Parallel, device_of_rank, hybrid_mesh, mesh_of
from ullage.engines.fsdp.weights import Source
from ullage.mixers.wrappers import bare, refuse_learned_prompt
from ullage.ranks import Axis, Topology, together
from ullage.training.setup.arguments import AUTO
from ullage.training.setup.sharding import ATTRIBUTE, sharding_of
from ullage.training.step.packable import make_packable, require_equal_calls

# Tensor parallelism by the model's own plan, as transformers applies it, with two differences.
#
# transformers shards a model before its weights are there and before they are tied; here both has happened, so a weight
# with two names is sharded under one and tied again. And where a small weight is on every rank but each rank's gradient
# covers its own heads only (``replicated_with_grad_allreduce``), transformers adds up ``param.grad`` after each
# backward, which counts earlier microbatches again; here each backward's gradient is added up before it is accumulated.
# Source: ``transformers.distributed.tensor_parallel`` and ``mixin`` of 5.23.

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_SPLITS_HEADS = "colwise"


def require_tensor_parallel(model: Any, size: int) -> None:
    """Raise ``InputError`` for a model that ``size`` ranks cannot share, with the reason."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if not _base_plan(model):
        reason = f"{name} has no tensor-parallel plan (base_model_tp_plan)"
        if getattr(config, "cell", None) is not None:
            reason = f"{name} is recurrent: every time step would wait for all ranks of tp"
        raise InputError(
            "this model cannot be split over tp", expected="a model with a plan", found=reason, hint="use dp instead"
        )
    heads = {
        "num_attention_heads": ("q_proj", "qkv_proj", "query_key_value"),
        "num_key_value_heads": ("k_proj", "v_proj"),
    }
    for attribute, projections in heads.items():
        number = getattr(config, attribute, None)
        if splits(model, *projections) and isinstance(number, int) and number % size:
            raise InputError(
                f"tp does not divide the model's {attribute}",
                where=name,
                expected=f"a multiple of tp = {size}",
                found=number,
            )


def splits(model: Any, *projections: str) -> bool:
    """Whether the model's plan leaves each rank with heads of its own after one of these projections."""
    plan = _base_plan(model)
    return any(name.rpartition(".")[2] in projections and style == _SPLITS_HEADS for name, style in plan.items())


def _base_plan(model: Any) -> dict[str, str]:
    return getattr(model.base_model, "tp_plan", None) or {}


def apply_plan(model: Any, mesh: DeviceMesh) -> None:
    """Shard the model's parameters over ``mesh``, an axis of one dim, and hook its modules; weights stay tied."""
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    modules, owners = dict(model.named_modules()), dict(model.named_parameters())
    summed = [name for name, style in plan.items() if style == _PARTIAL_GRADIENT]
    # A tied weight is listed under both names, but is one parameter, sharded under the first.
    aliases = {name for name in plan if name not in modules and name not in owners}
    kept = {name: style for name, style in plan.items() if name not in summed and name not in aliases}
    _apply_plan()(model, mesh, kept)
    if aliases:
        model.tie_weights(recompute_mapping=False)
    for name in summed:
        if name in modules:
            _sum_gradients(modules[name], mesh.get_group())


def _apply_plan() -> Callable[..., Any]:
    """transformers' function that shards a model by a plan. Raises ``InputError`` where it is not there yet."""
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise InputError(
            "this transformers does not split a model over tp as it is done here",
            expected="transformers 5.16 or newer",
            found=transformers.__version__,
            hint="use dp and cp alone, or a newer transformers",
        ) from None
    return apply_tensor_parallelism


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum each backward's gradients of this module's weights over the ranks, before they are accumulated."""

    def add_up(gradient: Tensor) -> Tensor:
        # A copy, because a hook must not change the gradient it is given.
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    hooked: dict[str, Tensor] = {}

    def before(module: nn.Module, arguments: Any) -> None:
        # FSDP2 puts other tensors in the parameters' place while the module runs: those have the gradients.
        if not torch.is_grad_enabled():
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and hooked.get(name) is not parameter:
                parameter.register_hook(add_up)
                hooked[name] = parameter

    module.register_forward_pre_hook(before)


#: Arguments that are not honoured for such a model, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "deepspeed": (None,),
    "fsdp": (None, "", [], False),
    "fp16": (False,),
    "torch_compile": (False,),
    "label_smoothing_factor": (0, 0.0),
    "push_to_hub": (False,),
    "enable_jit_checkpoint": (False,),
    "batch_eval_metrics": (False,),
    "neftune_noise_alpha": (None,),
    "auto_find_batch_size": (False,),
    "async_save": (False,),
    "packing_loss_weighting": ("token",),
}


class TrainedParallel(Parallel):
    """:class:`ullage.training.setup.sharding.Sharding` of a model that ``parallelize`` has spread."""

    @property
    def averaged_over(self) -> int:
        return self.topology.dp.size * self.topology.cp.size

    @cached_property
    def ranks_of_batch(self) -> list[list[int]]:
        mesh = self.mesh
        return [[0]] if mesh is None else mesh.mesh.reshape(mesh.shape[0], -1).tolist()

    def require_trainable(self, arguments: Any) -> None:
        require_supported(arguments)
        if arguments.bf16 and self.dtype is None:
            raise InputError(
                "bf16 is asked of a model whose layers compute in another type",
                where="TrainingArguments.bf16",
                expected="parallelize(model, dtype=torch.bfloat16)",
                found="parallelize without dtype",
            )

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        inner: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.mesh is None and self.dtype is not None:  # no FSDP to cast its weights
            inner = torch.autocast(self.device.type, self.dtype)
        elif self.topology.cp.size > 1:
            inner = packed_attention.context_parallel(self.cp)
        with warnings.catch_warnings(), inner:
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of changes in place to its outputs: none here
            yield

    def keywords(self, batch: RaggedBatch) -> dict[str, Any] | None:
        if self.topology.cp.size == 1:
            return None
        return packed_attention.shard_batch(batch, self.cp)

    def whole_loss(self, loss: Tensor) -> Tensor:
        if self.topology.cp.size > 1:
            dist.all_reduce(loss, group=self.cp.require_group())
        return loss

    @contextlib.contextmanager
    def deferred(self, model: Any) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)

    def clip(self, model: Any, max_norm: float | None) -> Tensor:
        return clip_grad_norm(model.parameters(), max_norm)

    def require_optimizer(self, model: Any, optimizer: Any) -> None:
        require_optimizer(model, optimizer)

    def whole_weights(self, model: Any) -> dict[str, Tensor]:
        return gather_weights(model)

    def save(self, checkpoint: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        states = {} if scheduler is None else {"scheduler": scheduler}
        save(checkpoint / MODEL_AND_OPTIMIZER, model, _bare(optimizer), **states)
        if Axis.world().rank == 0:
            model.config.save_pretrained(checkpoint)

    def load(self, checkpoint: Path, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        states = {} if scheduler is None else {"scheduler": scheduler}
        load(checkpoint, model, _bare(optimizer), allow_changed=True, **states)


def require_supported(arguments: Any) -> None:
    """Raise ``InputError`` for an argument that is not honoured for a model over several axes."""
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(arguments, name, harmless[0])
        if value not in harmless:
            raise InputError(
                f"{name} is not supported over ullage.engines.fsdp, which --dp, --cp and --tp use",
                expected=harmless[0],
                found=value,
                hint="leave it out",
            )
    if getattr(arguments, "packing_capacity", None) == AUTO:
        raise InputError(
            "a capacity is not found by itself over ullage.engines.fsdp, which --dp, --cp and --tp use",
            where="packing_capacity",
            expected="a number",
            found=AUTO,
        )


def _bare(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


Model = TypeVar("Model", bound=nn.Module)
#: What a loss is a mean over.
NEXT_TOKEN, TOKEN, SEQUENCE = "next_token", "token", "sequence"
#: The objective of transformers' losses beside the next token's.
_OBJECTIVES = {"ForTokenClassification": TOKEN, "ForMaskedLM": TOKEN, "ForSequenceClassification": SEQUENCE}


def parallelize(
    model: Model,
    topology: Topology | None = None,
    *,
    dtype: torch.dtype | None = None,
    weights: str | Path | None = None,
    dp_replicate: int = 1,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    sync_weights: bool = True,
) -> Model:
    """The same model, spread over ``topology``: FSDP2 over dp·cp, DTensor over tp, context parallel in its attention.

    Args:
        model: a causal language model, or a classifier of tokens or sequences, also with PEFT's adapters in its
            layers; changed in place.
        topology: the ranks of dp, cp and tp; one process if None.
        dtype: what layers compute in, for example ``torch.bfloat16``. Parameters and the optimizer stay as they are,
            and gradients are summed in float32.
        weights: for a model built on meta: a folder of safetensors, of which each rank reads its own part.
        dp_replicate: groups of dp ranks that each hold all parameters (HSDP): within a group they are sharded over
            dp ÷ dp_replicate · cp, over the groups gradients are added up.
        reshard_after_forward: whether layers free their gathered weights between forward and backward.
        cpu_offload: whether parameters, gradients and the optimizer's state lie on the host between their uses.
        sync_weights: whether rank 0's weights are sent to all first; leave it on unless every rank loaded the same
            file.

    Make the optimizer after this call: the model's parameters are other tensors then.

    A model built on meta (``with torch.device("meta")``) gets its weights here, from ``weights``; one that is real on
    rank 0 and on meta elsewhere gets rank 0's. No rank but such a source ever holds the whole.

    Collective over the world; changes the model in place. Raises ``InputError`` or ``DistributedError`` on every rank,
    before anything is changed, for a topology that is not the world's, a model that packed rows cannot be trained
    on, one without a tensor-parallel plan, or heads that tp does not divide.
    """
    topology = topology or Topology.single()
    world = Axis.world()
    # All checks, on every rank together: what follows changes the model and is collective.
    with together(world, "preparing a model for its topology"):
        objective = _check(model, topology, world.size, dp_replicate)
        _put_attention(bare(model), objective)
        _require_context(bare(model), topology)
    # By itself: it asks all ranks what they have, and one that was refused above would not answer.
    with together(world, "finding the weights of a model"):
        source = Source.of(model, weights)
    device = device_of_rank()
    if world.size == 1:
        return _on_one_process(model, TrainedParallel(topology, device, dtype=dtype), source, cpu_offload)
    mesh, sharded = mesh_of(topology)
    tp = mesh["tp"]
    if dp_replicate > 1:
        hybrid = hybrid_mesh(mesh, dp_replicate)
        sharded, tp = hybrid["dp_replicate", "dp_shard_cp"], hybrid["tp"]
    # A topology of numbers alone gets the mesh's process groups.
    if any(axis.size > 1 and axis.group is None for axis in topology.axes):
        topology = Topology.from_device_mesh(mesh)
    # In this order: whole weights are sent before they are cut, tp cuts them, and FSDP shards what tp left to each
    # rank. Of a model on meta there is nothing yet to send or cut but the shapes.
    if source is not None:
        source.take(model)
    elif sync_weights:
        _send_weights(model, device)
    if topology.tp.size > 1:
        apply_plan(model, tp)
        _share_seed(tp)
    _shard(model, sharded, dtype, device if cpu_offload else None, reshard_after_forward)
    if source is not None:
        source.fill(model, torch.device("cpu") if cpu_offload else device)
    _leave(model, TrainedParallel(topology, device, mesh, dtype, dp_replicate))
    return model


def _on_one_process(model: Model, parallel: Parallel, source: Source | None, cpu_offload: bool) -> Model:
    """A model on its device. There is no FSDP to cast its weights: autocast takes the place of mixed precision."""
    if cpu_offload:
        raise InputError("one process does not offload: it has no FSDP", where="cpu_offload", expected=False)
    if source is not None:
        source.take(model)
        source.fill(model, parallel.device)
    model.to(parallel.device)  # pyright: ignore[reportArgumentType]
    _leave(model, parallel)
    return model


def _leave(model: Any, parallel: Parallel) -> None:
    """Tell whoever gets the model how it lies over the ranks, and accelerate that there is nothing left to wrap."""
    setattr(model, ATTRIBUTE, parallel)
    model._is_accelerate_prepared = True


def _shard(
    model: Any, sharded: DeviceMesh, dtype: torch.dtype | None, offloaded_from: torch.device | None, reshard: bool
) -> None:
    """Shard parameters over a mesh of one dim, or of two with HSDP.

    ``offloaded_from``: the device that parameters lie beside, on the host; None leaves them on it.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None)
    shared: dict[str, Any] = {"mesh": sharded, "mp_policy": policy}
    if offloaded_from is not None:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=offloaded_from.type != "cpu")
    # Layers before the root, since fully_shard leaves out what a submodule manages already. Layers are gathered one at
    # a time; the root has the rest: embeddings, last norm and head.
    for layer in _layers(model):
        fully_shard(layer, reshard_after_forward=reshard, **shared)
    fully_shard(model, **shared)


def _check(model: Any, topology: Topology, world: int, dp_replicate: int) -> str:
    """The model's objective. Raises ``InputError`` for a model or topology that this engine does not take."""
    inner: Any = bare(model)
    if not isinstance(inner, PreTrainedModel):
        found = type(model).__name__
        raise InputError("a Hugging Face model is needed", expected="a PreTrainedModel, or PEFT's", found=found)
    refuse_learned_prompt(model)
    if sharding_of(model) is not None:
        raise InputError("this model is parallel already", found=type(model).__name__)
    objective = _objective_of(inner)
    if topology.pp.size > 1:
        raise InputError("FSDP takes no pipeline stages", expected="pp 1", found=f"pp {topology.pp.size}")
    if topology.world_size != world:
        raise InputError(
            "the topology is not the world's",
            expected=f"{world} ranks",
            found=" × ".join(f"{axis.name} {axis.size}" for axis in topology.axes) + f" = {topology.world_size}",
        )
    if not isinstance(dp_replicate, int) or dp_replicate < 1 or topology.dp.size % dp_replicate:
        raise InputError(
            "dp_replicate does not divide the ranks of dp",
            expected=f"a divisor of dp {topology.dp.size}",
            found=dp_replicate,
        )
    if topology.tp.size > 1:
        if inner is not model:
            raise InputError(
                "tp does not cut adapters", where=type(model).__name__, expected="tp 1", hint="use dp and cp instead"
            )
        require_tensor_parallel(model, topology.tp.size)
    if topology.cp.size > 1 and objective != NEXT_TOKEN:
        raise InputError(
            "cp shares the rows of causal language models alone",
            where=type(inner).__name__,
            expected="cp 1",
            found=f"cp {topology.cp.size}",
        )
    return objective


def _require_context(model: Any, topology: Topology) -> None:
    if topology.cp.size > 1:
        packed_attention.require_context_parallel(model)


def _put_attention(model: Any, objective: str) -> None:
    """Set the attention that keeps packed sequences apart, unless the model's forward takes their lengths itself."""
    if not _takes_row(model, objective):
        if getattr(model.config, "pad_token_id", None) is None:
            raise InputError(
                "a classifier of sequences is run on padded rows, and finds their ends by the id of padding",
                where=f"{type(model).__name__}.config.pad_token_id",
                expected="an id",
                found=None,
            )
        return
    if "cu_seq_lens_q" in inspect.signature(model.forward).parameters:
        packed_attention.require_packing(model)
    else:
        make_packable(model)
        require_equal_calls(model)


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


def _layers(model: Any) -> list[nn.Module]:
    """The blocks that are sharded each by itself: what the model says is not to be split."""
    inner: Any = bare(model)
    kinds = set(inner._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds and module is not model]


def _objective_of(model: Any) -> str:
    """What the loss of a model without its adapters is a mean over: tokens, or sequences.

    Raises ``InputError`` for a model that is not trained here.
    """
    loss = model.loss_function
    if "labels" in inspect.signature(model.forward).parameters:
        # A loss that transformers does not list is the model's own, and is taken for a next-token loss.
        if loss is ForCausalLMLoss or loss not in LOSS_MAPPING.values():
            return NEXT_TOKEN
        found = SEQUENCE if works_by_sequence(model) else _OBJECTIVES.get(loss_name(model) or "")
        if found is not None and not getattr(model.config, "is_encoder_decoder", False):
            return found
    raise InputError(
        "only causal language models, and classifiers of tokens or sequences, are trained by this engine",
        expected="a model whose loss predicts the next token, or one class per token or sequence",
        found=type(model).__name__,
        hint="ullage.training.Trainer trains the others",
    )


def _takes_row(model: Any, objective: str) -> bool:
    """Whether a microbatch runs as one packed row, and not padded."""
    return objective != SEQUENCE or "cu_seq_lens_q" in inspect.signature(model.forward).parameters
