"""What the images of sequences take besides tokens: patches of the vision tower, and images.

Patches are counted from the fields by item of a batch: by the grids of Qwen-VL's kind, by the sizes of images that are
padded to one tensor (Pixtral), and otherwise by the dims of the pixels and the side of a patch, which the model's
config names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ullage.core.batch import RaggedBatch
from ullage.core.items import UnequalRows
from ullage.core.layout import Int64, Layout
from ullage.planning.cost import IMAGES, PATCHES, SQUARED

#: The fields of pixels, each with the field of grids (frames, height, width in patches) that some models have beside.
_PIXELS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
#: The names under which a plan finds the amounts.
NAMES = (PATCHES, PATCHES + SQUARED, IMAGES)


def amounts_of(batch: RaggedBatch, config: Any) -> dict[str, Int64]:
    """What each sequence takes besides tokens, int64 [n] by the names of :data:`NAMES`.

    ``config``: of the model; one without a ``vision_config`` has no amounts, so that ``{}`` is returned for any batch
    of it. A frame of a clip counts as an image. Reads the grids on the host: waits for the device where they lie on
    one.
    """
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return {}
    found = {name: np.zeros(len(batch), np.int64) for name in NAMES}
    for pixels, grids in _PIXELS.items():
        if pixels in batch.items:
            sequences, images, patches = _images(batch, pixels, grids, vision)
            for name, each in zip(NAMES, (images * patches, images * patches * patches, images), strict=True):
                np.add.at(found[name], sequences, each)
    return found


def items_in(batch: RaggedBatch, config: Any) -> list[tuple[int, str, int]]:
    """Of each run of equal images or frames: its sequence, the field of their pixels, and the patches of one."""
    found: list[tuple[int, str, int]] = []
    for pixels, grids in _PIXELS.items():
        if pixels in batch.items:
            runs = zip(*_images(batch, pixels, grids, getattr(config, "vision_config", None)), strict=True)
            found += [(int(sequence), pixels, int(patches)) for sequence, number, patches in runs if number]
    return found


def _images(batch: RaggedBatch, pixels: str, grids: str, vision: Any) -> tuple[Int64, Int64, Int64]:
    """Of each run of equal images: its sequence, how many they are, and the patches of one."""
    rows, side = batch.items[pixels], _side(vision)
    number = np.arange(len(batch))
    if grids in batch.items:
        frames, height, width = _host(batch[grids]).T
        return np.repeat(number, batch.items[grids].lengths), frames, height * width
    # Pixtral's images are padded to the largest of their call; their own sizes stand beside them.
    if "image_sizes" in batch.items and getattr(vision, "model_type", "") == "pixtral":
        height, width = _host(batch["image_sizes"]).T // side
        sequences = np.repeat(number, batch.items["image_sizes"].lengths)
        return sequences, np.ones_like(sequences), height * width
    dims = _dims(batch[pixels], rows)
    if dims.shape[1] == 1:  # a row per patch, and nothing says where an image ends
        return number, (rows.lengths > 0).astype(np.int64), rows.lengths
    if dims.shape[1] == 2:  # a row per image: so many patches of so many elements
        return number, rows.lengths, dims[:, 0]
    # A row per image, or per several tiles of it: [..., channels, height, width].
    return number, rows.lengths * dims[:, :-3].prod(1), (dims[:, -2] // side) * (dims[:, -1] // side)


def _dims(tensor: torch.Tensor, rows: Layout) -> Int64:
    """The dims of a row of each sequence, int64 [n, dims]."""
    if isinstance(rows, UnequalRows):
        return np.array(rows.dims, np.int64)
    return np.tile(np.array(tensor.shape[1:], np.int64), (rows.num_items, 1))


def _side(vision: Any) -> int:
    side = getattr(vision, "patch_size", None) or 1
    return int(side if isinstance(side, int) else side[0])


def _host(tensor: torch.Tensor) -> Int64:
    return tensor.detach().cpu().numpy().astype(np.int64)


def stacked(amounts: list[Mapping[str, Int64]]) -> Int64:
    """The amounts of several batches as one flat array, sequence after sequence, for :func:`unstacked`."""
    return np.concatenate([np.zeros(0, np.int64), *(np.stack([*each.values()], 1).reshape(-1) for each in amounts)])


def unstacked(flat: Int64) -> dict[str, Int64]:
    """The amounts by name of what :func:`stacked` has joined."""
    return dict(zip(NAMES, flat.reshape(-1, len(NAMES)).T, strict=True))
