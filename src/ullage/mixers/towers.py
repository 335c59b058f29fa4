"""The forwards of what makes features of images and clips, on all items of a packed row at once.

A tower runs over the items of all sequences in one call, as it does over the items of one: each item is a row of a
batch, or a segment that the tower tells apart by the grids. Its features then go to their tokens in order. Here the
lengths of the text are kept from the tower, and the features of each sequence are counted.

A row without items runs the tower on a stand-in where that is asked for, since ranks that share its parameters wait
for each other in every call of it. None of its features is taken, so it adds nothing, and its gradients are zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.core.layout import Int64
from ullage.core.rows import LENGTH_NAMES
from ullage.mixers.by_lengths import PackedRow
from ullage.mixers.forwards import CurrentRow, Forward
from ullage.mixers.items import Items, require_matching

#: The methods that make features of items, by the kind of items.
FEATURES = {"image": "get_image_features", "video": "get_video_features"}


def tower_forwards(model: nn.Module, current: CurrentRow) -> list[Forward]:
    """The forwards of the methods of a model, or of its backbone, that make features of images and of clips."""
    part = features_of(model)
    return [FeaturesForward(part, current, kind=kind) for kind, name in FEATURES.items() if hasattr(type(part), name)]


def features_of(model: nn.Module) -> nn.Module:
    """The part of a model whose forward makes features of images: its backbone, where that has the method."""
    backbone = getattr(model, "base_model", model)
    return backbone if hasattr(type(backbone), FEATURES["image"]) else model


class FeaturesForward(Forward):
    """The method of a model that makes features of items: in a packed call of all items of the row."""

    def __init__(self, module: nn.Module, current: CurrentRow, *, kind: str) -> None:
        self.kind, self.name = kind, FEATURES[kind]
        super().__init__(module, current)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        row = self.current.get()
        if row is None:
            return self.own(*arguments, **keywords)
        # Within, the tower knows of no packed row.
        kept = {name: each for name, each in keywords.items() if name not in LENGTH_NAMES}
        with self.current.set(None):
            outputs = self.own(*arguments, **kept)
        if self.kind in row.stand_ins:
            return _without_features(outputs)
        self._require_matching(row, outputs)
        return outputs

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


def features_by_sequence(pooled: Any, items: Items, kind: str, num_sequences: int) -> Int64 | None:
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
