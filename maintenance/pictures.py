"""Sequences with images for a model that takes them, made from its configuration alone: no processor, no download.

How an image of some size is handed over is told by the keywords of the model's ``forward`` (:func:`items_of`), and how
many tokens stand for it by the model itself, which computes its features. What single types need stands as data.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.mixers.items import has_rows_of_items

#: Heights and widths of the images that are drawn in turn, in the smallest size that a model takes.
SIZES = ((2, 4), (6, 8), (4, 2), (2, 6), (4, 4))
#: The same of clips, behind the number of their frames.
CLIPS = ((4, 2, 2), (2, 4, 2))
#: Tokens of text before, between and behind the images of a sequence, in turn.
_TEXTS = (3, 2, 5, 1, 4)

#: Names of the tokens that stand for an image, before it and behind it, in configurations.
_IMAGE = ("image_token_id", "image_token_index", "image_token")
_VIDEO = ("video_token_id", "video_token_index")
_BEFORE = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
_BEHIND = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")

#: Types whose clips have text, the time, before every frame.
_BY_FRAME = re.compile(r"cohere_compass|cosmos3_.*|glm4\d*v.*|glm_ocr|glmga|qwen3_(5|vl).*|qwen4_exp")

#: Towers whose patches are handed over as [channels, height, width], and as merged ones of [height, width, channels].
_PLANES = ("kimi_k25_vision", "paddleocr_vl_vision")
_MERGED = ("inkling2_vision",)
#: Types whose clips are not drawn: with GLM's they cannot stand beside images in one call, for both have one token; the
#: model of Kimi counts the frames of a clip twice.
_NO_CLIPS = re.compile(r"glm.*|kimi_k25")


def takes_images(model: Any) -> bool:
    """Whether a model takes images beside text, as pictures of :func:`picture_samples` are handed over."""
    names = _keywords(model)
    return "input_ids" in names and "pixel_values" in names and _vision(model.config) is not None


def takes_clips(model: Any) -> bool:
    """Whether :func:`picture_samples` makes clips for a model."""
    return "video_grid_thw" in _keywords(model) and not _NO_CLIPS.fullmatch(model.config.model_type)


def picture_samples(
    model: nn.Module,
    *,
    seed: int = 0,
    images: Sequence[int] = (0, 1, 3),
    videos: Sequence[int] | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    texts: Sequence[int] = _TEXTS,
) -> list[dict[str, Tensor]]:
    """Sequences with images as ``RaggedBatch.from_samples`` takes them, labels among them; those of images are -100.

    Args:
        model: bare, in any mode; it computes the features of every image once, without gradients.
        seed: of tokens and pixels.
        images: how many each sequence has.
        videos: how many clips each sequence has behind its images; none if None.
        sizes: height and width of the images in turn, in patches as the model takes them; models whose images have one
            size ignore them.
        texts: numbers of tokens of text before, between and behind the images, in turn.

    Raises ``InputError`` for a model that takes no images.
    """
    if not takes_images(model):
        raise InputError(
            "the model takes no images", where=type(model).__name__, expected="pixel_values and a tower", found="none"
        )
    random = torch.Generator().manual_seed(seed)
    size, text, samples = _turns(sizes), _turns(texts), []
    clip = _turns(CLIPS)
    for place, count in enumerate(images):
        items = [_image(model, next(size), random) for _ in range(count)]
        clips = [_clip(model, next(clip), random) for _ in range(videos[place] if videos else 0)]
        samples.append(_sample(model, items, clips, random, text))
    return samples


def _sample(model: Any, items: Any, clips: Any, random: torch.Generator, text: Any) -> dict[str, Tensor]:
    """One sequence with images, then clips, text before, between and behind them."""
    config = model.config
    words = _words(model)

    def draw(size: int) -> list[int]:
        return words[torch.randint(len(words), (size,), generator=random)].tolist()

    tokens = draw(next(text))
    types = [0] * len(tokens)
    before, behind = (_id(config, names) for names in (_BEFORE, _BEHIND))
    for kind, item in [*((1, each) for each in items), *((2, each) for each in clips)]:
        token = _id(config, _IMAGE if kind == 1 else _VIDEO)
        if token is None:
            raise InputError("the configuration names no token that stands for an image", where=type(config).__name__)
        count = placeholders(model, item, kind)
        parts = int(item["video_grid_thw"][0, 0]) if kind == 2 and _BY_FRAME.fullmatch(config.model_type) else 1
        for _ in range(parts):
            # Between two images at least one token of text, as processors put it.
            around = [[each] if each is not None else draw(1) for each in (before, behind)]
            tokens += [*around[0], *[token] * (count // parts), *around[1]]
            types += [0, *[kind] * (count // parts), 0]
        rest = draw(next(text))
        tokens += rest
        types += [0] * len(rest)
    input_ids, kinds = torch.tensor(tokens), torch.tensor(types)
    labels = torch.where(kinds > 0, IGNORED_LABEL, input_ids)
    labels[:1] = IGNORED_LABEL
    sample = {"input_ids": input_ids, "labels": labels}
    names = _keywords(model)
    if "mm_token_type_ids" in names:
        sample["mm_token_type_ids"] = kinds
    if "token_type_ids" in names:
        sample["token_type_ids"] = _token_types(model, kinds)
    return sample | joined([*items, *clips])


def joined(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The fields of several items end to end; behind the first, dimensions of unequal size are padded with zeros."""
    fields: dict[str, list[Tensor]] = {}
    for item in items:
        for name, value in item.items():
            fields.setdefault(name, []).append(value)
    return {name: _end_to_end(values) for name, values in fields.items()}


