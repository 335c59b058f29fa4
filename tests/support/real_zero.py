"""Checkpoints written by real DeepSpeed code, with a known value in every element and a sentinel in the padding.

One process is each rank in turn: torch's ``fake`` process group lets DeepSpeed believe that it is rank *r* of *n*,
so that its own code flattens, partitions and saves. The state is then overwritten before it is saved: every element
of every parameter gets a value that depends on its name, its key and its position only (:func:`values`), and the
whole rest of each partition, which is padding, gets :data:`SENTINEL`. Where a parameter lies is read from the memory
of DeepSpeed's own flat buffer (the address of the parameter in it), not from any mapping on disk.

    truth = real_zero.write(folder, Recipe(stage=1, dp=64, groups=[{"w": (300,)}]))
    truth.tag_folder                       # folder/global_step7
    truth.tensor("w", "exp_avg")           # what a converted checkpoint must hold, bit for bit

The writer runs in a fork of the tests' server, and each rank in a fork of that, so no state leaks into the test.
"""

import gc
import importlib
import os
import re
import sys
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

#: Fills everything that is not an element of a parameter. No value of :func:`values` comes near it.
SENTINEL = -7.25e7
STEP = 7
#: Width of what the gates of experts read.
GATED = 3
_GATE, _EXPERTS = "deepspeed_moe.gate.wg.weight", "deepspeed_moe.experts.deepspeed_experts"


#: What takes as long as all else that a rank does, and is imported once before the forks.
_IMPORTED_BY_EVERY_RANK = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch.utils.serialization.config",
)

#: in the writer's process: values drawn before the forks
_known: dict[tuple[str, str], np.ndarray] = {}


