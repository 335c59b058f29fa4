"""The samples that ``ullage train`` trains on and evaluates on, and a line about each.

Data are files, folders and patterns, or the name of a data set on the hub; what lies here is never taken for a name.
Rows are chats (``messages``, or ``prompt`` and ``completion``) before they are texts, unless a column is asked for.
Of a stream the first rows are read as those of a file are, which says what its rows are; the others are tokenized as
they are trained on.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ullage.cli.train.model import find_or_fetch, name_with_revision, refuse_near
from ullage.cli.train.pictures import KIND, holds_pictures, image_folder_of, picture_rows, refuse_beside_pictures
from ullage.cli.train.process import one_line_of
from ullage.cli.train.settings import TrainCommand
from ullage.cli.train.summary import Voice
from ullage.core.errors import InputError, UsageError
from ullage.datasets.chats import (
    CHAT_COLUMNS,
    COMPLETION,
    PROMPT,
    ChatLoss,
    are_messages,
    chat_column,
    chats_of,
    require_template,
    tokenize_chats,
    turn_end,
    use_end_token,
    use_template,
)
from ullage.datasets.picture_chats import PictureDataset, PictureEncoder, tokenize_pictures
from ullage.datasets.pictures import PictureReader
from ullage.datasets.tables import ENDINGS, EmptyDataError, line_of, quiet, read_table, stream_rows, text_column
from ullage.datasets.text import TokenDataset, docstrings, split_held_out, texts_of, tokenize

DOCSTRINGS = "the docstrings of the standard library"
#: What the docstrings, on which a call without data trains, often begin with.
_DOCSTRINGS = "Return the "
#: How much of a sample begins the text: words, or letters of a script without spaces.
_WORDS, _LETTERS = 3, 40
#: Letters of a message that an answer is asked for, at most.
_ASKED = 200
#: Rows of a stream that are read ahead, and those among which it is shuffled.
_AHEAD, _SHUFFLED = 1000, 1000
#: Tokens of a sample that are looked at.
_LOOKED_AT = 64
#: How like an ending has to be to one of those for it to be a slip of the fingers.
_NEAR = 0.75
#: Columns that could be trained on too, where several are there.
_OTHERS = {*CHAT_COLUMNS, PROMPT, COMPLETION, "text", "input_ids"}


@dataclass(frozen=True)
class TakenSamples:
    """Samples of one source, as they were read.

    Attributes:
        rows: texts, lists of token ids, or rows of chats.
        kind: what one is called: "texts", "chats", "prompts" or "pictures".
        name: of the source, as it was typed, and its revision.
        numbers: of the rows in the source; ``None`` for all of them.
        num_empty: rows that were left out because they hold no text.
        invalid: what is said of rows that were left out because they cannot be used.
        stream: the ``datasets.IterableDataset`` whose first rows these are; ``None`` where these are all.
        image_folder: that the images of the rows lie in.
        place_of: how a row is named in a message, by its number.
    """

    rows: Sequence[Any]
    kind: str
    name: str
    numbers: Sequence[int] | None = None
    num_empty: int = 0
    invalid: str | None = None
    stream: Any = None
    image_folder: str | None = None
    place_of: Callable[[int], str] | None = None

    @property
    def talks(self) -> bool:
        """Whether a chat template writes these samples."""
        return self.kind not in ("texts", KIND) and len(self.rows) > 0 and are_messages(self.rows)


def read_samples(command: TrainCommand, say: Voice) -> tuple[TakenSamples, TakenSamples]:
    """The samples to train on and those to evaluate on, which may be none, as they are read.

    Raises ``InputError`` for data that cannot be read, and where the best model is to be chosen by nothing.
    """
    data = command.data
    training = _read_ahead(command, say) if data.streaming else _samples(command, "data", data.data_split, say)
    if data.eval_data is not None or data.eval_split is not None:
        held_out = _samples(command, "data" if data.eval_data is None else "eval_data", data.eval_split, say)
    else:
        training, held_out = _split(training, data.held_out)
    if KIND in (training.kind, held_out.kind):
        refuse_beside_pictures(command)
    if not held_out.rows and command.training.load_best_model_at_end:
        raise InputError(
            "there is nothing to choose the best model by",
            where=training.name,
            expected="samples to evaluate on",
            found="none",
            hint="give --eval_data or a larger --held_out, or leave out --load_best_model_at_end",
        )
    return training, held_out


def require_tokenizable(
    samples: Sequence[TakenSamples], command: TrainCommand, tokenizer: Any, say: Voice, *, may_grow: bool
) -> None:
    """Give the tokenizer its chat template and the token that ends its turns, and say which that is.

    ``may_grow``: whether the vocabulary may. Raises ``InputError`` where it lacks a template that the samples need, and
    for an ``--eos_token`` that is no token.
    """
    if command.data.chat_template is not None:
        use_template(tokenizer, command.data.chat_template)
    for part in samples:
        if part.rows and part.kind != "texts":
            try:
                require_template(part.rows, tokenizer)
            except InputError as error:
                raise error.at(part.name) from error
    own, are_chats = tokenizer.eos_token, samples[0].talks
    if command.data.eos_token is not None or are_chats:
        token = use_end_token(tokenizer, command.data.eos_token, may_grow=may_grow)
        if token is None:
            say(_endless(tokenizer))
        elif token != own:
            say(f"an answer ends with {token}, the end token of this run (--eos_token takes another)")


def _endless(tokenizer: Any) -> str:
    after = (turn_end(tokenizer) or "").split("\n")[0]
    if not after:
        return "the chat template writes nothing behind an answer, so that generation will not end by itself"
    return (
        f"the chat template ends an answer with {after[:40]!r}, no token of this tokenizer, so that generation will "
        "not end by itself; --eos_token makes it one"
    )


def datasets_of(
    samples: Sequence[TakenSamples], command: TrainCommand, tokenizer: Any, say: Voice
) -> tuple[TokenDataset, TokenDataset | None]:
    """The samples to train on and those to evaluate on, tokenized; ``None`` where there are none of the second.

    Raises ``InputError`` for a sample that cannot be tokenized, and where nothing is left to predict.
    """
    sets: list[TokenDataset | None] = []
    for part, use in zip(samples, ("train on", "evaluate on"), strict=True):
        if not part.rows:
            sets.append(None)
            say(f"{part.name}: nothing held out, so nothing to {use}")
            continue
        dataset = _tokenized(part, command, tokenizer)
        sets.append(dataset)
        say(_line_about(part, dataset, use, command.data.max_length))
    training, held_out = sets
    assert training is not None
    if not training.num_predicted:
        raise InputError(
            "there is nothing to predict",
            where=samples[0].name,
            expected="a token with a label behind the first of its sequence",
            found=f"{len(training):,} sequences of {int(training.layout.lengths.max()):,} tokens at most",
            hint="raise --max_length" if training.num_truncated else None,
        )
    return training, held_out


def _split(samples: TakenSamples, fraction: float) -> tuple[TakenSamples, TakenSamples]:
    """The samples to train on, and those that are held out."""
    kept, left = split_held_out(samples.rows, fraction)
    there = {id(row) for row in left}  # equal rows are on one side
    numbers = range(len(samples.rows)) if samples.numbers is None else samples.numbers
    sides = {
        is_held: [number for number, row in zip(numbers, samples.rows, strict=True) if (id(row) in there) == is_held]
        for is_held in (False, True)
    }
    # What was left out is said once.
    training = replace(samples, rows=kept, numbers=sides[False])
    held_out = replace(samples, rows=left, numbers=sides[True], num_empty=0, invalid=None, stream=None)
    return training, held_out


def _samples(command: TrainCommand, argument: str, split: str | None, say: Voice) -> TakenSamples:
    """The samples of one of the arguments ``data`` and ``eval_data``; the revision of a name is written down."""
    data = command.data
    sources: list[str] | None = getattr(data, argument)
    if sources is None:
        if split is not None or data.data_config is not None:
            raise InputError("there is no split of the docstrings", where="--data", expected="a name", found="none")
        return TakenSamples(docstrings(), "texts", DOCSTRINGS)
    local = _local(command, argument, sources)
    name = ", ".join(name_with_revision(command, argument, source) for source in sources)
    table = read_table(local, data.data_config, split, blanks=True)
    place_of = partial(_place, local, split)
    if holds_pictures(command, table):
        folder = image_folder_of(command, sources)
        return TakenSamples(picture_rows(table), KIND, name, image_folder=folder, place_of=place_of)
    return _taken(command, table, name, place_of, say)


def _taken(
    command: TrainCommand, table: Any, name: str, place_of: Callable[[int], str], say: Callable[[str], Any]
) -> TakenSamples:
    """The samples of a table's rows; ``place_of`` tells where a row is."""
    data = command.data
    loss = ChatLoss(data.completion_only_loss, data.assistant_only_loss)
    chats = chats_of(table, data.text_column, name, skip_invalid=data.skip_invalid, place_of=place_of)
    if chats is None:
        loss.require_none(name)
        read = texts_of(table, data.text_column, name, skip_invalid=data.skip_invalid, place_of=place_of)
        invalid = _invalid(read.invalid, place_of)
        taken = TakenSamples(read.samples, "texts", name, read.rows, read.num_empty, invalid)
        chosen, used = "input_ids", {"input_ids"}
    else:
        loss.require_rows(chats.samples, name)
        kind = "chats" if "messages" in chats.samples[0] else "prompts"
        taken = TakenSamples(chats.samples, kind, name, chats.rows, invalid=_invalid(chats.invalid, place_of))
        chosen = chat_column(table) or f"{PROMPT} and {COMPLETION}"
        used = {*CHAT_COLUMNS} if taken.kind == "chats" else {PROMPT, COMPLETION}
    others = [column for column in table.column_names if column in _OTHERS - used]
    if others and used & {*table.column_names} and data.text_column is None:
        say(f"{name}: takes {chosen}, not {', '.join(others)}; --text_column chooses another column")
    return taken


