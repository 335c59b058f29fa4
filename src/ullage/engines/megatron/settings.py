"""Packing settings from Megatron's config, read once and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.engines.megatron.flops import transformer_terms
from ullage.errors import InputError, require_int
from ullage.layout import Int64
from ullage.planning import TransformerCost, plan
from ullage.planning.plans import Plan
from ullage.planning.strategies import ALIASES, PREASSIGNED, strategy_names
from ullage.ranks.topology import Topology

#: Name of the scheduler that gives each microbatch its own context-parallel degree.
DYNAMIC = "default_dynamic_cp"
#: The attribute by which ``packed_block_spec`` marks the config of a model whose attention honours
#: ``PackedSeqParams.cp_group``. Megatron-LM's own switch for that, where it has one, is ``dynamic_context_parallel``.
TAKES_GROUPS = "attention_takes_cp_group"


def schedulers() -> list[str]:
    """Valid names for ``config.sequence_packing_scheduler``: ullage's strategies and Megatron-LM's schedulers."""
    return [name for name in strategy_names() if ALIASES.get(name, name) != PREASSIGNED]


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
        fp8_multiple: each rank's row is a multiple of this many tokens, for FP8 kernels.
        sequence_parallel: whether tensor-parallel ranks divide the row.
        alignment: ``pad_packed_seq_alignment``; a slot is a multiple of this.
    """

    capacity: int
    scheduler: str
    virtual: int
    multiple: int
    mtp_stages: frozenset[int]
    cost: TransformerCost
    fp8_multiple: int
    sequence_parallel: bool
    alignment: int

    @property
    def dynamic(self) -> bool:
        return self.scheduler == DYNAMIC

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Read a config. Raises ``InputError`` for a field that is missing or invalid, and for an unknown scheduler."""
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
        return cls(
            capacity=capacity,
            scheduler=scheduler,
            virtual=virtual,
            multiple=_positive(config, "microbatch_group_size_per_vp_stage") if virtual > 1 else 1,
            mtp_stages=mtp,
            cost=_cost(config),
            fp8_multiple=_fp8_multiple(config),
            sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
            alignment=int(getattr(config, "pad_packed_seq_alignment", None) or 1),
        )

    def pad_to_multiple_of(self, topology: Topology) -> int:
        """Multiple of a slot: two chunks per context-parallel rank, each divisible for sequence parallelism and FP8."""
        cp, tp = topology.cp.size, topology.tp.size
        # A rank holds two chunks of each slot. tp divides a rank's row under sequence parallelism.
        halves = 2 * cp if cp > 1 else 1
        return math.lcm(halves * (tp if self.sequence_parallel else 1), self.fp8_multiple * cp, self.alignment)

    def row_multiple(self, topology: Topology, degree: int | None) -> int:
        """Multiple of a whole row, in tokens.

        With a degree per microbatch the slots are multiples of twice the degree only, so the row is filled up to what
        sequence parallelism and FP8 can divide. ``degree``: None if it is fixed.
        """
        if degree is None or degree == 1:
            return self.pad_to_multiple_of(topology)
        return math.lcm(self.pad_to_multiple_of(topology) * degree, 2 * degree)

    def planner(self, topology: Topology) -> Callable[[Int64], Plan]:
        """Function from lengths to a plan; ``topology`` has dp flattened over cp if the degree is dynamic."""

        def make_plan(lengths: np.ndarray) -> Plan:
            return plan(
                lengths,
                ranks=topology.dp.size,
                capacity=self.capacity * topology.cp.size,
                pad_to_multiple_of=self.pad_to_multiple_of(topology),
                strategy="balanced" if self.dynamic else self.scheduler,
                context_parallel="auto" if self.dynamic else 1,
                microbatch_multiple=self.multiple,
                cost=self.cost,
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


def _positive(config: Any, name: str) -> int:
    value = _field(config, name, hint=f"set config.{name}")
    return require_int(value, f"config.{name}", least=1)


def _refuse_dynamic(config: Any, mtp_stages: frozenset[int]) -> None:
    """Refuse models that ignore the group of a microbatch: they would train on wrong positions without an error."""
    reason = None
    if mtp_stages:
        reason = "megatron-core rolls multi-token-prediction labels over the model's one context-parallel group"
    elif not (getattr(config, TAKES_GROUPS, False) or getattr(config, "dynamic_context_parallel", False)):
        reason = "megatron-core 0.16.1 applies rotary positions by the model's one context-parallel group"
    if reason is not None:
        raise InputError(
            f"{reason}, so microbatches cannot have degrees of their own",
            where=f"sequence_packing_scheduler {DYNAMIC!r}",
            hint="choose 'balanced', which keeps one degree"
            + ("" if mtp_stages else ", or build the model with ullage.engines.megatron.packed_block_spec(config)"),
        )


def _cost(config: Any) -> TransformerCost:
    terms = transformer_terms(config)
    return TransformerCost() if terms is None else TransformerCost(linear=terms[0], quadratic=terms[1])


def _fp8_multiple(config: Any) -> int:
    """Multiple of a rank's row that FP8 kernels require, in tokens, by recipe. Source: Megatron-LM's padding."""
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
