"""A model that answers questions about pictures, trained from nothing, on pictures that are drawn here.

    python examples/17_pictures.py

Each picture shows a shape of some colour at some place. A question asks for one of the three, of one picture or of one
among several, and has four answers, each as often as the others: who guesses is right once in four. The rows have
LLaVA's form; the model is a small Qwen2.5-VL, packed: no token and no patch of padding. Afterwards it answers questions
about pictures that it has not seen, and the same questions with the pictures exchanged.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    set_seed,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ullage.datasets import PictureReader
from ullage.datasets.pictures import without_clips
from ullage.training import RaggedCollator, Trainer, TrainingArguments

SHAPES = ("square", "ring", "bar", "post")
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "white": (240, 240, 240), "yellow": (240, 220, 50)}
#: Where a shape may be, its quarter of the picture and the colour behind it there: a lake and a wood, by day and night.
PLACES = {
    "over the lake": ((0, 0), (120, 170, 250)),
    "over the wood": ((1, 0), (20, 20, 90)),
    "on the lake": ((0, 1), (0, 90, 130)),
    "in the wood": ((1, 1), (90, 50, 10)),
}
QUESTIONS = {"shape": "Which shape", "colour": "Which colour", "place": "Where"}
ORDER = ("first", "second")
SIZE = 32
#: Marks of an image, and of turns.
IMAGE, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TURN, STOP, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
PARTS = (
    "{%- for part in message['content'] %}{%- if part['type'] == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{%- generation %}" + PARTS + "{%- endgeneration %}"
    "{%- else %}" + PARTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def new_processor() -> Any:
    """A tokenizer of bytes, and images in patches of 8 x 8 pixels of which four are a token."""
    marks = [IMAGE, VIDEO, BEGIN, END, TURN, STOP, PAD]
    words = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=STOP)
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 512 * 512}
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=1, size=sizes)
    return without_clips(Qwen2_5_VLProcessor)(images, tokenizer, chat_template=TEMPLATE)


def new_model(processor: Any, hidden: int = 128, layers: int = 2) -> Any:
    """A model of two layers, with a tower of two."""
    # Larger weights than is usual: a small model that is trained on little would see nothing of the images for long.
    common = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "initializer_range": 0.088}
    tower = {**common, "depth": layers, "out_hidden_size": hidden, "num_heads": 4, "patch_size": 8}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 64, "fullatt_block_indexes": [0, 1]}
    token = processor.tokenizer.convert_tokens_to_ids
    ids = {"pad_token_id": token(PAD), "eos_token_id": token(STOP), "bos_token_id": None}
    text = {**common, **ids, "vocab_size": len(processor.tokenizer), "num_hidden_layers": layers}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    # A quarter of the angles counts on, the others count rows and columns; an image of few patches has few of these.
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = dict(zip(names, map(token, (IMAGE, VIDEO, BEGIN, END)), strict=True))
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **marks, **ids)
    )


def draw(seen: dict[str, str], chance: random.Random) -> Image.Image:
    """A picture of a shape; its size, and where it is within its quarter, are left to chance."""
    picture, half = Image.new("RGB", (SIZE, SIZE)), SIZE // 2
    pen, radius = ImageDraw.Draw(picture), chance.randint(5, 6)
    for (column, row), colour in PLACES.values():
        pen.rectangle((column * half, row * half, (column + 1) * half, (row + 1) * half), fill=colour)
    x, y = (at * half + half // 2 + chance.randint(-1, 1) for at in PLACES[seen["place"]][0])
    colour = COLOURS[seen["colour"]]
    wide = 2 if seen["shape"] == "post" else radius
    high = 2 if seen["shape"] == "bar" else radius
    box = (x - wide, y - high, x + wide, y + high)
    if seen["shape"] == "ring":
        pen.rectangle(box, outline=colour, width=2)
    else:
        pen.rectangle(box, fill=colour)
    return picture


def make_rows(number: int, folder: Path, name: str, chance: random.Random) -> list[dict[str, Any]]:
    """Questions about one picture, or about one of two; each answer of a question equally often."""
    answers = {"shape": list(SHAPES), "colour": list(COLOURS), "place": list(PLACES)}
    rows = []
    for at in range(number):
        kind = list(QUESTIONS)[at % 3]
        count = 1 + at // 12 % 2
        asked = chance.randrange(count)
        names, seen = [], []
        for place in range(count):
            seen.append({part: chance.choice(choices) for part, choices in answers.items()})
            if place == asked:
                seen[-1][kind] = answers[kind][at // 3 % 4]
            names.append(f"{name}-{at}-{place}.png")
            draw(seen[-1], chance).save(folder / names[-1])
        which = f" in the {ORDER[asked]} picture?" if count > 1 else " is it?"
        said = [
            {"from": "human", "value": "<image>\n" * count + QUESTIONS[kind] + which},
            {"from": "gpt", "value": seen[asked][kind]},
        ]
        rows.append({"image": names, "conversations": said})
    return rows


def answers_of(
    model: Any, processor: Any, rows: list[dict[str, Any]], images: list[list[str]], reader: Any
) -> list[str]:
    """What the model answers to the questions of rows about these images."""
    said = []
    for row, names in zip(rows, images, strict=True):
        pictures = [{"type": "image", "image": reader.read(name, name)} for name in names]
        question = row["conversations"][0]["value"].replace("<image>\n", "")
        chat = [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]
        prompt = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        written = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        said.append(processor.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="questions to train on")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--held-out", type=int, default=240, help="questions to answer afterwards")
    parser.add_argument("--folder", help="keep the pictures and the model here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        run(folder, arguments)


def run(folder: Path, arguments: argparse.Namespace) -> None:
    """Draw, train, and ask."""
    pictures, chance = folder / "pictures", random.Random(0)
    pictures.mkdir(parents=True, exist_ok=True)
    kept = make_rows(arguments.held_out, pictures, "held", chance)
    rows = make_rows(arguments.rows, pictures, "train", chance)

    begun = time.perf_counter()
    set_seed(42)
    processor, reader = new_processor(), PictureReader(pictures)
    model, collator = new_model(processor), RaggedCollator(processor=processor, image_folder=pictures)
    sizes = {"packing_capacity": 2048, "per_device_train_batch_size": 48, "num_train_epochs": arguments.epochs}
    rates = {"learning_rate": 2e-3, "lr_scheduler_type": "cosine", "warmup_steps": 0.05, "save_strategy": "no"}
    settings = TrainingArguments(str(folder / "model"), report_to=[], **sizes, **rates)
    Trainer(model, settings, collator, rows, processing_class=processor).train()  # pyright: ignore
    print(f"trained in {time.perf_counter() - begun:.0f} s")

    model.eval()
    wanted = [row["conversations"][1]["value"] for row in kept]
    own = [row["image"] for row in kept]
    # Each question gets the pictures of another one, of as many pictures.
    exchanged = list(own)
    for count in {len(names) for names in own}:
        alike = [at for at, names in enumerate(own) if len(names) == count]
        others = chance.sample(alike, len(alike))
        for at, other in zip(others, [*others[1:], others[0]]):
            exchanged[at] = own[other]
    with torch.no_grad():
        right = [
            sum(said == answer for said, answer in zip(answers_of(model, processor, kept, images, reader), wanted))
            for images in (own, exchanged)
        ]
    print(f"held-out questions: {right[0] / len(kept):.1%} right, guessing 25.0%")
    print(f"with the pictures exchanged: {right[1] / len(kept):.1%} right")


if __name__ == "__main__":
    main()
