"""Five steps of tiny models that see images: packed, padded, and one sequence after another; run by torchrun.

``picture_types.py FOLDER '[[model type, options], ...]'``: options are those of the arguments, ``stage`` of ZeRO,
``trains``: what of the model is trained, and ``text_step``: one step is of text alone. Samples come from the configuration
alone, the same on every rank: with no image, one and many, of very unequal sizes, and clips where the type takes them.
Some steps have one sequence with images, so that a rank has text alone.
"""

import os

import numpy as np
import peft
import torch
from torch import nn
from transformers import AutoConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from maintenance.pictures import picture_samples, takes_clips
from maintenance.tiny import tiny_model
from tests.support.packing_script import zero
from tests.support.small_runs import STEADY, logged, packed_steps, quiet, serve
from ullage.core.columns import fill_value, is_media
from ullage.mixers.items import alone_form, has_rows_of_items, seen_tiles
from ullage.training import RaggedCollator, Trainer

TYPES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "llava", "llava_onevision", "internvl", "smolvlm",
    "pixtral", "paligemma", "mllama",
)  # fmt: skip
#: At a rate of 1e-3 five steps of Qwen 3.5 make 5e-6 of rounding in the norms of padded batches, for one seed of three.
STEPS, BATCH, RATE, NORM = 5, 4, 3e-4, 1.0
#: Heights and widths in patches: up to forty times as many patches as the smallest.
SIZES = ((2, 2), (12, 14), (4, 6), (2, 16), (8, 2))
#: Images of the sequences of each step, which a seed shuffles.
IMAGES = ((0, 1, 5, 0), (2, 0, 0, 0), (0, 3, 1, 1), (0, 0, 0, 4), (1, 0, 6, 2))


def made(model_type, seed=0, trains="all", text_step=False):
    """A tiny model in training mode, the same as a Trainer gets it, and the samples of all steps.

    ``trains``: "all", "text" (a frozen tower), "adapters of text" or "adapters of the tower".
    """
    if model_type == "pixtral":
        # Pixtral is a LLaVA with a tower and a text of its own.
        parts = {"vision_config": {"model_type": "pixtral"}, "text_config": {"model_type": "mistral"}}
        model_type = AutoConfig.for_model("llava", **parts, vision_feature_select_strategy="full")
    model = tiny_model(model_type, "image", seed=seed)
    random = np.random.default_rng(seed)
    steps = [step if not text_step or k != 1 else (0,) * BATCH for k, step in enumerate(IMAGES)]
    images = [int(each) for step in steps for each in random.permutation(step)]
    clips = [int(count == 1 or count > 4) for count in images] if takes_clips(model) else None
    texts = [int(each) for each in random.integers(1, 24, 40)]
    samples = picture_samples(model, seed=seed, images=images, videos=clips, sizes=SIZES, texts=texts)
    given = model.train()
    if trains == "text":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "visual" not in name and "vision_tower" not in name
    if trains.startswith("adapters"):
        where = {"adapters of text": r".*language_model.*q_proj", "adapters of the tower": r".*(vis).*(qkv|q_proj)"}
        torch.manual_seed(1)
        given = peft.get_peft_model(model, peft.LoraConfig(target_modules=where[trains], init_lora_weights=False))
    return model, given, samples


class PaddedCollator:
    """Rows padded on the right, and images as the processor of the model would put them."""

    def __init__(self, model):
        self.by_rows, self.config = has_rows_of_items(model), model.config

    def __call__(self, samples):
        fields = {"attention_mask": [torch.ones_like(sample["input_ids"]) for sample in samples]}
        for name in dict.fromkeys(name for sample in samples for name in sample):
            like = next(sample[name] for sample in samples if name in sample)
            fields[name] = [sample.get(name, like[:0]) for sample in samples]
        if "aspect_ratio_mask" in fields:
            fields["cross_attention_mask"] = [
                seen_tiles(sample["input_ids"], self.config, tiles)
                for sample, tiles in zip(samples, fields["aspect_ratio_mask"])
            ]
        found = {
            name: together(values, fill_value(name, values[0].dtype), rows=self.by_rows or not is_media(name))
            for name, values in fields.items()
        }
        if "aspect_ratio_mask" in found:
            found["aspect_ratio_mask"][:, :, 0] = 1  # as Mllama's processor has images of padding
        return found


