"""What a packed row makes of images on the way to its text, beside what each sequence gets alone.

Three things are looked at: the features that the tower makes of the images of all sequences; the embeddings that the
text is given, in which the features have their places; and the positions. So an audit that fails can say where.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ullage.core.columns import is_media
from ullage.core.items import ITEM_LENGTHS
from ullage.mixers.items import has_rows_of_items
from ullage.mixers.proof import largest
from ullage.mixers.towers import FEATURES, features_of

#: What modules are given by keywords of these names is compared.
_WATCHED = ("inputs_embeds", "position_ids")


@torch.no_grad()
def items_differ(model: nn.Module, alone: Sequence[Mapping[str, Any]], packed: Mapping[str, Any]) -> float | None:
    """Largest difference of the features of all images, and of all clips, from those of each sequence's alone.

    None for a model that does not make them by a method of its own.
    """
    part: Any = features_of(model)
    worst = None
    for kind, name in FEATURES.items():
        if not hasattr(part, name) or not any(each in packed for each in packed.get(ITEM_LENGTHS, ())):
            continue
        fields = [_of_kind(each, kind) for each in (*alone, packed)]
        if has_rows_of_items(model):
            fields[-1] = {each: value[None] for each, value in fields[-1].items()}
        found = [_rows(getattr(part, name)(**each)) if each else None for each in fields]
        expected = [each for each in found[:-1] if each is not None]
        if found[-1] is None or not expected:
            continue
        worst = max(worst or 0.0, largest([found[-1]], [torch.cat(expected)]))
    return worst


def _of_kind(keywords: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of images, or of clips, among the keywords of a call."""
    names = [name for name in keywords if is_media(name) and ("video" in name) == (kind == "video")]
    return {name: keywords[name] for name in names if not name.startswith("second_")}


def _rows(features: Any) -> Tensor:
    """Features [rows, d], however a model gives them."""
    pooled = getattr(features, "pooler_output", None)
    if pooled is None:
        pooled = features if isinstance(features, (Tensor, list, tuple)) else features[0]
    if isinstance(pooled, Tensor):
        return pooled.reshape(-1, pooled.shape[-1])
    return torch.cat([_rows(each) for each in pooled])


def given_differ(
    model: nn.Module, alone: Sequence[Mapping[str, Any]], packed: Mapping[str, Any], sizes: Sequence[int]
) -> dict[str, float]:
    """Largest difference of embeddings, and of positions, that parts of a model are given in a row and alone.

    Those of a row that runs by sequence are left out, for they are calls of sequences.

    Args:
        model: packed.
        alone: the keywords of each sequence that has tokens.
        packed: those of the row.
        sizes: tokens of each.
    """
    found: list[dict[tuple[str, str], Tensor]] = []
    for keywords in (*alone, packed):
        with torch.no_grad(), _given(model) as given:
            model(**keywords)
        found.append(given)
    worst: dict[str, float] = {}
    for key, row in found[-1].items():
        of_each = [each[key] for each in found[:-1] if key in each]
        dim = 1 if key[1] == "inputs_embeds" else -1
        whole = row.ndim > 1 and row.shape[dim] == sum(sizes) and len(of_each) == len(sizes)
        if not whole or [each.shape[dim] for each in of_each] != [*sizes]:
            continue
        pairs = [_alike(*pair) for pair in zip(row.split([*sizes], dim), of_each)]
        if key[1] == "position_ids":
            value = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        else:
            value = largest(*zip(*pairs))
        worst[key[1]] = max(worst.get(key[1], 0.0), value)
    return worst


def _alike(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Both with as many rows: positions of text stand before those of the axes, or are the same for all of them."""
    if ours.ndim == theirs.ndim == 3 and not ours.is_floating_point():
        number = min(len(ours), len(theirs))
        ours, theirs = ours[-number:], theirs[-number:]
    first, second = torch.broadcast_tensors(ours, theirs)
    return first, second


@contextmanager
def _given(model: nn.Module) -> Iterator[dict[tuple[str, str], Tensor]]:
    """What parts are given first, by their path and the name of the parameter."""
    given: dict[tuple[str, str], Tensor] = {}

    def note(path: str, names: list[str]) -> Any:
        def hook(module: nn.Module, arguments: Any, keywords: Mapping[str, Any]) -> None:
            for name, value in (*zip(names, arguments), *keywords.items()):
                if name in _WATCHED and isinstance(value, Tensor):
                    given.setdefault((path, name), value.detach())

        return hook

    handles = []
    for path, module in model.named_modules():
        names = [*inspect.signature(type(module).forward).parameters][1:]
        handles.append(module.register_forward_pre_hook(note(path, names), with_kwargs=True))
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def what_is_wrong(failed: Sequence[str]) -> str:
    """One clause for the names of the checks that failed, where they tell of images; empty where they do not."""
    found = []
    leaks = any(name.endswith(("other images", "other tokens")) for name in failed)
    if "items" in failed:
        found.append("the tower mixes the images of several sequences")
    elif "places" in failed:
        where = "in another sequence" if leaks else "in another place of its sequence"
        found.append(f"features of an image stand {where}")
    elif leaks:
        found.append("tokens see tokens or images of another sequence, so a mask reaches too far")
    if "positions" in failed:
        found.append("positions are not those of each sequence alone")
    return "; ".join(found)
