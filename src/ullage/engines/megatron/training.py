"""Packed training of a Megatron script (``pack_training``): one call, and the script's own loop runs on packed rows.

A script of Megatron-LM trains with ``forward_backward_func(forward_step_func=, data_iterator=, num_microbatches=,
...)``, once per step and once per evaluation step. That function is wrapped: it takes the step's samples from the
iterators, packs them (:func:`ullage.engines.megatron.packed_step`) and calls the original with the packed iterators and
the plan's number of microbatches. ``get_batch`` of the script returns packed batches, in the order in which its
``forward_step`` takes them, and ``num_floating_point_operations`` counts the step's real lengths.

A script that packs its steps itself, as those of Megatron-LM's dev branch do under ``--sequence-packing-scheduler``,
keeps doing so, with ullage's plan.

What ``get_batch`` returns is read from the forward step: six values in releases 0.16 and 0.17 of Megatron-LM, ten in
0.18 and later, seven on its dev branch, and others in the scripts of hybrid models. The names to which ``forward_step``
assigns them say which.

Models and configs that cannot train on packed rows are refused before the first step: every rank looks at its own
stage, and :func:`find_owners` is one agreement of all, so where one stage is refused every rank raises.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ullage.core.errors import InputError
from ullage.engines.megatron import batch as batches
from ullage.engines.megatron import wrapping
from ullage.engines.megatron.settings import flops_of_lengths
from ullage.engines.megatron.wrapping import WrappedStep
from ullage.engines.replacing import Replacements
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


def find_owners(chunks: Sequence[nn.Module], config: Any, plans_packed: bool, has_iterator: bool, groups: Any) -> str:
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


#: What a script may take, by the names in Megatron-LM's scripts.
NAMES = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "packed_seq_params",
    "padding_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)
GET_BATCH, GET_PACKED_BATCH = "get_batch", "get_batch_on_this_rank_for_sequence_packing"


@dataclass(frozen=True)
class Script:
    """A training script, as its forward step shows it.

    Attributes:
        scope: global names of the module that defines the forward step.
        returns: names that ``get_batch`` fills, in order; None if the forward step takes packed batches itself.
        plans_packed: whether a schedule plan, for overlapped communication of experts, is built for packed rows.
    """

    scope: dict[str, Any]
    returns: tuple[str, ...] | None
    plans_packed: bool


def read_script(forward_step: Callable[..., Any], returns: Sequence[str] | None) -> Script:
    """Read a forward step. Raises ``InputError`` if it does not show how it gets its batch, or drops the lengths.

    ``returns``: names of what ``get_batch`` returns, for a forward step whose source does not show them.
    """
    # Nothing plainer tells: get_batch returns a bare tuple whose order differs by release, its annotations do not name
    # the values, and calling it to see would take a batch from the iterator on some ranks. `returns` is the way around.
    function: Any = forward_step
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        scope = function.__globals__
    except (OSError, TypeError, SyntaxError, AttributeError):
        raise InputError(
            "the source of forward_step cannot be read",
            found=repr(forward_step),
            hint="pass the function of the training script that takes (data_iterator, model)",
        ) from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if returns is None:
        returns = _names_of_batch(tree)
    if returns is None and not any(_function_name(call) == GET_PACKED_BATCH for call in calls):
        raise InputError(
            "forward_step does not show what it takes from get_batch",
            expected=f"tokens, labels, ... = {GET_BATCH}(data_iterator, ...), or a call of {GET_PACKED_BATCH}",
            hint="pass returns=(...), the names of what get_batch returns",
        )
    if returns is not None:
        _require_names(tuple(returns), scope)
    packed = [call for call in calls if {"packed_seq_params", None} & {keyword.arg for keyword in call.keywords}]
    if not packed:
        raise InputError(
            "forward_step does not pass packed_seq_params to the model",
            hint="without it the sequences of a row see each other: call model(..., packed_seq_params=...)",
        )
    plans = [call for call in calls if _function_name(call) == "build_schedule_plan"]
    return Script(scope, None if returns is None else tuple(returns), all(plan in packed for plan in plans))


def _function_name(call: ast.Call) -> str | None:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)


def _names_of_batch(tree: ast.AST) -> tuple[str, ...] | None:
    """Names to which what ``get_batch`` returns is assigned."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _function_name(node.value) == GET_BATCH
        ):
            targets = getattr(node.targets[0], "elts", ())
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names and len(names) == len(targets):
                return tuple(names)
    return None


