"""The forwards that a packed model and its parts get in the place of their own.

The model's own call reads the lengths from its keywords, puts them in force, and runs the model. A part that mixes
tokens finds them there and runs by lengths. They are in force for this call in this thread alone. A layer that gradient
checkpointing repeats in the backward pass, when no call is running, gets the row of its first run again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.attention.current import current_row, row_in_force
from ullage.attention.heads import loss_author, works_by_sequence
from ullage.attention.releases import CACHE_NAMES
from ullage.attention.support import apart_from_row, has_two_way_parts
from ullage.core.errors import InputError
from ullage.core.items import ITEM_LENGTHS
from ullage.core.layout import Layout
from ullage.core.rows import LENGTH_NAMES, on_device, on_host, read_row, usual_positions
from ullage.mixers.axes import mapped, of_longest, restarted, run_by_lengths
from ullage.mixers.by_lengths import (
    SOURCES,
    TARGET_LENGTH_NAMES,
    TARGETS,
    PackedRow,
    call_whole,
    labels_by_sequence,
    require_cuttable,
    require_one_loss,
)
from ullage.mixers.items import (
    PIXELS,
    RowItems,
    counts_axes,
    positions_by_axis,
    require_matching,
    seen_tiles,
    tokens_by_sequence,
)
from ullage.mixers.over_ranks import over_ranks
from ullage.mixers.ways import COUNTED_FROM_ONE, Found, Way

#: Keywords that a part gets from a packed call and not from one on separate sequences: lengths, masks and caches.
_NOT_OF_PARTS = frozenset(
    {*LENGTH_NAMES, *TARGET_LENGTH_NAMES, *CACHE_NAMES, "attention_mask", "context_slices", "cu_seqlens", "mask"}
    | {"seq_idx"}
)

#: Keywords of the lengths of a row, of no use to a part that gets sequences as the rows of a batch.
_OF_ROWS = frozenset({*LENGTH_NAMES, *TARGET_LENGTH_NAMES, "context_slices", "cu_seqlens", "seq_idx"})
#: Keywords that say which tokens stand for images, or are of a prefix.
_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
#: Most tokens in a chunk of a scan on a CPU, where 32 to 64 were measured to be the fastest.
_CHUNK = 48


class CheckpointedRow:
    """A function that checkpoints a layer, which runs with the same row each time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, layer: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        row = current_row()

        def with_row(*again: Any, **named: Any) -> Any:
            with row_in_force(row):
                return layer(*again, **named)

        return self.function(layer if row is None else with_row, *arguments, **keywords)

    def __reduce__(self) -> Any:
        # In a pickle: the function alone.
        return functools.partial, (self.function,)


