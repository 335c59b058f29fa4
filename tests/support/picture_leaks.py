"""LLaVA and Qwen2.5-VL with features of images that depend on the other images of their call, each in a way of its own.

``picture_leaks.py FOLDER '[[kind, leak, first, options], ...]'`` trains three steps of each; run by torchrun. Options are
``stage`` of ZeRO and those of the arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from maintenance.pictures import picture_samples
from maintenance.tiny import tiny_model
from tests.support.packing_script import zero
from tests.support.small_runs import STEADY, logged, quiet, serve
from ullage.core.errors import InputError
from ullage.mixers.items import alone_form
from ullage.mixers.packed_model import way_of
from ullage.training import RaggedCollator, Trainer

KINDS = ("llava", "qwen2_5_vl")
STEPS, BATCH, RATE = 3, 4, 3e-4
#: Images of each sequence of the first step, and of the later ones.
FIRST = {"text": (0, 0, 0, 0), "one image": (0, 1, 0, 0), "images": (1, 0, 2, 1)}
LATER = ((2, 1, 0, 1), (0, 1, 3, 1))
#: Of images in patches; LLaVA's have one size.
SIZES = ((4, 6), (2, 2), (6, 4), (2, 8))


class _Mean(torch.autograd.Function):
    """Its input; the gradient has the mean of all added."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient + gradient.mean(0, keepdim=True)


def _sort(model: Any, images: Sequence[Tensor]) -> list[Tensor]:
    """By size, and images of one size by their mean."""
    return sorted(images, key=lambda each: (len(each), float(each.detach().mean())))


def _resampled(model: Any, images: Sequence[Tensor]) -> list[Tensor]:
    row = torch.cat([*images])
    return [each + (each @ row.T).softmax(-1) @ row for each in images]


def _normalised(model: Any, images: Sequence[Tensor]) -> list[Tensor]:
    return list(model.norm(torch.cat([*images])).split([len(each) for each in images]))


def _backward(model: Any, images: Sequence[Tensor]) -> list[Tensor]:
    return list(_Mean.apply(torch.cat([*images])).split([len(each) for each in images]))  # pyright: ignore


#: What a subclass makes of the features [number, d] of each image of a call.
LEAKS: dict[str, Callable[[Any, Sequence[Tensor]], list[Tensor]]] = {
    "mean": lambda model, images: [each + torch.cat([*images]).mean(0) for each in images],
    "sort": _sort,
    "index": lambda model, images: [each + 0.1 * at for at, each in enumerate(images)],
    "std": lambda model, images: [each / torch.cat([*images]).std() for each in images],
    "max in training": lambda model, images: (
        [each - torch.cat([*images]).amax(0) for each in images] if model.training else list(images)
    ),
    "batch norm": _normalised,
    "resampler": _resampled,
    "first image": lambda model, images: [each + images[0].mean(0) for each in images],
    "image before": lambda model, images: [each + images[max(at - 1, 0)].mean(0) for at, each in enumerate(images)],
    "count": lambda model, images: [each * len(images) / 2 for each in images],
    "mean, backward": _backward,
    "last image": lambda model, images: [each + images[-1].mean(0) for each in images],
}
#: What keeps to its image, in the same place.
EXACT: dict[str, Callable[[Any, Sequence[Tensor]], list[Tensor]]] = {
    "own mean": lambda model, images: [each + each.mean(0) for each in images],
}


def make(kind: str, leak: str | None = None) -> Any:
    """A tiny model; with a leak, its backbone is of a subclass."""
    model = tiny_model(kind, "image", seed=0)
    if leak is None:
        return model
    planted, backbone = {**LEAKS, **EXACT}[leak], model.model
    features_of = type(backbone).get_image_features

    def get_image_features(self: Any, pixel_values: Any, image_grid_thw: Any = None, **keywords: Any) -> Any:
        grids = {} if image_grid_thw is None else {"image_grid_thw": image_grid_thw}
        outputs = features_of(self, pixel_values, **grids, **keywords)
        features = outputs.pooler_output
        outputs.pooler_output = (
            type(features)(planted(self, features))
            if isinstance(features, (list, tuple))
            else (torch.stack(planted(self, list(features))))
        )
        return outputs

    own = type("Own", (type(backbone),), {"__module__": "modeling_own", "get_image_features": get_image_features})
    backbone.__class__ = own
    if leak == "batch norm":
        backbone.norm = nn.BatchNorm1d(model.config.text_config.hidden_size)
    return model


def samples(kind: str, first: str) -> list[dict[str, Tensor]]:
    """The sequences of three steps of four."""
    images = [count for step in (FIRST[first], *LATER) for count in step]
    texts = [int(each) for each in torch.randint(2, 12, (40,), generator=torch.Generator().manual_seed(0))]
    return picture_samples(make(kind), images=images, sizes=SIZES, texts=texts)


def alone(kind: str, leak: str | None, first: str) -> list[tuple[float, float]]:
    """Loss and norm of each step in a loop by hand, of one sequence after the other."""
    model, data = make(kind, leak).train(), samples(kind, first)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        chosen = data[step * BATCH : (step + 1) * BATCH]
        counts = [int((sample["labels"][1:] >= 0).sum()) for sample in chosen]
        optimizer.zero_grad()
        total = 0.0
        for sample, count in zip(chosen, counts):
            loss = model(**alone_form(model, sample)).loss * count / sum(counts)
            loss.backward()
            total += float(loss.detach())
        found.append((total, float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
    return found


def run(kind: str, leak: str | None, first: str, folder: Any, stage: int = 0, **options: Any) -> dict[str, Any]:
    """Loss and norm of each packed step, and the ways that the proofs took; or the error."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    unset_hf_deepspeed_config()  # of the case before
    model, data = make(kind, leak), samples(kind, first)
    arguments = quiet(
        folder, per_device_train_batch_size=BATCH // world, max_steps=STEPS, max_grad_norm=1.0,
        remove_unused_columns=False, deepspeed=zero(stage) if stage else None,
        **{**STEADY, "learning_rate": RATE, "packing_capacity": 256, **options},
    )  # fmt: skip
    ways: list[str] = []
    try:
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=RaggedCollator())
        before_step = trainer._packer.proof.before_step

        def noted(*given: Any) -> None:
            before_step(*given)
            way = way_of(model)
            ways.append(f"{way}, images by {way.items}")

        vars(trainer._packer.proof)["before_step"] = noted
        trainer.train()
    except InputError as error:
        return {"error": f"{type(error).__name__}: {error}", "ways": ways}
    return {"steps": [(loss, float(norm)) for loss, norm in logged(trainer)], "ways": ways}


def off(found: dict[str, Any], kind: str, leak: str | None, first: str) -> float:
    """The largest relative difference of losses and norms from each sequence alone; of a run with an error that of none."""
    if "error" in found:
        return 0.0
    pairs = [
        pair for one, other in zip(found["steps"], alone(kind, leak, first), strict=True) for pair in zip(one, other)
    ]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


if __name__ == "__main__":
    serve(lambda folder, kind, leak, first, **options: run(kind, leak, first, folder, **options))
