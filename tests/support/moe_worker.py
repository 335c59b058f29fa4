"""What one rank of a real DeepSpeed run with experts does: DeepSpeed's own MoE layers, or AutoEP over a Mixtral.

``job.config`` says which: ``ep`` (one size, or one per layer), ``experts`` per layer, ``autoep`` (a Hugging Face model
type), ``frozen`` (the first layer's experts are not trained), ``zero`` and ``other`` (entries of DeepSpeed's config).
Routing drops no token and draws nothing, so that losses do not depend on how tokens are dealt to the ranks.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.zero_worker import FEATURES, GLOBAL_BATCH, Job, base_config, data, take_steps

LOCAL = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
#: Names of AutoEP's stacked experts.
STACKED = re.compile(r".*\.experts\.w[123]")


class Expert(nn.Module):
    """Two linear layers of a width that divides nothing, one bias, and a buffer that enters the result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise = nn.Linear(width, 11)
        self.fall = nn.Linear(11, width, bias=False)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(torch.tanh(self.rise(x))) * self.scale.to(x.dtype)


class Net(nn.Module):
    """A linear layer, layers of experts, a frozen parameter, and a linear layer."""

    def __init__(self, width: int, ep: list[int], experts: list[int]) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.enter = nn.Linear(FEATURES, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)
        self.layers = nn.ModuleList(
            MoE(width, Expert(width), count, size, k=1, min_capacity=0, drop_tokens=False, use_rts=False)
            for size, count in zip(ep, experts)
        )
        self.leave = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return ((self.leave(hidden * self.scale).squeeze(-1) - y).float() ** 2).mean()


def ep_rank(size: int) -> int:
    """This rank's place in its expert-parallel group of ``size`` ranks."""
    from deepspeed.utils import groups

    return torch.distributed.get_rank(groups._get_expert_parallel_group(f"ep_size_{size}"))


def build(job: Job) -> nn.Module:
    """The model of ``job.seed``: each expert drawn by its global number, so that a rank's share is a share of one."""
    experts = job.config.get("experts", [4, 8])
    ep = job.config["ep"] if isinstance(job.config["ep"], list) else [job.config["ep"]] * len(experts)
    torch.manual_seed(job.seed)
    model = Net(job.width, ep, experts)
    rank = torch.distributed.get_rank()
    layers: Any = model.layers
    for number, layer in enumerate(layers):
        before = job.config.get("other", {}).get("use_data_before_expert_parallelism")
        place = rank // (job.world // layer.ep_size) if before else rank % layer.ep_size
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            which = place * layer.num_local_experts + local
            draw = torch.Generator().manual_seed(1000 * job.seed + 100 * number + which)
            for p in expert.parameters():
                p.data.copy_(torch.randn(p.shape, generator=draw) * 0.3)
                p.requires_grad_(not (job.config.get("frozen") and number == 0))
            expert.scale.fill_(1 + which / 8)
    return model.bfloat16() if job.precision.startswith("bf16") else model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights with weight decay, the rest without, each split into what is dense and what experts hold."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    named = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "decay", "params": [p for p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"name": "rest", "params": [p for p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return [g for g in split_params_into_different_moe_groups_for_optimizer(groups) if g["params"]]


def config(job: Job) -> dict[str, Any]:
    made = base_config(job, **{"reduce_scatter": True, **job.config.get("zero", {})})
    if job.precision == "bf16_optimizer":
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made | job.config.get("other", {})


