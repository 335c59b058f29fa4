"""Which dims of a value are tokens and which are sequences, and what follows: cut by lengths, joined, restarted.

Two calls of a model with batches of other sizes tell (:func:`axes_of`): a dim that grows as the tokens do is one of
tokens, one that grows as the sequences do is one of sequences. So modules may get [1, T, d], [T, 1, d], [1, d, T],
[T, d] or [1, heads, T, T], and no name or position has to be known.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from ullage.attention.packed_call import DeferredMask, described_mask
from ullage.mixers.by_lengths import SOURCES, TARGETS, Groups, PackedRow

#: Two batches: sequences, tokens of each source and of each target. All ratios are different.
Batches = Sequence[tuple[int, Mapping[str, int]]]
BATCHES: Batches = ((2, {SOURCES: 11, TARGETS: 7}), (3, {SOURCES: 13, TARGETS: 5}))


@dataclass(frozen=True)
class Axes:
    """What the dims of a value grow with.

    Attributes:
        tokens: dims that are tokens, with their sides; a number that is a length has the dim 0.
        batch: the dim of the sequences of a batch, one or several entries each; that of the tokens too where both are
            one dim.
        is_odd: whether a dim grows in any other way, so that nobody can cut it.
    """

    tokens: tuple[tuple[int, str], ...] = ()
    batch: int | None = None
    is_odd: bool = False

    @property
    def is_flat(self) -> bool:
        """Whether the tokens of all sequences lie in one dim, with nothing that tells sequences."""
        return self.batch is None or any(dim == self.batch for dim, _ in self.tokens)


@dataclass
class Spec:
    """The axes of what a module is given and of what it gives, by key; a key that was not seen has none."""

    given: dict[str, Axes] = field(default_factory=dict)
    made: dict[str, Axes] = field(default_factory=dict)

    def of(self, is_given: bool) -> dict[str, Axes]:
        """Of the one or the other."""
        return self.given if is_given else self.made


def axes_of(first: Sequence[int], second: Sequence[int], batches: Batches = BATCHES) -> Axes:
    """The axes of a value from its sizes in two batches.

    >>> axes_of((2, 11, 8), (3, 13, 8))
    Axes(tokens=((1, 'sources'),), batch=0, is_odd=False)
    """
    if len(first) != len(second):
        return Axes(is_odd=True)
    (number, lengths), (other_number, other_lengths) = batches
    tokens, batch = [], None
    for dim, (size, other) in enumerate(zip(first, second)):
        if size == other:
            continue
        side = next((each for each in lengths if (size, other) == (lengths[each], other_lengths[each])), None)
        products = {each: (number * lengths[each], other_number * other_lengths[each]) for each in lengths}
        merged = [each for each in lengths if (size, other) == products[each]]
        if side is not None:
            tokens.append((dim, side))
        elif merged and batch is None:
            tokens.append((dim, merged[0]))
            batch = dim
        elif size * other_number == other * number and batch is None:
            batch = dim
        else:
            return Axes(is_odd=True)
    return Axes(tuple(tokens), batch)


# Nested arguments and outputs.


def mapped(tree: Any, function: Callable[[str, Any], Any], key: str = "") -> Any:
    """A tree of tuples, lists and mappings with ``function(key, leaf)`` in the place of each leaf.

    A container in which nothing changes stays the same object, for layers may hand something on through it.
    """
    if isinstance(tree, Mapping):
        parts = {name: mapped(each, function, f"{key}.{name}") for name, each in tree.items()}
        if all(parts[name] is tree[name] for name in parts):
            return tree
        return parts if type(tree) is dict else type(tree)(**parts)
    if isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size):
        parts = [mapped(each, function, f"{key}.{place}") for place, each in enumerate(tree)]
        if all(part is each for part, each in zip(parts, tree)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(key, tree)


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by key."""
    found: dict[str, Any] = {}

    def note(key: str, leaf: Any) -> Any:
        found[key] = leaf
        return leaf

    mapped(tree, note)
    return found


