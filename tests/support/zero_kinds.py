"""Ranks of real DeepSpeed runs of the rarer kinds, each with the truth that it gathers from its own memory.

``Job.config["kind"]`` names the kind, see :data:`KINDS`. Every rank takes three steps, saves, and returns the whole
weights and moments of every parameter under their names in the whole model.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.zero_worker import Job, base_config, launch, whole_state

WIDTH = 24
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(torch.tanh(self.middle(torch.tanh(self.enter(x))))))
        return ((self.leave(hidden).squeeze(-1) - y).float() ** 2).mean()


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return x.to(dtype), torch.sin(x.sum(-1)).to(dtype)


def gathered(engine: Any, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Whole masters and states of every trained parameter, and the frozen ones. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    truth: dict[str, torch.Tensor] = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                truth[f"{name}/frozen"] = p.detach().clone()
            continue
        truth[f"{name}/fp32"] = safe_get_full_fp32_param(p).clone()
        for key in keys:
            found = whole_state(engine, p, key)
            if found is not None:
                truth[f"{name}/{key}"] = found
    return truth


def _config(job: Job, **zero: Any) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 30, "reduce_bucket_size": 4096, **zero}
    made = base_config(job, **{**zero, **job.config.get("zero_optimization", {})})
    made |= {"train_micro_batch_size_per_gpu": 4, "train_batch_size": None}
    made |= {k: v for k, v in job.config.items() if k not in ("zero_optimization", "kind", "options")}
    return {key: value for key, value in made.items() if value is not None}


def _engine(job: Job, model: nn.Module, **more: Any) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = _config(job) | more
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _train(engine: Any, job: Job, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    for step in range(STEPS):
        loss = engine(*batch(step, rank, dtype))
        engine.backward(loss)
        engine.step()
    truth = gathered(engine, ("exp_avg", "exp_avg_sq"))
    engine.save_checkpoint(str(job.save_to), tag="global_step3")
    return {"truth": truth}


def plain(job: Job, rank: int) -> dict[str, Any]:
    return _train(_engine(job, Net()), job, rank)


def fp16(job: Job, rank: int) -> dict[str, Any]:
    import deepspeed

    # Only asked before the run; torch multiplies half precision on a processor.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    engine = _engine(job, Net(), fp16={"enabled": True, "initial_scale_power": 8})
    return _train(engine, job, rank, torch.float16)


def lora(job: Job, rank: int) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["middle", "enter"], modules_to_save=["leave"]))
    return _train(_engine(job, model), job, rank)


def autotp(job: Job, rank: int) -> dict[str, Any]:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    tp = job.config["options"]["tp"]
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=36, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(job.seed)
    model = LlamaForCausalLM(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    model = deepspeed.tp_model_init(model, tp_size=tp, dtype=torch.float32)
    engine = _engine(job, model, tensor_parallel={"autotp_size": tp})
    from deepspeed.utils import safe_get_full_fp32_param

    for step in range(STEPS):
        ids = torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank // tp))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    # Each rank's own slice with its moments; the test joins them, by the shapes of the whole model.
    truth: dict[str, torch.Tensor] = {}
    for name, p in engine.module.named_parameters():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            found = safe_get_full_fp32_param(p) if key == "fp32" else whole_state(engine, p, key)
            truth[f"{name}/{key}"] = torch.zeros(p.shape) if found is None else found.view(p.shape).clone()
    engine.save_checkpoint(str(job.save_to), tag="global_step3")
    return {"truth": truth, "shapes": shapes}


class Scaled(nn.Module):
    """A layer with what no optimizer holds: a frozen weight, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.register_buffer("mean", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return (hidden - self.mean) * self.scale


def grid_pipeline(job: Job, rank: int) -> dict[str, Any]:
    """Two stages on DeepSpeed's own topology; one layer has nothing but a frozen weight."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    class Fixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH, bias=False)
            self.requires_grad_(False)

    def backwards(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight

    layers: list[Any] = [
        TiedLayerSpec("embed", nn.Linear, 8, WIDTH, bias=False),
        LayerSpec(Scaled),
        torch.tanh,
        LayerSpec(Fixed),
        LayerSpec(Scaled),
        TiedLayerSpec("embed", nn.Linear, 8, WIDTH, bias=False, forward_fn=backwards),
    ]
    model = PipelineModule(
        layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, y: ((out.sum(-1) - y) ** 2).mean()
    )
    engine = _engine(job, model, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=4)
    data = iter([batch(step, 0, torch.float32) for step in range(100)])
    for _ in range(STEPS):
        engine.train_batch(data)
    truth = gathered(engine, ("exp_avg", "exp_avg_sq"))
    truth |= {f"{name}/buffer": held.clone() for name, held in engine.module.named_buffers()}
    engine.save_checkpoint(str(job.save_to), tag="global_step3")
    return {"truth": truth}


def sequence_parallel(job: Job, rank: int) -> dict[str, Any]:
    """Ulysses: pairs of ranks share a sequence, and ZeRO cuts over all ranks (by an ``mpu``) or over its pairs."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if job.config["options"]["by"] == "mesh":
        more: dict[str, Any] = {"mesh_param": (job.world // 2, 2)}
    else:
        parallel_state_sp.initialize_sequence_parallel(2)
        more = {"mpu": parallel_state_sp}
    model = Net()
    model.norm.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_config(job), dist_init_required=False, **more
    )[0]
    return _train(engine, job, rank // 2)


KINDS = {f.__name__: f for f in (plain, fp16, lora, autotp, grid_pipeline, sequence_parallel)}


def run(job: Job, rank: int) -> dict[str, Any]:
    torch.manual_seed(job.seed)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return KINDS[job.config["kind"]](job, rank)


CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
BY_MPU, BY_MESH = ({"kind": "sequence_parallel", "options": {"by": by}} for by in ("mpu", "mesh"))
#: Runs: (ranks, stage, configuration). The first nine are read whole by one test, the others by tests of their own.
RUNS = {
    "hpz": (4, 3, {"kind": "plain", "zero_optimization": {"zero_hpz_partition_size": 2}}),
    "offloaded to the CPU": (2, 3, {"kind": "plain", "zero_optimization": CPU}),
    "fp16, stage 1": (3, 1, {"kind": "fp16"}),
    "fp16, stage 3": (2, 3, {"kind": "fp16"}),
    "lora": (2, 3, {"kind": "lora"}),
    "grid pipeline on four": (4, 1, {"kind": "grid_pipeline"}),
    "tensor parallel": (4, 2, {"kind": "autotp", "options": {"tp": 2}}),
    # Two heads of keys over three ranks: the last has none.
    "tensor parallel, uneven": (3, 1, {"kind": "autotp", "options": {"tp": 3}}),
    "sequence parallel, stage 2": (4, 2, BY_MPU),
    "grid pipeline": (2, 1, {"kind": "grid_pipeline"}),
    "sequence parallel, stage 1": (4, 1, BY_MPU),
    "sequence parallel, stage 3": (4, 3, BY_MPU),
    "mesh, stage 2": (4, 2, BY_MESH),
    "mesh, stage 3": (4, 3, BY_MESH),
}


def run_kind(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The folder that a run of :data:`RUNS` saved, the truth of all its ranks together, and what each returned.

    The slices of tensor-parallel ranks are joined by the shapes of the whole model.
    """
    world, stage, config = RUNS[kind]
    job = Job(folder / "results", world, stage, seed=1, save_to=folder / "saved", config=config,
              module=__name__, function="run")  # fmt: skip
    results = launch(job, timeout=120)
    assert not any("error" in r for r in results), [r.get("traceback") for r in results]
    truth = {name: value for result in reversed(results) for name, value in result["truth"].items()}
    tp = config.get("options", {}).get("tp", 1)
    for entry in truth if tp > 1 else ():
        shape = results[0]["shapes"][entry.rpartition("/")[0]]
        parts = [result["truth"][entry] for result in results[:tp]]
        if all(part.shape == shape for part in parts):
            assert all(torch.equal(part, parts[0]) for part in parts)
            truth[entry] = parts[0]
        else:
            (dim,) = (d for d, size in enumerate(shape) if sum(p.shape[d] for p in parts) == size)
            truth[entry] = torch.cat(parts, dim)
    return folder / "saved", truth, results


def require_whole(source: Path, truth: dict[str, torch.Tensor], folder: Path) -> None:
    """Convert ``source`` to every format, in ``folder``, and compare all tensors with ``truth``."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    from ullage import checkpoint

    assert checkpoint.read(source).problems() == []
    for format, more in (("universal", {}), ("safetensors", {"optimizer": True}), ("dcp", {})):
        checkpoint.convert(source, folder / format, format=format, **more)
        assert checkpoint.verify(source, folder / format) == []
    weights = load_file(folder / "safetensors" / "model.safetensors")
    states = load_file(next((folder / "safetensors" / "optimizer").glob("*.safetensors")))
    stored = _load_state_dict_from_keys(checkpoint_id=folder / "dcp")
    for entry, value in truth.items():
        name, key = entry.rsplit("/", 1)
        is_state = key.startswith("exp_avg")
        file = folder / "universal" / "zero" / name / f"{key if is_state else 'fp32'}.pt"
        found = {
            "universal": torch.load(file, weights_only=False)["param"],
            "safetensors": states[f"{key}:{name}"] if is_state else weights[name],
            "dcp": stored["optim"]["state"][name][key] if is_state else stored["model"][name],
        }
        for format, tensor in found.items():
            assert torch.equal(tensor.float(), value.float()), (format, entry)