def _require_names(returns: tuple[str, ...], scope: dict[str, Any]) -> None:
    unknown = [name for name in returns if name not in NAMES and not name.startswith("_")]
    if unknown:
        raise InputError(
            "forward_step takes something from get_batch that packed batches do not have",
            expected=", ".join(NAMES),
            found=", ".join(unknown),
        )
    if not {"packed_seq_params", "cu_seqlens"} & set(returns):
        raise InputError(
            "forward_step takes no lengths from get_batch, so the sequences of a row would see each other",
            expected="packed_seq_params, or cu_seqlens",
            found=", ".join(returns),
        )
    if not callable(scope.get(GET_BATCH)):
        raise InputError("the module of forward_step has no function get_batch", where=str(scope.get("__name__")))


def batch_values(batch: tuple[Any, ...], returns: tuple[str, ...]) -> tuple[Any, ...]:
    """A batch of ``get_batch_on_this_rank_for_sequence_packing`` as what ``get_batch`` of a script returns."""
    tokens, labels, loss_mask, attention_mask, position_ids, params, padding_mask = batch
    places = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    degree = params.local_cp_size
    values = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "packed_seq_params": params,
        "padding_mask": padding_mask,
        "local_cp_size": None if degree is None else torch.tensor(degree, dtype=torch.int32),
        "hybrid_cp_group": params.cp_group,
    }
    if "cu_seqlens_padded" in returns:  # as from a data loader, with a batch dimension
        values["cu_seqlens"], values["cu_seqlens_padded"] = params.cu_seqlens_q[None], places[None]
        values["max_seqlen"] = torch.tensor([params.max_seqlen_q], dtype=torch.int32)
    else:  # a script that has one kind of lengths uses them as positions in the row
        values["cu_seqlens"], values["max_seqlen"] = places, params.max_seqlen_q
    return tuple(values.get(name) for name in returns)


_LOOP, _UPSTREAM = "megatron.training.training", "megatron.core.datasets.data_schedule"
_COUNT = "num_floating_point_operations"
#: Arguments by which versions of that function take the lengths of a step, and the attribute of the step.
_COUNTED = {
    "total_real_tokens_in_batch": "num_tokens",
    "seqlen_squared_sum_in_batch": "sum_squared_lengths",
    "num_total_tokens_this_global_batch": "num_tokens",
    "sequence_square_sum_this_global_batch": "sum_squared_lengths",
}
_active: list[PackedTraining] = []


