"""Images and clips beside the tokens of a packed row: which rows of their fields belong to which sequence.

A field by item holds the rows of all sequences end to end, in the order of the sequences: patches of images, whole
images, grids, sizes. ``cu_seq_items``, as ``RaggedBatch.to_flattened`` gives it, holds the cumulated rows by sequence.
From it come what a call of some sequences alone is given, the positions that the model counts where images take more
than one axis, and the check that each sequence has as many tokens for images as features come for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ullage.core.columns import is_media
from ullage.core.errors import InputError
from ullage.core.items import ITEM_LENGTHS
from ullage.core.layout import Int64, Layout
from ullage.core.rows import host_integers, on_host

#: The parameters of a model that takes images or clips, the pixels themselves.
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
#: Fields with one row for each item, the first that a call has; pixels may have more.
_ONE_ROW_EACH = {
    "image": ("image_grid_thw", "image_sizes", "image_num_patches", "pixel_values"),
    "video": ("video_grid_thw", "pixel_values_videos"),
}
#: Where a config keeps the token that stands for an item's features.
_TOKENS = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id"),
    "video": ("video_token_id", "video_token_index"),
}


def takes_items(model: nn.Module) -> bool:
    """Whether a model takes images or clips beside its tokens, by the parameters of its class's ``forward``."""
    taken = inspect.signature(type(model).forward).parameters
    return "input_ids" in taken and any(name in taken for name in PIXELS.values())


def has_rows_of_items(model: nn.Module) -> bool:
    """Whether a model takes its images as rows of a batch, [sequences, images, ...], and not end to end."""
    taken = inspect.signature(type(model).forward).parameters
    return "aspect_ratio_ids" in taken or ("pixel_attention_mask" in taken and "spatial_shapes" not in taken)


class RowItems:
    """The fields by item of one packed row.

    Attributes:
        values: each field, with the rows of all sequences end to end.
        bounds: for each field, where the rows of each sequence begin and end, int64 [sequences + 1], on the host.
    """

    def __init__(self, values: Mapping[str, Tensor], bounds: Mapping[str, Int64], *, by_rows: bool) -> None:
        self.values, self.bounds, self.by_rows = dict(values), dict(bounds), by_rows
        #: For each sequence whose text looks at images by itself, which tiles each token sees, [L, images, tiles].
        self.seen: dict[int, Tensor] = {}

    @classmethod
    def taken_from(cls, model: nn.Module, keywords: dict[str, Any], num_sequences: int) -> RowItems | None:
        """Take the fields by item and their rows out of the keywords of a packed call; None where it has none.

        Raises ``InputError`` for pixels without ``cu_seq_items``, and for numbers of rows that do not fit the fields.
        """
        cumulated = keywords.pop(ITEM_LENGTHS, None)
        where = f"{type(model).__name__}.forward"
        for name in PIXELS.values():
            if keywords.get(name) is not None and name not in (cumulated or {}):
                raise InputError(
                    f"a packed row with {name} needs {ITEM_LENGTHS}, which says how many rows belong to each sequence",
                    where=where,
                    found=f"no {ITEM_LENGTHS}" if cumulated is None else f"one without {name}",
                    hint="pass what RaggedBatch.to_flattened() gives",
                )
        by_rows = has_rows_of_items(model)
        values, bounds = {}, {}
        for name, rows in (cumulated or {}).items():
            value = keywords.pop(name, None)
            if value is None:
                continue
            held = host_integers(rows, ITEM_LENGTHS)
            # As rows of a batch, of which a packed row is the only one.
            number = len(value)
            if by_rows and number == 1 != held[-1]:
                value, number = value[0], value.shape[1]
            if len(held) != num_sequences + 1 or held[0] != 0 or held[-1] != number or (np.diff(held) < 0).any():
                raise InputError(
                    f"{ITEM_LENGTHS} does not cover {name}",
                    where=where,
                    expected=f"{num_sequences + 1} rising numbers from 0 to {number}",
                    found=f"{len(held)} from {held[0]} to {held[-1]}" if len(held) else "none",
                    hint="pass what RaggedBatch.to_flattened() gives",
                )
            if number:
                values[name], bounds[name] = value, held
        return cls(values, bounds, by_rows=by_rows) if values else None

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def sequences(self) -> npt.NDArray[np.bool_]:
        """Which sequences have any, bool [sequences]."""
        return np.logical_or.reduce([np.diff(each) > 0 for each in self.bounds.values()])

    def of_row(self) -> dict[str, Tensor]:
        """The fields as the model takes them for one row."""
        return {name: value[None] if self.by_rows else value for name, value in self.values.items()}

    def of(self, members: Sequence[int]) -> dict[str, Tensor | None]:
        """The fields as the model takes them for a call of some sequences, which have at most one with items.

        None for a field that they have no rows of.
        """
        found: dict[str, Tensor | None] = dict.fromkeys(self.values)
        for name, value in self.values.items():
            for each in members:
                begin, end = self.bounds[name][each : each + 2]
                if end > begin:
                    found[name] = value[begin:end][None] if self.by_rows else value[begin:end]
        if self.seen:
            found["cross_attention_mask"] = next((self.seen[each][None] for each in members if each in self.seen), None)
        return found

    def counts(self, kind: str, number: int | None = None) -> Int64 | None:
        """How many items of a kind each sequence has, where there are ``number``, if given; None if no field tells."""
        for name in _ONE_ROW_EACH[kind]:
            if name in self.bounds and number in (None, self.bounds[name][-1]):
                return np.diff(self.bounds[name])
        return None