def values(name: str, key: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """The truth: float32 of ``shape``, determined by its arguments alone. ``exp_avg_sq`` is not negative."""
    if (name, key) in _known:
        return _known[name, key]
    random = np.random.default_rng(zlib.crc32(f"{seed}/{key}/{name}".encode()))
    array = random.standard_normal(shape, dtype=np.float32)
    return np.abs(array) if key in ("exp_avg_sq", "variance") else array


@dataclass
class Recipe:
    """What to write. ``groups``: one ``{name: shape}`` a parameter group; dotted names make nested modules."""

    #: 0 is DeepSpeed without ZeRO: one file, from the first rank
    stage: int = 1
    dp: int = 2
    groups: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    #: ``fp32``, ``bf16``, ``fp16``, or ``bf16_optimizer`` (bf16 with ZeRO 1 through BF16_Optimizer).
    dtype: str = "fp32"
    #: ``adamw``, ``sgd`` (no state), ``momentum``, ``lion`` (exp_avg only), ``adafactor`` (variance and step).
    optimizer: str = "adamw"
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: alias -> owner: both names are one parameter
    tied: dict[str, str] = field(default_factory=dict)
    #: one a group; 0.0 where missing
    weight_decay: list[float] = field(default_factory=list)
    round_robin: bool = False
    #: give the optimizer the names of its parameters (stage 0 saves them)
    named: bool = False
    #: leave frozen parameters out of the files
    exclude_frozen: bool = False
    #: align each parameter to 16 bytes in the flat buffer (``zero_optimization.parameter_alignment``)
    alignment: bool = False
    elastic: bool = False
    #: stage 3 only: elements a sub-group holds at most
    sub_group_size: int | None = None
    #: ``universal_checkpoint_info``; None writes none
    info: dict[str, Any] | None = None
    #: tensor- and pipeline-parallel sizes. ``groups`` then holds the shapes of ONE rank, unless ``per_rank`` is given.
    tp: int = 1
    pp: int = 1
    #: [pp * tp] lists like ``groups``, when the model ranks differ; index ``pp_rank * tp + tp_rank``
    per_rank: list[list[dict[str, tuple[int, ...]]]] | None = None
    #: a ``PipelineModule``: files by layer, as Megatron-DeepSpeed writes them. The names of its parameters begin with the
    #: number of their layer, and every stage has as many layers.
    pipeline: bool = False
    #: layers of experts (``deepspeed.moe.layer.MoE``) by path: how many, and the shapes of one. Each is a group more,
    #: the last ones, and its gate is in the first. Needs ``ep``, the ranks that share the experts.
    experts: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = field(default_factory=dict)
    ep: int = 1
    #: with tp: each rank has its slice of each expert (``enable_expert_tensor_parallelism``), of the shapes above
    slices_experts: bool = True
    #: ranks that hold the same experts follow one another (``use_data_before_expert_parallelism``)
    data_before: bool = False
    tag: str = f"global_step{STEP}"
    seed: int = 0

    def groups_of(self, model_rank: int) -> list[dict[str, tuple[int, ...]]]:
        return self.per_rank[model_rank] if self.per_rank is not None else self.groups


#: Tensor-valued, sliceable state of each optimizer.
STATE_KEYS = {
    "adamw": ("exp_avg", "exp_avg_sq"), "sgd": (), "momentum": ("momentum_buffer",), "lion": ("exp_avg",),
    "adafactor": ("variance",),
}  # fmt: skip


@dataclass
class Truth:
    """What was written: where, and what every tensor must be."""

    folder: Path
    recipe: Recipe

    @property
    def tag_folder(self) -> Path:
        return self.folder / self.recipe.tag

    def shapes(self, model_rank: int = 0) -> dict[str, tuple[int, ...]]:
        """Trained parameters of one model rank, in the order of the recipe."""
        found = {name: tuple(s) for group in self.recipe.groups_of(model_rank) for name, s in group.items()}
        for path, (total, inner) in self.recipe.experts.items():
            found[f"{path}.{_GATE}"] = (total, GATED)
            found |= {f"{path}.{_EXPERTS}.{e}.{n}": tuple(s) for e in range(total) for n, s in inner.items()}
        return found

    @property
    def keys(self) -> tuple[str, ...]:
        return ("fp32", *STATE_KEYS[self.recipe.optimizer])

    def tensor(self, name: str, key: str = "fp32", model_rank: int = 0) -> np.ndarray:
        """The truth of one tensor of one model rank. With tp or pp, replicas differ by rank: ``name@rank``."""
        return values(self.seeded(name, model_rank), key, self.shapes(model_rank)[name], self.recipe.seed)

    def seeded(self, name: str, model_rank: int) -> str:
        return (
            name if self.recipe.tp * self.recipe.pp == 1 or _replicated(self.recipe, name) else f"{name}@{model_rank}"
        )

    def frozen(self, name: str) -> np.ndarray:
        """A frozen parameter, in float32, before its cast to the model's dtype."""
        return values(name, "frozen", tuple(self.recipe.frozen[name]), self.recipe.seed)

    def buffer(self, name: str) -> np.ndarray:
        return values(name, "buffer", tuple(self.recipe.buffers[name]), self.recipe.seed)


def _replicated(recipe: Recipe, name: str) -> bool:
    lists = ("tp_replicated_parameter_patterns", "pipeline_replicated_parameter_patterns")
    return any(re.match(pattern, name) for which in lists for pattern in (recipe.info or {}).get(which, []))


def write(folder: Path | str, recipe: Recipe) -> Truth:
    """Writes ``folder/<tag>`` and ``folder/latest`` and says what is in them. Raises what the writer raised."""
    from tests.support import processes

    Path(folder).mkdir(parents=True, exist_ok=True)
    processes.call(_write, str(folder), asdict(recipe), loads=("torch", "training"), timeout=900)
    return Truth(Path(folder), recipe)


# ---------------------------------------------------------------------------------------------------------------------
# The writer, in a process of its own.


def _write(rank: int, folder: str, recipe: dict[str, Any]) -> None:
    import logging
    import warnings

    import deepspeed
    import torch

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    deepspeed.utils.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    for module in _IMPORTED_BY_EVERY_RANK:
        importlib.import_module(module)
    gc.freeze()  # DeepSpeed collects garbage in every fork, which would copy every page that holds an object
    error = _write_all_ranks(folder, Recipe(**recipe))
    if error:
        raise RuntimeError(f"DeepSpeed did not write the checkpoint:\n{error}")


def _write_all_ranks(folder: str, recipe: Recipe, parallel: int = 2) -> str:
    """Forks once a rank, ``parallel`` at a time. Returns the first traceback, or nothing."""
    world = recipe.dp * recipe.tp * recipe.pp
    truth = Truth(Path(folder), recipe)
    _known.clear()
    numel = sum(int(np.prod(s)) for m in range(recipe.tp * recipe.pp) for s in truth.shapes(m).values())
    if numel * len(truth.keys) < 20_000_000:  # drawn once, inherited by every fork
        for model_rank in range(recipe.tp * recipe.pp):
            for name in truth.shapes(model_rank):
                for key in truth.keys:
                    _known[truth.seeded(name, model_rank), key] = truth.tensor(name, key, model_rank)
    running: dict[int, int] = {}
    errors = []
    for rank in range(world + parallel):
        while len(running) >= (parallel if rank < world else 1) and running:
            pid, status = os.wait()
            done = running.pop(pid)
            if status:
                report = Path(folder) / f".error{done}"
                errors.append(report.read_text() if report.exists() else f"rank {done} died with status {status}")
        if rank < world and not errors:
            pid = os.fork()
            if pid == 0:
                _be_rank(folder, recipe, rank, world)
            running[pid] = rank
    return errors[0] if errors else ""


def _be_rank(folder: str, recipe: Recipe, rank: int, world: int) -> None:
    try:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        _write_rank(folder, recipe, rank, world)
    except BaseException:
        (Path(folder) / f".error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _mpu(rank: int, tp: int, dp: int, pp: int) -> SimpleNamespace:
    """Megatron's order of ranks: tensor fastest, then data, then pipeline. What DeepSpeed asks of it, by ``get_``."""
    import torch.distributed as dist

    tp_rank, dp_rank, pp_rank = rank % tp, rank // tp % dp, rank // (tp * dp)
    base = pp_rank * tp * dp
    told = {
        "data_parallel_group": dist.new_group([base + d * tp + tp_rank for d in range(dp)]),
        "data_parallel_rank": dp_rank,
        "data_parallel_world_size": dp,
        "tensor_model_parallel_group": dist.new_group([base + dp_rank * tp + t for t in range(tp)]),
        "tensor_model_parallel_rank": tp_rank,
        "tensor_model_parallel_world_size": tp,
        "model_parallel_group": dist.new_group([p * tp * dp + dp_rank * tp + t for p in range(pp) for t in range(tp)]),
        "model_parallel_rank": pp_rank * tp + tp_rank,
        "model_parallel_world_size": tp * pp,
        "pipeline_model_parallel_rank": pp_rank,
        "pipeline_model_parallel_world_size": pp,
    }
    return SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in told.items()})


