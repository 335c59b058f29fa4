"""Chats and prompts with completions: rows of messages made tokens by a chat template, with a label where they train.

A row has ``messages`` (a list of ``{"role": ..., "content": ...}``), or ``prompt`` and ``completion``, both texts or
both messages; ``tools`` and ``chat_template_kwargs`` beside them go to the template. The token ids and labels are those
that TRL's ``SFTTrainer`` makes of the same rows: the loss is on the completion alone unless asked otherwise, and on all
of a chat unless asked for the assistant's turns alone.

Which tokens the assistant says, the template marks (``{% generation %}``). Where it has no such marks, its text up to
each turn tells, which must begin the text of the whole chat.

Source: trl 1.16 ``trainer/sft_trainer.py``, ``_prepare_dataset``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError, first_line
from ullage.datasets.tables import no_rows
from ullage.datasets.text import TokenDataset, token_dataset

#: A column of whole chats; the second name is that of rows with ``from`` and ``value``.
CHAT_COLUMNS = ("messages", "conversations")
PROMPT, COMPLETION = "prompt", "completion"
_BESIDE = ("tools", "chat_template_kwargs")

#: What a chat template marks the assistant's words with.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Templates by name: each turn between two marks, its role in the first line; the assistant's is marked for the loss.
TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}"
        "{{- '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['role'] == 'assistant' %}"
        "{%- generation %}{{- message['content'] + '<|im_end|>\\n' }}{%- endgeneration %}"
        "{%- else %}{{- message['content'] + '<|im_end|>\\n' }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
}

#: The tokens of these templates that begin and end a turn.
MARKS = {"chatml": ("<|im_start|>", "<|im_end|>")}
#: What the assistant says where a template is asked how it ends a turn.
_SAID = "ZyX"

Row = Mapping[str, Any]


def chat_column(table: Any) -> str | None:
    """The column of a table that holds chats: a name of :data:`CHAT_COLUMNS`, with messages in it."""
    return next((name for name in CHAT_COLUMNS if name in table.column_names and _are_chats(table, name)), None)


@dataclass(frozen=True)
class ReadChats:
    """The rows of a table of chats; ``rows`` are their numbers, ``invalid`` those of rows that were left out."""

    samples: list[Row]
    rows: list[int]
    invalid: list[int]


def chats_of(
    table: Any,
    column: str | None,
    where: str,
    *,
    skip_invalid: bool = False,
    place_of: Callable[[int], str] | None = None,
) -> ReadChats | None:
    """The rows of a table that holds chats, or prompts with completions; ``None`` for one of neither.

    Args:
        table: of ``datasets``.
        column: of the chats, if asked for by name.
        where: the table is from, for messages.
        skip_invalid: leave out rows that are no chats, and say which; otherwise they raise ``InputError``.
        place_of: how a row is named in a message.
    """
    chats = chat_column(table) if column is None else column
    names: dict[str, str] = {}
    if chats is not None and chats in table.column_names and _are_chats(table, chats):
        names = {str(chats): "messages"}
    elif column is None and {PROMPT, COMPLETION} <= set(table.column_names):
        names = {PROMPT: PROMPT, COMPLETION: COMPLETION}
    else:
        return None
    names.update((name, name) for name in _BESIDE if name in table.column_names)
    columns: dict[str, list[Any]] = {own: table[name][:] for name, own in names.items()}
    kept: dict[int, Row] = {}
    invalid: list[int] = []
    for i, values in enumerate(zip(*columns.values())):
        try:
            place = f"row {i} counted from 0" if place_of is None else place_of(i)
            kept[i] = _checked(dict(zip(columns, values)), f"{where}, {place}")
        except InputError:
            if not skip_invalid:
                raise
            invalid.append(i)
    if not kept:
        raise no_rows(where)
    return ReadChats([*kept.values()], [*kept], invalid)


def _are_chats(table: Any, column: str) -> bool:
    """Whether the first value of a column that is not empty is a list of messages."""
    first = next((value for value in table[column] if value), None)
    if not isinstance(first, list) or not isinstance(first[0], dict):
        return False
    return "role" in first[0] or {"from", "value"} <= first[0].keys()


def _checked(row: dict[str, Any], where: str) -> Row:
    for name in ("messages", PROMPT, COMPLETION):
        if name not in row:
            continue
        value = row[name]
        if isinstance(value, list):
            row[name] = value = [_message(each) for each in value]
        if isinstance(value, str) and name != "messages" and (value or name == COMPLETION):
            continue
        good = isinstance(value, list) and value and all(isinstance(each.get("role"), str) for each in value)
        if not good:
            raise InputError(
                "a row is no chat" if name == "messages" else "a row is no prompt with its completion",
                where=f"{where}, column {name!r}",
                expected='a list of {"role": ..., "content": ...}' + ("" if name == "messages" else ", or a text"),
                found=repr(value)[:60],
            )
    if PROMPT in row and type(row[PROMPT]) is not type(row[COMPLETION]):
        raise InputError("prompt and completion differ in kind", where=where, expected="two texts, or two lists")
    return row


def _message(message: Any) -> dict[str, Any]:
    """A message under the names that templates read."""
    if not isinstance(message, dict):
        return {}
    other = {"from": "role", "value": "content"}
    return {other.get(name, name): value for name, value in cast(dict[str, Any], message).items()}


def use_template(tokenizer: Any, template: str) -> None:
    """Give a tokenizer the chat template of a file, or one of :data:`TEMPLATES` by name.

    Raises ``InputError`` for anything else.
    """
    path = Path(template)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError("the chat template cannot be read", where=template, found=str(error)) from error
        tokenizer.chat_template = text
    elif template in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[template]
    else:
        raise InputError(
            "there is no such chat template", where=template, expected=f"a file, or one of {', '.join(TEMPLATES)}"
        )


def are_messages(rows: Sequence[Row]) -> bool:
    """Whether rows hold messages, for a chat template, and not prompts and completions that are texts."""
    return not isinstance(rows[0].get(PROMPT), str)


def turn_end(tokenizer: Any) -> str | None:
    """The text that the chat template writes behind what the assistant says last; ``None`` where it writes no chat."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID}]
    try:
        # As a batch of one: a chat without a turn is refused by itself.
        text = tokenizer.apply_chat_template([chat], tokenize=False)[0]
    except Exception:  # a template raises whatever it likes, and may want other messages
        return None
    _, found, after = text.rpartition(_SAID)
    return after.strip() if found else None