def tokens_by_sequence(input_ids: Any, config: Any, kind: str, layout: Layout) -> Int64 | None:
    """How many tokens of each sequence stand for features of items; None where that is not known. As ``on_host``.

    ``input_ids``: [1, T], or None.
    """
    token = next((value for name in _TOKENS[kind] if isinstance(value := getattr(config, name, None), int)), None)
    if token is None or not isinstance(input_ids, Tensor):
        return None
    places = np.flatnonzero(on_host(input_ids)[0] == token)
    return np.diff(np.searchsorted(places, np.append(layout.starts, layout.size)))


def require_matching(tokens: Int64, features: Int64, kind: str, where: str) -> None:
    """Raise ``InputError`` that names the first sequence whose tokens for items are not as many as their features."""
    wrong = np.flatnonzero(tokens != features)
    if len(wrong):
        place = int(wrong[0])
        raise InputError(
            f"sequence {place} of the packed row has not as many {kind} tokens as its {kind}s have features",
            where=where,
            expected=f"{int(features[place])} {kind} tokens in sequence {place}",
            found=int(tokens[place]),
            hint=f"a sequence that was cut within an {kind}, or another sequence's {kind}: truncate to whole items",
        )


def alone_form(model: nn.Module, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call of a model on one sample alone, as its processor gives them, tensors [1, L, ...].

    Fields by item stay [rows, ...], but for models that take them as rows of a batch. A model whose text looks at
    images by another attention is told which tokens look at which (:func:`seen_tiles`).
    """
    by_rows = has_rows_of_items(model)
    keywords = {name: value if is_media(name) and not by_rows else value[None] for name, value in sample.items()}
    if "aspect_ratio_mask" in sample and "cross_attention_mask" not in sample:
        seen = seen_tiles(sample["input_ids"], getattr(model, "config", None), sample["aspect_ratio_mask"])
        keywords["cross_attention_mask"] = seen[None]
    return keywords


def seen_tiles(input_ids: Tensor, config: Any, tiles: Tensor) -> Tensor:
    """Which tiles of images each token of one sequence looks at, int64 [L, images, tiles]: those of the last image.

    Images that stand directly behind each other are seen together.

    Args:
        input_ids: [L], one token for each image.
        config: names that token.
        tiles: which of the tiles of each image there are, [images, tiles].
    """
    token = next(value for name in _TOKENS["image"] if isinstance(value := getattr(config, name, None), int))
    places = (input_ids == token).nonzero().flatten().tolist()
    seen = tiles.new_zeros(len(input_ids), *tiles.shape)
    end = len(input_ids)
    for image in range(len(places) - 1, -1, -1):
        if image + 1 < len(places) and places[image + 1] > places[image] + 1:
            end = places[image + 1]
        seen[places[image] : end, image] = tiles[image]
    return seen


# Positions along several axes: the model's own count of each sequence alone, on the host.


def counts_axes(model: nn.Module) -> nn.Module | None:
    """The part of a model that counts positions of images along several axes, as Qwen2-VL does; None without one."""
    return next((each for each in model.modules() if hasattr(type(each), "compute_3d_position_ids")), None)


def positions_by_axis(
    part: nn.Module, items: RowItems, layout: Layout, keywords: Mapping[str, Any], usual: Tensor
) -> Tensor:
    """Positions int64 [1 + axes, 1, T] of a row: those of text, then those that the model counts, by sequence.

    Where it counts none, they are those of text alone, [1, T].

    Args:
        part: which counts.
        items: of the row.
        layout: of the row.
        keywords: of the call.
        usual: int64 [1, T], the positions of sequences without images.

    The state in which the part keeps what it has counted, for a generation that goes on, is put back.
    """
    count: Any = part.compute_3d_position_ids  # type: ignore[union-attr]
    taken = inspect.signature(count).parameters
    by_token = {
        name: _on_host(value)
        for name, value in keywords.items()
        if name in taken and isinstance(value, Tensor) and value.shape == keywords["input_ids"].shape
    }
    by_item = {name: _on_host(value) for name, value in items.values.items() if name in taken}
    found: Tensor | None = None
    kept = vars(part).get("rope_deltas")
    try:
        for place in np.flatnonzero(items.sequences).tolist():
            begin = int(layout.starts[place])
            end = begin + int(layout.lengths[place])
            given: dict[str, Any] = {name: None for name, each in taken.items() if each.default is each.empty}
            given |= {name: value[:, begin:end] for name, value in by_token.items()}
            for name, value in by_item.items():
                first, last = items.bounds[name][place : place + 2]
                given[name] = value[first:last] if last > first else None
            vars(part)["rope_deltas"] = None
            positions = count(**given)
            if positions is not None:
                found = _on_host(usual).repeat(1 + len(positions), 1, 1) if found is None else found
                found[1:, :, begin:end] = positions
    finally:
        vars(part)["rope_deltas"] = kept
    return usual if found is None else found.to(usual.device, non_blocking=True)


def _on_host(values: Tensor) -> Tensor:
    return values.cpu() if values.is_floating_point() else torch.from_numpy(on_host(values))