def _hold(module: Any, name: str) -> tuple[Any, str]:
    """The module of a dotted name below this one, made where it is missing, and the last part of the name."""
    import torch

    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module._modules[part]
    return module, leaf


def _build(recipe: Recipe, model_rank: int):
    """A module with the parameters and buffers of the recipe, and its parameter groups."""
    import torch

    root = torch.nn.Module()
    parameters: dict[str, Any] = {}
    for group in [*recipe.groups_of(model_rank), recipe.frozen]:
        for name, shape in group.items():
            module, leaf = _hold(root, name)
            parameters[name] = torch.nn.Parameter(torch.zeros(tuple(shape)), requires_grad=name not in recipe.frozen)
            module.register_parameter(leaf, parameters[name])
    for name in recipe.frozen:
        parameters[name].data.copy_(torch.from_numpy(values(name, "frozen", tuple(recipe.frozen[name]), recipe.seed)))
    for alias, owner in recipe.tied.items():
        module, leaf = _hold(root, alias)
        module.register_parameter(leaf, parameters[owner])
    for name, shape in recipe.buffers.items():
        module, leaf = _hold(root, name)
        module.register_buffer(leaf, torch.from_numpy(values(name, "buffer", tuple(shape), recipe.seed)))
    decays = [*recipe.weight_decay, *[0.0] * len(recipe.groups_of(model_rank))]
    groups = [
        {
            "params": [(name, parameters[name]) if recipe.named else parameters[name] for name in group],
            "weight_decay": decay,
        }
        for group, decay in zip(recipe.groups_of(model_rank), decays)
    ]
    if recipe.stage:
        groups[0]["params"] += [parameters[name] for name in recipe.frozen]
    return root, groups


def _add_experts(recipe: Recipe, root: Any, groups: list[dict[str, Any]]) -> None:
    """Add the layers of experts to ``root``, their gates to the first group, and a group per layer for the experts."""
    import torch
    from deepspeed.moe.layer import MoE

    class Expert(torch.nn.Module):
        def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(tuple(shape))))

    for path, (total, shapes) in recipe.experts.items():
        layer: Any = MoE(
            GATED, Expert(shapes), total, recipe.ep, enable_expert_tensor_parallelism=recipe.slices_experts
        )
        root.add_module(path, layer)
        gate = layer.deepspeed_moe.gate.wg.weight
        gate.data.zero_()
        groups[0]["params"].append(gate)
        held = list(layer.deepspeed_moe.experts.parameters())
        groups.append({"params": held, "weight_decay": 0.0, "moe": True, "name": f"ep_size_{recipe.ep}"})