def _end_to_end(values: Sequence[Tensor]) -> Tensor:
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values))]
    padded = []
    for value in values:
        behind = [(0, size - own) for size, own in zip(most, value.shape[1:])]
        padded.append(nn.functional.pad(value, [each for pair in reversed(behind) for each in pair]))
    return torch.cat(padded)


# How an image is handed over.


def _image(model: Any, size: tuple[int, int], random: torch.Generator) -> dict[str, Tensor]:
    """The fields of one image of a height and width in patches."""
    names, vision = _keywords(model), _vision(model.config)
    if "image_grid_thw" in names:
        return _grid(model, (1, *size), random)
    if "aspect_ratio_ids" in names:
        return _tiled(vision, size, random)
    if "spatial_shapes" in names or "image_position_ids" in names:
        return _patches(model, size, random)
    if "image_sizes" in names and hasattr(model.config, "image_grid_pinpoints"):
        return _any_resolution(model, size, random)
    height = width = _one(vision.image_size)
    channels = getattr(vision, "num_channels", 3)
    if "image_sizes" in names and vision.model_type == "pixtral":
        height, width = (each * _one(vision.patch_size) for each in size)
        return {
            "pixel_values": _pixels(random, 1, channels, height, width),
            "image_sizes": torch.tensor([[height, width]]),
        }
    fields = {"pixel_values": _pixels(random, 1, channels, height, width)}
    if "high_res_pixel_values" in names:
        size_of_both = _one(model.config.high_res_vision_config.image_size)
        fields["high_res_pixel_values"] = _pixels(random, 1, channels, size_of_both, size_of_both)
    if "num_local_patches" in names and size[0] != size[1]:
        fields["pixel_values_local"] = _pixels(random, 2, channels, height, width)
    if "num_local_patches" in names:
        fields["num_local_patches"] = torch.tensor([2 if size[0] != size[1] else 0])
    if "tile_fine_mask" in names:
        fields["pixel_attention_mask"] = torch.ones(1, dtype=torch.bool)
    elif "pixel_attention_mask" in names:
        seen = torch.zeros(1, height, width, dtype=torch.int64)
        # The image may be smaller than what it is padded to.
        seen[:, :, : width if size[0] == size[1] else max(width // 2, 1)] = 1
        fields["pixel_attention_mask"] = seen
    return fields


def _clip(model: Any, size: tuple[int, int, int], random: torch.Generator) -> dict[str, Tensor]:
    """The fields of one clip: frames, height and width in patches."""
    names = _keywords(model)
    if not takes_clips(model):
        raise InputError("no clips are made for this model", where=type(model).__name__)
    merged = getattr(_vision(model.config), "temporal_merge_size", 1)
    frames = -(-max(1, size[0] // 2) // merged) * merged
    made = _grid(model, (frames, *size[1:]), random)
    item = {"pixel_values_videos": made["pixel_values"], "video_grid_thw": made["image_grid_thw"]}
    if "second_per_grid_ts" in names:
        item["second_per_grid_ts"] = torch.tensor([1.0])
    if "video_merge_sizes" in names:
        item["video_merge_sizes"] = made["image_merge_sizes"]
    return item


def _grid(model: Any, size: tuple[int, int, int], random: torch.Generator) -> dict[str, Tensor]:
    """Patches end to end, and how many there are in each direction."""
    vision = _vision(model.config)
    patch = _one(vision.patch_size)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    count = size[0] * size[1] * size[2]
    times = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
    shape = (channels * times * patch * patch,)
    if vision.model_type in _PLANES:
        shape = (channels, patch, patch)
    elif vision.model_type in _MERGED:
        patch *= vision.spatial_merge_size
        shape = (patch, patch, channels)
    fields = {"pixel_values": _pixels(random, count, *shape), "image_grid_thw": torch.tensor([size])}
    if "image_merge_sizes" in _keywords(model):
        fields["image_merge_sizes"] = torch.tensor([2])
    return fields


def _patches(model: Any, size: tuple[int, int], random: torch.Generator) -> dict[str, Tensor]:
    """Patches of one image, padded to as many as an image may have (SigLIP 2, Gemma 4)."""
    names, vision = _keywords(model), _vision(model.config)
    count, most = size[0] * size[1], 48
    there = torch.arange(most) < count
    patch = getattr(vision, "model_patch_size", None) or _one(vision.patch_size)
    pixels = _pixels(random, 1, most, 3 * patch**2) * there[None, :, None]
    if "spatial_shapes" in names:
        shapes = {"spatial_shapes": torch.tensor([size]), "pixel_attention_mask": there.long()[None]}
        return {"pixel_values": pixels} | shapes
    rows, columns = torch.arange(most) // size[1], torch.arange(most) % size[1]
    places = torch.where(there[:, None], torch.stack([columns, rows], 1), -1)
    return {"pixel_values": pixels, "image_position_ids": places[None]}


def _tiled(vision: Any, size: tuple[int, int], random: torch.Generator) -> dict[str, Tensor]:
    """An image in tiles, of which the last ones may be empty (Mllama)."""
    ratios = [tuple(each) for each in vision.supported_aspect_ratios]
    ratio = next(each for each in ((size[1] // 2, size[0] // 2), (1, 1)) if each in ratios)
    tiles = ratio[0] * ratio[1]
    pixels = torch.zeros(1, vision.max_num_tiles, 3, vision.image_size, vision.image_size)
    pixels[0, :tiles] = _pixels(random, tiles, 3, vision.image_size, vision.image_size)
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.tensor([ratios.index(ratio) + 1]),
        "aspect_ratio_mask": (torch.arange(vision.max_num_tiles) < tiles).long()[None],
    }


def _any_resolution(model: Any, size: tuple[int, int], random: torch.Generator) -> dict[str, Tensor]:
    """The whole image at one size, then its patches at the best of the resolutions that are possible (LLaVA-NeXT)."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    config, vision = model.config, _vision(model.config)
    side = _one(vision.image_size)
    height, width = (min(each, 4) * side // 2 - 2 for each in size)
    patches = image_size_to_num_patches([height, width], config.image_grid_pinpoints, side)
    return {
        "pixel_values": _pixels(random, 1, patches, 3, side, side),
        "image_sizes": torch.tensor([[height, width]]),
    }


def placeholders(model: Any, item: Mapping[str, Tensor], kind: int) -> int:
    """How many tokens stand for one item: rows of the features that the model makes of it."""
    if "aspect_ratio_ids" in item:
        return 1
    name = "get_image_features" if kind == 1 else "get_video_features"
    asked = next((part for part in (model, getattr(model, "model", None)) if hasattr(part, name)), None)
    if asked is None:
        raise InputError("the model does not tell the features of an image", where=type(model).__name__)
    parameter = next(model.parameters())
    rows = has_rows_of_items(model)
    given = {
        each: _like(value if not rows else value[None], parameter)
        for each, value in item.items()
        if each not in ("second_per_grid_ts",)
    }
    with torch.no_grad():
        found = getattr(asked, name)(**given)
    pooled = getattr(found, "pooler_output", None)
    return _rows(found if isinstance(found, (Tensor, list, tuple)) else found[0] if pooled is None else pooled)


def _rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    return sum(_rows(each) for each in features)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    return value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)


def _token_types(model: Any, kinds: Tensor) -> Tensor:
    """By token whether it is of an image (Gemma 3), or behind the prefix that is seen both ways (PaliGemma)."""
    if model.config.model_type != "paligemma":
        return (kinds > 0).long()
    last = int(kinds.nonzero().max()) + 1 if kinds.any() else 0
    types = torch.zeros_like(kinds)
    types[min(last + 2, len(kinds)) :] = 1
    return types


# What a configuration tells.


def _keywords(model: Any) -> set[str]:
    return {*inspect.signature(model.forward).parameters}


def _vision(config: Any) -> Any:
    """The configuration of the tower for images; None without one."""
    for name in ("vision_config", "vision_encoder_config", "image_config"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _one(size: Any) -> int:
    return int(size[0]) if isinstance(size, (list, tuple)) else int(size)


def _id(config: Any, names: Sequence[str]) -> int | None:
    """The first of some entries that is a token."""
    return next((value for name in names if type(value := getattr(config, name, None)) is int), None)


def _words(model: Any) -> Tensor:
    """Tokens of text: all but those with a meaning of their own."""
    config: Any = model.config
    text = config.get_text_config()
    special = {
        value
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    return torch.tensor([each for each in range(int(text.vocab_size)) if each not in special][:1000])


def _turns(values: Sequence[Any]) -> Any:
    while True:
        yield from values


def _pixels(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random)