# A stream


def _read_ahead(command: TrainCommand, say: Voice) -> TakenSamples:
    """The first rows of a stream as samples, beside the stream itself."""
    sources = command.data.data
    if sources is None:
        raise UsageError("there is nothing to stream", where="--streaming", hint="name it with --data")
    if command.training.max_steps < 1:
        raise UsageError(
            "nobody knows where a stream ends", where="--streaming", hint="give the length of the run, --max_steps N"
        )
    import datasets

    name = ", ".join(sources)
    with one_line_of("the data cannot be streamed", where=name):
        rows = _opened(command, sources)
        with quiet():
            table = datasets.Dataset.from_list(list(rows.take(_AHEAD)))
    taken = _taken(command, table, name, lambda row: f"row {row} counted from 0", say)
    if taken.kind == "texts":
        column = text_column(table, command.data.text_column, name, mixed=True)
        command = replace(command, data=replace(command.data, text_column=column))
    say(f"{name}: a stream, of which these are the first {len(table):,} rows; shuffled among {_SHUFFLED:,} at a time")
    return replace(taken, stream=(rows, table, command))


def _opened(command: TrainCommand, sources: list[str]) -> Any:
    """The rows of files here, or of a data set of the hub, none of which are fetched before they are read."""
    data = command.data
    if _are_files(sources):
        return stream_rows(sources, data.data_config, data.data_split)
    import datasets

    refuse_near(sources[0], "dataset")
    repository, _, revision = sources[0].partition("@")
    with quiet():
        return datasets.load_dataset(
            repository, data.data_config, split=data.data_split or "train", revision=revision or None, streaming=True
        )