def _build_pipeline(recipe: Recipe, rank: int):
    """A pipeline module of this rank's layers, its parameter groups, and its rank among the model ranks."""
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            for name, shape in held.items():
                layer, _, inner = name.partition(".")
                if int(layer) == number:
                    module, leaf = _hold(self, inner)
                    module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(tuple(shape))))

    topology = PipeModelDataParallelTopology(num_pp=recipe.pp, num_mp=recipe.tp, num_dp=recipe.dp)
    here = topology.get_coord(rank)
    model_rank = here.pipe * recipe.tp + here.model
    every = [name for r in range(recipe.pp * recipe.tp) for group in recipe.groups_of(r) for name in group]
    held = {name: shape for group in recipe.groups_of(model_rank) for name, shape in group.items()}
    layers = [LayerSpec(Layer, number) for number in range(1 + max(int(name.split(".")[0]) for name in every))]
    module = PipelineModule(layers, topology=topology, partition_method="uniform", loss_fn=torch.nn.MSELoss())
    parameters = dict(module.named_parameters())
    assert parameters.keys() == held.keys(), (sorted(parameters), sorted(held))
    groups = [{"params": [parameters[n] for n in group], "weight_decay": 0.0} for group in recipe.groups_of(model_rank)]
    return module, groups, model_rank, here.data


def _optimizer(recipe: Recipe, groups: list[dict[str, Any]]):
    import torch

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p].setdefault("exp_avg", torch.zeros_like(p))

    made = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-3),
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-3),
        "momentum": lambda: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
        "lion": lambda: Lion(groups, lr=1e-3),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=1e-3),
    }
    return made[recipe.optimizer]()


def _config(recipe: Recipe) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": recipe.stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    asked = {"round_robin_gradients": recipe.round_robin, "parameter_alignment": recipe.alignment}
    zero |= {name: True for name, wanted in {**asked, "elastic_checkpoint": recipe.elastic}.items() if wanted}
    if recipe.sub_group_size is not None:
        zero["sub_group_size"] = recipe.sub_group_size
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if recipe.data_before:
        config["use_data_before_expert_parallelism"] = True
    if recipe.dtype in ("bf16", "bf16_optimizer"):
        config["bf16"] = {"enabled": True}
    if recipe.dtype == "bf16_optimizer":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif recipe.dtype == "bf16" and recipe.stage == 1:
        config["data_types"] = {"grad_accum_dtype": "bf16"}
    if recipe.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return config


def _write_rank(folder: str, recipe: Recipe, rank: int, world: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    import deepspeed

    from ullage.training.deepspeed import init_distributed

    init_distributed("fake")
    mpu = None
    if recipe.pipeline:
        model, groups, model_rank, dp_rank = _build_pipeline(recipe, rank)
    else:
        mpu = _mpu(rank, recipe.tp, recipe.dp, recipe.pp) if recipe.tp * recipe.pp > 1 else None
        model_rank = mpu.get_model_parallel_rank() if mpu else 0
        dp_rank = mpu.get_data_parallel_rank() if mpu else rank
        model, groups = _build(recipe, model_rank)
        _add_experts(recipe, model, groups)
    if recipe.info is not None:
        # Read by the engine where it is a method; with experts it must be a dict, and no client state.
        model.universal_checkpoint_info = recipe.info if recipe.experts else lambda: recipe.info
    if recipe.dtype == "fp16":  # nothing is computed here, so a processor without fp16 will do
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_optimizer(recipe, groups), config=_config(recipe), mpu=mpu
    )
    zero = engine.optimizer
    if recipe.stage:
        _fill(Truth(Path(folder), recipe), recipe, zero, model_rank, dp_rank)
    else:
        _fill_plain(Truth(Path(folder), recipe), engine)
    engine.global_steps = STEP
    client_state = {"iteration": STEP}
    if recipe.info is not None and not recipe.experts:
        client_state["universal_checkpoint_info"] = recipe.info
    engine._checkpoint_tag_validation = lambda tag: None  # compares over ranks that do not exist
    engine.save_checkpoint(
        folder, tag=recipe.tag, client_state=client_state, exclude_frozen_parameters=recipe.exclude_frozen
    )


