"""The parts of a model that have to be told the lengths of a packed row, found by runs: no table of models.

A few short sequences run alone, and every call of every module is remembered. Then they run once more as one packed
row, and each call is compared, token by token, with what the sequences gave alone. Three rules decide:

1. *What counts through the row is restarted.* An argument or output that is not what a sequence gets alone, but begins
   as the row's own value does: positions, rotary angles, biases by distance.
2. *A module whose arguments are right and whose output is not runs by lengths*: convolutions, scans, attention with a
   forward of its own, and whatever else mixes tokens. Modules end from the inside out, so the innermost is found. It
   runs again at once with the sequences as rows of a batch, and the run goes on with the right output. So one pass
   finds all such modules.
3. *Where this does not help, the module around it is the next to be found*, and what was found within it is forgotten.
   The last is the model itself.

Attention that transformers lets others replace is replaced first, and taken back where a sequence alone then differs.

Afterwards other tokens, and numbers that are none, are put into half of the sequences: nothing of the others may change
beyond rounding, which finds what is too small to be seen beside the roundings of other shapes. In training mode all is
done again. The proof of outputs, loss and gradients has the last word (:mod:`ullage.mixers.proof`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ullage.attention.current import current_row, row_in_force
from ullage.attention.interface import CALLS
from ullage.attention.support import counts_places
from ullage.attention.support import first_position as first_of
from ullage.core.layout import Layout
from ullage.mixers.at_rest import at_rest, input_embeddings
from ullage.mixers.axes import (
    BATCHES,
    ByCalls,
    Digest,
    Key,
    Recorder,
    Watch,
    leaves_of,
    mapped,
    of_longest,
    portion_of,
    restarted,
    run_by_lengths,
    specs_of,
    tokens_of,
)
from ullage.mixers.by_lengths import SOURCES, TARGETS, PackedRow
from ullage.mixers.forwards import Forward, FoundForward
from ullage.mixers.proof import is_routed, limits_of
from ullage.mixers.trial import Trial, varied
from ullage.mixers.ways import Found, Way, own_attention, way_of_found

_logger = logging.getLogger(__name__)

#: Most modules that the search for leaks finds, one in each run; others are left to the proof.
_LEAKS = 8
#: Keywords by which kernels are told the lengths; a forward may hand on any of a set, and none twice.
_LENGTHS_OF_KERNELS = (("seq_idx", "cu_seq_lens_q"), ("seq_idx", "cu_seqlens"), ("seq_idx",), ("cu_seqlens",))
#: The number behind shorter sequences that no causal part may see.
_BEHIND = 3.0

Put = Callable[[nn.Module, Way], None]


class _Failed:
    """The output of a module that cannot take a row as it is."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Choosing(TorchFunctionMode):
    """Notes whether the largest of some scores are chosen: of equal ones, others are in a longer row."""

    is_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_seen = self.is_seen or func in (torch.topk, Tensor.topk)
        return func(*args, **(kwargs or {}))


