"""Differences of two checkpoints of any formats: which tensors differ, and by how much.

Tensors are paired by name and state. What one format calls ``fp32`` (master weights) another calls ``frozen`` or
``buffer``, or stores under the name of a tied tensor; these are one *weight* here, so a ZeRO checkpoint and the
safetensors made of it are compared throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.checkpoint.conversion.comparing import compare_ranges, unequal_elements
from ullage.checkpoint.conversion.converting import default_workers
from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.core.numbers import Bytes, as_floats
from ullage.checkpoint.formats import table as formats
from ullage.core.display import Shown, quantity

#: The state under which the weights of all formats are compared.
_WEIGHT = "weight"
#: Dtypes that numpy has no arithmetic of: their elements are compared, and not subtracted.
_NO_NUMBERS = ("float8", "float4", "bits", "complex32", "bcomplex32")


@dataclass(frozen=True)
class TensorDifference:
    """One tensor, or one fact, that is not the same in both checkpoints. ``str()`` says it in one line.

    Attributes:
        name: the tensor's; empty for the optimizer's steps.
        key: ``weight``, a state such as ``exp_avg``, or ``step``.
        kind: ``values``; ``dtype`` (and perhaps values); ``shape``; ``missing in first``; ``missing in second``;
            ``step``.
        first: dtype and shape, or steps, of the first; None where it is missing.
        second: of the second.
        elements: of the tensor.
        differing: elements whose bytes differ, or whose numbers differ where dtypes do.
        max_abs: largest difference of two finite elements; None where no numbers can be subtracted.
        max_relative: largest difference over the larger magnitude of both, at most 2.
        not_finite: elements that differ and are NaN or Inf on a side; they are in no maximum.
    """

    name: str
    key: str
    kind: str
    first: str | None = None
    second: str | None = None
    elements: int = 0
    differing: int = 0
    max_abs: float | None = None
    max_relative: float | None = None
    not_finite: int = 0

    def __str__(self) -> str:
        title = " ".join(word for word in (self.name, self.key) if word)
        if self.kind.startswith("missing"):
            return f"{title}: {self.kind} ({self.first or self.second})"
        said = [] if self.kind == "values" else [f"{self.first} against {self.second}"]
        if self.differing:
            said.append(f"{self.differing:,} of {self.elements:,} elements differ")
            if self.max_abs is not None and self.differing > self.not_finite:
                said.append(f"by at most {self.max_abs:.3g} (relative {self.max_relative:.3g})")
            if self.not_finite:
                said.append(f"{self.not_finite:,} of them NaN or Inf")
        return f"{title}: {', '.join(said)}"


@dataclass(frozen=True, repr=False)
class Differences(Shown):
    """The result of :func:`diff`. True where the checkpoints differ.

    Attributes:
        first, second: the folders.
        num_tensors: tensors that both have, which were compared unless their shapes differ.
        num_elements: of these, in the first.
        differences: by tensor, in the order of the first; empty where everything is the same.
    """

    first: str
    second: str
    num_tensors: int
    num_elements: int
    differences: tuple[TensorDifference, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.differences)

    def _facts(self) -> Iterator[str]:
        yield f"{quantity(self.num_tensors, 'tensor')} compared"
        yield quantity(len(self.differences), "difference")

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        return asdict(self) | {"equal": not self.differences, "differences": [asdict(d) for d in self.differences]}


def diff(
    first: str | Path | Inventory,
    second: str | Path | Inventory,
    *,
    weights_only: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Differences:
    """Compare two checkpoints of any formats, tensor by tensor.

    Args:
        first: a folder, as for :func:`ullage.checkpoint.read`, or an inventory.
        second: the other one.
        weights_only: leave the optimizer's state and steps out.
        workers: threads; by default as for :func:`ullage.checkpoint.convert`.
        progress: called as ``progress(done, total)``, in bytes of the first.

    Raises ``CheckpointError`` for a checkpoint that is not whole.
    """
    one, other = (each if isinstance(each, Inventory) else formats.read(each) for each in (first, second))
    for inventory in (one, other):
        formats.require_none(inventory, inventory.problems())
    found: list[TensorDifference] = []
    pairs: list[tuple[tuple[str, str], Tensor, Tensor]] = []
    order: dict[tuple[str, str], int] = {}
    for name, a, b in pair_tensors(one, other, weights_only):
        order[name] = len(order)
        if a is None or b is None:
            found.append(
                TensorDifference(*name, f"missing in {'first' if a is None else 'second'}", _form(a), _form(b))
            )
        elif a.shape != b.shape:
            found.append(TensorDifference(*name, "shape", _form(a), _form(b), a.numel))
        else:
            pairs.append((name, a, b))
    found += _compare(one, other, pairs, workers or default_workers(), progress)
    found.sort(key=lambda difference: order[difference.name, difference.key])
    steps = None if weights_only else steps_that_differ(one, other)
    if steps is not None:
        found.append(TensorDifference("", "step", "step", *steps))
    elements = sum(a.numel for _, a, _ in pairs)
    return Differences(str(one.folder), str(other.folder), len(pairs), elements, tuple(found))


def pair_tensors(
    one: Inventory, other: Inventory, weights_only: bool = False
) -> Iterator[tuple[tuple[str, str], Tensor | None, Tensor | None]]:
    """(name and state, the tensor of the first, of the second) of all that either holds; None where one lacks it."""
    mine, yours = _by_weight(one, weights_only), _by_weight(other, weights_only)
    for name in dict.fromkeys([*mine, *yours]):
        yield name, _with_aliases(name, mine, one), _with_aliases(name, yours, other)


def _by_weight(inventory: Inventory, weights_only: bool = False) -> dict[tuple[str, str], Tensor]:
    """The tensors by name and state, in which every format calls a weight ``weight``."""
    named = {}
    for tensor in inventory.tensors:
        is_weight = tensor.kind != "parameter" or tensor.key == "fp32"
        if is_weight or not weights_only:
            named[tensor.name, _WEIGHT if is_weight else tensor.key] = tensor
    return named


def _with_aliases(name: tuple[str, str], tensors: dict[tuple[str, str], Tensor], inventory: Inventory) -> Tensor | None:
    """The tensor of that name, or the one that it is tied to: formats choose which of both names is stored."""
    label, key = name
    if name in tensors or key != _WEIGHT:
        return tensors.get(name)
    return tensors.get((inventory.aliases.get(label, label), key))


def _form(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def steps_that_differ(one: Inventory, other: Inventory) -> tuple[str, str] | None:
    """The optimizer's steps in words, where they differ.

    Groups are numbered differently by formats, and some do not keep steps: values count.
    """
    steps = [sorted({float(step) for step in each.steps.values() if step is not None}) for each in (one, other)]
    if not all(steps) or steps[0] == steps[1]:
        return None
    first, second = (", ".join(f"{step:g}" for step in each) for each in steps)
    return first, second


class _Count(NamedTuple):
    """Of one range: elements that differ, those of them that are not finite, and the largest differences."""

    differing: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0


def _compare(
    one: Inventory,
    other: Inventory,
    pairs: list[tuple[tuple[str, str], Tensor, Tensor]],
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> list[TensorDifference]:
    tensors = [(a, b) for _, a, b in pairs]

    def compare(number: int, low: int, left: Bytes, right: Bytes) -> _Count:
        return _compare_range(*tensors[number], left, right)

    answers, errors = compare_ranges(one, other, tensors, compare, workers, progress)
    for error in errors:
        raise error
    counts: list[list[_Count]] = [[] for _ in pairs]
    for number, count in answers:
        counts[number].append(count)
    differences = []
    for ((name, key), a, b), found in zip(pairs, counts, strict=True):
        kind = "values" if a.dtype == b.dtype else "dtype"
        differing = sum(count.differing for count in found)
        if not differing and kind == "values":
            continue
        made = TensorDifference(
            name, key, kind, _form(a), _form(b), a.numel, differing, not_finite=sum(c.not_finite for c in found)
        )
        if _has_numbers(a) and _has_numbers(b):
            largest = [max((count[field] for count in found), default=0.0) for field in (2, 3)]
            made = replace(made, max_abs=largest[0], max_relative=largest[1])
        differences.append(made)
    return differences


def _compare_range(a: Tensor, b: Tensor, one: Bytes, other: Bytes) -> _Count:
    """The differences of some elements of two tensors of one shape, of which the bytes are given."""
    if a.dtype == b.dtype:
        unequal = unequal_elements(one, other, a.item_bytes)
        if unequal is None:
            return _Count()
    else:
        unequal = np.ones(len(one) // a.item_bytes, bool)
    if not (_has_numbers(a) and _has_numbers(b)):
        return _Count(int(unequal.sum()))
    left, right = (_numbers(chunk, t.dtype)[unequal] for chunk, t in ((one, a), (other, b)))
    if a.dtype != b.dtype:
        differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
        left, right = left[differ], right[differ]
    finite = np.isfinite(left) & np.isfinite(right)
    if not finite.any():
        return _Count(len(left), len(left))
    count, not_finite = len(left), int((~finite).sum())
    left, right = left[finite], right[finite]
    with np.errstate(all="ignore"):
        distance = np.abs(left - right)
        larger = np.maximum(np.abs(left), np.abs(right))
        relative = np.divide(distance, larger, out=np.zeros_like(distance), where=larger > 0)
    return _Count(count, not_finite, float(distance.max()), float(relative.max()))


def _numbers(chunk: Bytes, dtype: str) -> Any:
    """The elements as float64, or complex128: wide enough for the difference of any two of them."""
    if dtype.startswith("complex"):
        return chunk.view(dtype).astype(np.complex128)
    return as_floats(chunk, dtype).astype(np.float64)


def _has_numbers(tensor: Tensor) -> bool:
    return not tensor.dtype.startswith(_NO_NUMBERS)