def streamed_samples(samples: Sequence[TakenSamples], tokenizer: Any, vocab_size: int) -> Any:
    """What is trained on of a stream, shuffled: its rows tokenized as they are read, without those held out of it."""
    import datasets

    rows, first, command = samples[0].stream
    name = samples[0].name
    is_own = command.data.eval_data is None and command.data.eval_split is None
    held_out = [*samples[1].rows] if is_own else []

    def tokenized(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        with contextlib.suppress(EmptyDataError):
            with one_line_of("rows of the stream are unlike the first", where=f"{name}, row {numbers[0]} and behind"):
                table = datasets.Dataset.from_dict(batch, features=first.features)
            part = _taken(command, table, name, lambda row: f"row {numbers[row]} of the stream", lambda _: None)
            kept = [(row, i) for row, i in zip(part.rows, part.numbers or (), strict=True) if row not in held_out]
            part = replace(part, rows=[row for row, _ in kept], numbers=[numbers[i] for _, i in kept])
            if kept:
                made = _tokenized(part, command, tokenizer)
                made.require_vocabulary(vocab_size, name)
                return {key: [made[i][key].tolist() for i in range(len(made))] for key in ("input_ids", "labels")}
        return {"input_ids": [], "labels": []}

    columns = first.column_names
    made = rows.map(tokenized, with_indices=True, batched=True, batch_size=_AHEAD // 10, remove_columns=columns)
    seed = command.training.data_seed
    return made.shuffle(seed=command.training.seed if seed is None else seed, buffer_size=_SHUFFLED)


def _place(sources: Sequence[Any], split: str | None, row: int) -> str:
    """How a row is named: by the line of the one file that it comes from, where it has lines."""
    path = Path(sources[0])
    line = line_of(path, row) if len(sources) == 1 and path.is_file() and split in (None, "train") else None
    return f"row {row} counted from 0" if line is None else f"line {line}"


def _invalid(rows: Sequence[int], place_of: Callable[[int], str]) -> str | None:
    """What is said of rows that were left out; ``None`` without any."""
    if not rows:
        return None
    return f"{len(rows):,} that cannot be used left out, the first at {place_of(rows[0])}"


def _local(command: TrainCommand, argument: str, sources: list[str]) -> list[Any]:
    """The files, folders and patterns of ``sources``; a name of the hub is the folder of its files. Collective for one.

    A name with the ending of a file is never looked up on the hub, so that reading it says that it is not there.
    """
    if _are_files(sources):
        return list(sources)
    return [
        find_or_fetch(command, argument, sources[0], "dataset", ["README.md", *(f"*{ending}" for ending in ENDINGS)])
    ]


def _are_files(sources: list[str]) -> bool:
    """Whether ``sources`` are files, folders or patterns; raises for the name of a file that is nearly one here."""
    if len(sources) > 1 or any(Path(source).exists() or glob.has_magic(source) for source in sources):
        return True
    ending = Path(sources[0].partition("@")[0]).suffix.lower()
    if ending not in ENDINGS and not get_close_matches(ending, ENDINGS, cutoff=_NEAR):
        return False
    refuse_near(sources[0], "data file")
    return True


def _tokenized(samples: TakenSamples, command: TrainCommand, tokenizer: Any) -> TokenDataset:
    data = command.data
    most = data.max_length or None
    try:
        if samples.kind == KIND:
            return tokenize_pictures(
                samples.rows,
                PictureEncoder(tokenizer, PictureReader(samples.image_folder)),
                most,
                numbers=samples.numbers,
                where=str if samples.place_of is None else samples.place_of,
                skip_invalid=data.skip_invalid,
            )
        if samples.kind == "texts":
            return tokenize(samples.rows, tokenizer, most, numbers=samples.numbers)
        return tokenize_chats(
            samples.rows,
            tokenizer,
            most,
            completion_only_loss=data.completion_only_loss,
            assistant_only_loss=data.assistant_only_loss,
            numbers=samples.numbers,
            skip_invalid=data.skip_invalid,
        )
    except InputError as error:
        where = ", ".join(filter(None, [samples.name, error.where]))
        raise error.at(where) from error


def _line_about(samples: TakenSamples, dataset: TokenDataset, use: str, max_length: int) -> str:
    """A line about a data set: its size, what its loss is on, and what was cut or left out."""
    line = f"{samples.name}: {_quantity(len(dataset), samples.kind)} to {use}, {dataset.num_tokens:,} tokens"
    if dataset.labels is not None:
        line += f", {dataset.num_labels:,} of them with a label"
    lost: list[str] = [f"{samples.num_empty:,} empty left out"] if samples.num_empty else []
    lost += [] if samples.invalid is None else [samples.invalid]
    if isinstance(dataset, PictureDataset):
        line += f", {dataset.num_images:,} images"
        if dataset.num_too_long:
            lost.append(f"{dataset.num_too_long:,} of more than {max_length} tokens left out (--max_length)")
        if dataset.num_invalid:
            lost.append(f"{dataset.num_invalid:,} that cannot be used left out")
    elif dataset.num_invalid:
        lost.append(f"{dataset.num_invalid:,} that the chat template refuses left out")
    if dataset.num_truncated:
        lost.append(
            f"{_quantity(dataset.num_truncated, samples.kind)} cut to {max_length}, "
            f"{dataset.truncated_tokens:,} tokens lost"
        )
    if dataset.num_dropped:
        lost.append(f"{dataset.num_dropped:,} without a token to train on left out, {dataset.dropped_tokens:,} tokens")
    return f"{line} ({'; '.join(lost)})" if lost else line


def _quantity(number: int, kind: str) -> str:
    return f"{number:,} {kind if number != 1 else kind.removesuffix('s')}"


# What the model of a run is asked at its end


def sample_of(
    command: TrainCommand, samples: Sequence[TakenSamples], tokenizer: Any, training: Any, held_out: Any
) -> str | list[dict[str, str]]:
    """The first words of a held-out sample, as this tokenizer writes them; of chats, what is said before an answer."""
    if command.data.data is None:
        return _DOCSTRINGS
    part = samples[0] if held_out is None else samples[1]
    if part.talks and (asked := _asked(part.rows[0])):
        return asked
    ids = (training if held_out is None else held_out)[0]["input_ids"][:_LOOKED_AT]
    # The last token may be a part of a letter.
    text = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd").strip()
    return " ".join(text.split(" ")[:_WORDS])[:_LETTERS]


def _asked(row: Any) -> list[dict[str, str]]:
    """The messages of a chat before the first answer, long ones cut; [] where they are not texts."""
    messages = row.get("prompt") or row["messages"]
    before = list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))
    if not all(isinstance(message.get("content"), str) for message in before):
        return []
    return [
        {"role": message["role"], "content": textwrap.shorten(message["content"], _ASKED, placeholder=" ...")}
        if len(message["content"]) > _ASKED
        else {"role": message["role"], "content": message["content"]}
        for message in before
    ]
