"""The forwards of what makes features of images and clips, on all items of a packed row at once.

A tower runs over the items of all sequences in one call, as it does over the items of one: each item is a row of a
batch, or a segment that the tower tells apart by the grids. Its features then go to their tokens in order. Here the
lengths of the text are kept from the tower, and the features of each sequence are counted.

Where attention looks at images itself, as in Mllama, the tokens of each sequence look at the images of that sequence.

A row without items runs the tower on a stand-in where that is asked for, since ranks that share its parameters wait
for each other in every call of it. None of its features is taken, so it adds nothing, and its gradients are zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from ullage.attention.current import current_row, row_in_force
from ullage.attention.kernels import Scores, attend
from ullage.attention.support import apart_from_row, text_modules
from ullage.core.layout import Int64
from ullage.core.rows import LENGTH_NAMES
from ullage.mixers.by_lengths import PackedRow
from ullage.mixers.forwards import Forward, RowForward
from ullage.mixers.items import PIXELS, RowItems, has_rows_of_items, require_matching

#: The methods that make features of items, by the kind of items.
FEATURES = {"image": "get_image_features", "video": "get_video_features"}


def tower_forwards(model: nn.Module) -> list[Forward]:
    """The forwards of a model whose rows may hold images: of what makes features of them, and of what looks at them."""
    part = features_of(model)
    made: list[Forward] = [
        FeaturesForward(part, kind=kind) for kind, name in FEATURES.items() if hasattr(type(part), name)
    ]
    for module in model.modules():
        kind = _LOOKING.get(type(module).__name__)
        if kind is not None:
            made.append(kind(module))
    return made


def features_of(model: nn.Module) -> nn.Module:
    """The part of a model whose forward makes features of images: its backbone, where that has the method."""
    backbone = getattr(model, "base_model", model)
    return backbone if hasattr(type(backbone), FEATURES["image"]) else model


def tower_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that only images reach, of the part that makes features of them: but those text goes through."""
    text = {id(each) for _, module in text_modules(part) for each in module.parameters(recurse=False)}
    return (each for each in part.parameters() if id(each) not in text)