def tokens_of(tree: Any, known: Mapping[str, Axes]) -> list[tuple[str, Tensor, Axes]]:
    """The tensors by token among arguments or outputs."""
    return [
        (key, leaf, axes)
        for key, leaf in leaves_of(tree).items()
        if isinstance(leaf, Tensor) and (axes := known.get(key, Axes())).tokens and not axes.is_odd and leaf.numel()
    ]


# By lengths.


class NotCuttable(ValueError):
    """A value that cannot be cut by the lengths of a row."""


class ByCalls:
    """What calls of a part gave for pairs of tokens, a tensor for each call: nothing makes T² numbers of it.

    The next part that runs by lengths takes it as it is, as T5's layers hand a bias on.
    """

    def __init__(self, groups: Groups, parts: Sequence[Tensor]) -> None:
        self.groups, self.parts = groups, list(parts)
        #: The path of the part, while parts are searched.
        self.maker = ""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dropout may stand between two parts; anything else would have to know the calls.
        if function is not F.dropout or not isinstance(args[0], cls):
            raise NotCuttable(getattr(function, "__name__", str(function)))
        return cls(args[0].groups, [function(part, *args[1:], **(kwargs or {})) for part in args[0].parts])


def run_by_lengths(
    function: Callable[..., Any],
    row: PackedRow,
    given: Any,
    spec: Spec,
    *,
    kind: str = "alike",
    shared: frozenset[str] = frozenset(),
    padding: float = 0.0,
) -> Any:
    """What ``function`` gives for a row, called with its sequences as the rows of a batch.

    Args:
        function: takes positional and named arguments.
        row: whose sequences they are.
        given: (arguments, keywords) of the row.
        spec: of the function.
        kind: "apart": each has a call of its own; "alike": sequences of equal lengths share one, where arguments tell
            sequences apart; "padded": those of
            similar lengths do, the shorter ones with ``padding`` behind, which is right where no token sees a later
            one; "one": all of them do.
        shared: keys of arguments that say the same of every sequence, as far as it goes.
        padding: the number behind shorter sequences.

    Raises ``NotCuttable`` for arguments or outputs that cannot be cut.
    """
    leaves = {key: described_mask(row, leaf) for key, leaf in leaves_of(given).items()}
    cut = {key: axes for key, axes in spec.given.items() if isinstance(leaves.get(key), Tensor)}
    cut = {key: axes for key, axes in cut.items() if axes.tokens or axes.is_odd}
    odd = next((key for key, axes in cut.items() if axes.is_odd), None)
    if odd is not None:
        raise NotCuttable(odd)
    sides = frozenset(side for axes in cut.values() for _, side in axes.tokens) or frozenset({SOURCES})
    of_own = [axes for key, axes in cut.items() if key not in shared]
    if any(axes.is_flat for axes in of_own):
        kind = "apart"
    elif kind in ("padded", "one") and (len(sides) > 1 or any(len(axes.tokens) > 1 for axes in of_own)):
        kind = "alike"
    if padding and kind in ("apart", "alike"):
        raise NotCuttable("no room for padding")
    groups = row.groups_of(sides, kind)
    parts: dict[str, list[Any]] = {}
    for key, leaf in leaves.items():
        found = _parts(leaf, spec.given.get(key, Axes()), row, groups, is_shared=key in shared, sides=sides)
        if found is not None:
            parts[key] = found
    if padding and kind in ("padded", "one"):
        for key, axes in cut.items():
            parts[key] = [_filled(part, axes, groups, call, row, padding) for call, part in enumerate(parts[key])]
    outputs = []
    for call in range(len(groups)):
        arguments, keywords = mapped(given, lambda key, leaf: parts[key][call] if key in parts else leaf)  # noqa: B023
        outputs.append(function(*arguments, **keywords))
    return _joined(outputs, groups, row, spec.made)


