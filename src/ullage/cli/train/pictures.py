"""Conversations with images for ``ullage train``: how they are told, their processor, a new model for them.

A new model is a small one of type ``qwen2_5_vl``. Its tokenizer is trained on the conversations themselves, and its
image processor cuts images into small patches, so that it takes images of a few pixels too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.core.errors import InputError, UsageError
from ullage.core.extras import needed_by
from ullage.datasets.chats import chat_column, use_template
from ullage.datasets.picture_chats import IMAGE_COLUMNS, PICTURE_COLUMNS, picture_chat
from ullage.datasets.pictures import load_processor, without_clips

if TYPE_CHECKING:
    from ullage.cli.train.settings import TrainCommand

#: The name of a new model that takes images; the kind of samples that it is for.
PICTURES, KIND = "qwen2_5_vl", "pictures"
#: Tokens of a new tokenizer, at most.
_VOCABULARY = 4096
#: Pixels of the side of a patch, patches of the side of a token, pixels of an image that a new processor enlarges to,
#: and shrinks to.
_PATCH, _MERGED, _LEAST, _MOST = 8, 2, 16 * 16, 512 * 512
_MARKS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "begin": "<|vision_start|>",
    "end": "<|vision_end|>",
}
_TURNS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_PARTS = (
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}"
)
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] + '<|im_end|>\\n' }}"
    "{%- elif message['role'] == 'assistant' %}{%- generation %}" + _PARTS + "{%- endgeneration %}"
    "{%- else %}" + _PARTS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def holds_pictures(command: TrainCommand, table: Any) -> bool:
    """Whether the rows of a table are conversations with images: a column of them, a part of one, or so asked for."""
    names = set(table.column_names)
    column = chat_column(table)
    if column is None and not {"prompt", "completion"} <= names:
        return False
    if command.data.image_folder is not None or names & set(IMAGE_COLUMNS):
        return True
    parts = re.compile(r"'type': '(image|image_url)'")
    return column is not None and any(parts.search(str(chat)) for chat in table[column][:100])


def picture_rows(table: Any) -> list[dict[str, Any]]:
    """The conversations of a table, images as they are stored: names, or bytes."""
    import datasets

    for name, feature in table.features.items():
        inner = getattr(feature, "feature", None)
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(inner, datasets.Image):
            table = table.cast_column(name, type(feature)(datasets.Image(decode=False)))
    columns = {name: table[name][:] for name in table.column_names if name in PICTURE_COLUMNS}
    return [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]


def refuse_beside_pictures(command: TrainCommand) -> None:
    """Raise ``UsageError`` for what is not done with conversations with images."""
    data, given = command.data, command.given
    asked = {
        "--streaming": data.streaming,
        "--sample_prompts": command.output.sample_prompts is not None,
        "--text_column": data.text_column is not None,
        "--assistant_only_loss false": "assistant_only_loss" in given and not data.assistant_only_loss,
        "--completion_only_loss false": data.completion_only_loss is False,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UsageError(
                "this is not for conversations with images, which are trained on what the assistant says",
                where=name,
                hint="leave it out",
            )


def image_folder_of(command: TrainCommand, sources: Sequence[str] | None) -> str | None:
    """The folder of the images: the one that is asked for, or the one that the data file lies in."""
    if command.data.image_folder is not None:
        if not Path(command.data.image_folder).is_dir():
            raise InputError("there is no such folder", where="--image_folder", found=command.data.image_folder)
        return command.data.image_folder
    files = [Path(source) for source in sources or ()]
    return str(files[0].parent) if len(files) == 1 and files[0].is_file() else None


# The processor


def processor_for(command: TrainCommand, rows: Sequence[Any], folder: Path | None) -> tuple[Any, str]:
    """The processor of a model or checkpoint in a folder, or a new one, for these rows; and what is said of it."""
    asked = command.data.tokenizer
    if asked is not None:
        found, note = load_processor(asked), asked
    elif folder is not None:
        found, note = load_processor(folder), "the model's own"
    else:
        found = _new_processor(rows)
        note = f"a new one, of {len(found.tokenizer):,} tokens and patches of {_PATCH} x {_PATCH} pixels"
    if command.data.chat_template is not None:
        use_template(found, command.data.chat_template)
    return found, note


def _new_processor(rows: Sequence[Any]) -> Any:
    with needed_by(f"--model {PICTURES}"):
        import PIL  # noqa: F401  (without it transformers fails at a name of its own)
        from transformers import Qwen2_5_VLProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"shortest_edge": _LEAST, "longest_edge": _MOST}
    images = Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=_MERGED, temporal_patch_size=1, size=sizes)
    return without_clips(Qwen2_5_VLProcessor)(images, _new_tokenizer(_texts(rows)), chat_template=_TEMPLATE)


def _texts(rows: Sequence[Any]) -> Iterator[str]:
    for row in rows:
        try:
            chat = picture_chat(row, "")
        except InputError:  # which is told, or left out, where the row is made a sample
            continue
        for message in chat.messages:
            yield message["role"]
            yield from (part["text"] for part in message["content"] if part["type"] == "text")


def _new_tokenizer(texts: Iterator[str]) -> Any:
    """A tokenizer of pieces of words, down to bytes, trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = [*_TURNS, *_MARKS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=marks, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=_TURNS[2], eos_token=_TURNS[1])


