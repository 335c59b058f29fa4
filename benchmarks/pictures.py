"""Packed rows with images against padded batches: real tokens and images a second, beside what FLOPs allow.

A Qwen2.5-VL, a LLaVA and a Gemma 3 of a few million parameters with random weights in float32; forward and backward
with the loss, one CPU thread. A batch has text alone, one image and many, of unequal sizes where the model takes them.
*Padded* is the model as transformers builds it on right-padded rows with an ``attention_mask``; its images are end to
end, as its processor puts them. *Packed* is a copy after ``ullage.pack_model`` on ``RaggedBatch.to_flattened``. The
ways take turns, must agree on the loss, and the shortest CPU time of the process counts.

What is allowed is FLOPs of the padded batch ÷ FLOPs of the packed row. FLOPs of a forward, of which a backward is twice
as many in both ways::

    2 · Wt · slots + 4 · ht · lt · Σ slots² + 2 · Wv · patches + 4 · hv · lv · Σ patches²

Wt and Wv are the weights of the products of text (its head among them) and tower, h their hidden sizes, l their layers;
slots are tokens with padding: the longest sequence for each row, or the sequences as they are. The squares are of
sequences and of images (of windows where the tower has them). The tower does the same work in both ways, so it makes
the quotient smaller. *Share* is the measured speed-up ÷ that quotient.

    python benchmarks/pictures.py                    # two minutes
    python benchmarks/pictures.py --only llava --batches 1
"""

from __future__ import annotations

import copy
import json
import logging
import os
import statistics
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from machine import processor
from rich.console import Console
from rich.table import Table
from torch import nn

import ullage

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # rows are padded as in the tests

from maintenance.pictures import picture_samples  # noqa: E402
from tests.support.picture_types import PaddedCollator  # noqa: E402
from ullage.attention.support import text_modules  # noqa: E402

SEQUENCES, MOST = 8, 300
_TEXT: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64,
    "patch_size": 8,
}  # fmt: skip
_QWEN = {
    "depth": 3, "hidden_size": 192, "out_hidden_size": 256, "intermediate_size": 768, "num_heads": 3, "patch_size": 8,
    "spatial_merge_size": 2, "window_size": 64, "fullatt_block_indexes": [1],
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE}, "vision_config": _QWEN, "image_token_id": 3,
        "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
        "image_token_index": 3, "vision_feature_layer": -1,
    },
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 128, "query_pre_attn_scalar": 64}, "vision_config": _TOWER,
        "image_token_index": 3, "boi_token_index": 5, "eoi_token_index": 6, "mm_tokens_per_image": 16,
    },
}  # fmt: skip


def build(model_type: str) -> Any:
    """A model with random weights."""
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).train()


def draw(model: nn.Module, seed: int) -> list[dict[str, Any]]:
    """Sequences of which half have images, with texts of lognormal lengths (median 30, σ 1) around them."""
    random = np.random.default_rng(seed)
    images = random.permutation([0, 1, 0, 3, 0, 1, 0, 2])
    texts = np.clip(random.lognormal(np.log(30), 1.0, 100), 2, MOST).astype(int)
    sizes = [(4, 4), (16, 20), (8, 6), (6, 16), (12, 12)]
    return picture_samples(model, seed=seed, images=images.tolist(), sizes=sizes, texts=texts.tolist())