def use_end_token(tokenizer: Any, token: str | None = None, *, may_grow: bool = True) -> str | None:
    """Make ``token`` the end token, or else the one that ends the turns of the chat template; returns it.

    A model that is trained on chats has to end with what ends its turns, or it talks to itself. The marks of a
    template of :data:`TEMPLATES` are added to a vocabulary that lacks them, and ``token`` where turns end with it; the
    embeddings of a model have to follow (``model.resize_token_embeddings(len(tokenizer))``).

    Args:
        tokenizer: with a chat template, or with ``token`` in its vocabulary.
        token: the end token; by default that of the template.
        may_grow: whether tokens may be added. Not where a model has been trained with this tokenizer.

    Returns ``None`` where the turns end in no token, so that the end token stays. Raises ``InputError`` for a ``token``
    that is not there.
    """
    template = getattr(tokenizer, "chat_template", None)
    name = next((name for name, text in TEMPLATES.items() if text == template), None)
    after = turn_end(tokenizer) if template is not None else None
    new = list(MARKS[name]) if name is not None else []
    if token is not None and after is not None and after.startswith(token):
        new.append(token)
    known = tokenizer.get_vocab()
    new = [mark for mark in dict.fromkeys(new) if mark not in known]
    if new and may_grow:
        tokenizer.add_tokens(new, special_tokens=True)
        # The byte tokenizer reads every mark as bytes, unless it is told not to.
        tokenizer.split_special_tokens = False
        known = tokenizer.get_vocab()
    if token is not None and token not in known:
        near = get_close_matches(token, [*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens], n=1)
        raise InputError(
            "the end token is not in the vocabulary of the tokenizer",
            where=token,
            expected=f"a token of {len(tokenizer):,}, or what ends a turn of the chat template",
            found=None if after is None else f"turns that end in {after[:20]!r}",
            hint=f"did you mean {near[0]}?" if near else None,
        )
    if token is None:
        marks = sorted({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}, key=len, reverse=True)
        token = next((mark for mark in marks if after and after.startswith(mark)), None)
    if token is not None and token != tokenizer.eos_token:
        tokenizer.eos_token = token
    return token