# A new model


def picture_config(hidden_size: int, layers: int, ids: dict[str, Any], processor: Any) -> Any:
    """Config of a new model of so many layers, and as many in its tower, for a processor's tokens and patches."""
    from transformers import Qwen2_5_VLConfig

    if processor is None:
        raise InputError(
            "this new model is for conversations with images",
            where=f"--model {PICTURES}",
            found="text",
            hint="take llama, or data with images",
        )
    if hidden_size % 32 or layers < 1:
        raise InputError(
            "the hidden size is a number of heads of 32, and there is a layer",
            where="--model",
            found=f"hidden size {hidden_size}, {layers} layers",
        )
    tokenizer, images, heads = processor.tokenizer, processor.image_processor, hidden_size // 32
    token = tokenizer.convert_tokens_to_ids
    # Larger than is usual: a small model that is trained on little would see nothing of the images for long.
    spread = round(hidden_size**-0.5, 3)
    tower = {
        "initializer_range": spread,
        "depth": layers,
        "hidden_size": hidden_size,
        "out_hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_heads": heads,
        "patch_size": images.patch_size,
        "spatial_merge_size": images.merge_size,
        "temporal_patch_size": images.temporal_patch_size,
        "window_size": 4 * images.patch_size * images.merge_size,
        "fullatt_block_indexes": [*range(layers)],
    }
    text = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": True,
        "initializer_range": spread,
        # A quarter of the angles counts on, the others count rows and columns, as in Qwen2-VL; these turn the least,
        # and an image of few patches has few columns.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
        **ids,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=token(_MARKS["image"]),
        video_token_id=token(_MARKS["video"]),
        vision_start_token_id=token(_MARKS["begin"]),
        vision_end_token_id=token(_MARKS["end"]),
        **{name: value for name, value in ids.items() if name != "vocab_size"},
    )


def picture_script(command: TrainCommand, row: Any) -> str:
    """A script that loads the model of a finished run, and asks it what a row asks."""
    chat = picture_chat(row, "")
    begun = next((at for at, message in enumerate(chat.messages) if message["role"] == "assistant"), None)
    image = "IMAGE.png"
    asked = [
        {"role": message["role"], "content": [
            {"type": "image", "image": image} if part["type"] == "image" else part for part in message["content"]
        ]}
        for message in chat.messages[:begun]
    ]  # fmt: skip
    folder = command.place if "://" not in command.place else Path(command.place).name
    return f"""\
from transformers import AutoModelForImageTextToText
from ullage.datasets import load_processor

model = AutoModelForImageTextToText.from_pretrained({folder!r})
processor = load_processor({folder!r})
chat = {asked!r}
options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
prompt = processor.apply_chat_template(chat, **options)
written = model.generate(**prompt, max_new_tokens=64)
print(processor.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))"""
