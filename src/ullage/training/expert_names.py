"""Names of experts among all, in a DeepSpeed engine that knows them by their numbers on its rank.

A universal checkpoint has each expert under its number among all experts, or AutoEP's stack of all of them. DeepSpeed
looks a parameter up by the name that it has on the rank; for its own MoE layers (``deepspeed.moe.layer.MoE``) that is
the name of another expert. For AutoEP's stacks its loader takes the rows of the rank, of trained parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_LOCAL = "deepspeed_moe.experts.deepspeed_experts"


@dataclass
class ExpertNames:
    """Names that parameters and buffers of experts have among all.

    Attributes:
        logical: by the name on this rank, for DeepSpeed's own layers.
        elsewhere: names of the experts of all ranks.
        rows: by name of a stack, the experts that this rank holds.
    """

    logical: dict[str, str] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    rows: dict[str, list[int]] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """The name in a checkpoint of what has ``name`` on this rank."""
        return self.logical.get(name, name)

    def held(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Of a tensor of the checkpoint, the part that belongs on this rank."""
        return value[self.rows[name]] if name in self.rows else value


def expert_names(engine: Any) -> ExpertNames:
    """The names of ``engine``'s experts; empty for a model without any."""
    found = ExpertNames()
    if not engine.has_moe_layers:
        return found
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    for prefix, module in engine.module.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, MoE):
            share = module.num_local_experts
            first = groups._get_expert_parallel_rank(module.expert_group_name) * share
            mine: Any = module.deepspeed_moe.experts.deepspeed_experts
            for local, expert in enumerate(mine):
                for name in expert.state_dict():
                    there = f"{dot}{_LOCAL}.{first + local}.{name}"
                    found.logical[f"{dot}{_LOCAL}.{local}.{name}"] = there
                    found.elsewhere |= {f"{dot}{_LOCAL}.{number}.{name}" for number in range(module.num_experts)}
        elif _is_autoep(module):
            held = _rows(module)
            found.rows |= {f"{dot}experts.{name}": held for name, _ in module.experts.named_parameters()}
    return found


def _is_autoep(module: torch.nn.Module) -> bool:
    # Imported only where it can be: a DeepSpeed of before AutoEP has no such module.
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer")


def _rows(module: Any) -> list[int]:
    placed = {entry["rank"]: entry["experts"] for entry in module.expert_placement_descriptor["ranks"]}
    return list(placed[module.ep_rank])


def group_names(zero: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Parameter groups of experts with the name that each has now, by which DeepSpeed finds its process group."""
    for group in zero.optimizer.param_groups:
        if group.get("moe"):
            yield group, group["name"]