class PackedTraining:
    """What :func:`pack_training` has put in place, and how to take it out again; a context manager that does so.

    Attributes:
        step: the last training step: its plan, ``num_microbatches``, ``num_tokens`` (Σlength over all ranks) and
            ``sum_squared_lengths``; None before the first.
        evaluation: the last step of an evaluation, likewise.
    """

    step: WrappedStep | None
    evaluation: WrappedStep | None

    def __init__(
        self, script: Script, capacity: int | None, scheduler: str | None, owners: str | None, pg_collection: Any
    ) -> None:
        self.step = self.evaluation = None
        self._script, self._capacity, self._scheduler = script, capacity, scheduler
        self._owners, self._groups = owners, pg_collection
        self._replaced = Replacements()
        # The model that was checked; and the one whose configs were changed, with what stood there.
        self._checked: Any = None
        self._configs: list[tuple[Any, bool]] = []
        # The chunk whose forward step runs, with its config and groups.
        self._running: tuple[Any, Any, Any] | None = None
        # A step that the script itself has wrapped.
        self._given: WrappedStep | None = None

    def undo(self) -> None:
        """Let the script train as it did before. More than once does nothing more."""
        self._replaced.undo()
        for config, value in self._configs:
            config.variable_seq_lengths = value
        self._configs.clear()
        if self in _active:
            _active.remove(self)

    def __enter__(self) -> PackedTraining:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def _put_in(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        put = self._replaced
        getter = schedules.get_forward_backward_func
        put.put_everywhere(getter, self._getter(getter))
        scope = self._script.scope
        if self._script.returns is not None:
            put.put(scope, GET_BATCH, self._get_batch(scope[GET_BATCH]))
        # Megatron-LM's own module, and that of a script that has such functions itself.
        loops = [vars(sys.modules[name]) for name in (_LOOP,) if name in sys.modules]
        counts = {id(loop[_COUNT]): loop[_COUNT] for loop in (scope, *loops) if _COUNT in loop}
        for count in counts.values():
            put.put_everywhere(count, self._counting(count))
        # Where megatron-core has entry points for packing of its own, scripts call ours.
        if _UPSTREAM in sys.modules:
            upstream = vars(sys.modules[_UPSTREAM])
            served = {
                "wrap_data_iterator": self._wrap,
                GET_PACKED_BATCH: batches.get_batch_on_this_rank_for_sequence_packing,
            }
            for name in served.keys() & upstream.keys():
                put.put_everywhere(upstream[name], served[name])
        _active.append(self)

    def _getter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            function = original(*args, **kwargs)

            @functools.wraps(function)
            def forward_backward(*given: Any, **named: Any) -> Any:
                # A loop may hold this function for longer than its training is packed.
                return self._run(function, given, named) if self in _active else function(*given, **named)

            return forward_backward

        return get_forward_backward_func

    def _run(self, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call = inspect.signature(function).bind(*given, **named)
        values = call.arguments
        if values.get("collect_non_loss_data"):
            raise InputError(
                "collect_non_loss_data is not packed: Megatron-LM calls it on one rank, and packing needs all of them"
            )
        from megatron.core.utils import get_model_config

        chunks = values["model"] if isinstance(values["model"], list) else [values["model"]]
        config, groups = get_model_config(chunks[0]), values.get("pg_collection")
        # A schedule's collection may lack the data-parallel group.
        groups = self._groups or (groups if getattr(groups, "dp", None) is not None else None)
        self._require_packable(chunks, config, values["data_iterator"], groups)
        step = self._given
        if step is None:
            step = self._packed_step(values["data_iterator"], config, values["num_microbatches"], groups)
            values |= {"data_iterator": step.data_iterator, "num_microbatches": step.num_microbatches}
        if values.get("forward_only"):
            self.evaluation = step
        else:
            self.step = step
        forward_step = values["forward_step_func"]

        @functools.wraps(forward_step)
        def with_chunk(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            before, self._running = self._running, (model, config, groups)
            try:
                return forward_step(data_iterator, model, *args, **kwargs)
            finally:
                self._running = before

        values["forward_step_func"] = with_chunk
        return function(*call.args, **call.kwargs)

    def _require_packable(self, chunks: list[Any], config: Any, data_iterator: Any, groups: Any) -> None:
        """Check a model once, and let its pipeline stages exchange rows of unequal length."""
        if self._checked is chunks[0]:
            return
        iterators = data_iterator if isinstance(data_iterator, (list, tuple)) else [data_iterator]
        has = any(iterator is not None for iterator in iterators)
        owners = find_owners(chunks, config, self._script.plans_packed, has, groups)
        self._owners = self._owners or owners
        if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
            self._configs.append((config, config.variable_seq_lengths))
            config.variable_seq_lengths = True
        self._checked = chunks[0]

    def _packed_step(self, data_iterator: Any, config: Any, num_microbatches: int, groups: Any) -> WrappedStep:
        # A copy, because a script may act on the scheduler of its config.
        packing = copy.copy(config)
        if self._capacity is not None:
            packing.max_seqlen_per_dp_cp_rank = self._capacity
        named = getattr(config, "sequence_packing_scheduler", None)
        packing.sequence_packing_scheduler = self._scheduler or named or "balanced"
        owners = self._owners or "ends"
        return wrapping.packed_step(data_iterator, packing, num_microbatches, groups, owners=owners)

    def _wrap(self, data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None) -> Any:
        """``wrap_data_iterator`` of a script that wraps each step itself, before ``forward_backward_func``."""
        groups = pg_collection or self._groups
        self._given = step = self._packed_step(data_iterator, config, num_microbatches, groups)
        return step.data_iterator, step.num_microbatches, step.num_tokens, step.sum_squared_lengths

    def _get_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        returns = self._script.returns
        assert returns is not None

        @functools.wraps(original)
        def get_batch(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running is None:  # not within a packed step
                return original(data_iterator, *args, **kwargs)
            batch = _batch_of(data_iterator, *self._running)
            # Megatron-LM's dev branch prepares its context-parallel routes from the finished lengths.
            finish = self._script.scope.get("finalize_packed_seq_params")
            if finish is not None:
                finish(batch[5])
            return batch_values(batch, returns)

        return get_batch

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        taken = {name: value for name, value in _COUNTED.items() if name in inspect.signature(original).parameters}

        @functools.wraps(original)
        def num_floating_point_operations(args: Any, batch_size: int, *others: Any, **named: Any) -> float:
            step = self.step
            if step is None or self not in _active:
                return original(args, batch_size, *others, **named)
            if taken:
                return original(args, batch_size, **{name: getattr(step, value) for name, value in taken.items()})

            def one_sequence(length: int) -> float:
                other = copy.copy(args)
                other.seq_length = length
                return original(other, 1, *others, **named)

            return flops_of_lengths(one_sequence, args.seq_length, step.num_tokens, step.sum_squared_lengths)

        return num_floating_point_operations


def _batch_of(data_iterator: Any, model: Any, config: Any, groups: Any) -> tuple[Any, ...]:
    """The next packed batch for a chunk of a model."""
    from megatron.core.utils import get_attr_wrapped_model

    chunk: Any = get_attr_wrapped_model(model, "vp_stage", return_model_obj=True)
    return batches.get_batch_on_this_rank_for_sequence_packing(
        data_iterator,
        vpp_size=config.virtual_pipeline_model_parallel_size,
        mtp_on_this_rank=bool(getattr(chunk, "mtp_process", False)),
        vp_stage=chunk.vp_stage,
        pg_collection=groups,
    )


def pack_training(
    forward_step: Callable[..., Any],
    *,
    capacity: int | None = None,
    scheduler: str | None = None,
    returns: Sequence[str] | None = None,
    owners: str | None = None,
    pg_collection: Any = None,
) -> PackedTraining:
    """Let a Megatron training script train and evaluate on packed rows, from its next step on.

    Call it once on every rank, before ``pretrain(...)`` or before the loop asks for ``get_forward_backward_func()``.

    Args:
        forward_step: the script's, which takes (data_iterator, model) and calls the script's ``get_batch``, or
            ``get_batch_on_this_rank_for_sequence_packing``.
        capacity: padded tokens that a dp·cp rank holds in one microbatch; ``config.max_seqlen_per_dp_cp_rank`` if None.
        scheduler: one of :func:`schedulers`; the config's if None, and ``"balanced"`` if it has none.
        returns: names of what the script's ``get_batch`` returns, in order; those to which ``forward_step`` assigns it
            if None.
        owners: which ranks bring samples, as for ``packed_step``; found at the first step if None.
        pg_collection: process groups; those that the schedule is given, or Megatron's parallel state, if None.

    Returns a handle with the last step and ``undo()``, which is a context manager as well. Not collective; the first
    step is, and raises on every rank for a model or config that cannot train on packed rows. Raises ``InputError`` for
    a forward step that takes no lengths, and if training is packed already.
    """
    if _active:
        raise InputError("training is packed already", hint="call undo() of what pack_training returned before")
    training = PackedTraining(read_script(forward_step, returns), capacity, scheduler, owners, pg_collection)
    training._put_in()
    return training