@dataclass(frozen=True)
class ChatLoss:
    """Which tokens of a chat are trained on.

    Attributes:
        completion_only: only the completion of a prompt; ``None``: where there are prompts
        assistant_only: only what the assistant says
    """

    completion_only: bool | None = None
    assistant_only: bool = False

    def require_none(self, where: str | None = None) -> None:
        """Raise ``InputError`` where something is asked for that plain texts do not have."""
        asked = {"completion_only_loss": self.completion_only, "assistant_only_loss": self.assistant_only}
        for name, value in asked.items():
            if value:
                raise InputError(
                    f"{name} is for chats and prompts",
                    where=where,
                    expected="columns messages, or prompt and completion",
                    found="texts",
                )

    def require_rows(self, rows: Sequence[Row], where: str | None = None) -> None:
        """Raise ``InputError`` where the rows have no completions, or no turns, that could be told from the rest."""
        if self.completion_only and PROMPT not in rows[0]:
            raise InputError(
                "completion_only_loss is for prompts with completions",
                where=where,
                expected="columns prompt and completion",
                found="messages",
                hint="assistant_only_loss trains on the assistant's turns of a chat",
            )
        if self.assistant_only and isinstance(rows[0].get(PROMPT), str):
            raise InputError(
                "assistant_only_loss is for chats", where=where, expected="messages", found="texts in column prompt"
            )


def tokenize_chats(
    rows: Sequence[Row],
    tokenizer: Any,
    max_length: int | None = None,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    numbers: Sequence[int] | None = None,
    skip_invalid: bool = False,
) -> TokenDataset:
    """Data set of the tokens of chats, or of prompts with completions, and of the labels that are trained on.

    Args:
        rows: with ``messages``, or ``prompt`` and ``completion``; perhaps ``tools`` and ``chat_template_kwargs``.
        tokenizer: whose ``chat_template`` renders messages. A completion that is text gets its end token.
        max_length: cut sequences that are longer, in tokens.
        completion_only_loss: train on completions alone; by default where there are prompts.
        assistant_only_loss: train on the assistant's turns alone.
        numbers: of the rows where they came from, for messages; by default their places here.
        skip_invalid: leave out and count chats that the template refuses.

    Sequences that have no token to train on after the cut are left out and counted. Raises ``InputError`` where there
    is no template, where it fails (the message says for which sample), and where the turns cannot be told apart.
    """
    if not len(rows):
        raise InputError("the dataset is empty", expected="at least one sample", found="none")
    loss = ChatLoss(completion_only_loss, assistant_only_loss)
    loss.require_rows(rows)
    return token_dataset(_Encoder(tokenizer, loss).encode(rows, numbers, skip_invalid), max_length, numbers)


def require_template(rows: Sequence[Row], tokenizer: Any) -> None:
    """Raise ``InputError`` where rows of messages meet a tokenizer without a chat template."""
    if are_messages(rows) and getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the tokenizer has no chat template",
            expected="one, for rows of messages",
            hint=f"give --chat_template a file, or {' or '.join(TEMPLATES)}",
        )


