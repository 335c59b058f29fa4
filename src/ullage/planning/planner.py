"""``plan(...)``: check the arguments, turn sequences into items, let a strategy place them, and make the plan.

Pure: no process group, no device, no randomness. Every rank that calls it with the same lengths gets the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.core.errors import InputError, UllageError, listed, require_int, require_one_of
from ullage.core.layout import Int64, Integers, as_lengths
from ullage.planning import request
from ullage.planning.cost import SQUARED, Cost, TransformerCost, integer_costs
from ullage.planning.placement import NO_LIMIT, TOKENS, free_degrees, slot_multiple, slots_of
from ullage.planning.plans import Plan
from ullage.planning.solver.compiled import run
from ullage.planning.solver.items import rows
from ullage.planning.strategies import ALIASES, PREASSIGNED, Assignment, Strategy, Task, find_strategy


@dataclass(frozen=True)
class _Known:
    """The cost model of a plan that is made already: its own costs."""

    costs: Int64
    per_microbatch: float
    communication: float

    def __call__(self, lengths: Int64) -> Int64:
        return self.costs


def arrival_order(plan: Plan) -> Plan | None:
    """The plan by ``next_fit`` of the same sequences, with the costs of ``plan``; None if there is none to compare.

    ``next_fit`` has one degree for all microbatches: the least degree of ``plan``, else the next one at which every
    sequence fits.
    """
    if plan.strategy == "next_fit" or not plan.num_microbatches:
        return None
    least = int(plan.degrees.min())
    dropped = bool(np.any(plan.bins < 0))
    truncated = bool(np.any(plan.lengths[plan.order] < plan.original_lengths[plan.order]))
    oversize = "drop" if dropped else "truncate" if truncated else "error"
    uniform = bool(np.all(plan.degrees == least))
    return at_least_degree(
        # What the plan truncated stays so where the degree differs: only then is the work the same.
        plan.original_lengths if uniform else plan.lengths,
        sorted({least, *free_degrees(plan.ranks, least)}),
        oversize=oversize if uniform else "error",
        ranks=plan.ranks,
        capacity=plan.capacity,
        capacities=plan.capacities,
        amounts=plan.amounts,
        cost=_Known(plan.costs, plan.per_microbatch, plan.communication),
        sync=plan.sync,
        microbatch_multiple=plan.microbatch_multiple,
        pad_to_multiple_of=plan.pad_to_multiple_of,
        max_sequences=None if plan.max_sequences == NO_LIMIT else plan.max_sequences,
    )


def at_least_degree(lengths: Int64, degrees: Iterable[int], *, ranks: int, **settings: Any) -> Plan | None:
    """The plan by ``next_fit`` at the first of ``degrees`` that divides the ranks and lets every sequence fit.

    ``settings``: of ``plan``, but for the strategy and ``context_parallel``.
    """
    for degree in degrees:
        if ranks % degree:
            continue
        try:
            return plan(lengths, ranks=ranks, strategy="next_fit", context_parallel=degree, **settings)
        except UllageError:  # a sequence needs a larger degree
            continue
    return None


def plan(
    lengths: Integers,
    *,
    ranks: int,
    capacity: int | None = None,
    capacities: Mapping[str, int] | None = None,
    amounts: Mapping[str, Integers | Sequence[Integers]] | None = None,
    cost: Cost | Sequence[float] | None = None,
    strategy: str = "balanced",
    sync: str = "microbatch",
    context_parallel: int | str = 1,
    min_context_parallel: int = 1,
    microbatch_multiple: int = 1,
    pad_to_multiple_of: int = 1,
    max_sequences: int | None = None,
    keep_together: Integers | Sequence[Integers] | None = None,
    assignment: Sequence[Any] | None = None,
    oversize: str = "error",
) -> Plan:
    """Give each sequence a microbatch and a rank, or several ranks.

    Args:
        lengths [n]: tokens of each sequence of the global batch.
        ranks: number of ranks that hold data.
        capacity: slots (lengths rounded up to ``pad_to_multiple_of``) that a rank holds in one microbatch; never
            exceeded.
        capacities: the same by resource, ``{"tokens": 8192, "patches": 16384}``: no microbatch exceeds any of them.
            ``capacity`` is that of tokens. Ranks that share a microbatch all hold its patches.
        amounts: what each sequence takes of every resource besides tokens, such as patches of images: one integer per
            sequence, or a list per sequence of the sizes of its items.
        cost: one number per sequence; or any callable on an array of lengths that returns them, and on the amounts too
            if it has a parameter of that name; ``None`` is ``TransformerCost()``.
        strategy: one of :func:`ullage.planning.strategy_names`.
        sync: ``"microbatch"`` where ranks wait for one another in every microbatch (FSDP, ZeRO-3, expert parallel),
            ``"step"`` where they meet once per step (DDP).
        context_parallel: number of consecutive ranks that share every microbatch; or ``"auto"``: a power of two, or all
            ranks, as each microbatch needs.
        min_context_parallel: with ``"auto"``, the least number of ranks that share a microbatch: a power of two that
            divides ``ranks``, or all of them.
        microbatch_multiple: the number of microbatches is a multiple of it (virtual pipelines).
        pad_to_multiple_of: each slot is a multiple of it.
        max_sequences: sequences that one microbatch may hold; ``None`` is no limit.
        keep_together: one integer per sequence, where equal ones >= 0 share a microbatch; or lists of ids that share
            one.
        assignment: for ``"preassigned"``, the ids of each microbatch and rank.
        oversize: what happens to a sequence that no microbatch can hold: ``"error"``, ``"truncate"`` or ``"drop"``.
            Only tokens are truncated, of sequences that take nothing else.

    Waits for no device. Raises ``InputError`` before any work for arguments that cannot be met.

    >>> plan([5, 3, 4, 4], ranks=2, capacity=8).members(0, 1).tolist()
    [0, 1]
    """
    # Arguments are checked before any work is done.
    given = as_lengths(lengths)
    limits, taken = request.read_resources(capacity, capacities, amounts, len(given))
    name = ALIASES.get(strategy, strategy)
    # Megatron-LM's name for it implies that degrees are free; a degree that is given stands.
    if strategy == "default_dynamic_cp" and context_parallel == 1:
        context_parallel = "auto"
    shape = _Shape(
        ranks=require_int(ranks, "ranks", least=1),
        capacity=limits.pop(TOKENS),
        limits=limits,
        pad_to_multiple_of=require_int(pad_to_multiple_of, "pad_to_multiple_of", least=1),
        microbatch_multiple=require_int(microbatch_multiple, "microbatch_multiple", least=1),
        max_sequences=NO_LIMIT if max_sequences is None else require_int(max_sequences, "max_sequences", least=1),
        sync=require_one_of(sync, ("microbatch", "step"), "sync"),
        degrees=request.degrees(context_parallel, min_context_parallel, int(ranks)),
        auto=context_parallel == "auto",
    )
    require_one_of(oversize, ("error", "truncate", "drop"), "oversize")
    place = None if name == PREASSIGNED else find_strategy(name)
    _refuse_contradictions(name, shape, keep_together, assignment)
    # Costs are those of what is kept: a truncated sequence is a shorter one.
    kept, placed = request.fit(given, shape.longest(), shape.pad_to_multiple_of, oversize, limits, taken)
    costs, per_microbatch, communication = integer_costs(TransformerCost() if cost is None else cost, kept, taken)
    if place is None:
        order, offsets, microbatches = request.preassigned(
            assignment, shape.num_blocks, shape.microbatch_multiple, len(given), placed
        )
        degrees = None
    else:
        order, offsets, microbatches, degrees = _place(
            place, shape, kept, taken, costs, communication, placed, keep_together
        )
    # The strategy placed items on blocks of the least degree; offsets and degrees go back to ranks.
    made = Plan(
        order=order,
        offsets=shape.spread(offsets),
        degrees=shape.spread_degrees(microbatches, degrees),
        lengths=kept,
        original_lengths=given,
        costs=costs,
        ranks=shape.ranks,
        capacity=shape.capacity,
        pad_to_multiple_of=shape.pad_to_multiple_of,
        max_sequences=shape.max_sequences,
        microbatch_multiple=shape.microbatch_multiple,
        per_microbatch=per_microbatch,
        communication=communication,
        sync=sync,
        strategy=name,
        capacities=limits,
        # The squares are for the cost alone.
        amounts={each: values for each, values in taken.items() if not each.endswith(SQUARED)},
    )
    if name not in ("balanced", "next_fit"):  # others' answers are not taken on trust
        problems = made.problems()
        if problems:
            raise InputError(f"strategy {name!r} gave an unsound plan: {problems[0]}", hint=f"{len(problems)} in all")
    return made


@dataclass(frozen=True)
class _Shape:
    """The sizes of a request. Strategies see ``num_blocks`` blocks of the least degree in the place of ranks."""

    ranks: int
    capacity: int
    pad_to_multiple_of: int
    microbatch_multiple: int
    max_sequences: int
    sync: str
    degrees: tuple[int, ...]
    auto: bool
    limits: dict[str, int]

    @property
    def least_degree(self) -> int:
        return self.degrees[0]

    @property
    def num_blocks(self) -> int:
        return self.ranks // self.least_degree

    def longest(self) -> int:
        """Tokens of the longest sequence that some number of ranks can hold."""
        most = 0
        for degree in self.degrees:
            # The capacity of ``degree`` ranks, rounded down: the slot is the length rounded up to ``multiple``.
            multiple = slot_multiple(self.pad_to_multiple_of, degree)
            most = max(most, self.capacity * degree // multiple * multiple)
        return most

    def spread(self, offsets: Int64) -> Int64:
        """Offsets of blocks of ranks as offsets of ranks: all members stand at a block's first rank."""
        if self.least_degree == 1:
            return offsets
        return np.concatenate((offsets[:1], np.repeat(offsets[1:], self.least_degree)))

    def spread_degrees(self, microbatches: int, degrees: Int64 | None) -> Int64:
        """Degrees in blocks of ranks as degrees of ranks; without them every block runs alone."""
        if degrees is None:
            return np.full((microbatches, self.ranks), self.least_degree)
        return np.repeat(degrees * self.least_degree, self.least_degree, axis=1)