def flops(model: Any, samples: list[dict[str, Any]], slots: np.ndarray) -> float:
    """FLOPs of a forward over these images and rows of so many slots."""
    vision = model.config.vision_config
    held = {id(part) for _, part in text_modules(model) if isinstance(part, nn.Linear)}
    held.add(id(model.get_output_embeddings()))
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    text = sum(each.weight.numel() for each in linear if id(each) in held)
    tower = sum(each.weight.numel() for each in linear if id(each) not in held)
    tower += sum(each.weight.numel() for each in model.modules() if isinstance(each, (nn.Conv2d, nn.Conv3d)))
    hidden, layers = vision.hidden_size, getattr(vision, "depth", None) or vision.num_hidden_layers
    pairs = 0.0
    if "image_grid_thw" in (fields := {name for sample in samples for name in sample}):
        sizes = torch.cat(
            [sample["image_grid_thw"].prod(1) for sample in samples if "image_grid_thw" in sample]
        ).numpy()
        whole, window = len(vision.fullatt_block_indexes), (vision.window_size // vision.patch_size) ** 2
        pairs = whole * (sizes.astype(float) ** 2).sum() + (layers - whole) * (sizes * np.minimum(window, sizes)).sum()
    else:
        assert "pixel_values" in fields
        each = (vision.image_size // vision.patch_size) ** 2
        sizes = np.full(sum(len(sample.get("pixel_values", ())) for sample in samples), each)
        pairs = layers * (sizes.astype(float) ** 2).sum()
    of_text = 2 * text * slots.sum() + 4 * _TEXT["hidden_size"] * _TEXT["num_hidden_layers"] * np.square(slots).sum()
    return float(of_text + 2 * tower * sizes.sum() + 4 * hidden * pairs)


def measure(padded: Any, packed: Any, seed: int, repeats: int) -> dict[str, float]:
    """Both ways on one batch; raises where the losses differ."""
    samples = draw(padded, seed)
    lengths = np.array([len(sample["input_ids"]) for sample in samples], float)
    rows = PaddedCollator(padded)(samples) | {"use_cache": False}
    ways = {
        "padded": (padded, rows),
        "packed": (packed, ullage.RaggedBatch.from_samples(samples).to_flattened()),
    }
    best, losses = dict.fromkeys(ways, float("inf")), {}
    for turn in range(repeats + 1):
        for name, (model, keywords) in ways.items():
            model.zero_grad()
            began = time.process_time()
            loss = model(**keywords).loss
            loss.backward()
            taken = time.process_time() - began
            losses[name] = float(loss.detach())
            if turn:  # the first one warms up
                best[name] = min(best[name], taken)
    if abs(losses["padded"] - losses["packed"]) > 1e-4 * losses["padded"]:
        raise RuntimeError(f"the ways disagree: losses {losses}")
    allowed = flops(padded, samples, np.full_like(lengths, lengths.max())) / flops(padded, samples, lengths)
    items = "image_grid_thw" if "image_grid_thw" in rows else "pixel_values"
    images = sum(len(sample.get(items, ())) for sample in samples)
    return {
        "seed": seed,
        "tokens": int(lengths.sum()),
        "images": images,
        "slots": int(lengths.max() * len(lengths)),
        "padded_seconds": best["padded"],
        "packed_seconds": best["packed"],
        "speed_up": best["padded"] / best["packed"],
        "allowed": allowed,
        "share": best["padded"] / best["packed"] / allowed,
    }


def main(
    only: Annotated[list[str], typer.Option(help="A model; repeat for several.")] = list(MODELS),  # noqa: B006
    batches: Annotated[int, typer.Option(min=1, help="Batches of each model.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way and batch.")] = 7,
    output: Annotated[Path, typer.Option(help="Folder of the JSON.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Print a table and write dated JSON."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    load, rows = os.getloadavg()[0], []
    table = Table("model", "batch", "padded tokens/s", "packed tokens/s", "images/s", "speed-up", "allowed", "share")
    for name in only:
        padded = build(name)
        packed = copy.deepcopy(padded)
        ullage.pack_model(packed)
        for seed in range(batches):
            found = measure(padded, packed, seed, repeats)
            rows.append({"model": name, **found})
            rates = (found["tokens"] / found["padded_seconds"], found["tokens"] / found["packed_seconds"])
            images = [found["images"] / found[f"{way}_seconds"] for way in ("padded", "packed")]
            table.add_row(
                name, str(seed), *(f"{rate:,.0f}" for rate in rates), f"{images[0]:.1f}, {images[1]:.1f}",
                *(f"{found[each]:.2f}" for each in ("speed_up", "allowed", "share")),
            )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    for name in only:
        shares = [row["share"] for row in rows if row["model"] == name]
        console.print(f"{name}: share {min(shares):.2f} at worst, median {statistics.median(shares):.2f}")
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "threads": 1, "load": [load, os.getloadavg()[0]]},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {"sequences": SEQUENCES, "repeats": repeats, "clock": "process_time"},
        "rows": rows,
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"pictures_rates_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
