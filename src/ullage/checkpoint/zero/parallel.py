"""Joining of slices over tensor-parallel ranks, by the patterns of ``universal_checkpoint_info``, and over stages.

Megatron-DeepSpeed saves lists of regular expressions (``re.match``, at most one match a list) that say, by the name of
a parameter, what its slices are: replicas, parts along dim 0 (the default) or dim 1 (row parallel), parts of several
sub-parameters (SwiGLU halves, fused QKV), or values to average; and which tensors carry padding rows of a vocabulary.
Versions 0.2 to 0.5 of the description are supported; the geometric map that may come with it is in ``affine``.

Every one of these is bands along one dim: ``width`` indices of a slice lie at ``at`` in the whole. Where nothing comes
before that dim, a band is a contiguous run and the fragments can address the whole directly (``Merge("flat")``).
Source: ``deepspeed/checkpoint/ds_to_universal.py`` (merge_tp_slices) and ``constants.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ullage.checkpoint.core.inventory import Band, Fragments, Merge, Slice, Tensor
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.zero import shards
from ullage.checkpoint.zero.affine import AffineMaps, Joint, place_by_map
from ullage.checkpoint.zero.folder import Folder
from ullage.core.errors import CheckpointError

_MAX_VERSION = 0.5
#: Sub-parameters of one parameter: a larger number is damage, and would be allocated.
_MAX_SUB_PARAMETERS = 1 << 16
_INFO = "universal_checkpoint_info"
_UNDESCRIBED = "autotp_unsupported_parameter_patterns"
#: Lists of patterns of parameters of which each slice has all elements, and how these join.
_WHOLE: dict[str, Literal["replicated", "average"]] = {
    "tp_replicated_parameter": "replicated",
    "parameter_to_average": "average",
}
#: Lists of patterns that say how slices join.
_CATEGORIES = (*_WHOLE, "parameter_with_2_sub_params_cat_dim_0", "parameter_with_row_parallelism")
#: By tensor-parallel rank: the slice, its dtype, and its parameter group.
Parts = dict[int, tuple[Slice, str, int | None]]
#: By name and key, then by pipeline stage.
Stages = dict[tuple[str, str], dict[int, Parts]]
#: A folder that claims more than ``_LEAST`` ranks, of which fewer than one in ``_RATIO`` is there, is not looked into:
#: the number is damage, and everything that is allocated per rank would grow with it.
_LEAST, _RATIO = 1024, 64


@dataclass(frozen=True)
class SubParameters:
    """One entry of ``parameter_with_sub_params``: a view of the parameter and the dim that is cut."""

    patterns: list[str]
    shape: tuple[Any, ...]
    partition_dim: int


def _fused_parameter(given: Any, entry: str, where: str) -> SubParameters:
    held = metadata.mapping(getattr(given, "state", None) or given, entry, where)
    shape = tuple(
        tuple(metadata.integers(d, entry, where))
        if isinstance(d, (list, tuple))
        else metadata.integer(d, entry, where, least=-1)
        for d in metadata.sequence(held.get("shape"), entry, where)
    )
    dim = metadata.integer(held.get("partition_dim"), entry, where)
    if dim >= len(shape):
        raise metadata.malformed(entry, where, f"a shape of more than {dim} dims", shape)
    return SubParameters(metadata.regexes(held.get("patterns"), entry, where), shape, dim)


@dataclass
class Patterns:
    """``universal_checkpoint_info``, looked up by the name of a parameter.

    Attributes:
        info: the entry as it was saved.
        where: the folder, for errors.
        used: patterns that have matched a name so far.
    """

    info: dict[str, Any]
    where: str = ""
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        version = self.info.get("universal_checkpoint_version", 0.2)
        if not isinstance(version, (int, float)) or not 0 <= version <= _MAX_VERSION:
            raise CheckpointError(
                "universal_checkpoint_info is of an unknown version",
                where=self.where or None,
                expected=f"up to {_MAX_VERSION}",
                found=metadata.brief(version),
            )
        self.version = float(version)
        #: Patterns of parameters of which the writer says that it cannot describe their cut, each with the reason.
        undescribed = self.info.get(_UNDESCRIBED) or {}
        reasons = dict(undescribed) if isinstance(undescribed, dict) else dict.fromkeys(undescribed, "")
        metadata.regexes(list(reasons), f"{_UNDESCRIBED} of {_INFO}", self.where)
        self._undescribed = reasons
        self._lists = {
            key: metadata.regexes(value, f"{key} of {_INFO}", self.where)
            for key, value in self.info.items()
            if isinstance(key, str) and key.endswith(("_patterns", "_cat_dim_0")) and key != _UNDESCRIBED
        }
        self.vocab_size = 0
        if self._lists.get("vocabulary_parameter_patterns"):
            size = self.info.get("original_vocab_size")
            self.vocab_size = metadata.integer(size, f"original_vocab_size of {_INFO}", self.where)
        entry = f"sub_param_shard_widths of {_INFO}"
        self.widths: dict[Any, list[list[int]]] = {
            pattern: [metadata.integers(row, entry, self.where) for row in metadata.sequence(rows, entry, self.where)]
            for pattern, rows in metadata.mapping(self.info.get("sub_param_shard_widths"), entry, self.where).items()
        }
        entry = f"parameter_with_sub_params of {_INFO}"
        listed = metadata.sequence(self.info.get("parameter_with_sub_params"), entry, self.where)
        self._fused = [_fused_parameter(given, entry, self.where) for given in listed]
        self.affine = AffineMaps(self.info, self.where)

    def require_described(self, name: str) -> None:
        """Raise ``CheckpointError`` for a parameter of which the writer says that nothing describes its slices."""
        for pattern, reason in self._undescribed.items():
            if re.match(pattern, name):
                raise CheckpointError(
                    "the writer says that it cannot describe how this was cut", where=name, found=metadata.brief(reason)
                )

    def states(self, name: str) -> bool:
        """Whether a list of patterns says how the slices of ``name`` join; where none does, they lie along dim 0."""
        # Every list is asked, so that a pattern that matches counts as used.
        found = [self.match(which, name) for which in _CATEGORIES]
        return self.sub_parameters(name) is not None or any(found)

    def match(self, which: str, name: str) -> str | None:
        """The pattern of list ``which`` that matches ``name``. Raises ``CheckpointError`` when more than one does."""
        listed = self._lists.get(f"{which}_patterns") or self._lists.get(which)
        if not listed:
            return None
        found = [p for p in listed if re.match(p, name)]
        if len(found) > 1:
            raise CheckpointError(f"more than one pattern of {which} matches", where=name, found=found)
        self.used.update(found)
        return found[0] if found else None

    def sub_parameters(self, name: str) -> tuple[SubParameters, str] | None:
        """The fused parameter that ``name`` is, and the pattern that says so; None for any other parameter."""
        for fused in self._fused:
            for pattern in fused.patterns:
                if re.match(pattern, name):
                    self.used.add(pattern)
                    return fused, pattern
        return None

    def unused(self) -> list[str]:
        """Patterns that matched no name."""
        # Patterns of what pipeline stages repeat are looked up only where there are several stages.
        lists = [patterns for key, patterns in self._lists.items() if not key.startswith("pipeline")]
        return sorted({pattern for patterns in lists for pattern in patterns} - self.used)


@dataclass(frozen=True)
class Joined:
    """The whole tensor: its shape, its slices, their merge, and the entries of a universal file beside it.

    ``others`` are (slices, merge) of the same tensor, taken from other ranks that hold the same elements.
    """

    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    merge: Merge
    extra: dict[str, Any]
    others: tuple[tuple[tuple[Slice, ...], Merge], ...] = ()


def join(name: str, slices: list[Slice], patterns: Patterns, item_bytes: int) -> Joined:
    """Join the slices of tensor-parallel ranks 0, 1, ... of one tensor.

    Raises ``CheckpointError`` that names the tensor, for slices that do not fit together.
    """
    given = patterns.affine.find(name)
    if given is None:
        patterns.require_described(name)
        return _flat(name, slices, _by_patterns(name, slices, patterns), patterns, item_bytes)
    # The map is followed; where patterns speak of the parameter as well, both must say the same.
    stated = _by_patterns(name, slices, patterns) if patterns.states(name) else None
    place = place_by_map(name, given, slices, stated, lambda: _by_patterns(name, slices, patterns))
    if place is not None and (given.is_replicated or given.num_holders == 1):
        return _flat(name, slices, place, patterns, item_bytes)
    made: list[Joined] = []
    for choice in range(given.num_holders):
        whole = _whole(slices, given.shape, given.fragments(slices, choice, item_bytes))
        made.append(
            _flat(name, [whole], Joint(given.shape, Merge(), place.extra if place else {}), patterns, item_bytes)
        )
    return replace(made[0], others=tuple((other.slices, other.merge) for other in made[1:]))


def _by_patterns(name: str, slices: list[Slice], patterns: Patterns) -> Joint:
    """How the slices join, by the lists of patterns. Raises ``CheckpointError`` for slices that do not fit together."""
    extra: dict[str, Any] = {}
    # The pattern that matches says what the slices are: replicas, values to average, or bands along one dim.
    sub = patterns.sub_parameters(name)
    bands: list[Band]
    for category, kind in _WHOLE.items():
        if patterns.match(category, name):
            if len({s.shape for s in slices}) > 1:
                raise CheckpointError("replicas differ in shape", where=name, found=[list(s.shape) for s in slices])
            return Joint(slices[0].shape, Merge(kind) if len(slices) > 1 else Merge(), extra)
    if patterns.match("parameter_with_2_sub_params_cat_dim_0", name):
        if not all(s.shape for s in slices):
            raise CheckpointError("a parameter of two halves without a dim", where=name)
        # ``torch.chunk(slice, 2)``: the first half is the larger one.
        halves = [[math.ceil(s.shape[0] / 2), s.shape[0] // 2] for s in slices]
        dim, shape, bands = 0, _stacked_shape(name, slices, 0), _interleave([[h[i] for h in halves] for i in (0, 1)])
        extra |= {"cat_dim": 0, "param_n_sub_params": 2}
    elif sub is not None:
        dim, shape, widths, normal = _sub_shapes(name, slices, *sub, patterns)
        bands = _interleave(widths)
        extra["sub_param_shape"] = normal
    else:
        dim = 1 if patterns.match("parameter_with_row_parallelism", name) else 0
        shape = _stacked_shape(name, slices, dim)
        bands = _interleave([[s.shape[dim] if s.shape else 1 for s in slices]])
        extra["cat_dim"] = dim
    # Cut at ``dim``, the whole is [outer, size, inner]; a band is ``width`` of the ``size`` indices. Two slices of [4,
    # 3] along dim 1 make [4, 6]: outer 4, size 6, inner 1, and bands of width 3 at 0 and at 3.
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    return Joint(shape, Merge("columns", outer, shape[dim] if shape else 1, inner, tuple(bands)), extra)


def _flat(name: str, slices: list[Slice], place: Joint, patterns: Patterns, item_bytes: int) -> Joined:
    """The tensor of a placement: a vocabulary cut to its size, and what needs no merging as one slice."""
    shape, merge, extra = place.shape, place.merge, dict(place.extra)
    # 1. Padding rows of a vocabulary are cut off.
    if patterns.match("vocabulary_parameter", name):
        if not shape:
            raise CheckpointError("a vocabulary without rows", where=name)
        # The bands stay those of the padded whole: rows beyond ``shape`` are simply never read.
        shape = (min(shape[0], patterns.vocab_size), *shape[1:])
        extra["vocab_tensor"] = True
    # 2. Stacks of experts: the loader takes the rows of its rank.
    if shape and patterns.match("expert_parameter", name):
        extra |= {"is_expert_param": True, "ep_num_experts": shape[0]}
    # 3. Bands that are contiguous runs of the whole need no merging: their fragments address the whole.
    bands = merge.bands
    if len(slices) == 1 and all(b.begin == b.at for b in bands) and sum(b.width for b in bands) == merge.size:
        merge = Merge()  # nothing was cut, and its sub-parameters already lie in order
    numel = math.prod(shape)
    if merge.kind == "columns" and merge.outer == 1:
        return Joined(shape, (_whole(slices, shape, flatten_bands(slices, merge, numel, item_bytes)),), Merge(), extra)
    if merge.kind == "flat":
        held = slices[0].fragments
        cut = held if math.prod(slices[0].shape) <= numel else held.window(0, numel, item_bytes)
        return Joined(shape, (_whole(slices, shape, cut),), merge, extra)
    return Joined(shape, tuple(slices), merge, extra)


def _whole(slices: list[Slice], shape: tuple[int, ...], fragments: Fragments) -> Slice:
    """One slice that holds the whole, from ``fragments`` of several."""
    return Slice(slices[0].model_rank, shape, fragments)


def _stacked_shape(name: str, slices: list[Slice], dim: int) -> tuple[int, ...]:
    first = slices[0].shape
    if not first and len(slices) == 1:
        return first
    for part in slices:
        if len(part.shape) <= dim or part.shape[:dim] + part.shape[dim + 1 :] != first[:dim] + first[dim + 1 :]:
            found = [list(s.shape) for s in slices]
            raise CheckpointError(f"slices cannot be joined along dim {dim}", where=name, found=found)
    return (*first[:dim], sum(s.shape[dim] for s in slices), *first[dim + 1 :])


def _interleave(widths: list[list[int]]) -> list[Band]:
    """Bands of ``widths[j][i]``, those of sub-parameter j in slice i.

    A slice holds its parts of all sub-parameters, one after the other. The whole holds sub-parameter 0 of all slices,
    then sub-parameter 1 of all slices, and so on.
    """
    # Two slices of 4 rows, each 2 rows of a gate and 2 of another projection: widths [[2, 2], [2, 2]]. The rows of the
    # whole are 0 and 1 of slice 0, 0 and 1 of slice 1, 2 and 3 of slice 0, 2 and 3 of slice 1.
    bands, at = [], 0
    begins = [0] * len(widths[0])
    for row in widths:
        for i, width in enumerate(row):
            bands.append(Band(i, begins[i], at, width))
            begins[i] += width
            at += width
    return bands


def _sub_shapes(name: str, slices: list[Slice], sub: SubParameters, pattern: str, patterns: Patterns):
    """Shape and cut of a fused parameter, such as QKV in one matrix: several sub-parameters along one dim.

    Args:
        name: of the parameter.
        slices: those of tensor-parallel ranks 0, 1, ...
        sub: the view that the writer recorded: a shape in which the cut dim may be a tuple of sizes.
        pattern: the pattern that matched, under which widths are recorded.
        patterns: the whole of ``universal_checkpoint_info``.

    Returns the dim that is cut, the shape of the whole, the widths [sub-parameter][slice], and the entry for the
    universal file. Raises ``CheckpointError`` where slices, view and widths do not fit together.
    """
    # 1. The sizes of the sub-parameters along the dim that is cut: listed, or equal parts.
    dim, spec, tp = sub.partition_dim, sub.shape[sub.partition_dim], len(slices)
    numel = sum(math.prod(s.shape) for s in slices)
    if any(len(s.shape) <= dim for s in slices):
        raise CheckpointError("a fused parameter has fewer dims than its view", where=name, expected=f"more than {dim}")
    if isinstance(spec, tuple):
        sizes = spec
    elif patterns.version >= 0.4:
        sizes = (spec,)
    else:  # before 0.4 a number is how many equal sub-parameters there are
        total = sum(s.shape[dim] for s in slices)
        if not 0 < spec <= _MAX_SUB_PARAMETERS or total % spec:
            raise CheckpointError("sub-parameters do not divide their dim", where=name, expected=spec, found=total)
        sizes = (total // spec,) * spec
    # 2. The width of each sub-parameter in each slice: recorded since version 0.4, equal before.
    if patterns.version >= 0.4:
        widths = patterns.widths.get(pattern)
        if widths is None:
            raise CheckpointError("sub_param_shard_widths lacks a fused parameter", where=name)
    elif any(size % tp for size in sizes):
        raise CheckpointError("sub-parameters are cut unevenly and no widths are recorded", where=name, found=sizes)
    else:
        widths = [[size // tp] * tp for size in sizes]
    if [sum(w) for w in widths] != list(sizes) or any(len(w) != tp for w in widths):
        raise CheckpointError("the widths of sub-parameters do not add up", where=name, expected=sizes, found=widths)
    # 3. The shape of the whole, with one dim that may be left open; every slice must have its part of it.
    shape = [sum(d) if isinstance(d, tuple) else d for d in sub.shape]
    shape[dim] = sum(sizes)
    if shape.count(-1) == 1:
        shape[shape.index(-1)] = numel // max(1, math.prod(d for d in shape if d >= 0))
    if math.prod(shape) != numel:
        raise CheckpointError("a fused parameter does not fit its view", where=name, expected=shape, found=numel)
    for i, part in enumerate(slices):
        # Elements of the other dims, times the indices that this rank holds of all sub-parameters.
        held = math.prod(shape) // shape[dim] * sum(w[i] for w in widths) if shape[dim] else 0
        if held != math.prod(part.shape):
            raise CheckpointError(
                "a slice does not have the recorded width",
                where=f"{name}, model rank {part.model_rank}",
                expected=held,
                found=math.prod(part.shape),
            )
    kept = list(sub.shape)
    kept[dim] = tuple(sizes)
    return dim, tuple(shape), widths, SubParameters(sub.patterns, tuple(kept), dim)


def flatten_bands(slices: Sequence[Slice], merge: Merge, limit: int, item_bytes: int) -> Fragments:
    """The fragments of bands that are contiguous runs of the whole, cut at ``limit`` elements (padding rows)."""
    parts = []
    for band in merge.bands:
        # Nothing comes before the dim, so a band is one run: of its slice from ``begin`` on, of the whole from ``at``
        # on. ``moved`` shifts its fragments from the one address to the other. With rows of 3 elements, the 2 rows from
        # row 4 of a slice on that lie at row 6 of the whole are elements [12, 18) there, and move on by 6 to [18, 24).
        begin, at = band.begin * merge.inner, band.at * merge.inner
        width = max(0, min(band.width * merge.inner, limit - at))
        parts.append(slices[band.slice].fragments.window(begin, begin + width, item_bytes).moved(at - begin))
    return Fragments.join(parts)


def require_plausible(folder: Folder, what: str, claimed: int, there: int) -> None:
    """Raise ``CheckpointError`` for a number of ranks of which almost none is there, before memory depends on it."""
    if claimed > max(_LEAST, _RATIO * there):
        raise CheckpointError(
            f"the files say that {claimed} {what}, and almost none is there",
            where=str(folder.path),
            expected=claimed,
            found=there,
            hint="copy the folder again from where it was saved",
        )


def parallel_sizes(folder: Folder, model_ranks: int) -> tuple[int, int]:
    """(tensor-parallel, pipeline-parallel) sizes, as the files say or as their names show."""
    degrees = folder.models[min(folder.models)].degrees
    if degrees is not None:
        require_plausible(folder, "model ranks wrote it", degrees[0] * degrees[1], model_ranks)
        return degrees
    # A pipeline module's layer files have the tensor-parallel rank in their names; without any, there is one stage.
    layers = [m for m in (shards.LAYER.fullmatch(f.name) for f in folder.files) if m]
    tp = len({m["mp"] for m in layers}) if layers else model_ranks
    return max(1, tp), max(1, model_ranks // max(1, tp))


@dataclass
class Joining:
    """Joining of slices over tensor-parallel ranks, and over the pipeline stages that hold one name.

    Attributes:
        folder: gets the problems and notes.
        patterns: how the slices of a name join.
        tp: number of tensor-parallel ranks; a model rank is pipeline stage · ``tp`` + tensor-parallel rank.
    """

    folder: Folder
    patterns: Patterns
    tp: int

    def stage_of(self, slices: Stages, name: str, key: str, model_rank: int) -> tuple[Parts, int]:
        """Of one name and key: the slices of the model rank's pipeline stage, and its tensor-parallel rank."""
        return slices.setdefault((name, key), {}).setdefault(model_rank // self.tp, {}), model_rank % self.tp

    def join(self, slices: Stages, kind: str = "parameter") -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """The tensors, and pairs of those that several stages, or choices of ranks, hold and that must be equal.

        Of several stages the first one's tensor is taken; a conversion compares it with the others.
        """
        tensors: list[Tensor] = []
        twins: list[tuple[Tensor, Tensor]] = []
        for (name, key), stages in slices.items():
            # One tensor per stage. If any of them cannot be made, its problem is noted and the name is left out.
            made = [self._of_stage(name, key, stages[stage], kind) for stage in sorted(stages)]
            if not all(made):
                continue
            twins += [(tensor, copy) for tensor, *copies in made for copy in copies]
            first, *others = (tensor for tensor, *_ in made)
            tensors.append(first)
            for other in others:
                if (other.shape, other.dtype) == (first.shape, first.dtype):
                    twins.append((first, other))
                    continue
                what = f"pipeline stages hold different tensors of one name ({key})"
                one, two = (f"{t.dtype} {list(t.shape)}" for t in (first, other))
                self.folder.add_problem(what, parameter=name, expected=one, found=two)
            if others and key in ("fp32", "frozen"):
                note = f"{name} is in {len(made)} pipeline stages; they are compared, and the first is taken"
                self.folder.notes.append(note)
        return tensors, twins

    def _of_stage(self, name: str, key: str, parts: Parts, kind: Any) -> list[Tensor]:
        """The tensor that the ranks of one stage hold; none, and a problem, where it cannot be made.

        Further ones are the same tensor, taken from other ranks that must hold the same elements.
        """
        lead, dtype, group = parts[min(parts)]
        for rank in sorted(set(range(self.tp)) - set(parts)):
            # What a rank holds no element of is in no flat buffer; only the map tells that from a loss.
            shape = self.patterns.affine.empty_slice(name, rank)
            if shape is None:
                self.folder.add_problem(f"no slice of {key} on tensor-parallel rank {rank}", parameter=name)
                return []
            parts[rank] = Slice(lead.model_rank, shape, Fragments.of([])), dtype, group
        slices = [parts[t][0] for t in range(self.tp)]
        dtypes = sorted({part[1] for part in parts.values()})
        if len(dtypes) > 1:
            what = f"slices of {key} are of several dtypes"
            self.folder.add_problem(what, parameter=name, found=", ".join(dtypes))
            return []
        try:
            whole = join(name, slices, self.patterns, ITEM_BYTES[dtype])
        except CheckpointError as error:
            self.folder.problems.append(Problem.of_error(error, parameter=error.where or name))
            return []
        first = Tensor(name, key, whole.shape, dtype, kind, whole.slices, whole.merge, group, whole.extra)
        return [first, *(replace(first, slices=slices, merge=merge) for slices, merge in whole.others)]