def _parts(
    leaf: Any, axes: Axes, row: PackedRow, groups: Groups, *, is_shared: bool, sides: frozenset[str]
) -> list[Any] | None:
    """A leaf for each call; None where all get it as it is."""
    number = len(groups)
    if isinstance(leaf, Cache):
        return [None] * number  # made by default, and of no use in a packed row
    if isinstance(leaf, ByCalls):
        same = [part.tolist() for part in leaf.groups.members] == [part.tolist() for part in groups.members]
        if not same:
            raise NotCuttable("what other calls gave")
        return list(leaf.parts)
    sizes = [len(part) for part in groups.members]
    if isinstance(leaf, DeferredMask):
        of_queries = TARGETS if TARGETS in sides else SOURCES
        of_keys = SOURCES if SOURCES in sides else TARGETS
        widths = zip(groups.of_side(of_queries).widths, groups.of_side(of_keys).widths)
        masks = [leaf.of_lengths(*each) for each in widths]
        # Each a copy: the mask of a sequence is made once for all layers, and one may write into it.
        return [each.repeat(n, 1, 1, 1) if isinstance(each, Tensor) else each for each, n in zip(masks, sizes)]
    if type(leaf) is int and axes.tokens:
        return list(groups.of_side(axes.tokens[0][1]).widths)
    if isinstance(leaf, torch.Size) and (axes.tokens or axes.batch is not None):
        return [_resized(leaf, axes, row, groups, call) for call in range(number)]
    if not isinstance(leaf, Tensor):
        return None
    if not axes.tokens:
        return None if axes.batch is None else [torch.cat([leaf] * n, axes.batch) for n in sizes]
    if is_shared:
        corner = is_corner(leaf, axes, row)
        starts = [0 if corner else _start_of_longest(row, side) for _, side in axes.tokens]
        widths = [groups.of_side(side).widths for _, side in axes.tokens]
        return [_narrowed(leaf, axes, [(s, w[call]) for s, w in zip(starts, widths)]) for call in range(number)]
    if len(axes.tokens) == 1 and not axes.is_flat:
        (dim, side), batch = axes.tokens[0], axes.batch
        assert batch is not None
        # [T, entries of a sequence, ...] to [n, L, entries, ...] to [n · entries, L, ...].
        cut = groups.of_side(side).cut(leaf.movedim((dim, batch), (0, 1)))
        return [part.movedim(2, 1).flatten(0, 1).movedim((0, 1), (batch, dim)) for part in cut]
    pieces = [[_of_sequence(leaf, axes, row, int(k)) for k in part] for part in groups.members]
    return [each[0] if axes.batch is None or len(each) == 1 else torch.cat(each, axes.batch) for each in pieces]


def _start_of_longest(row: PackedRow, side: str) -> int:
    layout = row.layout_of(side)
    return int(layout.starts[layout.lengths.argmax()]) if len(layout.lengths) else 0


def _resized(size: torch.Size, axes: Axes, row: PackedRow, groups: Groups, call: int) -> torch.Size:
    sizes = list(size)
    for dim, side in axes.tokens:
        sizes[dim] = sizes[dim] // max(row.layout_of(side).size, 1) * groups.of_side(side).widths[call]
    if axes.batch is not None:
        sizes[axes.batch] *= len(groups.members[call])
    return torch.Size(sizes)


def _of_sequence(value: Tensor, axes: Axes, row: PackedRow, k: int) -> Tensor:
    """What a value of the row holds for sequence ``k``."""
    layouts = [row.layout_of(side) for _, side in axes.tokens]
    return _narrowed(value, axes, [(int(each.starts[k]), int(each.lengths[k])) for each in layouts])


def _narrowed(value: Tensor, axes: Axes, places: Sequence[tuple[int, int]]) -> Tensor:
    for (dim, _), (start, length) in zip(axes.tokens, places):
        value = value.narrow(dim, start, length)
    return value


def _filled(part: Any, axes: Axes, groups: Groups, call: int, row: PackedRow, padding: float) -> Any:
    """A part [n, L, ...] with a number behind the shorter sequences."""
    if axes.is_flat or axes.batch is None or part.dtype == torch.bool or not part.numel():
        return part
    # Of ids one that is there: that of padding may stand for nothing.
    behind_it = padding if part.is_floating_point() else int(part.max())
    ((dim, side),) = axes.tokens
    lengths = torch.as_tensor(row.layout_of(side).lengths[groups.members[call]])
    behind = torch.arange(part.shape[dim])[None] >= lengths[:, None]
    entries = part.shape[axes.batch] // len(lengths)
    behind = behind.repeat_interleave(entries, 0).to(part.device)
    shape = [1] * part.ndim
    shape[axes.batch], shape[dim] = behind.shape
    return part.masked_fill((behind if axes.batch < dim else behind.T).reshape(shape), behind_it)


