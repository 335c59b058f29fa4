"""Models and configs that cannot train on packed rows, refused before the first step.

Every rank looks at its own stage, and :func:`require_packable` is one agreement of all: where one stage is refused,
every rank raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ullage.errors import InputError
from ullage.ranks import Axis, Topology, gather_agreed, tried

_SPEC_HINT = "build it with a Transformer Engine spec"


def _mamba_problem(module: Any) -> str | None:
    if "packed_seq_params" not in inspect.signature(module.forward).parameters:
        return "this megatron-core's Mamba layers carry their state from one sequence of a row into the next"
    if not getattr(module, "use_mem_eff_path", True):
        return "Mamba layers keep sequences apart only in their memory-efficient path (use_mamba_mem_eff_path)"
    return None


def _delta_net_problem(module: Any) -> str | None:
    from megatron.core import package_info

    version = (int(package_info.MAJOR), int(package_info.MINOR))
    return "gated delta net takes packed rows from megatron-core 0.18 on" if version < (0, 18) else None


def _attention_problem(module: Any) -> str:
    return f"megatron-core's own attention takes no packed rows; {_SPEC_HINT}"


#: Problem with a module, by its class within megatron.core; None if it keeps the sequences of a row apart.
MODULES: dict[str, Callable[[Any], str | None]] = {
    "transformer.dot_product_attention.DotProductAttention": _attention_problem,
    "ssm.mamba_mixer.MambaMixer": _mamba_problem,
    "ssm.gated_delta_net.GatedDeltaNet": _delta_net_problem,
}


def _config_problem(config: Any, plans_packed: bool) -> InputError | None:
    per_token = getattr(config, "calculate_per_token_loss", False)
    if not per_token:
        # The plan's number of microbatches is not the script's, and microbatches hold unequal numbers of tokens.
        return InputError(
            "packed training needs the loss per token",
            where="config.calculate_per_token_loss",
            expected="True",
            found=per_token,
            hint="pass --calculate-per-token-loss, before the model is wrapped for data parallelism",
        )
    asked = {
        "hybrid_context_parallel": getattr(config, "hybrid_context_parallel", False),
        "cuda_graph_scope": "full_iteration" in str(getattr(config, "cuda_graph_scope", "")),
        "cuda_graph_impl": getattr(config, "cuda_graph_impl", None) == "full_iteration",
        "overlap_moe_expert_parallel_comm": getattr(config, "overlap_moe_expert_parallel_comm", False)
        and not plans_packed,
        "moe_token_dispatcher_type": getattr(config, "num_moe_experts", None)
        and getattr(config, "moe_token_dispatcher_type", None) == "allgather"
        and getattr(config, "pipeline_model_parallel_size", 1) > 1,
    }
    for name, refused in asked.items():
        if refused:
            found = getattr(config, name)
            return InputError("packed training does not do this", where=f"config.{name}", found=found)
    return None


def _problem(chunks: Sequence[nn.Module], config: Any, plans_packed: bool) -> InputError | None:
    problem = _config_problem(config, plans_packed)
    if problem is not None:
        return problem
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for kind in type(module).__mro__:
                judge = MODULES.get(f"{kind.__module__}.{kind.__name__}".removeprefix("megatron.core."))
                found = None if judge is None else judge(module)
                if found is not None:
                    return InputError(f"this model cannot train on packed rows: {found}", where=path)
    return None


def require_packable(
    chunks: Sequence[nn.Module], config: Any, plans_packed: bool, has_iterator: bool, groups: Any
) -> str:
    """Check every rank's part of a model, and tell which ranks bring samples: ``owners`` of ``packed_step``.

    Args:
        chunks: this rank's parts of the model, one per virtual stage.
        config: the model's.
        plans_packed: whether the script builds its schedule plans for packed rows.
        has_iterator: whether this rank has a data iterator.
        groups: process groups; Megatron's parallel state if None.

    Collective over all ranks. Raises ``InputError`` on a rank at fault and ``DistributedError`` on the others.
    """

    def check() -> list[Any]:
        problem = _problem(chunks, config, plans_packed)
        if problem is not None:
            raise problem
        topology = Topology.from_megatron(groups)
        middle = not (topology.is_first_stage or topology.is_last_stage)
        return [topology.tp.rank, middle, has_iterator]

    record, failure = tried(check)
    found = gather_agreed(record, Axis.world(), "checking the model", failure)
    if any(has for tp, _, has in found if tp) and all(has for _, _, has in found):
        return "every"
    between = [has for tp, middle, has in found if middle and not tp]
    return "stages" if between and all(between) else "ends"