def together(values, fill, *, rows):
    """Tensors padded to the largest of them: as rows of a batch, or end to end."""
    most = [max(sizes) for sizes in zip(*(value.shape for value in values))]
    found = []
    for value in values:
        behind = [(0, size - own) for size, own in zip(most, value.shape)]
        if not rows:
            behind[0] = (0, 0)
        found.append(nn.functional.pad(value, [each for pair in reversed(behind) for each in pair], value=fill))
    return torch.stack(found) if rows else torch.cat(found)


def by_hand(model_type, seed=0, *, alone=True, **parts):
    """Losses and norms of steps without a Trainer: each sequence alone, or padded with those that have as many images."""
    model, _, samples = made(model_type, seed, **parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    collate, losses, norms = PaddedCollator(model), [], []
    for step in range(STEPS):
        chosen = samples[step * BATCH : (step + 1) * BATCH]
        groups: dict = {}
        for place, sample in enumerate(chosen):
            groups.setdefault(place if alone else len(sample.get("pixel_values", ())), []).append(sample)
        groups = list(groups.values())
        calls = [alone_form(model, group[0]) if alone else collate(group) for group in groups]
        counts = [sum(int((sample["labels"][1:] >= 0).sum()) for sample in group) for group in groups]
        optimizer.zero_grad()
        loss = 0.0
        for keywords, count in zip(calls, counts):
            if not count:
                continue  # the mean over no labels is no number
            part = model(**keywords).loss * count / sum(counts)
            if part.requires_grad:  # not that of text alone, where adapters of the tower alone are trained
                part.backward()
            loss += part.item()
        losses.append(loss)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
    return {"losses": losses, "norms": norms}


def run(model_type, folder, *, seed=0, packed=True, stage=0, trains="all", text_step=False, **options):
    """Losses and norms of the Trainer's steps, and how many microbatches of this rank had images."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    unset_hf_deepspeed_config()  # that of a run before, under which a model would be built in parts
    model, given, samples = made(model_type, seed, trains, text_step)
    most = max(len(sample["input_ids"]) for sample in samples)
    arguments = quiet(
        folder, per_device_train_batch_size=BATCH // world, max_steps=STEPS, max_grad_norm=NORM,
        remove_unused_columns=False, deepspeed=zero(stage) if stage else None,
        packing_capacity=most + most // 2 if packed else None, **{**STEADY, "learning_rate": RATE, **options},
    )  # fmt: skip
    collator = RaggedCollator() if packed else PaddedCollator(model)
    trainer = Trainer(given, arguments, train_dataset=samples, data_collator=collator)
    steps = packed_steps(trainer) if packed else []
    trainer.train()
    losses, norms = zip(*logged(trainer))
    images = [[bool(microbatch.items) for microbatch in step.microbatches] for step in steps]
    return {"losses": losses, "norms": [float(norm) for norm in norms], "images": images}


def difference(found, expected):
    """The largest relative difference of losses and of norms over the steps; infinite for another number of steps."""
    for name in ("losses", "norms"):
        assert len(expected[name]) == STEPS
    if any(len(found[name]) != STEPS for name in ("losses", "norms")):
        return float("inf")
    pairs = [pair for name in ("losses", "norms") for pair in zip(found[name], expected[name], strict=True)]
    return max(abs(one - other) / abs(other) if other == other and one == one else float("inf") for one, other in pairs)


def texts_beside_images(ranks):
    """How many microbatches of a rank are of text alone while another rank has images, of ``images`` of all ranks."""
    return sum(
        not mine and any(microbatch)
        for step in zip(*ranks, strict=True)
        for microbatch in zip(*step, strict=True)
        for mine in microbatch
    )


if __name__ == "__main__":
    serve(lambda folder, model_type, **options: run(model_type, folder, **options))