def _joined(outputs: Sequence[Any], groups: Groups, row: PackedRow, made: Mapping[str, Axes]) -> Any:
    """Outputs of calls as those of the row; what belongs to no token or sequence is that of the first call."""
    calls = [leaves_of(each) for each in outputs]

    def whole(key: str, first: Any) -> Any:
        axes = made.get(key, Axes())
        if axes.is_odd and isinstance(first, Tensor):
            raise NotCuttable(key)
        if not isinstance(first, Tensor) or (not axes.tokens and axes.batch is None):
            return first
        parts = [leaves[key] for leaves in calls]
        if len(axes.tokens) > 1 or (axes.tokens and _differ_beside(parts, axes)):
            return ByCalls(groups, parts)
        if not axes.tokens:
            return _by_sequence(parts, axes, groups)
        ((dim, side),) = axes.tokens
        own = groups.of_side(side)
        if any(part.shape[dim] != width for part, width in zip(parts, own.widths)):
            return None  # a memory of the last tokens alone, for example
        if not axes.is_flat:
            batch = axes.batch
            assert batch is not None
            split = [
                part.movedim((batch, dim), (0, 1)).unflatten(0, (n, -1)) for part, (n, _) in zip(parts, own.shapes)
            ]
            return own.join([part.movedim(1, 2) for part in split]).movedim((0, 1), (dim, batch))
        if any(n != 1 for n, _ in own.shapes):
            # The same for all sequences of a call: that of the longest holds those of all.
            longest = max(parts, key=lambda part: part.shape[dim])
            return longest.index_select(dim, row.places_of(side))
        return own.join([part.movedim(dim, 0)[None] for part in parts]).movedim(0, dim)

    return mapped(outputs[0], whole) if outputs else None


def _differ_beside(parts: Sequence[Tensor], axes: Axes) -> bool:
    """Whether dims that are neither tokens nor sequences differ from call to call, as of the keys that are chosen."""
    own = {axes.batch, *(dim for dim, _ in axes.tokens)}
    return len({tuple(size for dim, size in enumerate(part.shape) if dim not in own) for part in parts}) > 1


def _by_sequence(parts: Sequence[Tensor], axes: Axes, groups: Groups) -> Any:
    assert axes.batch is not None
    split = [part.movedim(axes.batch, 0).unflatten(0, (len(m), -1)) for part, m in zip(parts, groups.members)]
    if len({part.shape[1:] for part in split}) != 1:
        return None
    return groups.ordered(split).flatten(0, 1).movedim(0, axes.batch)


# Restarted.


def is_corner(value: Tensor, axes: Axes, row: PackedRow) -> bool:
    """Whether a value is that of the longest sequence alone, of which each sequence takes the beginning."""
    sizes = [value.shape[dim] for dim, _ in axes.tokens]
    longest = [row.longest_of(side) for _, side in axes.tokens]
    return sizes == longest and sizes != [row.layout_of(side).size for _, side in axes.tokens]


def restarted(value: Tensor, axes: Axes, row: PackedRow) -> Tensor:
    """What counts through a row, or through its longest sequence, as it counts in each sequence.

    Of pairs of tokens the beginning is kept, of which each sequence takes its own.
    """
    if len(axes.tokens) > 1:
        return _narrowed(value, axes, [(0, row.longest_of(side)) for _, side in axes.tokens])
    for dim, side in axes.tokens:
        value = value.index_select(dim, row.places_of(side))
    return value