class _Guarded(Forward):
    """The forward of a module during a search: what it raises is its output, which is then tried by lengths."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return self.own(*arguments, **keywords)
        except Exception as error:
            return _Failed(error)


class Search(Watch):
    """A packed run beside the digests of its sequences alone, which fills what is found."""

    def __init__(
        self, model: nn.Module, found: Found, row: PackedRow, alone: Sequence[Mapping[Key, Digest]], limit: float
    ) -> None:
        super().__init__(model, sorted(found.parts))
        self.found, self.row, self.alone, self.limit = found, row, alone, limit
        self._known = set(found.restarts)
        #: Of the calls in progress: whether what they took was right, and a copy of it.
        self._right: list[tuple[bool, Any]] = []
        self.hopeless: list[str] = []
        self._running: PackedRow | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all modules, and go on where one cannot take the row."""
        inner = tuple(f"{path}." for path in self.without)
        guarded = [
            _Guarded(module)
            for path, module in self.model.named_modules()
            if path and path not in self.without and not (inner and path.startswith(inner))
        ]
        for each in guarded:
            each.put_in()
        try:
            with super().watching():
                yield
        finally:
            for each in guarded:
                each.take_out()

    @property
    def sides(self) -> dict[str, tuple[str, str]]:
        """By path, the sides of the layers that called our attention."""
        seen = {} if self._running is None else self._running.seen
        return {path: seen[module] for path, module in self.model.named_modules() if module in seen}

    def _is_right(self, key: Key, value: Tensor, axes: Any, *, from_zero: bool = False) -> bool:
        expected = [each.get(key) for each in self.alone]
        if any(each is None for each in expected):
            return True  # not known
        found = Digest.of_all(value, axes, self.row, from_zero=from_zero)
        return found is not None and all(
            digest.equals(other, self.limit) for digest, other in zip(found, expected) if other is not None
        )

    def _checked(self, path: str, number: int, is_given: bool, tree: Any) -> tuple[Any, bool]:
        """Arguments or outputs with those restarted that count through the row, and whether all are right then."""
        known = self.found.specs[path].of(is_given) if path in self.found.specs else {}
        is_right, restarts = True, set()
        for key, value, axes in tokens_of(tree, known):
            place = (path, number, is_given, key)
            is_known = is_given and (path, True, key) in self._known  # by its forward
            if is_known or self._is_right(place, value, axes):
                continue
            if path and self._is_right(place, value, axes, from_zero=True):
                restarts.add((path, is_given, key))
            else:
                is_right = False
        if restarts:
            self.found.restarts |= restarts
            keys = {key for _, _, key in restarts}
            tree = mapped(tree, lambda key, leaf: restarted(leaf, known[key], self.row) if key in keys else leaf)
        return tree, is_right

    def before(self, path: str, number: int, given: Any) -> Any:
        given, is_right = self._checked(path, number, True, given)
        if current_row() is not None:
            self._running = current_row()
        # A module may write into what it is given.
        self._right.append((is_right, _copied(given, current_row().noted) if path and current_row() else None))
        return given

    def after(self, path: str, number: int, given: Any, output: Any) -> Any:
        was_right, copied = self._right.pop()
        if isinstance(output, _Failed):
            if not was_right:
                raise output.error
        elif path not in self.found.parts or path in self.without:
            restarts = set(self.found.restarts)
            output, is_right = self._checked(path, number, False, output)
            if is_right and self.found.restarts != restarts and not self._takes_restarted(path):
                self._note_counting(path, number, copied)
            if is_right or not was_right:
                return output
        if not path:
            self.found.add("")
        if not path or path in self.hopeless:
            if isinstance(output, _Failed):
                raise output.error
            return output
        shared = self._shared(path, copied)
        parted, is_single = self._parted(path, number, copied, shared), False
        if parted is None:  # the sequences of one call may meet in it
            parted, is_single = self._parted(path, number, copied, shared, kind="apart"), True
        if parted is None:
            self.hopeless.append(path)
            if isinstance(output, _Failed):
                raise output.error
            return output
        for leaf in leaves_of(parted).values():
            if isinstance(leaf, ByCalls):
                leaf.maker = path
        self.found.add(path)
        if is_single:
            self.found.single.add(path)
        self.found.shared[path] = shared & self.found.shared.get(path, shared)
        # Whatever stands behind a sequence must not matter.
        can_pad = path not in self.found.apart and path not in self.found.single
        if can_pad and self._parted(path, number, copied, shared, kind="one", padding=_BEHIND) is not None:
            self.found.padded.add(path)
            self._note_told(path, number, copied)
        else:
            # What hands something on for pairs of tokens makes the calls of who takes it.
            makers = {leaf.maker for leaf in leaves_of(copied).values() if isinstance(leaf, ByCalls)}
            self.found.padded -= {path, *makers}
            self.found.apart |= {path, *makers}
        return parted

    def _note_told(self, path: str, number: int, given: Any) -> None:
        """Note by which keywords a module is told the lengths, if its kernels keep sequences apart then."""
        known, module = self.found.told.pop(path, None), self.model.get_submodule(path)
        restarts = set(self.found.restarts)
        for keywords in _LENGTHS_OF_KERNELS if known is None else (known,):
            forward = FoundForward(module, replace(self.found, told={path: keywords}), path)
            taken = forward.parameters
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD or each.name in keywords for each in taken.values()):
                continue
            self.is_quiet = True
            try:
                with row_in_force(None):
                    arguments, named = forward.told(self.row, *_copied(given))
                    output = forward.own(*arguments, **named)
                is_right = not isinstance(output, _Failed) and self._checked(path, number, False, output)[1]
                if is_right and self.found.restarts == restarts:
                    self.found.told[path] = keywords
                    return
            except Exception:  # whatever it raises, it is not told so
                continue
            finally:
                self.is_quiet, self.found.restarts = False, restarts

    def _takes_restarted(self, path: str) -> bool:
        return any(where == path and is_given for where, is_given, _ in self.found.restarts)

    def _shared(self, path: str, given: Any) -> frozenset[str]:
        """The arguments without a dim of sequences that say the same of each, as far as it goes."""
        found = set()
        for key, value, axes in tokens_of(given, self.found.specs[path].given):
            if axes.batch is not None:
                continue
            parts = [portion_of(value, axes, self.row, k) for k in range(len(self.row))]
            longest = parts[int(self.row.layout_of(axes.tokens[0][1]).lengths.argmax())]
            if longest is not None and all(_begins(part, longest, axes) for part in parts):
                found.add(key)
        return frozenset(found)

    def _note_counting(self, path: str, number: int, given: Any) -> None:
        """Note a module that only counts, and may be called on as many tokens as the longest sequence has."""
        known = self.found.specs[path]
        self.is_quiet = True
        try:
            with row_in_force(None):
                arguments, keywords = of_longest(_copied(given), known.given, self.row)
                output = self.model.get_submodule(path).forward(*arguments, **keywords)
            values = tokens_of(output, known.made)
            if values and all(self._is_right((path, number, False, key), value, axes) for key, value, axes in values):
                self.found.once.add(path)
        except Exception:  # whatever it raises, it gets the row
            return
        finally:
            self.is_quiet = False

    def _parted(
        self, path: str, number: int, given: Any, shared: frozenset[str], *, kind: str = "alike", padding: float = 0.0
    ) -> Any:
        """What a module gives by lengths; None where that is not right either."""
        self.is_quiet, restarts = True, set(self.found.restarts)
        try:
            self.row.noted = current_row().noted
            given = _copied(given, self.row.noted)
            with row_in_force(None):
                own = self.model.get_submodule(path).forward
                options: dict[str, Any] = {"kind": kind, "shared": shared, "padding": padding}
                choosing = _Choosing()
                with choosing:
                    parted = run_by_lengths(own, self.row, given, self.found.specs[path], **options)
            if isinstance(parted, _Failed):
                return None
            if padding and choosing.is_seen:
                return None
            parted, is_right = self._checked(path, number, False, parted)
            return parted if is_right and self.found.restarts == restarts else None
        except Exception:  # whatever it raises, it cannot run by lengths
            return None
        finally:
            self.is_quiet, self.found.restarts = False, restarts


