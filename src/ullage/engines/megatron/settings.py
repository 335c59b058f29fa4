"""Packing settings from Megatron's config, read once and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.engines.megatron.fields import check_fields
from ullage.engines.megatron.flops import transformer_terms
from ullage.engines.megatron.params import core_takes_groups
from ullage.engines.megatron.tail import Tail, sequence_limit
from ullage.errors import InputError, require_int, require_one_of
from ullage.layout import ORDERS
from ullage.planning import TransformerCost, plan
from ullage.planning.plans import Plan
from ullage.planning.strategies import ALIASES, PREASSIGNED, strategy_names
from ullage.ranks.topology import Topology

#: Names of the scheduler that gives each microbatch its own context-parallel degree, and of the one that takes samples
#: which are packed already.
DYNAMIC, PACKED_ALREADY = "default_dynamic_cp", "empty"
#: The attribute of the config of a model whose attention honours ``PackedSeqParams.cp_group``. Megatron-LM's own switch
#: for that, where it has one, is ``dynamic_context_parallel``.
TAKES_GROUPS = "attention_takes_cp_group"


def schedulers() -> list[str]:
    """Valid names for ``config.sequence_packing_scheduler``: ullage's strategies and Megatron-LM's schedulers."""
    return [name for name in strategy_names() if name == PACKED_ALREADY or ALIASES.get(name, name) != PREASSIGNED]


def is_dynamic(config: Any) -> bool:
    """Whether the config asks for a context-parallel degree per microbatch."""
    return _scheduler(config) == DYNAMIC


@dataclass(frozen=True)
class Settings:
    """Packing settings of a run.

    Attributes:
        capacity: padded tokens that a dp·cp rank holds in one microbatch.
        scheduler: one of :func:`schedulers`.
        virtual: number of virtual pipeline stages, 1 without.
        multiple: the number of microbatches is a multiple of this.
        mtp_stages: pipeline stages with multi-token-prediction layers; -1 is the last.
        cost: cost of a sequence.
        fp8_multiple: each rank's row is a multiple of this many tokens, for FP8 and FP4 kernels.
        sequence_parallel: whether tensor-parallel ranks divide the row.
        order: how context-parallel ranks cut a row, ``"zigzag"`` or ``"contiguous"``.
        tail: how a row is filled up behind its last sequence; ``None`` if it is not.
        max_sequences: sequences that a microbatch may hold; ``None`` is no limit.
        least_degree: least context-parallel degree of a microbatch, where the degree is dynamic.
    """

    capacity: int
    scheduler: str
    virtual: int
    multiple: int
    mtp_stages: frozenset[int]
    cost: TransformerCost
    fp8_multiple: int
    sequence_parallel: bool
    order: str = "zigzag"
    tail: Tail | None = None
    max_sequences: int | None = None
    least_degree: int = 1

    @property
    def dynamic(self) -> bool:
        return self.scheduler == DYNAMIC

    @property
    def packed_already(self) -> bool:
        """Whether each item of the iterators is a microbatch."""
        return self.scheduler == PACKED_ALREADY

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Read a config. Raises ``InputError`` for a field that is missing, invalid or not supported, and for an
        unknown scheduler."""
        check_fields(config)
        capacity = _positive(config, "max_seqlen_per_dp_cp_rank")
        _field(config, "sequence_packing_scheduler", hint=f"set one of {', '.join(schedulers())}")
        scheduler = _scheduler(config)
        if scheduler not in schedulers():
            raise InputError("no such sequence_packing_scheduler", expected=" or ".join(schedulers()), found=scheduler)
        # ``...`` stands for a missing field, because None is a valid value.
        virtual = getattr(config, "virtual_pipeline_model_parallel_size", ...)
        if virtual is ...:
            raise _missing("virtual_pipeline_model_parallel_size", "None without virtual stages")
        virtual = 1 if virtual is None else _positive(config, "virtual_pipeline_model_parallel_size")
        mtp = _mtp_stages(config)
        if scheduler == DYNAMIC:
            _refuse_dynamic(config, mtp)
        tail, most = Tail.of(config), sequence_limit(config)
        return cls(
            capacity=capacity,
            scheduler=scheduler,
            virtual=virtual,
            multiple=_positive(config, "microbatch_group_size_per_vp_stage") if virtual > 1 else 1,
            mtp_stages=mtp,
            cost=_cost(config),
            fp8_multiple=_fp8_multiple(config),
            sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
            order=order_of(config),
            tail=tail,
            # The dummy sequence of a tail is one of those that the limit counts.
            max_sequences=None if most is None else most - (tail is not None and not tail.extend_last),
            least_degree=_positive(config, "min_dynamic_context_parallel_size", 1) if scheduler == DYNAMIC else 1,
        )

    def pad_to_multiple_of(self, topology: Topology) -> int:
        """Multiple of a slot: two chunks per context-parallel rank, each divisible for sequence parallelism and FP8."""
        cp, tp = topology.cp.size, topology.tp.size
        # A rank holds two chunks of each slot. tp divides a rank's row under sequence parallelism.
        halves = 2 * cp if cp > 1 else 1
        return math.lcm(halves * (tp if self.sequence_parallel else 1), self.fp8_multiple * cp)

    def row_multiple(self, topology: Topology, degree: int | None) -> int:
        """Multiple of a whole row, in tokens.

        With a degree per microbatch the slots are multiples of twice the degree only, so the row is filled up to what
        sequence parallelism and FP8 can divide. ``degree``: None if it is fixed.
        """
        if degree is None or degree == 1:
            return self.pad_to_multiple_of(topology)
        return math.lcm(self.pad_to_multiple_of(topology) * degree, 2 * degree)

    def planner(self, topology: Topology) -> Callable[..., Plan]:
        """Function from lengths, and the assignment of samples that are packed already, to a plan.

        ``topology`` has dp flattened over cp if the degree is dynamic.
        """

        # Only where it says something: a fixed degree has no least one.
        least: dict[str, Any] = {"min_context_parallel": self.least_degree} if self.least_degree > 1 else {}

        def make_plan(lengths: np.ndarray, assignment: list[list[list[int]]] | None = None) -> Plan:
            return plan(
                lengths,
                ranks=topology.dp.size,
                capacity=self.capacity * topology.cp.size,
                pad_to_multiple_of=self.pad_to_multiple_of(topology),
                strategy="balanced" if self.dynamic else self.scheduler,
                context_parallel="auto" if self.dynamic else 1,
                microbatch_multiple=self.multiple,
                max_sequences=self.max_sequences,
                cost=self.cost,
                assignment=assignment,
                **least,
            )

        return make_plan


