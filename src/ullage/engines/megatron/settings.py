"""Packing settings from Megatron's config, read once and checked; the FLOPs of its GPT, which are a sequence's cost.

The tail of a packed row is padding behind the last sequence, which gives rows of one shape, or of few.
``pad_packed_seq_alignment`` rounds each context-parallel rank's part of a row up to a multiple, once per row and not
once per sequence; ``"max"`` makes every part ``max_seqlen_per_dp_cp_rank`` long. With ``thd_max_packed_sequences`` the
cumulated lengths have one more entry than that in every step. Tokens and lengths then have the same shapes each step,
as CUDA graphs require.

The tail is a sequence of its own, the dummy (``thd_tail_padding_policy="append_dummy_seq"``, the default), or belongs
to the slot of the last sequence (``"extend_last"``). A dummy is an ordinary sequence to attention and padding to the
loss: its length is in ``cu_seqlens_q``, and the padding mask covers it.

A field of another core may ask for something that packing here does not do, and to train on without a word would be
wrong. So a field whose name says that it concerns packing is refused, unless it is known or at its default: the names
are those of megatron-core 0.16.1, and of Megatron-LM's main branch (core 0.20.0) and dev branch (core 0.19.0) in August
2026.

Source: ``pad_sequence_for_thd`` in ``megatron/core/packed_seq_params.py`` of Megatron-LM's dev branch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.core.errors import InputError, require_int, require_one_of
from ullage.core.layout import ORDERS, Int64, Layout
from ullage.engines.megatron.params import core_takes_groups
from ullage.planning import TransformerCost, plan
from ullage.planning.plans import Plan
from ullage.planning.strategies import ALIASES, PREASSIGNED, strategy_names
from ullage.ranks.topology import Topology

#: What the name of a field contains that concerns packing.
_CONCERNS = re.compile("pack|thd|seqlen|context_parallel|cp_")

#: Of the fields with such names, those that decide how samples are packed, sliced or weighed,
HONOURED = frozenset(
    (
        "cp_partition_mode",
        "dynamic_context_parallel",
        "max_seqlen_per_dp_cp_rank",
        "min_dynamic_context_parallel_size",
        "pad_packed_seq_alignment",
        "sequence_packing_scheduler",
        "thd_max_packed_sequences",
        "thd_tail_padding_policy",
    )
)

#: and those whose value makes no difference to packing: the model, the optimizer or the schedule reads them.
WITHOUT_EFFECT = frozenset(
    ("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes", "linear_cp_mode")
)

#: Fields that must have their default -> what to set in their place.
REFUSED: dict[str, str] = {
    "hybrid_context_parallel": "one microbatch has one context-parallel degree here: leave it off and set "
    "sequence_packing_scheduler to 'default_dynamic_cp'"
}


def check_fields(config: Any) -> None:
    """Raise ``InputError`` for a field that concerns packing, is set, and is not supported.

    Unknown fields are looked for in dataclasses only, because elsewhere nobody knows a default.
    """
    for name, hint in REFUSED.items():
        # Newer cores turn the old name into ``dynamic_context_parallel`` and leave it set.
        if getattr(config, name, None) and not getattr(config, "dynamic_context_parallel", False):
            raise InputError("packing does not support a field of the config", where=f"config.{name}", hint=hint)
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        known = field.name in HONOURED or field.name in WITHOUT_EFFECT or field.name in REFUSED
        if known or not _CONCERNS.search(field.name):
            continue
        value, default = getattr(config, field.name, None), _default(field)
        if value is not default and bool(value != default):
            raise InputError(
                "packing does not know a field of the config that concerns it",
                where=f"config.{field.name}",
                expected=default,
                found=value,
                hint="leave it at its default",
            )
    _refuse_balance_by_sequence(config)


def _refuse_balance_by_sequence(config: Any) -> None:
    """Raise ``InputError`` for a balancing loss of experts by sequence: the router takes a row for one sequence."""
    kinds: Any = getattr(config, "moe_router_load_balancing_type", None)
    weights: Any = getattr(config, "moe_aux_loss_coeff", 0)
    pairs = zip(kinds, weights, strict=False) if isinstance(kinds, (list, tuple)) else [(kinds, weights)]
    asked = any(kind == "seq_aux_loss" and weight for kind, weight in pairs)
    if asked and getattr(config, "num_moe_experts", None) and sequence_limit(config) != 1:
        raise InputError(
            "packing does not support a field of the config",
            where="config.moe_router_load_balancing_type",
            expected="'aux_loss' or 'global_aux_loss': 'seq_aux_loss' takes a packed row for one sequence",
            found=kinds,
            hint="or set its moe_aux_loss_coeff to 0, or thd_max_packed_sequences to 1",
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def transformer_terms(config: Any, vocab_size: int = 0) -> tuple[int, int] | None:
    """Forward FLOPs per token, and per squared token (causal half only), of a GPT with this ``TransformerConfig``.

    A batch costs ``terms[0]·Σlength + terms[1]·Σlength²`` forward and three times that with backward. ``vocab_size``:
    of the output layer, 0 to leave it out. Returns ``None`` for a config without sizes, and for experts or latent
    attention, for which there is no formula here.
    """
    hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if not hidden or not layers or not heads:
        return None
    if getattr(config, "num_moe_experts", None) or getattr(config, "multi_latent_attention", False):
        return None
    # Multiply-adds per token and layer: query and output projections, key and value projections (fewer heads with
    # grouped queries), and two matrices of the MLP, or three if it is gated. A multiply-add is two FLOPs.
    dim = getattr(config, "kv_channels", None) or hidden // heads
    keys = getattr(config, "num_query_groups", None) or heads
    inner = getattr(config, "ffn_hidden_size", None) or 4 * hidden
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    projections = 2 * hidden * heads * dim + 2 * hidden * keys * dim
    linear = 2 * (layers * (projections + matrices * hidden * inner) + hidden * vocab_size)
    # Scores and their product with the values are 4·heads·dim FLOPs per pair, and half of the pairs are causal.
    return linear, 2 * layers * heads * dim


_POLICIES = ("append_dummy_seq", "extend_last")


def sequence_limit(config: Any) -> int | None:
    """``thd_max_packed_sequences``, or ``None``. Raises ``InputError`` for a value that is not a number."""
    most = getattr(config, "thd_max_packed_sequences", None)
    return None if most is None else require_int(most, "config.thd_max_packed_sequences", least=1)


@dataclass(frozen=True)
class Tail:
    """How long a row is made, and to which sequence the padding belongs. Lengths are tokens of one rank's part.

    Attributes:
        alignment: the part is a multiple of it; ``None`` where ``target`` is set.
        target: the part is exactly this long; ``None`` where ``alignment`` is set.
        max_sequences: number of sequences in the cumulated lengths, the dummy among them; ``None`` for as many as
            there are.
        extend_last: whether the tail belongs to the last sequence.
        per_rank: what a part must be divisible by besides.
    """

    alignment: int | None
    target: int | None
    max_sequences: int | None
    extend_last: bool
    per_rank: int = 1

    @classmethod
    def of(cls, config: Any, per_rank: int = 1) -> Tail | None:
        """Read the config; ``None`` where rows get no tail. Raises ``InputError`` for an invalid value."""
        policy = getattr(config, "thd_tail_padding_policy", None) or _POLICIES[0]
        require_one_of(policy, _POLICIES, "config.thd_tail_padding_policy")
        most = sequence_limit(config)
        asked = getattr(config, "pad_packed_seq_alignment", None)
        if asked is None:
            return None
        if most == 1 and policy == _POLICIES[0]:
            raise InputError(
                "config.thd_max_packed_sequences counts the dummy sequence of the tail",
                expected="at least 2",
                found=most,
                hint="or set thd_tail_padding_policy to 'extend_last'",
            )
        # Graphs are captured at one shape, whatever the alignment is.
        captured = getattr(config, "cuda_graph_impl", None) not in (None, "none")
        alignment = target = None
        if isinstance(asked, str) and asked.isdecimal():
            asked = int(asked)
        if asked != "max" and (isinstance(asked, (bool, str)) or not isinstance(asked, (int, np.integer)) or asked < 1):
            raise InputError(
                "config.pad_packed_seq_alignment must be a number of tokens or 'max'",
                expected="'max' or a positive integer",
                found=asked,
            )
        if asked == "max" or captured:
            longest = getattr(config, "max_seqlen_per_dp_cp_rank", None)
            target = require_int(longest, "config.max_seqlen_per_dp_cp_rank", least=1)
        else:
            alignment = int(asked)
        return cls(alignment, target, most, policy == "extend_last", per_rank)

    def filled(self, layout: Layout, parts: int, order: str = "zigzag") -> tuple[Layout, Int64]:
        """The layout with its tail, and the length of each sequence that ``cu_seqlens_q`` shows.

        Args:
            layout: of a whole row.
            parts: context-parallel ranks that share it.
            order: how it is cut.

        A last sequence without tokens is a dummy already and is made longer. Raises ``InputError`` for a row that is
        longer than the target or has too many sequences.

        >>> tail = Tail(alignment=8, target=None, max_sequences=4, extend_last=False)
        >>> layout, shown = tail.filled(Layout([3, 7]), parts=1)
        >>> layout.cu_seqlens_padded.tolist(), layout.lengths.tolist(), shown.tolist()
        ([0, 3, 10, 16, 16], [3, 7, 0, 0], [3, 7, 6, 0])
        """
        rest = self._length(layout.size, parts, order) * parts - layout.size
        lengths, slots = layout.lengths.tolist(), layout.slots.tolist()
        has_dummy = not self.extend_last and bool(lengths) and not lengths[-1]
        if rest and (has_dummy or (self.extend_last and lengths)):
            slots[-1] += rest
        elif rest:
            lengths.append(0)
            slots.append(rest)
            has_dummy = not self.extend_last
        shown = np.array(lengths, np.int64)
        if has_dummy:
            shown[-1] = slots[-1]
        # Sequences of no tokens, which repeat the last entry of the cumulated lengths.
        spare = 0 if self.max_sequences is None else self.max_sequences - len(lengths)
        if spare < 0:
            raise InputError(
                "a packed row has more sequences than config.thd_max_packed_sequences",
                expected=f"at most {self.max_sequences}" + (", the dummy included" if has_dummy else ""),
                found=len(lengths),
                hint="raise it, or let wrap_data_iterator pack the row",
            )
        zeros = [0] * spare
        return Layout.from_slots(lengths + zeros, slots + zeros), np.append(shown, zeros).astype(np.int64)

    def _length(self, size: int, parts: int, order: str) -> int:
        """Tokens of one part."""
        # In zigzag order a part is two chunks of each slot, so it is even.
        unit = math.lcm(self.per_rank, 2 if parts > 1 and order == "zigzag" else 1)
        least = -(-size // parts)
        if self.target is None:
            unit = math.lcm(unit, self.alignment or 1)
            return -(-least // unit) * unit
        if self.target % unit:
            raise InputError(
                "rows cannot be padded to config.max_seqlen_per_dp_cp_rank",
                expected=f"a multiple of {unit}, which the ranks can divide",
                found=self.target,
            )
        if least > self.target:
            raise InputError(
                "a packed row is longer than what it is padded to",
                expected=f"at most {self.target} tokens per rank, config.max_seqlen_per_dp_cp_rank",
                found=least,
            )
        return self.target


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