class Forward:
    """A ``forward`` in the place of a module's own. A deep copy of the module gets one too, a pickle its own forward.

    Attributes:
        module: whose forward it is.
        name: of the method, where it takes the place of another one than ``forward``.
        before: what the instance itself had in this place, a wrapper for example; None if its class has the forward.
    """

    name = "forward"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = vars(module).get(self.name)

    def put_in(self) -> None:
        """Take the place of the module's own forward."""
        vars(self.module)[self.name] = self

    def take_out(self) -> None:
        """Give the module its own forward back."""
        if self.before is None:
            vars(self.module).pop(self.name)
        else:
            vars(self.module)[self.name] = self.before

    @property
    def own(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.before or functools.partial(getattr(type(self.module), self.name), self.module)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the module's own forward."""
        if self.before is not None:
            return inspect.signature(self.before).parameters
        return _parameters(getattr(type(self.module), self.name))

    def named(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, by the names of the module's own parameters.

        With ``*args``, which the forward hands on, by those of the first one beneath it that names them.
        """
        taken = self.parameters
        if arguments and _takes_places(taken):
            methods = (vars(each).get(self.name) for each in type(self.module).__mro__)
            beneath = (_parameters(each) for each in methods if each is not None)
            taken = next((each for each in beneath if not _takes_places(each)), taken)
        return {**dict(zip(taken, arguments)), **keywords}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __reduce__(self) -> Any:
        # The module is known when its attributes are read, and at that time has the forward of its class.
        return getattr, (self.module, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        other = object.__new__(type(self))
        memo[id(self)] = other
        for name, value in vars(self).items():
            setattr(other, name, copy.deepcopy(value, memo))
        return other


@functools.lru_cache(maxsize=512)
def _parameters(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a method without ``self``, read once, because every layer of every forward asks."""
    return dict(list(inspect.signature(method).parameters.items())[1:])


def _takes_places(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether there is an ``*args`` among parameters."""
    return any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values())


class RowForward(Forward):
    """The forward of a part that does something of its own with a packed row, and in any other call its own."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = current_row()
        if row is None:
            return self.own(*arguments, **keywords)
        return self._run_packed(row, self.named(arguments, keywords))

    def _run_packed(self, row: PackedRow, named: dict[str, Any]) -> Any:
        """What the part gives for a row; ``named``: the arguments of the call."""
        raise NotImplementedError


def _kept(named: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """What a part's own forward gets of a call's arguments: no lengths, masks and caches."""
    kept = {name: value for name, value in named.items() if name not in _NOT_OF_PARTS}
    kept |= {name: None for name in named if name in _NOT_OF_PARTS and name in taken}
    return kept | ({"use_cache": False} if "use_cache" in taken else {})


class FoundForward(Forward):
    """The forward of a part that a search has found: restarted, by lengths, or both, within a packed call.

    A part whose kernels take the lengths gets the row in one call: transformers' mixers call those of fla, mamba-ssm,
    and causal-conv1d where they are installed, and torch's own functions elsewhere, which take none. Padding behind a
    sequence belongs to its slot there.

    Attributes:
        found: by the search.
        path: of the module in the model that was searched.
        runs: whether it runs by lengths.
        is_causal: whether no token of it sees a later one, so that sequences may be padded behind.
        in_one_call: whether all sequences share a call, whatever their lengths: ranks that gather sharded parameters in
            each call have to make equally many.
        length_keywords: by which it is told the lengths in one call, where its kernels take them.
    """

    def __init__(self, module: nn.Module, found: Found, path: str) -> None:
        super().__init__(module)
        self.found, self.path, self.runs = found, path, path in found.parts
        self.is_causal, self.in_one_call = path in found.padded, False
        self.length_keywords = found.told.get(path, ()) if self.is_causal else ()
        own = [(is_given, key) for where, is_given, key in found.restarts if where == path]
        self._keys = {which: {key for is_given, key in own if is_given is which} for which in (True, False)}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = current_row()
        if row is None:
            return self.own(*arguments, **keywords)
        if self.runs and row.slices is not None:
            return self._over_ranks(row, arguments, keywords)
        row.is_served = True
        return self._of_row(row, arguments, keywords)

    @torch.compiler.disable(reason="where the slices lie is data")
    def _over_ranks(self, row: PackedRow, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        def run(whole: PackedRow, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            with row_in_force(whole):
                return self._packed(arguments, keywords)

        row.is_served = True
        return over_ranks(row, run, arguments, {name: v for name, v in keywords.items() if name not in _OF_ROWS})

    @torch.compiler.disable(recursive=False, reason="the lengths of the sequences are data")
    def _of_row(self, row: PackedRow, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        spec, given = self.found.specs[self.path], (arguments, keywords)
        if self.path in self.found.once:
            with row_in_force(None):
                arguments, keywords = of_longest(given, spec.given, row)
                output = self.own(*arguments, **keywords)
        else:
            arguments, keywords = self._restarted(given, row, is_given=True)
            output = self._packed(arguments, keywords) if self.runs else self.own(*arguments, **keywords)
        return self._restarted(output, row, is_given=False)

    def _packed(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self._by_kernels(arguments, keywords) if self.length_keywords else self._by_lengths(arguments, keywords)

    # The part's own forward is compiled as it would be without this function around it.
    @torch.compiler.disable(recursive=False, reason="the lengths of the sequences are data")
    def _by_kernels(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        row = current_row()
        assert row is not None
        row.is_served = True
        arguments, keywords = self.told(row, arguments, keywords)
        return self.own(*arguments, **keywords)

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def told(self, row: PackedRow, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What the part's own forward gets of the row as a whole, the lengths among it."""
        if not _takes_places(self.parameters):
            arguments, keywords = (), self.named(arguments, keywords)
        lengths = {name: row.of_kernels[name] for name in self.length_keywords}
        return arguments, _kept(keywords, self.parameters) | lengths

    def _restarted(self, tree: Any, row: PackedRow, *, is_given: bool) -> Any:
        keys = self._keys[is_given]
        if not keys:
            return tree
        known = self.found.specs[self.path].of(is_given)
        return mapped(tree, lambda key, leaf: restarted(leaf, known[key], row) if key in keys else leaf)

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _by_lengths(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        row = current_row()
        assert row is not None
        kept = {name: each for name, each in keywords.items() if name not in _OF_ROWS}
        kind = "alike" if not self.is_causal else "one" if self.in_one_call else "padded"
        if self.path in self.found.single:
            kind = "apart"
        shared = self.found.shared.get(self.path, frozenset())
        with row_in_force(None):
            function = self._in_short_chunks if self._chunk_size is not None else self.own
            return run_by_lengths(
                function, row, (arguments, kept), self.found.specs[self.path], kind=kind, shared=shared
            )

    @property
    def _chunk_size(self) -> int | None:
        """Tokens in a chunk of the module's scan, where it has one that this forward may choose."""
        size = getattr(self.module, "chunk_size", None)
        # A wrapper's forward is bound to the module itself.
        return size if self.is_causal and self.before is None and type(size) is int else None

    def _in_short_chunks(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's own forward of rows [n, L, ...] on a CPU, in chunks that suit their length.

        torch's scans fill a row up to whole chunks, and compute all pairs of tokens within each: of chunks made for a
        GPU (256 tokens) most is padding or thrown away. What a scan computes does not depend on the size.
        """
        rows = next(each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor) and each.ndim == 3)
        most = self._chunk_size
        assert most is not None
        if rows.device.type != "cpu" or most <= _CHUNK:
            return self.own(*arguments, **keywords)
        # A copy that shares all parameters, since other threads may run the module.
        module: Any = copy.copy(self.module)
        module.chunk_size = -(-rows.shape[1] // -(-rows.shape[1] // _CHUNK))
        return type(module).forward(module, *arguments, **keywords)


class ModelForward(Forward):
    """The forward of a packed model: reads the lengths of a packed call from its keywords.

    ``way``: of the model, which tells which of its parts run by lengths.
    """

    #: Padding behind a sequence becomes a sequence of its own. Attention in both directions, which would see it, asks.
    keeps_padding_apart = True

    def __init__(self, module: nn.Module, *, way: Way) -> None:
        super().__init__(module)
        self.way = way
        #: What the loss of its calls is, where that was found: see ``call_whole``.
        self.division: str | None = None
        #: The fields of a stand-in by kind of items, for rows that have none, where each row has to run the tower.
        self.stand_ins: dict[str, dict[str, Tensor]] = {}
        #: Whether a row with images runs by sequence whatever the way says, for as long as nothing is known of it.
        self.runs_items_apart = False
        #: Whether it was taken out where something else stands around it, and leaves all to the module's own.
        self.is_off = False

    @property
    def __signature__(self) -> inspect.Signature:
        # Whoever asks what the model takes finds the lengths among it.
        signature = inspect.signature(self.own)
        own = list(signature.parameters.values())
        rest = [each for each in own if each.kind is inspect.Parameter.VAR_KEYWORD]
        names = LENGTH_NAMES if self.way.items is None else (*LENGTH_NAMES, ITEM_LENGTHS)
        added = [name for name in names if name not in signature.parameters]
        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in added]
        return signature.replace(parameters=[*(each for each in own if each not in rest), *named, *rest])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.is_off or keywords.get("cu_seq_lens_q") is None:
            if keywords.pop(ITEM_LENGTHS, None) is not None:
                raise InputError(
                    f"{ITEM_LENGTHS} came without cu_seq_lens_q, which bounds the sequences",
                    where=f"{type(self.module).__name__}.forward",
                    hint="pass what RaggedBatch.to_flattened() gives",
                )
            return self.own(*arguments, **keywords)
        if self._is_text_alone(keywords):
            return self.own(*arguments, **keywords)
        return self._run_packed(arguments, keywords)

    def _is_text_alone(self, keywords: dict[str, Any]) -> bool:
        """Whether a row of a model of images has none, and is one that its attention packs without help.

        Takes what says so out of the keywords.
        """
        way = self.way
        if way.items is None or way.kind != "native" or way.both_ways or way.first_position or way.found is not None:
            return False
        has_items = any(keywords.get(name) is not None for name in (*PIXELS.values(), ITEM_LENGTHS))
        if has_items or self.stand_ins or self._model_type in COUNTED_FROM_ONE:
            return False
        keywords.pop(ITEM_LENGTHS, None)
        if has_two_way_parts(self.module):
            for name in _KINDS_OF_TOKENS:
                keywords.pop(name, None)
        return True

    # The model inside is compiled as it would be without this function around it.
    @torch.compiler.disable(recursive=False, reason="the lengths of the sequences are data")
    def _run_packed(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        taken = self.parameters
        keywords = self.named(arguments, keywords)
        targets = _targets_as_rows(keywords)
        row = PackedRow.of(keywords, targets, keywords.get("context_slices") if self.shares_rows else None)
        assert row is not None
        _refuse_masks_and_caches(keywords, type(self.module).__name__)
        if self.way.items is not None:
            row.items = RowItems.taken_from(self.module, keywords, len(row))
            self._count_tokens_of_items(row, keywords)
        if row.slices is None:
            require_cuttable(keywords, row)
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        runs_whole = self.runs_whole or (row.items is not None and self._runs_items_by_sequence)
        runs_whole = runs_whole or (self._has_pairs and (self.way.found is None or targets is None))
        found = self.way.found
        if found is not None:
            row.is_found, row.defers_masks, row.noted = True, found.defers, {} if found.is_searched else None
        is_one_row = self.way.is_one_row and not runs_whole
        hands_lengths_on = is_one_row and (takes_any or "cu_seq_lens_q" in taken)
        if found is not None and "cu_seq_lens_q" not in taken and row.slices is None:
            hands_lengths_on = False  # attention asks the row
        positions = keywords.pop("position_ids", None)
        # A slice comes with its places in the sequences, which not every model asks for.
        if row.slices is not None and "position_ids" not in taken:
            positions = None
        is_usual = positions is None or (row.slices is None and _are_usual(positions, row.sources))
        if not is_usual and "position_ids" not in taken:
            raise self._counts_by_itself()
        if found is not None and not found.positions:
            if not is_usual:
                raise self._counts_by_itself()
        elif is_one_row and "position_ids" in taken:
            keywords["position_ids"] = self._positions(row, keywords) if is_usual else positions
            if is_usual and row.items is not None:
                keywords["position_ids"] = self._positions_by_axis(row, keywords)
        elif not is_usual:
            keywords["position_ids"] = positions
        if found is not None and not works_by_sequence(self.module):
            require_one_loss(self.module, labels_by_sequence(keywords, row))
        if not hands_lengths_on:
            keywords = {name: each for name, each in keywords.items() if name not in (*LENGTH_NAMES, "context_slices")}
        keywords = {name: each for name, each in keywords.items() if name not in TARGET_LENGTH_NAMES}
        if "use_cache" in taken:
            keywords["use_cache"] = False
        if row.targets is not None and (is_one_row or self.way.kind == "mixers"):
            self._shift_targets(row, keywords)
        elif runs_whole:
            with apart_from_row():
                return call_whole(self.module, self.own, row, keywords, self.division)
        if row.items is not None:
            keywords |= row.items.of_row()
        self._stand_in(row, keywords)
        row.is_served = row.is_served or self.way.kind == "native"
        has_two_way_parts = is_one_row and self._keep_two_way_parts(row, keywords)
        if (self.way.both_ways or has_two_way_parts) and row.sources.num_tokens < row.sources.size:
            # What sees both ways would see the padding behind a sequence: make it a sequence of its own.
            bounds = row.bounds_of(SOURCES, apart=True)
            keywords |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        if self.way.kind == "mixers" or found is not None or row.items is not None:
            self._remember_row_in_checkpoints()
        with row_in_force(row):
            outputs = self.own(**keywords)
        if not row.is_served:
            raise InputError(
                "the model did not call the part that keeps its sequences apart",
                where=", ".join(self.way.paths),
                found=f"{type(self.module).__name__}.forward calls another",
                hint="leave packing_capacity and pack_model out, and the Trainer pads its batches",
            )
        return outputs

    def _counts_by_itself(self) -> InputError:
        return InputError(
            "this model counts positions by itself, from 0 in each sequence",
            where=f"{type(self.module).__name__}.forward",
            found="other position_ids",
            hint="leave position_ids out",
        )

    @property
    def shares_rows(self) -> bool:
        """Whether ranks can share a row: the mixers get whole sequences, and attention takes slices."""
        return not self.is_off and self.way.kind == "mixers" and not self.way.both_ways

    @property
    def cuts_rows(self) -> bool:
        """Whether the lengths of a packed call end here, and what attention there is gets sequences as rows."""
        return not self.is_off and self.way.kind == "whole"

    @property
    def runs_whole(self) -> bool:
        """Whether the head runs by lengths as well, and what its calls give is joined."""
        of_pairs = self._has_pairs and self.way.kind != "mixers" and self.way.found is None
        return self.way.kind == "whole" or of_pairs

    @property
    def _has_pairs(self) -> bool:
        return bool(getattr(getattr(self.module, "config", None), "is_encoder_decoder", False))

    @property
    def _runs_items_by_sequence(self) -> bool:
        """Whether a row with images runs by sequence, where one without does not."""
        by_sequence = self.way.items == "sequences" or self.runs_items_apart
        return by_sequence and self.way.kind in ("native", "mixers")

    def _positions_by_axis(self, row: PackedRow, keywords: dict[str, Any]) -> Tensor:
        """The positions of a row with images, along as many axes as the model counts."""
        usual, part = keywords["position_ids"], counts_axes(self.module)
        if part is None or row.items is None or keywords.get("input_ids") is None:
            return usual
        return positions_by_axis(part, row.items, row.sources, keywords, usual)

    def _keep_two_way_parts(self, row: PackedRow, keywords: dict[str, Any]) -> bool:
        """Have the model make a mask in which its images, or its prefix, see each other both ways; whether it does.

        Attention reads that mask by sequence. A row that has no images needs none.
        """
        names = [name for name in _KINDS_OF_TOKENS if keywords.get(name) is not None]
        if not names or not has_two_way_parts(self.module):
            return False
        if row.items is None and self._model_type not in COUNTED_FROM_ONE:
            keywords |= dict.fromkeys(names)
            return False
        # With a mask of tokens transformers does not look for sequences by itself, for which it would count in another
        # way than the pattern of the images does.
        keywords["attention_mask"] = torch.ones(1, row.sources.size, dtype=torch.bool, device=row.device)
        return True

    @property
    def _model_type(self) -> str | None:
        return getattr(getattr(self.module, "config", None), "model_type", None)

    def _stand_in(self, row: PackedRow, keywords: dict[str, Any]) -> None:
        """Give a row without images, or clips, a stand-in, where each row has to run the tower."""
        missing = {kind: fields for kind, fields in self.stand_ins.items() if keywords.get(PIXELS[kind]) is None}
        for fields in missing.values():
            keywords |= {name: value.to(row.device) for name, value in fields.items()}
        row.stand_ins = frozenset(missing)

    def _count_tokens_of_items(self, row: PackedRow, keywords: dict[str, Any]) -> None:
        """Note how many tokens of each sequence stand for images and clips, and what text sees of images by itself."""
        items, ids = row.items, keywords.get("input_ids")
        if items is None:
            return
        config: Any = getattr(self.module, "config", None)
        for kind in PIXELS:
            number = tokens_by_sequence(ids, config, kind, row.sources)
            if number is not None:
                row.tokens_of_items[kind] = number
        tiles = items.values.get("aspect_ratio_mask")
        if tiles is None or not isinstance(ids, Tensor):
            return
        bounds = items.bounds["aspect_ratio_mask"]
        require_matching(row.tokens_of_items["image"], np.diff(bounds), "image", type(self.module).__name__)
        for place in np.flatnonzero(np.diff(bounds)).tolist():
            begin, length = int(row.sources.starts[place]), int(row.sources.lengths[place])
            own = tiles[bounds[place] : bounds[place + 1]]
            items.seen[place] = seen_tiles(ids[0, begin : begin + length], config, own)
            row.seen_tiles[place] = items.seen[place].flatten(1).bool()

    def _shift_targets(self, row: PackedRow, keywords: dict[str, Any]) -> None:
        """Make an encoder-decoder's inputs of its labels, as it does of each target."""
        if keywords.get("labels") is None or keywords.get("decoder_input_ids") is not None:
            return
        module: Any = self.module
        shift = getattr(module, "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            # The function of the model's file, which its forward calls.
            function = sys.modules[loss_author(module)[0].__module__].shift_tokens_right
            shift = functools.partial(
                function,
                pad_token_id=module.config.pad_token_id,
                decoder_start_token_id=module.config.decoder_start_token_id,
            )
        calls = row.groups_of(frozenset({TARGETS}), "alike").of_side(TARGETS)
        shifted = [shift(part) for part in calls.cut(keywords["labels"][0])]
        keywords["decoder_input_ids"] = calls.join(shifted)[None] if shifted else keywords["labels"]

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _positions(self, row: PackedRow, keywords: dict[str, Any]) -> Tensor:
        """Positions int64 [1, T] of a row, as the model counts those of a sequence alone."""
        layout, first = row.sources, self.way.first_position
        positions = usual_positions(layout)[None]
        if self._model_type in COUNTED_FROM_ONE:
            return on_device(positions + 1, row.device)
        if not first and not self.way.both_ways:
            return on_device(positions, row.device)
        ids, offset = keywords.get("input_ids"), layout.positions()
        length, start = (np.repeat(each, layout.slots) for each in (layout.lengths, layout.starts))
        # Padding counts as a sequence of its own: a slot of 5 with 3 tokens has positions 0, 1, 2, 0, 1.
        is_padding, alone = offset >= length, np.maximum(offset - length, 0)
        if first and ids is not None:
            # RoBERTa gives tokens of padding the position of padding, wherever they are, and does not count them: where
            # 1 is the padding's id, the ids 5, 1, 7 are at 2, 1, 3. A running count is taken from that at each start.
            counted = (ids[0] != first - 1).long()
            total = counted.cumsum(0)
            starts = on_device(start, row.device)
            real = ((total - (total - counted)[starts]) * counted)[None] + first - 1
            return torch.where(on_device(is_padding, row.device), on_device(alone, row.device), real)
        return on_device(np.where(is_padding, alone, positions + first), row.device)

    def _remember_row_in_checkpoints(self) -> None:
        # At each call, because checkpointing may have been turned on since the last.
        for module in self.module.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None and not isinstance(function, CheckpointedRow):
                vars(module)["_gradient_checkpointing_func"] = CheckpointedRow(function)


@torch.compiler.disable(reason="the lengths of the sequences are data")
def _are_usual(position_ids: Tensor, layout: Layout) -> bool:
    """Whether positions are those that every model counts by itself. Waits for the device as ``on_host`` does."""
    return np.array_equal(on_host(position_ids), usual_positions(layout)[None])


def _targets_as_rows(keywords: dict[str, Any]) -> Layout | None:
    """The layout of an encoder-decoder's targets; nested ones become a row [1, T] among the keywords."""
    lengths = keywords.get("decoder_cu_seq_lens_q")
    targets = None if lengths is None else read_row(lengths, None, name="decoder_cu_seq_lens_q")
    for name, value in list(keywords.items()):
        if isinstance(value, Tensor) and value.is_nested:
            rows = value.unbind()
            keywords[name] = torch.cat(rows)[None]
            if targets is None:
                targets = Layout([len(row) for row in rows])
    return targets


def _refuse_masks_and_caches(keywords: dict[str, Any], where: str) -> None:
    """Take out a mask that hides nothing; raise ``InputError`` for what a packed call cannot take."""
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = keywords.pop(name, None)
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2 or not bool(mask.bool().all())):
            raise InputError(
                "a packed row takes no mask, its lengths say which tokens see each other",
                where=f"{where}, {name}",
                hint="pass what RaggedBatch.to_flattened() gives",
            )
    for name in (*CACHE_NAMES, "encoder_outputs"):
        if keywords.get(name) is not None:
            raise InputError("a packed row takes no cache", where=f"{where}, {name}", hint="leave it out")
        keywords.pop(name, None)
    if keywords.get("output_attentions"):
        raise InputError(
            "a packed row gives no attention weights", where=where, hint="call the model on padded rows for them"
        )