def of_longest(tree: Any, known: Mapping[str, Axes], row: PackedRow) -> Any:
    """Arguments of a row with the beginning of each, as long as the longest sequence: for what counts alone."""

    def shortened(key: str, leaf: Any) -> Any:
        axes = known.get(key, Axes())
        if isinstance(leaf, DeferredMask):
            return leaf.of_lengths(*[row.longest_of(SOURCES if row.targets is None else TARGETS)] * 2)
        if not axes.tokens or axes.is_odd:
            return leaf
        if type(leaf) is int:
            return row.longest_of(axes.tokens[0][1])
        if isinstance(leaf, torch.Size):
            sizes = list(leaf)
            for dim, side in axes.tokens:
                sizes[dim] = row.longest_of(side)
            return torch.Size(sizes)
        if not isinstance(leaf, Tensor) or is_corner(leaf, axes, row):
            return leaf
        return _narrowed(leaf, axes, [(0, row.longest_of(side)) for _, side in axes.tokens])

    return mapped(tree, shortened)


# All calls of a model's modules: what they take and give, per token, of a row or of a sequence alone.

#: A value that every call of a model may make: path, number of the call, whether it was given, key.
Key = tuple[str, int, bool, str]


class Watch:
    """Calls of modules in progress: :meth:`before` and :meth:`after` may replace what a call takes and gives.

    ``without``: paths of modules whose insides are not watched.
    """

    def __init__(self, model: nn.Module, without: Sequence[str] = ()) -> None:
        self.model, self.without, self.is_quiet = model, tuple(without), False
        self._open: list[tuple[str, int, Any]] = []
        self._counts: dict[str, int] = defaultdict(int)

    def before(self, path: str, number: int, given: Any) -> Any:
        """``given``: positional and named arguments of a call; returns what the call shall take."""
        return given

    def after(self, path: str, number: int, given: Any, output: Any) -> Any:
        """Returns what the call shall give."""
        return output

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all modules but those within ``without``."""

        def began(path: str, module: nn.Module, given: Any, named: Any) -> Any:
            if self.is_quiet:
                return None
            number = self._counts[path]
            self._counts[path] += 1
            taken = self.before(path, number, (given, named))
            self._open.append((path, number, taken))
            return taken

        def ended(path: str, module: nn.Module, given: Any, named: Any, output: Any) -> Any:
            if self.is_quiet:
                return None
            path, number, taken = self._open.pop()
            return self.after(path, number, taken, output)

        handles = []
        for path, module in self.model.named_modules():
            if any(path.startswith(f"{outer}.") for outer in self.without):
                continue
            handles.append(module.register_forward_pre_hook(functools.partial(began, path), with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(ended, path), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Sizes(Watch):
    """The shapes, and numbers, that calls take and give."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: dict[tuple[str, int, bool], dict[str, tuple[int, ...]]] = {}

    def before(self, path: str, number: int, given: Any) -> Any:
        self.found[path, number, True] = _sizes_of(given)
        return given

    def after(self, path: str, number: int, given: Any, output: Any) -> Any:
        self.found[path, number, False] = _sizes_of(output)
        return output


def _sizes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for key, leaf in leaves_of(tree).items():
        if isinstance(leaf, (Tensor, torch.Size)):
            found[key] = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf)
        elif type(leaf) is int:
            found[key] = (leaf,)
    return found


def specs_of(model: nn.Module, calls: Sequence[Callable[[], Any]], batches: Batches = BATCHES) -> dict[str, Spec]:
    """The spec of each module by path, from two calls with two batches."""
    seen = []
    for call in calls:
        sizes = _Sizes(model)
        with sizes.watching():
            call()
        seen.append(sizes.found)
    specs: dict[str, Spec] = defaultdict(Spec)
    for (path, number, is_given), first in seen[0].items():
        second = seen[1].get((path, number, is_given), {})
        known = specs[path].of(is_given)
        for key, sizes in first.items():
            axes = axes_of(sizes, second.get(key, ()), batches)
            known[key] = axes if known.get(key, axes) == axes else Axes(is_odd=True)
    return specs


