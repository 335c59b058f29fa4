"""Optimizer state that is not cut like the weights, and whether it can be carried to another layout.

A state tensor as long as the partition is cut with the weights, after ``blockwise`` has decoded what it knows. Any
other is either a code book that is the same everywhere, or belongs to ONE rank's partition and means nothing once the
partition is gone. The files do not say which. What two ranks hold in common byte for byte belongs to neither
partition, and is carried; what differs, or was saved by one rank only, cannot be carried to another layout, and the
optimizer's state is refused. The weights are not concerned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ullage.checkpoint.files.metadata import brief, comparable
from ullage.checkpoint.inventory import Group
from ullage.checkpoint.problem import Problem
from ullage.checkpoint.zero.flat import FlatTensor
from ullage.checkpoint.zero.shards import ShardFile

#: What to do where the optimizer's state cannot be carried.
WEIGHTS_ONLY = "the weights can be converted without it: --to safetensors or --to dcp, with --weights-only"
#: Numbers that an optimizer computes again from the weights before it reads them, so that they may be left out.
#: RMS: ``Adafactor.step`` of transformers.
_RECOMPUTED = {"RMS"}
#: Dtypes of codes: no optimizer keeps values of its own in one byte.
_CODES = {"uint8", "int8"}


@dataclass
class Uncut:
    """Optimizer state of one model rank that is not cut into partitions.

    Attributes:
        keys: states whose tensors are no partition, so that they are kept whole.
        left_out: states that are numbers and need not be carried.
        problems: why the state cannot be converted.
        notes: what was decided, for the report.
    """

    keys: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_uncut(shards: list[ShardFile], groups: list[Group]) -> Uncut:
    """Compare all state that is not cut over the shards of one model rank. ``groups``: that rank's flat buffers."""
    ordered = sorted(shards, key=lambda s: s.dp_rank)
    lead = ordered[0]
    sizes = {group.index: group.shard_size for group in groups}
    found = Uncut()
    # A key whose length is not the partition's in some group is not one in any other: lengths may agree by chance.
    found.keys = {
        key
        for index, flat in enumerate(lead.flats)
        for key, placed in flat.items()
        if key != "fp32" and placed.numel not in (sizes.get(index), flat["fp32"].numel)
    }
    found.problems += [
        Problem(
            f"optimizer state {key} is quantised in a way that is not known",
            lead.name, lead.dp_rank, index,
            expected="blocks with a scale each, as bitsandbytes saves them",
            found=f"{placed.numel} elements of {placed.dtype}",
            hint=WEIGHTS_ONLY,
        )
        for index, flat in enumerate(lead.flats)
        for key, placed in flat.items()
        if placed.dtype in _CODES
    ]  # fmt: skip
    found.problems += [
        Problem(
            f"optimizer state {key} is of a kind that is not known",
            lead.name, lead.dp_rank, index, expected="tensors and numbers", found=brief(value), hint=WEIGHTS_ONLY,
        )
        for index, scalars in enumerate(lead.scalars)
        for key, value in scalars.items()
        if not _is_plain(value)
    ]  # fmt: skip
    # A state on some ranks only has no place on the others.
    for shard in ordered[1:]:
        # The reverse, a state that ``lead`` has and another rank lacks, is found where fragments are made of the state.
        for index, (mine, theirs) in enumerate(zip(lead.flats, shard.flats)):
            for key in sorted(set(theirs) - set(mine))[:1]:
                found.problems.append(
                    Problem(
                        f"optimizer state {key} is not on all ranks", lead.name, lead.dp_rank, index, hint=WEIGHTS_ONLY
                    )
                )
    # State that is not a partition is carried if all ranks have the same bytes.
    for index, flat in enumerate(lead.flats):
        for key in sorted(found.keys & set(flat)):
            problem = _compare(ordered, index, key)
            if problem is not None:
                found.problems.append(problem)
            else:
                found.notes.append(
                    f"group {index}: state {key} is not a partition and equal on all ranks; it is kept whole"
                )
    found.problems += _compare_numbers(ordered)
    for key in sorted(_RECOMPUTED):
        if any(_differ(ordered, index, key) for index in range(len(lead.scalars))):
            found.left_out.add(key)
            found.notes.append(f"state {key} differs between ranks; the optimizer computes it again, so it is left out")
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is a number or text, or a container of such; anything else may hold tensors of its own form."""
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _compare(shards: list[ShardFile], index: int, key: str) -> Problem | None:
    """The problem of one state of one group, if it may not be carried."""
    lead, *others = shards
    mine = lead.flats[index][key]
    expected = f"a state of {lead.flats[index]['fp32'].numel} elements, like the weights, or the same on all ranks"

    def problem(shard: ShardFile, placed: FlatTensor | None, how: str) -> Problem:
        size = "nothing" if placed is None else f"{placed.numel} elements"
        return Problem(
            f"optimizer state {key} belongs to one rank's partition, so it cannot be carried to another layout",
            shard.name, shard.dp_rank, index, expected=expected, found=f"{size}, {how}", hint=WEIGHTS_ONLY,
        )  # fmt: skip

    if mine.digest is None:
        return problem(lead, mine, "too many to be the same on all ranks")
    for shard in others:
        theirs = shard.flats[index].get(key) if index < len(shard.flats) else None
        if theirs is None or theirs.digest != mine.digest:
            return problem(shard, theirs, "others than on rank 0")
    return None if others else problem(lead, mine, "on one rank, where nothing tells what they belong to")


def _compare_numbers(shards: list[ShardFile]) -> list[Problem]:
    """Numbers and settings of the optimizer that differ between ranks, other than the step, which is checked apart.

    One rank that differs is enough to say.
    """
    lead, *others = shards
    for shard in others:
        found = [
            problem
            for index, (mine, theirs) in enumerate(zip(lead.scalars, shard.scalars))
            for problem in _differing("optimizer state ", shard, index, mine, theirs, _RECOMPUTED | {"step"})
        ]
        found += [
            problem
            for index, (mine, theirs) in enumerate(zip(lead.settings, shard.settings))
            for problem in _differing("the optimizer's ", shard, index, mine, theirs, {"params"})
        ]
        sizes = {"number of groups": len(lead.settings)}, {"number of groups": len(shard.settings)}
        found += _differing("the ", shard, 0, *sizes, set())
        if found:
            return found
    return []


def _differing(
    what: str, shard: ShardFile, index: int, mine: dict[str, Any], theirs: dict[str, Any], but: set[str]
) -> list[Problem]:
    """One problem per key that ``shard`` has otherwise than rank 0.

    Args:
        what: words before the key.
        shard: the file of the other rank, which the problem names.
        index: number of the group.
        mine: entries of rank 0.
        theirs: entries of ``shard``.
        but: keys that may differ.
    """
    return [
        Problem(
            f"{what}{key} differs between ranks, so it cannot be carried to another layout",
            shard.name,
            shard.dp_rank,
            index,
            expected=f"{comparable(mine.get(key))}, as on rank 0",
            found=f"{comparable(theirs.get(key))}",
            hint=WEIGHTS_ONLY,
        )
        for key in sorted({k for k in {*mine, *theirs} if isinstance(k, str)} - but)
        if comparable(mine.get(key)) != comparable(theirs.get(key))
    ]


def _differ(shards: list[ShardFile], index: int, key: str) -> bool:
    return len({repr(comparable(s.scalars[index].get(key))) for s in shards if index < len(s.scalars)}) > 1


def kept_whole(shard: ShardFile, index: int, uncut: Uncut) -> dict[str, Any]:
    """State of a group that is neither cut nor the step: numbers, and references to tensors."""
    found = {k: v for k, v in shard.scalars[index].items() if k != "step" and k not in uncut.left_out}
    return found | {k: v for k, v in shard.states[index].items() if k in uncut.keys}
