"""Megatron's own loop on packed rows: a scheduler around its ``forward_backward_func``.

A script of Megatron-LM trains with ``forward_backward_func(forward_step_func=, data_iterator=, num_microbatches=,
...)``, once per step and once per evaluation step. :class:`PackingScheduler` wraps that function: it takes the step's
samples from the iterators, packs them (:func:`ullage.engines.megatron.packed_step`) and calls the original with the
packed iterators and the plan's number of microbatches. The script's forward step takes packed batches by
``get_batch_on_this_rank_for_sequence_packing``.

Models and configs that cannot train on packed rows are refused before the first step: every rank looks at its own
stage, and :func:`find_owners` is one agreement of all, so where one stage is refused every rank raises.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ullage.core.errors import InputError
from ullage.engines.megatron.wrapping import WrappedStep, packed_step
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


def _config_problem(config: Any) -> InputError | None:
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
        "moe_token_dispatcher_type": getattr(config, "num_moe_experts", None)
        and getattr(config, "moe_token_dispatcher_type", None) == "allgather"
        and getattr(config, "pipeline_model_parallel_size", 1) > 1,
    }
    for name, refused in asked.items():
        if refused:
            found = getattr(config, name)
            return InputError("packed training does not do this", where=f"config.{name}", found=found)
    return None


def _problem(chunks: Sequence[nn.Module], config: Any) -> InputError | None:
    problem = _config_problem(config)
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


def find_owners(chunks: Sequence[nn.Module], config: Any, has_iterator: bool, groups: Any) -> str:
    """Check every rank's part of a model, and tell which ranks bring samples: ``owners`` of ``packed_step``.

    Args:
        chunks: this rank's parts of the model, one per virtual stage.
        config: the model's.
        has_iterator: whether this rank has a data iterator.
        groups: process groups; Megatron's parallel state if None.

    Collective over all ranks. Raises ``InputError`` on a rank at fault and ``DistributedError`` on the others.
    """

    def check() -> list[Any]:
        problem = _problem(chunks, config)
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


class PackingScheduler:
    """Packs the steps of a Megatron loop: called with its ``forward_backward_func``, it gives one that packs.

    ::

        scheduler = PackingScheduler(capacity=8192)
        forward_backward_func = scheduler(get_forward_backward_func())

    and in the forward step ``get_batch_on_this_rank_for_sequence_packing(data_iterator, vp_stage=...)``.

    Args:
        capacity: padded tokens that a dp·cp rank holds in one microbatch; ``config.max_seqlen_per_dp_cp_rank`` if None.
        scheduler: one of :func:`~ullage.engines.megatron.schedulers`; the config's if None, and ``"balanced"`` if it
            has none.
        owners: which ranks bring samples, as for ``packed_step``; found at the first step if None.
        pg_collection: process groups; those that the schedule is given, or Megatron's parallel state, if None.

    Attributes:
        step: the last training step: its plan, ``num_microbatches``, ``num_tokens`` (Σlength over all ranks) and
            ``sum_squared_lengths``; None before the first.
        evaluation: the last step of an evaluation, likewise.

    The first step is collective over all ranks, and raises on every rank for a model or config that cannot train on
    packed rows.
    """

    def __init__(
        self,
        capacity: int | None = None,
        scheduler: str | None = None,
        *,
        owners: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        self.step: WrappedStep | None = None
        self.evaluation: WrappedStep | None = None
        self._capacity, self._scheduler, self._owners, self._groups = capacity, scheduler, owners, pg_collection
        self._checked: Any = None  # the model that was checked

    def __call__(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """``forward_backward_func`` of packed steps, with the same arguments and results."""
        signature = inspect.signature(forward_backward_func)

        @functools.wraps(forward_backward_func)
        def packed(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            self._pack(call.arguments)
            return forward_backward_func(*call.args, **call.kwargs)

        return packed

    def _pack(self, values: dict[str, Any]) -> None:
        """Put a packed step in the place of what a call of ``forward_backward_func`` was given."""
        if values.get("collect_non_loss_data"):
            raise InputError(
                "collect_non_loss_data is not packed: Megatron-LM calls it on one rank, and packing needs all of them"
            )
        from megatron.core.utils import get_model_config

        chunks = values["model"] if isinstance(values["model"], list) else [values["model"]]
        config, groups = get_model_config(chunks[0]), values.get("pg_collection")
        # A schedule's collection may lack the data-parallel group.
        groups = self._groups or (groups if getattr(groups, "dp", None) is not None else None)
        if self._checked is not chunks[0]:
            iterators = values["data_iterator"]
            iterators = iterators if isinstance(iterators, (list, tuple)) else [iterators]
            owners = find_owners(chunks, config, any(each is not None for each in iterators), groups)
            self._owners = self._owners or owners
            if config.pipeline_model_parallel_size > 1:
                config.variable_seq_lengths = True  # stages exchange rows of unequal length
            self._checked = chunks[0]
        # A copy, because a script may act on the scheduler of its config.
        packing = copy.copy(config)
        if self._capacity is not None:
            packing.max_seqlen_per_dp_cp_rank = self._capacity
        named = getattr(config, "sequence_packing_scheduler", None)
        packing.sequence_packing_scheduler = self._scheduler or named or "balanced"
        step = packed_step(
            values["data_iterator"], packing, values["num_microbatches"], groups, owners=self._owners or "ends"
        )
        values |= {"data_iterator": step.data_iterator, "num_microbatches": step.num_microbatches}
        if values.get("forward_only"):
            self.evaluation = step
        else:
            self.step = step