class _Encoder:
    """Token ids and labels of rows."""

    def __init__(self, tokenizer: Any, loss: ChatLoss) -> None:
        self._tokenizer, self._loss = tokenizer, loss

    def encode(
        self, rows: Sequence[Row], numbers: Sequence[int] | None = None, skip_invalid: bool = False
    ) -> Iterator[tuple[list[int], list[int] | None] | None]:
        require_template(rows, self._tokenizer)
        for number, row in zip(range(len(rows)) if numbers is None else numbers, rows, strict=True):
            try:
                ids, masks = self._encoded(row)
            except InputError as error:
                raise error.at(f"sample {number}") from error
            except Exception as error:  # a template raises whatever it likes
                if skip_invalid:
                    yield None
                    continue
                raise InputError(
                    "the chat template cannot be applied",
                    where=f"sample {number}",
                    found=f"{type(error).__name__}: {first_line(error)}",
                ) from error
            if not masks:
                yield ids, None
                continue
            counts = [all(bits) for bits in zip(*masks, strict=True)]
            yield ids, [token if counted else IGNORED_LABEL for token, counted in zip(ids, counts, strict=True)]

    def _encoded(self, row: Row) -> tuple[list[int], list[Sequence[bool | int]]]:
        if PROMPT not in row:
            ids, spoken = self._chat(row["messages"], row)
            return ids, spoken
        if isinstance(row[PROMPT], str):
            before, (ids, masks) = self._ids(row[PROMPT]), (self._ended(row[PROMPT] + row[COMPLETION]), [])
        else:
            before = self._applied(row[PROMPT], row, add_generation_prompt=True)
            ids, masks = self._chat([*row[PROMPT], *row[COMPLETION]], row)
        if self._loss.completion_only is False:
            return ids, masks
        # The prompt alone may end in other tokens than before the completion, which then begins where they part.
        start = common_tokens(before, ids)
        if start == len(ids) and isinstance(row[PROMPT], str) and ids[-1] == self._tokenizer.eos_token_id:
            start -= 1  # the end of an empty completion, which the tokenizer puts behind any text
        return ids, [*masks, [place >= start for place in range(len(ids))]]

    def _chat(self, messages: list[dict[str, Any]], row: Row) -> tuple[list[int], list[Sequence[bool | int]]]:
        if not self._loss.assistant_only:
            return self._applied(messages, row), []
        template = self._tokenizer.get_chat_template(None, _tools(row))
        if MARKED.search(template) and getattr(self._tokenizer, "is_fast", False):
            made = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **_options(row)
            )
            return list(made["input_ids"]), [made["assistant_masks"]]
        return self._by_turns(messages, row)

    def _by_turns(self, messages: list[dict[str, Any]], row: Row) -> tuple[list[int], list[Sequence[bool | int]]]:
        """Tokens of a chat, and which of them are the assistant's, by the text up to each of its turns."""
        whole = self._text(messages, row)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], row, add_generation_prompt=True)
            after = self._text(messages[: number + 1], row)
            if not (after.startswith(before) and whole.startswith(after)):
                raise InputError(
                    "the chat template writes a turn in another way when more follow, so that the assistant's turns "
                    "cannot be told from the rest",
                    found=f"turn {number + 1} of {len(messages)}",
                    hint="give --chat_template a template that marks them with {% generation %} and "
                    "{% endgeneration %}, or leave out --assistant_only_loss",
                )
            spans.append((len(before), len(after)))
        ids = self._ids(whole, plain=True)
        mask = [False] * len(ids)
        for begin, end in spans:
            start, stop = (common_tokens(self._ids(whole[:place], plain=True), ids) for place in (begin, end))
            mask[start:stop] = [True] * (stop - start)
        return ids, [mask]

    def _text(self, messages: list[dict[str, Any]], row: Row, **options: Any) -> str:
        # As a batch of one: a chat without a turn is refused by itself.
        made = self._tokenizer.apply_chat_template([messages], tokenize=False, **_options(row), **options)
        return made[0]

    def _applied(self, messages: list[dict[str, Any]], row: Row, **options: Any) -> list[int]:
        made = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, **_options(row), **options
        )
        return list(made["input_ids"])

    def _ids(self, text: str, plain: bool = False) -> list[int]:
        return list(
            self._tokenizer(text, verbose=False, **({"add_special_tokens": False} if plain else {}))["input_ids"]
        )

    def _ended(self, text: str) -> list[int]:
        """The tokens of a text and the end token, once."""
        end = self._tokenizer.eos_token_id
        ids = self._ids(text)
        if end is None or (ids and ids[-1] == end):
            return ids
        # As a part of the text, for tokenizers that treat what stands before it differently; where that is not a token
        # of theirs, by its id.
        written = self._ids(text + self._tokenizer.eos_token)
        return written if written[-1:] == [end] and written.count(end) == ids.count(end) + 1 else [*ids, end]


def _tools(row: Row) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def _options(row: Row) -> dict[str, Any]:
    return {"tools": _tools(row), **(row.get("chat_template_kwargs") or {})}


def common_tokens(some: Sequence[int], others: Sequence[int]) -> int:
    """Number of leading tokens that two sequences have in common."""
    for place, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return place
    return min(len(some), len(others))
