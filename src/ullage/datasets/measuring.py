"""Lengths of texts in tokens, of a tokenizer or of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ullage.errors import InputError, first_line
from ullage.extras import needed_by

#: The unit of text measured without a vocabulary.
BYTES = "byte tokens"

#: Texts in, their lengths in tokens out.
Measure = Callable[[Sequence[str]], list[int]]


def measure(tokenizer: str | None) -> Measure:
    """The function that counts the tokens of texts; for ``None``, bytes of UTF-8 and one for the end, as in ByT5."""
    if tokenizer is None:
        # JSON may hold lone surrogates, which strict UTF-8 refuses.
        return lambda texts: [len(text.encode("utf-8", "surrogatepass")) + 1 for text in texts]
    encode = load_tokenizer(tokenizer)
    # A thousand texts at a time, so that the ids of few are in memory.
    return lambda texts: [
        len(ids) for start in range(0, len(texts), 1000) for ids in encode(texts[start : start + 1000])
    ]


def load_tokenizer(name: str | None) -> Callable[[Sequence[str]], list[list[int]]]:
    """The function from texts to token ids: for ``None`` the byte tokenizer, else what ``AutoTokenizer`` loads."""
    with needed_by("a tokenizer"):
        from transformers import AutoTokenizer
    if name is None:
        from ullage.datasets.text import byte_tokenizer  # loads torch, which measuring bytes does not need

        loaded = byte_tokenizer()
    else:
        try:
            loaded = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            raise InputError("a tokenizer cannot be loaded", where=name, found=first_line(error)) from error
    return lambda texts: loaded(list(texts))["input_ids"]