def _fill(truth: Truth, recipe: Recipe, zero: Any, model_rank: int, dp_rank: int) -> None:
    """Overwrites masters, moments and model weights with the truth, and everything else with the sentinel."""
    import torch

    names = {p: _among_all(recipe, name, dp_rank) for p, name in zero.param_names.items()}
    inner = zero.optimizer
    partitions = _partitions(zero, recipe, dp_rank)
    for group, (flat, _) in zip(inner.param_groups, partitions if recipe.stage < 3 else []):
        assert group["params"][0] is flat
    for flat, _ in partitions:
        flat.grad = torch.zeros_like(flat)
    if recipe.stage == 3:
        for i in range(len(partitions)):
            inner.param_groups[zero.sub_group_to_group_id[i]]["params"] = [partitions[i][0]]
            inner.step()
            inner.param_groups[zero.sub_group_to_group_id[i]]["params"] = []
    else:
        inner.step()
    for flat, fragments in partitions:
        state = inner.state[flat]
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = torch.tensor(float(STEP))
        tensors = {
            k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() == flat.numel() and v.dim()
        }
        tensors["fp32"] = flat.data
        for key, tensor in tensors.items():
            if key == "step":
                continue
            tensor.fill_(SENTINEL)
            for param, at, start, length in fragments:
                array = truth.tensor(names[param], key, model_rank).reshape(-1)[start : start + length]
                tensor[at : at + length] = torch.from_numpy(array.copy()).to(tensor.dtype)
        flat.grad = None
    if recipe.stage < 3:
        for group in zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups:
            for param in group:
                param.data.copy_(torch.from_numpy(truth.tensor(names[param], "fp32", model_rank)))


def _expert_places(recipe: Recipe, dp_rank: int) -> tuple[int, int]:
    """(expert-parallel rank, number of the partition) of a data-parallel rank, as Megatron and DeepSpeed order them."""
    same = recipe.dp // recipe.ep
    return (dp_rank // same, dp_rank % same) if recipe.data_before else (dp_rank % recipe.ep, dp_rank // recipe.ep)


def _among_all(recipe: Recipe, name: str, dp_rank: int) -> str:
    """The name of an expert's parameter with the number that the expert has among all."""
    for path, (total, _) in recipe.experts.items():
        begin = f"{path}.{_EXPERTS}."
        if name.startswith(begin):
            local, _, leaf = name.removeprefix(begin).partition(".")
            return f"{begin}{_expert_places(recipe, dp_rank)[0] * (total // recipe.ep) + int(local)}.{leaf}"
    return name


def _fill_plain(truth: Truth, engine: Any) -> None:
    """Stage 0: the same, in the parameters and in the state of the optimizer that DeepSpeed uses, plain or its own."""
    import torch

    names = {id(p): name for name, p in engine.module.named_parameters()}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    inner.step()
    for p in engine.module.parameters():
        if p.requires_grad:
            p.data.copy_(torch.from_numpy(truth.tensor(names[id(p)])))
    for p, state in inner.state.items():
        for key, value in state.items():
            if key == "step":
                value.fill_(float(STEP))
            elif id(p) in names:
                value.copy_(torch.from_numpy(truth.tensor(names[id(p)], key)))


def _partitions(zero: Any, recipe: Recipe, dp_rank: int):
    """[(flat fp32 partition of this rank, [(param, position in it, first element, length)])], read from memory."""
    found = []
    if recipe.stage == 3:
        for flat, part, group in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, zero.fp16_groups
        ):
            fragments = []
            for param in group:
                at = (param.ds_tensor.data_ptr() - part.data_ptr()) // part.element_size()
                share = param.ds_tensor.ds_numel
                start = share * dp_rank
                fragments.append((param, at, start, max(0, min(share, param.ds_numel - start))))
            found.append((flat, [f for f in fragments if f[3]]))
        return found
    bf16 = hasattr(zero, "bf16_groups")
    flats = zero.bf16_groups_flat if bf16 else zero.bit16_groups_flat
    masters = zero.fp32_groups_flat_partition if bf16 else zero.single_partition_of_fp32_groups
    for number, (flat, master, group) in enumerate(
        zip(flats, masters, zero.bf16_groups if bf16 else zero.bit16_groups)
    ):
        # The last groups are experts', cut over the ranks that hold the same ones.
        is_experts = number >= len(masters) - len(recipe.experts)
        low, fragments = (_expert_places(recipe, dp_rank)[1] if is_experts else dp_rank) * master.numel(), []
        high = low + master.numel()
        for param in group:
            at = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
            begin, end = max(at, low), min(at + param.numel(), high)
            if begin < end:
                fragments.append((param, begin - low, begin - at, end - begin))
        found.append((master, fragments))
    return found