def _scheduler(config: Any) -> str:
    value = getattr(config, "sequence_packing_scheduler", None)
    return str(getattr(value, "value", value)).lower()


def _missing(name: str, hint: str | None) -> InputError:
    return InputError("the config lacks a field that packing needs", where=name, hint=hint)


def _field(config: Any, name: str, hint: str | None = None) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise _missing(name, hint)
    return value


def order_of(config: Any) -> str:
    """``cp_partition_mode``: how context-parallel ranks cut a row."""
    order = getattr(config, "cp_partition_mode", None) or "zigzag"
    return require_one_of(order, ORDERS, "config.cp_partition_mode")


def tail_of(config: Any, tp_size: int) -> Tail | None:
    """The tail that the config asks for, on parts that ``tp_size`` tensor-parallel ranks and the kernels can divide."""
    shared = tp_size if getattr(config, "sequence_parallel", False) else 1
    return Tail.of(config, math.lcm(shared, _fp8_multiple(config)))


def _positive(config: Any, name: str, default: int | None = None) -> int:
    if default is not None and getattr(config, name, None) is None:
        return default
    value = _field(config, name, hint=f"set config.{name}")
    return require_int(value, f"config.{name}", least=1)


def _refuse_dynamic(config: Any, mtp_stages: frozenset[int]) -> None:
    """Refuse models that ignore the group of a microbatch: they would train on wrong positions without an error."""
    reason = None
    if core_takes_groups():
        return
    if mtp_stages:
        reason = "this megatron-core rolls multi-token-prediction labels over the model's one context-parallel group"
    elif not (getattr(config, TAKES_GROUPS, False) or getattr(config, "dynamic_context_parallel", False)):
        reason = "this megatron-core applies rotary positions by the model's one context-parallel group"
    if reason is not None:
        raise InputError(
            f"{reason}, so microbatches cannot have degrees of their own",
            where=f"sequence_packing_scheduler {DYNAMIC!r}",
            hint="choose 'balanced', which keeps one degree"
            + (
                "" if mtp_stages else f", or set config.{TAKES_GROUPS} where attention honours PackedSeqParams.cp_group"
            ),
        )


def _cost(config: Any) -> TransformerCost:
    terms = transformer_terms(config)
    return TransformerCost() if terms is None else TransformerCost(linear=terms[0], quadratic=terms[1])


def _fp8_multiple(config: Any) -> int:
    """Multiple of a rank's row that FP8 and FP4 kernels require, in tokens. Source: Megatron-LM's padding."""
    if getattr(config, "fp4", None):
        return 128  # what lets FP4 kernels quantize groups without padding of their own
    if not getattr(config, "fp8", None):
        return 1
    recipe = str(getattr(config, "fp8_recipe", ""))
    # 128 is the block of blockwise scaling, 32 that of MXFP8, 16 what the other recipes' matrix products need.
    return 128 if "blockwise" in recipe else 32 if "mxfp8" in recipe else 16


def _mtp_stages(config: Any) -> frozenset[int]:
    """Pipeline stages that hold multi-token-prediction layers; -1 is the last. Source: ``mtp_on_this_rank``."""
    if not getattr(config, "mtp_num_layers", None):
        return frozenset()
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return frozenset([-1])
    stages = getattr(layout, "layout", layout)
    return frozenset(
        stage
        for stage, chunks in enumerate(stages)
        if any(getattr(layer, "name", layer) == "mtp" for chunk in chunks for layer in chunk)
    )
