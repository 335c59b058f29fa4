"""Packed training of a Megatron script (``pack_training``): one call, and the script's own loop runs on packed rows.

A script of Megatron-LM trains with ``forward_backward_func(forward_step_func=, data_iterator=, num_microbatches=,
...)``, once per step and once per evaluation step. That function is wrapped: it takes the step's samples from the
iterators, packs them (:func:`ullage.engines.megatron.packed_step`) and calls the original with the packed iterators and
the plan's number of microbatches. ``get_batch`` of the script returns packed batches, in the order in which its
``forward_step`` takes them, and ``num_floating_point_operations`` counts the step's real lengths.

A script that packs its steps itself, as those of Megatron-LM's dev branch do under ``--sequence-packing-scheduler``,
keeps doing so, with ullage's plan.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ullage.engines.megatron import batch as batches
from ullage.engines.megatron import wrapping
from ullage.engines.megatron.flops import flops_of_lengths
from ullage.engines.megatron.packable import require_packable
from ullage.engines.megatron.script import GET_BATCH, GET_PACKED_BATCH, Script, batch_values, read_script
from ullage.engines.megatron.wrapping import WrappedStep
from ullage.engines.replacing import Replacements
from ullage.errors import InputError

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
        owners = require_packable(chunks, config, self._script.plans_packed, has, groups)
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