def _refuse_contradictions(name: str, shape: _Shape, keep_together: Any, assignment: Any) -> None:
    if shape.auto and shape.limits:
        raise InputError(
            f'a capacity of {listed(list(shape.limits), 4)} cannot be held with context_parallel="auto"',
            hint="give context_parallel a number, or leave out that capacity",
        )
    if shape.auto and name in (PREASSIGNED, "next_fit"):
        raise InputError(
            f"strategy {name!r} gives every sequence one degree", hint='context_parallel="auto" needs "balanced"'
        )
    if assignment is not None and name != PREASSIGNED:
        raise InputError(
            "an assignment is given to a strategy that makes its own",
            expected='strategy "preassigned"',
            found=repr(name),
        )
    if keep_together is not None and name == PREASSIGNED:
        raise InputError("keep_together says nothing where the assignment is given", hint="leave one of them out")


def _place(
    place: Strategy,
    shape: _Shape,
    kept: Int64,
    taken: dict[str, Int64],
    costs: Int64,
    communication: int,
    placed: Int64,
    keep_together: Any,
) -> tuple[Int64, Int64, int, Int64 | None]:
    """Ids bin by bin, where bins start, the number of microbatches, and the degrees if the strategy chose them."""
    # From sequences to items: each its own item, or the sums over each group. At degree d the cost of an item is that
    # of all its ranks together: the work once, and communication of ``(d − 1)/d`` on each of d ranks.
    lengths, costs = kept[placed], costs[placed]
    item = None if keep_together is None else request.groups(keep_together, len(kept), placed)
    count = len(lengths) if item is None else int(item.max(initial=-1)) + 1
    slots = [_sums(slots_of(lengths, shape.pad_to_multiple_of, degree), item, count) for degree in shape.degrees]
    work = [_sums(costs + communication * lengths * (degree - 1), item, count) for degree in shape.degrees]
    counts = _sums(np.ones(len(lengths), np.int64), item, count)
    amounts = [_sums(taken[name][placed], item, count) for name in shape.limits]
    task = Task(
        slots=slots[0],
        costs=work[0],
        counts=counts,
        ranks=shape.num_blocks,
        capacity=shape.capacity * shape.least_degree,
        max_sequences=shape.max_sequences,
        microbatch_multiple=shape.microbatch_multiple,
        sync=shape.sync,
        shared_slots=np.array(slots) if shape.auto else None,
        shared_costs=np.array(work) if shape.auto else None,
        shared_degrees=np.array(shape.degrees) // shape.least_degree if shape.auto else None,
        amounts=np.array(amounts, np.int64).reshape(len(amounts), count),
        limits=np.array([*shape.limits.values()], np.int64),
    )
    if item is not None:
        # A group fits if at some degree its slots on each rank do.
        shares = [-(-each * shape.least_degree // degree) for each, degree in zip(slots, shape.degrees)]
        others = [(each, limit, name) for each, (name, limit) in zip(amounts, shape.limits.items(), strict=True)]
        request.refuse_large_groups(
            np.min(shares, axis=0), counts, item, placed, task.capacity, task.max_sequences, others
        )
    answer = _sound(place(task), task)
    # Back from items to sequences: all members of a group follow it.
    bins = answer.bins if item is None else answer.bins[item]
    order, offsets = run(rows, bins, answer.num_microbatches * task.ranks, work=len(bins))
    return placed[order], offsets, answer.num_microbatches, answer.degrees


def _sums(values: Int64, item: Int64 | None, count: int) -> Int64:
    if item is None:
        return values
    sums = np.zeros(count, np.int64)
    np.add.at(sums, item, values)
    return sums


def _sound(answer: Assignment, task: Task) -> Assignment:
    """``answer`` if every item has a bin that is there. Raises ``InputError``."""
    bins = np.ascontiguousarray(answer.bins, np.int64)
    last = answer.num_microbatches * task.ranks - 1
    if bins.shape != (task.num_items,) or bins.min(initial=0) < 0 or bins.max(initial=-1) > last:
        raise InputError("a strategy must give each item a bin", expected=f"{task.num_items} numbers from 0 to {last}")
    return Assignment(bins, answer.num_microbatches, answer.degrees)
