"""Conversations with images: rows made samples by a processor of transformers, labels where the assistant speaks.

A row is LLaVA's, ``{"image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, ...]}``, or a
chat, ``{"images": [...], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ...},
...]}]}``, or a ``prompt`` and a ``completion``, both of messages. An image stands where ``<image>`` or a part of type
``image`` is; images without a place stand before the first user message, as TRL has it.

A sample holds the token ids, the labels, what the processor gives beside them by token, and its images by item: their
own number of rows in each sample (``pixel_values``, ``image_grid_thw`` and others).

The processor writes many tokens for an image where the template writes one. The text of the template is therefore
tokenized as it is too: an assistant's turn begins as many tokens later in the sample as the images before it are longer
there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError, UllageError, first_line
from ullage.datasets.pictures import PictureReader

#: A column of whole chats; the second name is that of rows with ``from`` and ``value``.
CHAT_COLUMNS = ("messages", "conversations")
PROMPT, COMPLETION = "prompt", "completion"
#: What a chat template marks the assistant's words with.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Columns of images beside conversations.
IMAGE_COLUMNS = ("images", "image")
#: All columns that a conversation with images is read from.
PICTURE_COLUMNS = (*CHAT_COLUMNS, PROMPT, COMPLETION, *IMAGE_COLUMNS)
#: Where an image stands in a text.
PLACE = "<image>"
_PLACES = re.compile(rf"\n?{PLACE}\n?")
_ROLES = {"human": "user", "gpt": "assistant"}
#: Stands for an image where its place among the turns is looked for.
_SENTINEL = "\ufdd0"


@dataclass(frozen=True)
class PictureChat:
    """A conversation: messages whose contents are lists of parts, and the images in the order of their places.

    ``spoken``: messages before this one are a prompt.
    """

    messages: list[dict[str, Any]]
    images: list[Any]
    spoken: int = 0


def is_picture_chat(row: Any) -> bool:
    """Whether a row is a conversation, with images or without."""
    return isinstance(row, Mapping) and (
        any(_are_messages(row.get(name)) for name in CHAT_COLUMNS)
        or (_are_messages(row.get(PROMPT)) and _are_messages(row.get(COMPLETION)))
    )


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def picture_chat(row: Mapping[str, Any], where: str) -> PictureChat:
    """The conversation of a row. Raises ``InputError`` for one that is none, and for images without places."""
    if not is_picture_chat(row):
        raise InputError(
            "a row is no conversation",
            where=where,
            expected='a list of {"role": ..., "content": ...} as messages, or of {"from": ..., "value": ...} as '
            "conversations",
            found=f"columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__,
        )
    before: list[Any] = []
    spoken = next((row[name] for name in CHAT_COLUMNS if _are_messages(row.get(name))), None)
    if spoken is None:
        before, spoken = [*row[PROMPT]], row[COMPLETION]
    beside = _images_beside(row)
    # A text is searched for places of images only where the row has images: others may speak of <image>.
    has_own = any(isinstance(each.get("content"), list) for each in (*before, *spoken))
    inline: list[Any] = []
    messages = [_message(each, bool(beside), inline, where) for each in (*before, *spoken)]
    waiting = [place for place, image in enumerate(inline) if image is None]
    if beside and not waiting and not (has_own and inline):
        user = next((each for each in messages if each["role"] == "user"), messages[0])
        user["content"][:0] = [{"type": "image"} for _ in beside]
        inline, waiting = [None] * len(beside), list(range(len(beside)))
    if len(waiting) != len(beside):
        raise InputError(
            "the images of a row and their places disagree",
            where=where,
            expected=f"{len(waiting)} images, one for each {PLACE} or part of type image",
            found=f"{len(beside)}",
        )
    for place, image in zip(waiting, beside, strict=True):
        inline[place] = image
    return PictureChat(messages, inline, len(before))


def _images_beside(row: Mapping[str, Any]) -> list[Any]:
    """The images in the columns beside a conversation."""
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        if value is not None:
            return [each for each in value if each is not None] if isinstance(value, (list, tuple)) else [value]
    return []


def _message(message: Any, has_images: bool, inline: list[Any], where: str) -> dict[str, Any]:
    """A message with its role and parts; its images, or ``None`` for each that is named beside, go to ``inline``."""
    role = message.get("role") or message.get("from")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if not isinstance(role, str) or not isinstance(content, (str, list, tuple)):
        raise InputError(
            "a message has no role or no content",
            where=where,
            expected='{"role": ..., "content": ...}, or {"from": ..., "value": ...}',
            found=repr(dict(message))[:60],
        )
    parts: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts = _PLACES.split(content) if has_images else [content]
        for number, text in enumerate(texts):
            if number:
                parts.append({"type": "image"})
                inline.append(None)
            if text:
                parts.append({"type": "text", "text": text})
        content = ()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            parts.append({"type": "image"})
            inline.append(_inline_image(part))
        else:
            raise InputError("a part of a message is neither text nor an image", where=where, found=repr(part)[:60])
    return {"role": _ROLES.get(role, role), "content": parts}


def _inline_image(part: Mapping[str, Any]) -> Any:
    """The image that a part holds or names; ``None`` where it is beside the conversation."""
    for name in ("image", "path", "url", "image_url", "base64"):
        value = part.get(name)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if value is not None:
            return f"data:{value[:16]}" if name == "base64" else value
    return None


@dataclass(frozen=True)
class PictureEncoder:
    """Rows of conversations made samples.

    Attributes:
        processor: of transformers, with a chat template, a tokenizer and an image processor.
        reader: of the images.
    """

    processor: Any
    reader: PictureReader = field(default_factory=PictureReader)

    def encode(self, row: Mapping[str, Any], where: str) -> dict[str, Tensor]:
        """The sample of a row: each of its images is decoded once.

        Raises ``InputError`` that names ``where`` for a row that is no conversation, an image that cannot be read, and
        what the processor refuses.
        """
        chat = picture_chat(row, where)
        images = [self.reader.read(image, where) for image in chat.images]
        try:
            text, spans = self._rendered(chat)
            made = self._processed(text, images)
            ids = made["input_ids"][0]
            mask = self._mask(text, spans, images, ids.tolist())
        except UllageError:
            raise
        except Exception as error:  # a template and a processor raise whatever they like
            raise InputError(
                "the processor cannot make a sample of this row",
                where=where,
                found=f"{type(error).__name__}: {first_line(error)}",
            ) from error
        sample = {name: self.of_one(name, value, ids) for name, value in made.items() if name != "attention_mask"}
        return {**sample, "labels": torch.where(mask, ids, IGNORED_LABEL)}

    @cached_property
    def _template(self) -> str:
        found = getattr(self.processor, "chat_template", None) or self.processor.tokenizer.chat_template
        if isinstance(found, Mapping):
            found = found.get("default")
        if not isinstance(found, str):
            raise InputError(
                "the processor has no chat template",
                where=type(self.processor).__name__,
                expected="one, for conversations",
                hint="set processor.chat_template",
            )
        return found

    def _render(self, messages: Sequence[Any], **options: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and the spans of letters that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = render_jinja_template(
            [[*messages]], chat_template=self._template, **options, **self.processor.tokenizer.special_tokens_map
        )
        return texts[0], [(int(start), int(stop)) for start, stop in marks[0]] if marks else []

    def _rendered(self, chat: PictureChat) -> tuple[str, list[tuple[int, int, int]]]:
        """The text of a chat, and of each span that counts its letters and the number of images before it."""
        if MARKED.search(self._template):
            whole, marks = self._render(chat.messages, return_assistant_tokens_mask=True)
            # A prompt may hold turns of the assistant's; what follows it is asked for.
            begin = len(self._render(chat.messages[: chat.spoken])[0]) if chat.spoken else 0
            befores = [len(chat.images)] * len(marks)
            if chat.images and not _are_first(chat):
                marked = [_with_sentinels(message) for message in chat.messages]
                text, places = self._render(marked, return_assistant_tokens_mask=True)
                befores = [text[:start].count(_SENTINEL) for start, _ in places]
            found = zip(marks, befores, strict=True)
            return whole, [(start, stop, images) for (start, stop), images in found if start >= begin]
        whole, _ = self._render(chat.messages)
        spans, images = [], 0
        for number, message in enumerate(chat.messages):
            if message["role"] == "assistant" and number >= chat.spoken:
                before, _ = self._render(chat.messages[:number], add_generation_prompt=True)
                after, _ = self._render(chat.messages[: number + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    raise InputError(
                        "the chat template writes a turn in another way when more follow, so that the assistant's "
                        "turns cannot be told from the rest",
                        found=f"turn {number + 1} of {len(chat.messages)}",
                        hint="take a template that marks them with {% generation %} and {% endgeneration %}",
                    )
                spans.append((len(before), len(after), images))
            images += sum(part["type"] == "image" for part in message["content"])
        return whole, spans

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text as it is, one for the place of an image."""
        tokenizer = self.processor.tokenizer
        return list(tokenizer(text, add_special_tokens=self._adds(text), verbose=False)["input_ids"])

    def _adds(self, text: str) -> bool:
        # As transformers does: a template that begins with the token that begins a text has written it.
        begin = self.processor.tokenizer.bos_token
        return begin is None or not text.startswith(begin)

    def _processed(self, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        made = self.processor(
            text=[text],
            images=[[*images]] if images else None,
            add_special_tokens=self._adds(text),
            return_tensors="pt",
        )
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}

    def _mask(self, text: str, spans: Sequence[tuple[int, int, int]], images: Sequence[Any], ids: list[int]) -> Tensor:
        """Which tokens of a sample are in the spans, bool [length]."""
        mask, plain = torch.zeros(len(ids), dtype=torch.bool), self._tokens(text)
        longer = {0: 0, len(images): len(ids) - len(plain)}
        for start, stop, before in spans:
            if before not in longer:  # other images follow: how long are those so far?
                part = text[:start]
                made = self._processed(part, images[:before])
                longer[before] = made["input_ids"].shape[1] - len(self._tokens(part))
            first, last = (common_tokens(self._tokens(text[:place]), plain) for place in (start, stop))
            mask[first + longer[before] : last + longer[before]] = True
        return mask

    def of_one(self, name: str, value: Tensor, ids: Tensor) -> Tensor:
        """A field of a batch of one as that of a sample: by token [length, ...], or by item [rows, ...]."""
        by_token = value.ndim > 1 and value.shape[0] == 1 and value.shape[1] == len(ids) and "pixel" not in name
        return value[0] if by_token or (self._by_sample and value.ndim > 1 and value.shape[0] == 1) else value

    @cached_property
    def _by_sample(self) -> bool:
        """Whether the processor gives images as [samples, images, ...], and not all images of a batch end to end."""
        from PIL import Image

        blank = Image.new("RGB", (64, 64))
        return self.processor.image_processor([[blank, blank]], return_tensors="pt")["pixel_values"].shape[0] == 1


def _are_first(chat: PictureChat) -> bool:
    """Whether all images stand before what the assistant says first."""
    seen = False
    for message in chat.messages:
        seen = seen or message["role"] == "assistant"
        if seen and any(part["type"] == "image" for part in message["content"]):
            return False
    return True


def _with_sentinels(message: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "text", "text": _SENTINEL} if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": parts}


def common_tokens(some: Sequence[int], others: Sequence[int]) -> int:
    """Number of leading tokens that two sequences have in common."""
    for place, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return place
    return min(len(some), len(others))