def held_by(engine: Any) -> dict[str, Any]:
    """What this rank knows of every tensor, by the name that a converted checkpoint has, gathered over its group.

    ``tensors``: (name, key) -> value. Of a stacked tensor a rank knows its own experts: ``stacked`` says which.
    """
    from deepspeed.utils import groups

    zero = engine.optimizer
    sizes = {
        id(p): int(p.group_name.removeprefix("ep_size_"))
        for p in engine.module.parameters()
        if getattr(p, "allreduce", True) is False
    }
    locals_ = {
        f"{prefix}." if prefix else "": module.num_local_experts
        for prefix, module in engine.module.named_modules()
        if hasattr(module, "num_local_experts") and hasattr(module, "num_experts")
    }
    flats = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    stacked: dict[str, tuple[int, int]] = {}

    def named(name: str) -> str:
        for prefix, count in locals_.items():
            if name.startswith(prefix) and (LOCAL.fullmatch(name) or STACKED.fullmatch(name)):
                module = engine.module.get_submodule(prefix.rstrip("."))
                place = ep_rank(module.ep_size)
                if STACKED.fullmatch(name):
                    stacked[name] = (place * count, (place + 1) * count)
                if found := LOCAL.fullmatch(name):
                    return f"{found[1]}{place * count + int(found[2])}{found[3]}"
        return name

    for name, p in engine.module.named_parameters():
        whole_name = named(name)
        if not p.requires_grad:
            tensors[whole_name, "frozen"] = p.detach().clone()
            continue
        size = sizes.get(id(p))
        group = groups._get_expert_data_parallel_group(f"ep_size_{size}") if size else zero.dp_process_group
        keys = ["fp32", *sorted({k for s in zero.optimizer.state.values() for k, v in s.items() if v.dim() == 1})]
        for key in keys:
            whole = torch.zeros(p.numel())
            if p._hp_mapping is not None:
                flat = flats[p._hp_mapping.param_group_index]
                source = flat.detach() if key == "fp32" else zero.optimizer.state[flat][key]
                hp, lp = p._hp_mapping.hp_fragment_address, p._hp_mapping.lp_fragment_address
                whole[lp.start : lp.start + lp.numel] = source[hp.start : hp.start + hp.numel]
            torch.distributed.all_reduce(whole, group=group)
            tensors[whole_name, key] = whole.view(p.shape)
    kept = engine.module.state_dict()
    for name, buffer in engine.module.named_buffers():
        if name not in kept:
            continue
        tensors[named(name), "buffer"] = buffer.clone()
    return {"tensors": tensors, "stacked": stacked}


def merged(results: list[dict[str, Any]]) -> dict[tuple[str, str], torch.Tensor]:
    """The truth of a run: what all its ranks held, replicas compared, stacked experts put together."""
    whole: dict[tuple[str, str], torch.Tensor] = {}
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for result in results:
        for (name, key), value in result["saved"]["tensors"].items():
            if name in result["saved"]["stacked"]:
                parts.setdefault((name, key), {})[result["saved"]["stacked"][name][0]] = value
            elif (name, key) in whole:
                assert torch.equal(whole[name, key], value), f"ranks differ in {name} {key}"
            else:
                whole[name, key] = value
    return whole | {which: torch.cat([held[i] for i in sorted(held)]) for which, held in parts.items()}


def run(job: Job, rank: int) -> dict[str, Any]:
    import deepspeed

    model = build(job)
    optimizer = torch.optim.AdamW(groups_of(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(job), dist_init_required=False)
    dtype = next(model.parameters()).dtype
    return train(engine, job, lambda step: engine(*(part.to(dtype) for part in data(step, job, rank))))


def autoep_model(job: Job) -> Any:
    """A Hugging Face model with experts of ``job.seed``; ``job.config["autoep"]`` is its type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "num_local_experts": 4,
        "num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts_per_tok": 2,
    }  # fmt: skip
    kind = job.config["autoep"]
    names = {"mixtral": {"num_experts", "moe_intermediate_size"}}.get(kind, {"num_local_experts"})
    names |= set() if kind == "qwen2_moe" else {"shared_expert_intermediate_size"}
    names |= {"head_dim"} if kind == "qwen2_moe" else set()
    torch.manual_seed(job.seed)
    made = AutoConfig.for_model(kind, **{k: v for k, v in sizes.items() if k not in names})
    return AutoModelForCausalLM.from_config(made)


def run_autoep(job: Job, rank: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.module_inject import auto_ep

    # Recording of router logits does not know the registry of transformers 5.23, and nothing here records them.
    auto_ep.AutoEP._retarget_transformers_output_recorders = lambda *_, **__: None
    kind = job.config["autoep"]
    made = config(job) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    preset = "mixtral" if kind == "mixtral" else "qwen3_moe"
    asked = {"enabled": True, "autoep_size": job.config["ep"], "preset_model": preset, "use_grouped_mm": False}
    model = autoep_model(job)
    engine, *_ = deepspeed.initialize(model=model, config=made | {"expert_parallel": asked}, dist_init_required=False)
    if rank == 0 and job.save_to:
        model.config.save_pretrained(job.save_to)

    def loss(step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 + step)
        rows = torch.randint(0, 32, (GLOBAL_BATCH, 8), generator=draw)
        share = GLOBAL_BATCH // job.world
        mine = rows[rank * share : (rank + 1) * share]
        return engine(input_ids=mine, labels=mine).loss

    return train(engine, job, loss)


def train(engine: Any, job: Job, loss_of: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    loaded = {}
    if job.load_from is not None:
        from ullage.training import deepspeed

        getattr(deepspeed, job.loader)(engine, job.load_from)
        loaded = {"loaded": held_by(engine)}
    return loaded | take_steps(engine, job, loss_of, held_by)
