"""Processors and models of the types that take images, small, made of parts: nothing is read from anywhere."""

from __future__ import annotations

from typing import Any

import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ullage.datasets.pictures import without_clips

#: What stands for an image in the text of a template, by the type of model.
PLACES = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "llava": "<image>\n",
    "gemma3": "<boi>",
    "idefics3": "<image>",
}
_SPECIAL = (
    *("<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"),
    *("<|vision_end|>", "<image>", "<boi>", "<eoi>", "<soft>", "<fake_token_around_image>", "<global-img>"),
    "<end_of_utterance>",
)


def template(place: str, marked: bool = False) -> str:
    """A chat template; ``marked``: with the words of the assistant marked."""
    content = (
        "{%- if m['content'] is string %}{{- m['content'] }}{%- else %}{%- for p in m['content'] %}"
        "{%- if p['type'] == 'image' %}{{- '"
        + place.replace("\n", "\\n")
        + "' }}{%- else %}{{- p['text'] }}{%- endif %}"
        "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}"
    )
    spoken = "{%- generation %}" + content + "{%- endgeneration %}" if marked else content
    return (
        "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}"
        "{%- if m['role'] == 'assistant' %}" + spoken + "{%- else %}" + content + "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


def tokenizer(**marks: str) -> Any:
    """A tokenizer of bytes, with the marks of all types."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*_SPECIAL])
    more = {"extra_special_tokens": marks} if marks else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>", **more)


def processor(kind: str, *, marked: bool = False) -> Any:
    """The processor of a type of model."""
    text = {"chat_template": template(PLACES[kind], marked)}
    half = {"height": 16, "width": 16}
    if kind == "qwen2_5_vl":
        sizes = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=sizes)
        return without_clips(transformers.Qwen2_5_VLProcessor)(images, tokenizer(), **text)
    if kind == "llava":
        images = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=half)
        return transformers.LlavaProcessor(
            images, tokenizer(), patch_size=4, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, **text,
        )  # fmt: skip
    if kind == "gemma3":
        marks = tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>")
        return transformers.Gemma3Processor(Gemma3ImageProcessorPil(size=half), marks, image_seq_length=4, **text)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 16}, max_image_size={"longest_edge": 16})
    return transformers.Idefics3Processor(images, tokenizer(), image_seq_len=4, **text)


def picture(colour: str = "red", size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A picture with a rectangle in it."""
    made = Image.new("RGB", size, colour)
    ImageDraw.Draw(made).rectangle((2, 2, 6, 9), fill="white")
    return made


def asked(question: str, answer: str, images: int = 1) -> list[dict[str, str]]:
    """LLaVA's form of a question about images."""
    return [{"from": "human", "value": "<image>\n" * images + question}, {"from": "gpt", "value": answer}]


def model(kind: str, vocab_size: int = 272, **options: Any) -> Any:
    """A model of a type, its weights drawn from one seed, for the processor of this type."""
    marks = tokenizer()
    ids = {name: marks.convert_tokens_to_ids(name) for name in _SPECIAL}
    text: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": ids["<pad>"], "bos_token_id": ids["<s>"],
        "eos_token_id": ids["<|im_end|>"],
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        tower = {
            "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        config: Any = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=tower, image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )  # fmt: skip
    else:
        assert kind == "llava"
        tower = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "projection_dim": 32,
        }  # fmt: skip
        config = transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"}, vision_config=tower, image_token_index=ids["<image>"],
            vision_feature_layer=-1,
        )  # fmt: skip
    transformers.set_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, **options)


#: Rows with no image, one, two and of unequal sizes.
ROWS: list[dict[str, Any]] = [
    {"images": [picture()], "conversations": asked("what?", "red")},
    {"conversations": asked("hi", "hello there", 0)},
    {
        "images": [picture("blue", (24, 16)), picture("green", (8, 32))],
        "conversations": asked("and?", "blue, green", 2),
    },
    {"images": [picture("black", (32, 24))], "conversations": asked("which colour is this?", "black")},
    {"conversations": asked("no image at all, so", "one word", 0)},
    {"images": [picture("white")], "conversations": [*asked("hi", "hello", 0), *asked("what?", "white")]},
    {"images": [picture("pink", (16, 32))], "conversations": asked("what?", "pink")},
    {"conversations": asked("bye", "bye", 0)},
    # A step of text alone.
    *({"conversations": asked(f"text {i}, no image", "indeed " * i, 0)} for i in range(1, 5)),
]