class FeaturesForward(Forward):
    """The method of a model that makes features of items: in a packed call of all items of the row.

    Attributes:
        kind: "image" or "video".
        in_one_call: whether a tower that would see other items through a mask alone gets all of them at once: ranks
            that gather sharded parameters in each call have to make equally many.
    """

    def __init__(self, module: nn.Module, *, kind: str) -> None:
        self.kind, self.name, self.in_one_call = kind, FEATURES[kind], False
        super().__init__(module)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = current_row()
        if row is None:
            return self.own(*arguments, **keywords)
        # Within, the tower knows of no packed row.
        kept = {name: each for name, each in keywords.items() if name not in LENGTH_NAMES}
        pixels = self.named(arguments, kept).get(PIXELS[self.kind])
        is_trained = any(each.requires_grad for each in tower_parameters(self.module))
        is_trained = is_trained or getattr(pixels, "requires_grad", False)
        with row_in_force(None), apart_from_row(), torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            outputs = self._run(arguments, kept)
        if self.kind in row.stand_ins:
            return _without_features(outputs)
        self._require_matching(row, outputs)
        return outputs

    def _run(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The outputs of the tower, of all items at once where it tells them apart, else of one after the other."""
        by_place = self.named(arguments, {})
        named = by_place | keywords
        sizes = named.get("image_sizes")
        if self.in_one_call or sizes is None or not self._joins_items:
            return self.own(*arguments, **keywords)
        outputs = []
        for pixels, size in zip(named["pixel_values"], sizes):
            height, width = size.tolist()
            one = {"pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]}
            # By place what was given by place.
            places = [one.get(name, each) for name, each in by_place.items()]
            outputs.append(self.own(*places, **keywords | {name: one[name] for name in one.keys() & keywords.keys()}))
        first = outputs[0]
        first.pooler_output = [part for each in outputs for part in each.pooler_output]
        return first

    @property
    def _joins_items(self) -> bool:
        """Whether the tower runs over the patches of all images in one row, with a mask of all pairs of patches."""
        vision = getattr(getattr(self.module, "config", None), "vision_config", None)
        return getattr(vision, "model_type", None) == "pixtral"

    @torch.compiler.disable(reason="the rows of the items are data")
    def _require_matching(self, row: PackedRow, outputs: Any) -> None:
        """Raise ``InputError`` where a sequence has not as many tokens for items as there are features of its own."""
        tokens = row.tokens_of_items.get(self.kind)
        pooled = getattr(outputs, "pooler_output", outputs)
        if row.items is None or tokens is None:
            return
        features = features_by_sequence(pooled, row.items, self.kind, len(row))
        if features is not None:
            require_matching(tokens, features, self.kind, f"{type(self.module).__name__}.{self.name}")


def features_by_sequence(pooled: Any, items: RowItems, kind: str, num_sequences: int) -> Int64 | None:
    """How many features of a kind of items each sequence has; None where that cannot be told.

    ``pooled``: features by item, [items, features, d] or a list of [features, d]; or those of all items, of which each
    has as many.
    """
    if isinstance(pooled, Tensor):
        pooled = list(pooled) if pooled.ndim > 2 else [pooled]
    if not isinstance(pooled, (list, tuple)) or not all(isinstance(each, Tensor) for each in pooled):
        return None
    sizes = np.array([each.numel() // each.shape[-1] for each in pooled], np.int64)
    number = items.counts(kind, len(sizes))
    if number is not None:
        return np.bincount(np.repeat(np.arange(num_sequences), number), sizes, num_sequences).astype(np.int64)
    total = items.counts(kind)
    if len(sizes) != 1 or total is None or not total.sum() or sizes[0] % total.sum():
        return None
    return total * (sizes[0] // total.sum())


def _without_features(outputs: Any) -> Any:
    """The outputs of a tower, with features of no item in the place of those that it has made."""
    for name in ("pooler_output", "deepstack_features", "last_hidden_state"):
        value = getattr(outputs, name, None)
        if value is not None:
            setattr(outputs, name, _none_of(value))
    return _none_of(outputs) if isinstance(outputs, (Tensor, list, tuple)) else outputs


def _none_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value[:0]
    return type(value)(_none_of(each) for each in value) if isinstance(value, (list, tuple)) else value


# A stand-in: the smallest image that a model takes, all ones. Some models leave one of zeros out.


def smallest_item(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """The fields of one small item as a model takes them for a row; none where it takes no items of this kind."""
    taken = inspect.signature(type(model).forward).parameters
    name = PIXELS[kind]
    has_method = hasattr(type(features_of(model)), FEATURES[kind])
    if name not in taken or not (has_method or "aspect_ratio_ids" in taken):
        return {}
    fields = _smallest(model, kind, taken)
    # Ranks that share parameters keep parts of them: the dtype is that of any.
    parameter = next(each for each in model.parameters() if each.is_floating_point())
    by_rows = has_rows_of_items(model)
    return {
        each: (value[None] if by_rows else value).to(
            parameter.device, parameter.dtype if value.is_floating_point() else value.dtype
        )
        for each, value in fields.items()
    }


def _smallest(model: nn.Module, kind: str, taken: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields of the smallest item, a row each."""
    config: Any = model.config
    vision = config.vision_config
    name, patch = PIXELS[kind], _side(vision.patch_size)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    if f"{kind}_grid_thw" in taken:
        merge = _side(getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_kernel_size", 2))
        times = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
        is_plane = vision.model_type in ("kimi_k25_vision", "paddleocr_vl_vision")
        shape = (channels, patch, patch) if is_plane else (channels * times * patch * patch,)
        fields = {name: torch.ones(merge * merge, *shape), f"{kind}_grid_thw": torch.tensor([[1, merge, merge]])}
        merges = f"{kind}_merge_sizes"
        return fields | ({merges: torch.tensor([merge])} if merges in taken else {})
    if "spatial_shapes" in taken or "image_position_ids" in taken:
        return _smallest_of_patches(vision, taken, patch)
    if getattr(vision, "model_type", None) == "pixtral":
        # Two features: of one, the model would take the only dim for that of the images.
        height = patch * getattr(config, "spatial_merge_size", 1)
        return {name: torch.ones(1, channels, height, 2 * height), "image_sizes": torch.tensor([[height, 2 * height]])}
    side = _side(vision.image_size)
    whole = torch.ones(1, channels, side, side)
    if kind == "video":
        return {name: whole[None]}
    if "aspect_ratio_ids" in taken:
        tiles = torch.arange(vision.max_num_tiles)[None]
        pixels = whole[:, None].expand(-1, tiles.shape[1], -1, -1, -1)
        return {name: pixels, "aspect_ratio_ids": torch.ones(1, 1).long(), "aspect_ratio_mask": (tiles < 1).long()}
    if "image_sizes" in taken and hasattr(config, "image_grid_pinpoints"):
        number = image_size_to_num_patches([side, side], config.image_grid_pinpoints, side)
        return {name: whole[:, None].expand(-1, number, -1, -1, -1), "image_sizes": torch.tensor([[side, side]])}
    # Of granite_docling, which has one entry for each tile.
    there = {"pixel_attention_mask": torch.ones(1, dtype=torch.bool)} if "tile_fine_mask" in taken else {}
    return {name: whole} | there


def _smallest_of_patches(vision: Any, taken: Mapping[str, Any], patch: int) -> dict[str, Tensor]:
    """The fields of the smallest image that is handed over in patches with their places (SigLIP 2, Gemma 4)."""
    patch = getattr(vision, "model_patch_size", None) or patch
    side = 2 if "spatial_shapes" in taken else getattr(vision, "pooling_kernel_size", 1)
    pixels = torch.ones(1, side * side, 3 * patch**2)
    if "spatial_shapes" in taken:
        there = torch.ones(1, side * side).long()
        return {"pixel_values": pixels, "spatial_shapes": torch.tensor([[side, side]]), "pixel_attention_mask": there}
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
    return {"pixel_values": pixels, "image_position_ids": places.view(1, -1, 2)}


def _side(size: Any) -> int:
    return int(size[0]) if isinstance(size, (list, tuple)) else int(size)


# Attention of text to images, as Mllama has it.


class CrossForward(RowForward):
    """The forward of an attention to images: tokens look at the images of their own sequence alone."""

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _run_packed(self, row: PackedRow, named: dict[str, Any]) -> Any:
        module: Any = self.module
        hidden, states = named["hidden_states"], named["cross_attention_states"]

        def heads(tokens: Tensor) -> Tensor:
            return tokens.flatten(0, 1).unflatten(-1, (-1, module.head_dim))

        query = module.q_norm(heads(module.q_proj(hidden)))
        key, value = module.k_norm(heads(module.k_proj(states))), heads(module.v_proj(states))
        # Tokens of sequences without images get zeros, and no gradient.
        mixed = torch.zeros_like(query) + sum(each[:0].sum() for each in (query, key, value))
        per_tile = states.shape[1]
        parts, tiles = list(mixed.split(row.sources.slots.tolist())), 0
        for place, seen in row.seen_tiles.items():
            begin, length = int(row.sources.starts[place]), int(row.sources.lengths[place])
            keys = slice(tiles * per_tile, (tiles + seen.shape[1]) * per_tile)
            some = (query[begin : begin + length], key[keys], value[keys])
            # A token in front of all images sees all of them here, and is left out behind this attention.
            mask = (seen | ~seen.any(1, keepdim=True)).repeat_interleave(per_tile, 1)[None, None]
            scores = Scores(causal=False, scale=module.scaling)
            dropout = module.dropout if module.training else 0.0
            part = attend(*(each.transpose(0, 1)[None] for each in some), scores, mask=mask, dropout=dropout)
            parts[place] = torch.cat([part[0].transpose(0, 1), parts[place][length:]])
            tiles += seen.shape[1]
        return module.o_proj(torch.cat(parts).flatten(1))[None], None


class CrossLayerForward(Forward):
    """The forward of a layer around an attention to images: it leaves sequences without images as they are."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = current_row()
        if row is None:
            return self.own(*arguments, **keywords)
        hidden = self.named(arguments, keywords)["hidden_states"]
        has_images, sees = self._tokens(row)
        masks = {"full_text_row_masked_out_mask": sees[None, None, :, None].to(hidden.dtype)}
        # Hidden states stay where they are among the arguments: the older kind of checkpoint asks for that.
        outputs = self.own(*arguments, **{**keywords, **masks})
        return torch.where(has_images[None, :, None], outputs, hidden)

    @torch.compiler.disable(reason="the lengths of the sequences are data")
    def _tokens(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Which tokens are of sequences with images, and which see one, bool [T]."""
        has_images, sees = (torch.zeros(row.sources.size, dtype=torch.bool, device=row.device) for _ in range(2))
        for place, seen in row.seen_tiles.items():
            begin, length = int(row.sources.starts[place]), int(row.sources.lengths[place])
            has_images[begin : begin + length] = True
            sees[begin : begin + length] = seen.any(1)
        return has_images, sees


#: What looks at images by itself, by the name of its class.
_LOOKING: dict[str, type[Forward]] = {
    "MllamaTextCrossAttention": CrossForward,
    "MllamaCrossAttentionDecoderLayer": CrossLayerForward,
}