def _copied(tree: Any, noted: Mapping[int, Any] | None = None) -> Any:
    """Arguments whose tensors are copied, but for the masks that are noted."""
    known = noted or {}
    return mapped(tree, lambda key, leaf: leaf.clone() if isinstance(leaf, Tensor) and id(leaf) not in known else leaf)


def _begins(part: Tensor | None, longest: Tensor, axes: Any) -> bool:
    """Whether a part is the beginning of that of the longest sequence."""
    if part is None:
        return False
    for dim, _ in axes.tokens:
        longest = longest.narrow(dim, 0, part.shape[dim])
    return torch.equal(part, longest)


class Discoverer:
    """Searches how one model keeps sequences apart.

    Args:
        model: bare and not packed.
        trial: a few sequences of different lengths, alone and as a row.
        put_in, take_out: pack the model in a way, and make it what it was.
    """

    def __init__(self, model: nn.Module, trial: Trial, put_in: Put, take_out: Callable[[nn.Module], None]) -> None:
        self.model, self._put_in, self._take_out = model, put_in, take_out
        self.sides = {SOURCES: [each["input_ids"][0] for each in trial.alone]}
        if trial.target_sizes is not None:
            names = ("decoder_input_ids", "labels")
            targets = [next(each[name] for name in names if name in each) for each in trial.alone]
            self.sides[TARGETS] = [(each.unbind()[0] if each.is_nested else each[0]) for each in targets]
        self.device = self.sides[SOURCES][0].device
        layouts = {side: Layout([len(each) for each in rows]) for side, rows in self.sides.items()}
        self.row = PackedRow(layouts[SOURCES], layouts.get(TARGETS), self.device)
        taken = inspect.signature(model.forward).parameters
        self._fixed = {"use_cache": False} if "use_cache" in taken else {}
        self._takes_positions = "position_ids" in taken
        # Of its own, so that all ranks draw the same.
        self._pool, self._random = torch.cat(self.sides[SOURCES]).unique(), torch.Generator().manual_seed(1)
        parameter = next((each for each in model.parameters() if each.is_floating_point()), None)
        self._dtype = torch.float32 if parameter is None else parameter.dtype
        self.limit = limits_of(self._dtype, self.device).outputs
        #: The first part whose sequences meet however it is called, with its class; empty if there was none.
        self.cause = ""

    def run(self) -> list[Found]:
        """What may be told the lengths, the finest first: each to be proved, and none where no run succeeds."""
        found: list[Found] = []
        for replaces, positions in ((True, True), (True, False), (False, True), (False, False)):
            if positions and not self._takes_positions:
                continue
            each = Found(replaces=replaces, positions=positions)
            try:
                with varied(self.model):
                    self._search(each)
            except Exception as error:  # whatever a model raises, this is not its way
                _logger.debug("%s: %s: %s", type(self.model).__name__, type(error).__name__, error)
                continue
            finally:
                self._take_out(self.model)
            if "" in each.parts:
                continue
            self._alike(each)
            # Without masks of all pairs of tokens of the row, where the model leaves its masks as they are.
            found += [replace(each, defers=defers) for defers in ((True,) if replaces else (True, False))]
            if self.share(each) < (0.5 if replaces else 0.9):
                break  # nothing much finer is to be had
        return sorted(found, key=self.share)

    def _alike(self, found: Found) -> None:
        """Have parts of one class take padding only where all of them may."""
        kinds = {path: type(self.model.get_submodule(path)) for path in found.parts}
        never = {kind for path, kind in kinds.items() if path not in found.padded}
        found.padded -= {path for path, kind in kinds.items() if kind in never}

    def share(self, found: Found) -> float:
        """The share of the parameters that run by lengths: what tells finer ways from coarser ones."""
        total = sum(each.numel() for each in self.model.parameters())
        inside = {id(each): each for path in found.parts for each in self.model.get_submodule(path).parameters()}
        return sum(each.numel() for each in inside.values()) / max(total, 1)

    def _search(self, found: Found) -> None:
        """Fill what is found, in evaluation mode, and in training mode where anything is otherwise then."""
        before: Recorder | None = None
        for training in (False, True):
            with at_rest(self.model, training=training), torch.no_grad():
                if not found.specs:
                    batches = [functools.partial(self._batch, found.positions, *each) for each in BATCHES]
                    found.specs = specs_of(self.model, batches)
                    # Llama 4 scales its queries by their places from some thousand tokens on, which no short run shows.
                    for path, module in self.model.named_modules():
                        if counts_places(module):
                            found.add(path)
                if before is not None:
                    with self._applied(found):
                        if _are_equal(before, self._recorded(found, self.sides), self._rounding):
                            return
                with own_attention(self.model):
                    alone = [self._alone(found, k) for k in range(len(self.row))]
                search, calls = Search(self.model, found, self.row, alone, self.limit), CALLS[0]
                with self._applied(found), search.watching():
                    self._call_packed(self.sides)
                found.sides |= search.sides
                if search.hopeless and not self.cause:
                    self.cause = f"{search.hopeless[0]} ({type(self.model.get_submodule(search.hopeless[0])).__name__})"
                if found.replaces and CALLS[0] == calls:
                    raise LookupError("it calls no other attention")
                if "" not in found.parts:
                    # Kernels of a device multiply what another sequence has by a weight of zero, and nan stays nan.
                    is_told = not training and self.device.type == "cpu" and not is_routed(self.model)
                    before = self._find_leaks(found, poison=is_told)
                if "" in found.parts:
                    return

    @property
    def _rounding(self) -> float:
        return 16 * torch.finfo(self._dtype).eps

    def _find_leaks(self, found: Found, *, poison: bool) -> Recorder:
        """Have modules run by lengths that let what stands in other sequences through, however small what comes is.

        Returns what the row gives then.
        """
        for left in reversed(range(_LEAKS)):
            with self._applied(found):
                before = self._recorded(found, self.sides)
                leak = self._first_leak(found, before, poison)
            if leak is None or leak in found.parts or not left:
                return before
            found.add(leak)
            found.apart.add(leak)
        raise AssertionError("the last one returns")

    def _first_leak(self, found: Found, before: Recorder, poison: bool) -> str | None:
        """The first module through which other tokens in every second sequence, or nan, reach the others."""
        others = {
            side: [self._with_padding(self._draw(1, len(each))[0]) if k % 2 else each for k, each in enumerate(rows)]
            for side, rows in self.sides.items()
        }
        kept = range(0, len(self.row), 2)
        for is_spoiled in (False, True)[: 1 + poison]:
            after = self._recorded(found, self.sides if is_spoiled else others, is_spoiled=is_spoiled)
            for path, number in before.ended:
                if _leaks(before, after, path, number, kept, self._rounding):
                    return path
        return None

    def _recorded(self, found: Found, sides: Mapping[str, Sequence[Tensor]], *, is_spoiled: bool = False) -> Recorder:
        recorder = Recorder(self.model, found.specs, self.row, sorted(found.parts))
        with self._spoiled(is_spoiled), recorder.watching():
            self._call_packed(sides)
        return recorder

    @contextmanager
    def _spoiled(self, is_on: bool) -> Iterator[None]:
        """nan in what is embedded of every second sequence."""
        if not is_on:
            yield
            return

        def spoil(module: nn.Module, given: Any, output: Any) -> Any:
            for side in self.row.sides:
                layout = self.row.layout_of(side)
                if isinstance(output, Tensor) and output.ndim == 3 and tuple(output.shape[:2]) == (1, layout.size):
                    output = output.clone()
                    for k in range(1, len(self.row), 2):
                        begin, length = int(layout.starts[k]), int(layout.lengths[k])
                        output[:, begin : begin + length] = torch.nan
            return output

        handles = [module.register_forward_hook(spoil) for _, module in input_embeddings(self.model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _applied(self, found: Found) -> Iterator[None]:
        """The model packed by what is found so far; what is found meanwhile is not done twice."""
        now = replace(
            found, is_searched=True, parts=set(found.parts), restarts=set(found.restarts), once=set(found.once)
        )
        self._put_in(self.model, way_of_found(self.model, now))
        try:
            yield
        finally:
            self._take_out(self.model)

    def _row_of_one(self, k: int) -> PackedRow:
        layouts = {side: Layout([len(rows[k])]) for side, rows in self.sides.items()}
        return PackedRow(layouts[SOURCES], layouts.get(TARGETS), self.device)

    def _alone(self, found: Found, k: int) -> dict[Key, Digest]:
        recorder = Recorder(self.model, found.specs, self._row_of_one(k))
        with recorder.watching():
            self._call({side: rows[k][None] for side, rows in self.sides.items()})
        return recorder.of_sequence[0]

    def _batch(self, has_positions: bool, number: int, lengths: Mapping[str, int]) -> None:
        rows = {side: self._draw(number, length) for side, length in lengths.items() if side in self.sides}
        positions = torch.arange(lengths[SOURCES], device=self.device).expand(number, -1) + first_of(self.model)
        self._call(rows, **({"position_ids": positions} if has_positions else {}))

    def _with_padding(self, tokens: Tensor) -> Tensor:
        """Tokens of which the second is that of padding: what counts may look which tokens are."""
        padding = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        text: Any = getattr(self.model, "config", None)
        text = text.get_text_config() if hasattr(text, "get_text_config") else text
        most = getattr(text, "vocab_size", None) or 0
        if isinstance(padding, int) and 0 <= padding < most and len(tokens) > 2:
            tokens[1] = padding
        return tokens

    def _draw(self, number: int, length: int) -> Tensor:
        places = torch.randint(len(self._pool), (number, length), generator=self._random)
        return self._pool[places.to(self.device)]

    def _call(self, rows: Mapping[str, Tensor], **more: Any) -> Any:
        named = {"input_ids": rows[SOURCES], **self._fixed, **more}
        if TARGETS in self.sides:
            named["decoder_input_ids"] = rows[TARGETS]
        return self.model(**named)

    def _call_packed(self, sides: Mapping[str, Sequence[Tensor]]) -> Any:
        """One packed call of sequences, as a run makes it."""
        lengths = [len(each) for each in sides[SOURCES]]
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
        places = torch.cat([torch.arange(each) for each in lengths]).to(self.device)
        named = {"input_ids": torch.cat(list(sides[SOURCES]))[None], "position_ids": places[None], **self._fixed}
        named |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        named |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
        if TARGETS in sides:
            named["decoder_input_ids"] = torch.nested.nested_tensor(list(sides[TARGETS]), layout=torch.jagged)
        return self.model(**named)


def _are_equal(before: Recorder, after: Recorder, limit: float) -> bool:
    """Whether all calls took and gave the same, for all sequences."""
    pairs = zip(before.of_sequence, after.of_sequence)
    return all(
        first.keys() == second.keys() and all(each.equals(second[key], limit) for key, each in first.items())
        for first, second in pairs
    )


def _leaks(before: Recorder, after: Recorder, path: str, number: int, kept: Sequence[int], limit: float) -> bool:
    """Whether a call gave something else for sequences for which it took the same."""
    changed = {True: False, False: False}
    for k in kept:
        for key, digest in before.of_sequence[k].items():
            if key[:2] == (path, number) and key in after.of_sequence[k]:
                changed[key[2]] |= not after.of_sequence[k][key].equals(digest, limit)
    return changed[False] and not changed[True]
