"""Checkpoints of every kind that the tests build, by the libraries' own writers wherever there is one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = [
    {
        "embed.weight": (10, 3),
        "layers.0.weight": (7, 3),
        "layers.0.bias": (7,),
        "layers.1.weight": (7, 3),
        "head": (11,),
    },
    {"norm.weight": (7,), "norm.bias": (7,), "scale": (1,)},
]
#: Told apart by their shapes, where DeepSpeed saves the optimizer by number.
DISTINCT = [{"embed.weight": (10, 3), "layers.0.weight": (7, 3)}, {"norm.weight": (5,)}]
EXTRAS = {
    "frozen": {"adapter.base": (6, 5)},
    "buffers": {"norm.running_mean": (5,)},
    "tied": {"lm_head.weight": "embed.weight"},
}
#: Layers of experts whose shapes divide nothing.
EXPERTS = {"first": (4, {"w": (3, 5), "b": (7,)}), "second": (8, {"w": (5, 3), "one": (1,)})}
#: ``Recipe`` by name: DeepSpeed's own code, a rank at a time.
RECIPES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "dp": 1, "groups": DISTINCT},
    "stage 0, with names": {"stage": 0, "dp": 1, "groups": MODEL, "named": True, "dtype": "bf16", **EXTRAS},
    "stage 0, by number": {"stage": 0, "dp": 1, "groups": MODEL},
    "stage 1": {"stage": 1, "dp": 3, "groups": MODEL, "weight_decay": [0.1, 0.0], **EXTRAS},
    "stage 1, round robin": {"stage": 1, "dp": 4, "groups": MODEL, "round_robin": True},
    "stage 1, aligned": {"stage": 1, "dp": 2, "groups": MODEL, "alignment": True, "dtype": "bf16"},
    "stage 1, elastic": {"stage": 1, "dp": 3, "groups": MODEL, "elastic": True},
    "stage 1, bf16_optimizer": {"stage": 1, "dp": 2, "groups": MODEL, "dtype": "bf16_optimizer"},
    "stage 1, fp16": {"stage": 1, "dp": 2, "groups": MODEL, "dtype": "fp16"},
    "stage 2": {"stage": 2, "dp": 3, "groups": MODEL, "dtype": "bf16", "weight_decay": [0.1, 0.0], **EXTRAS},
    "stage 2, padding of many shards": {"stage": 2, "dp": 24, "groups": [{"w": (13,)}, {"b": (3,)}]},
    "stage 2, without frozen": {"stage": 2, "dp": 2, "groups": MODEL, "exclude_frozen": True, **EXTRAS},
    "stage 3": {"stage": 3, "dp": 3, "groups": MODEL, "dtype": "bf16", **EXTRAS},
    "stage 3, sub-groups": {"stage": 3, "dp": 2, "groups": MODEL, "sub_group_size": 40},
    "sgd": {"stage": 2, "dp": 2, "groups": MODEL, "optimizer": "sgd"},
    "momentum": {"stage": 1, "dp": 2, "groups": MODEL, "optimizer": "momentum"},
    "lion": {"stage": 3, "dp": 2, "groups": MODEL, "optimizer": "lion"},
    "adafactor": {"stage": 1, "dp": 2, "groups": MODEL, "optimizer": "adafactor"},
    "experts": {"dp": 4, "ep": 2, "groups": [{"w": (5, 7)}, {"b": (3,)}], "experts": EXPERTS},
    "experts, stage 2, data before": {
        "stage": 2, "dp": 4, "ep": 4, "groups": [{"w": (5, 7)}], "experts": EXPERTS, "data_before": True,
    },
}  # fmt: skip
#: ``zero_grids.recipe`` by name: tensor- and pipeline-parallel.
GRIDS: dict[str, tuple[str, int, dict[str, int]]] = {
    "tensor parallel": ("stage 1", 4, {"tp": 2}),
    "pipeline parallel": ("stage 2", 4, {"pp": 2}),
    "tensor and pipeline parallel": ("bf16_optimizer", 8, {"tp": 2, "pp": 2}),
    "pipeline module": ("pipeline", 4, {"pp": 2}),
}
CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
MUON = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}}
#: Runs of DeepSpeed on real processes: how many, the stage, the configuration, the module of the tests.
RUNS: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "hpz": (2, 3, {"kind": "plain", "zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_kinds"),
    "offloaded": (2, 3, {"kind": "plain", "zero_optimization": CPU}, "zero_kinds"),
    "lora": (2, 3, {"kind": "lora"}, "zero_kinds"),
    "automatic tensor parallel": (2, 1, {"kind": "autotp", "options": {"tp": 2}}, "zero_kinds"),
    "tied pipeline": (2, 1, {"kind": "grid_pipeline"}, "zero_kinds"),
    "experts of a run": (2, 1, {"ep": 2}, "moe_worker"),
}


def sources(folder: Path, only: str, note: Callable[[str], Any]) -> dict[str, Path | str]:
    """Every checkpoint with ``only`` in its name: its folder, or why it could not be made."""
    from tests.support import real_zero, zero_grids
    from tests.support.real_zero import Recipe

    made: dict[str, Path | str] = {}
    makers: dict[str, Callable[[Path], Path]] = {}
    for name, recipe in RECIPES.items():
        makers[name] = lambda to, recipe=recipe: real_zero.write(to, Recipe(**recipe)).folder
    for name, (kind, ranks, sizes) in GRIDS.items():
        makers[name] = lambda to, kind=kind, ranks=ranks, sizes=sizes: (
            real_zero.write(to, zero_grids.recipe(kind, ranks, **sizes)).folder
        )
    for name, run in RUNS.items():
        makers[name] = lambda to, run=run: _run(to, *run)
    makers |= {"muon": _muon, "Hugging Face folder": _hugging_face, "dcp of torch": _dcp}
    makers |= {"Trainer's folder": _trainer}
    for name, make in makers.items():
        if only not in name:
            continue
        note(name)
        try:
            made[name] = make(folder / name.replace(" ", "_").replace(",", "").replace("'", ""))
        except Exception as error:
            made[name] = f"{type(error).__name__}: {error}"
    return made


def _run(folder: Path, world: int, stage: int, config: dict[str, Any], module: str) -> Path:
    from tests.support.zero_worker import Job, launch

    more = {"num_steps": 2, "save_after": 2, "width": 16} if module == "moe_worker" else {}
    job = Job(folder / "results", world, stage, seed=1, save_to=folder / "saved", config=config,
              module=f"tests.support.{module}", function="run", **more)  # fmt: skip
    for result in launch(job, timeout=200):
        if "error" in result:
            raise RuntimeError(result["error"])
    return folder / "saved"


def _muon(folder: Path) -> Path:
    """Muon's momentum: each rank has all of every matrix of which its partition holds an element."""
    import torch

    from tests.support import real_zero
    from tests.support.checkpoints import edit
    from ullage import checkpoint

    truth = real_zero.write(folder, real_zero.Recipe(stage=2, dp=3, groups=[{"a": (9, 4), "b": (5, 7), "c": (3, 3)}]))
    group = checkpoint.read(truth.folder).groups[0]

    def change(content: dict[str, Any], rank: int) -> None:
        held = sorted(set(group.pieces.item[group.pieces.shard == rank].tolist()))
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][0]["use_muon"] = True
        state = base["state"][0]
        del state["exp_avg"], state["exp_avg_sq"]
        parts = [torch.from_numpy(truth.tensor(group.names[i], "momentum")).reshape(-1) for i in held]
        state["momentum_buffer"] = torch.cat(parts)

    for rank in range(3):
        path = truth.tag_folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        edit(path, lambda content, r=rank: change(content, r))
    return truth.folder


def _hugging_face(folder: Path) -> Path:
    """A model of transformers in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=44, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="4KB")
    return folder


def _trained() -> tuple[Any, Any]:
    """A small model after two steps, and its optimizer."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _trained()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder), no_dist=True)
    return folder


def _trainer(folder: Path) -> Path:
    """What a plain Trainer leaves of one process."""
    import torch
    from safetensors.torch import save_file

    model, optimizer = _trained()
    folder.mkdir(parents=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    buffers = json.dumps([name for name, _ in model.named_buffers()])
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt", "buffers": buffers})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    return folder