@dataclass(frozen=True)
class Digest:
    """Two numbers per token of a value, and the size of what they were made of."""

    numbers: Tensor
    scale: float
    is_exact: bool
    sizes: Tensor

    @classmethod
    def of(cls, value: Tensor, axes: Axes) -> Digest:
        """The digest of what one sequence has of a value."""
        is_exact = not (value.is_floating_point() or value.is_complex())
        value = torch.view_as_real(value) if value.is_complex() else value
        rows = value.detach().movedim(axes.tokens[0][0], 0).flatten(1) if value.ndim > 1 else value.detach()[:, None]
        rows = rows.double().nan_to_num(nan=1e3).clamp(-1e6, 1e6)
        numbers = rows @ _waves(rows.shape[1], rows.device)
        sizes = rows.norm(dim=1)
        return cls(numbers, float(sizes.max()) if rows.numel() else 0.0, is_exact, sizes)

    @classmethod
    def of_all(cls, value: Tensor, axes: Axes, row: PackedRow, *, from_zero: bool = False) -> list[Digest] | None:
        """The digests of what each sequence has of a value; None where it is not by token of this row."""
        if len(axes.tokens) != 1:
            parts = [portion_of(value, axes, row, k, from_zero=from_zero) for k in range(len(row))]
            return (
                None
                if any(part is None for part in parts)
                else [cls.of(part, axes) for part in parts if part is not None]
            )
        dim, side = axes.tokens[0]
        layout, corner = row.layout_of(side), is_corner(value, axes, row)
        if not corner and value.shape[dim] != layout.size:
            return None
        whole = cls.of(value, axes)
        starts = [0] * len(row) if corner or from_zero else layout.starts.tolist()
        places = list(zip(starts, layout.lengths.tolist()))
        sizes = [whole.sizes.narrow(0, *each) for each in places]
        scales = [float(each.max()) if len(each) else 0.0 for each in sizes]
        parts = [whole.numbers.narrow(0, *each) for each in places]
        return [cls(part, scale, whole.is_exact, size) for part, scale, size in zip(parts, scales, sizes)]

    def equals(self, other: Digest, limit: float) -> bool:
        """Whether two values are the same but for rounding."""
        if self.numbers.shape != other.numbers.shape:
            return False
        allowed = max(0.0 if self.is_exact else limit * other.scale, 1e-9)
        return not self.numbers.numel() or bool((self.numbers - other.numbers).abs().max() <= allowed)


@functools.lru_cache(maxsize=256)
def _waves(size: int, device: torch.device) -> Tensor:
    place = torch.arange(1, size + 1, dtype=torch.float64, device=device).square()
    return torch.stack([place.cos(), (0.7 * place).sin()], 1)


def portion_of(value: Tensor, axes: Axes, row: PackedRow, k: int, *, from_zero: bool = False) -> Tensor | None:
    """What a value of a row holds for sequence ``k``; None where it is not by token of this row.

    ``from_zero``: its beginning, as long as the sequence. So is that of the longest sequence alone, in any case.
    """
    corner = is_corner(value, axes, row)
    for dim, side in axes.tokens:
        layout = row.layout_of(side)
        if not corner and value.shape[dim] != layout.size:
            return None
        start = 0 if corner or from_zero else int(layout.starts[k])
        value = value.narrow(dim, start, int(layout.lengths[k]))
    return value


class Recorder(Watch):
    """Digests of what all calls take and give, for each sequence of a row."""

    def __init__(
        self, model: nn.Module, specs: Mapping[str, Spec], row: PackedRow, without: Sequence[str] = ()
    ) -> None:
        super().__init__(model, without)
        self.specs, self.row = specs, row
        self.of_sequence: list[dict[Key, Digest]] = [{} for _ in range(len(row))]
        self.ended: list[tuple[str, int]] = []

    def _note(self, path: str, number: int, is_given: bool, tree: Any) -> None:
        for key, value, axes in tokens_of(tree, self.specs[path].of(is_given) if path in self.specs else {}):
            for digests, digest in zip(self.of_sequence, Digest.of_all(value, axes, self.row) or ()):
                digests[path, number, is_given, key] = digest

    def before(self, path: str, number: int, given: Any) -> Any:
        self._note(path, number, True, given)
        return given

    def after(self, path: str, number: int, given: Any, output: Any) -> Any:
        self._note(path, number, False, output)
        self.ended.append((path, number))
        return output
