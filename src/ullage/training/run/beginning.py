"""Before the first step: data that can be trained on, the same arguments and data on all ranks, what packing brings.

Every rank runs a loop of its own over batches of its own, and meets the others in each step. With another number of
steps, another batch size or another data set the ranks meet in different collectives, which abort or wait for each
other; with the same samples in another order nothing breaks, and samples are trained twice or never.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import transformers
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from ullage.core.batch import RaggedBatch
from ullage.core.errors import DistributedError, InputError, listed
from ullage.core.layout import Int64
from ullage.datasets.stored import stored_lengths
from ullage.exchange.source import fingerprint
from ullage.mixers.at_rest import random_states_kept
from ullage.mixers.wrappers import bare
from ullage.ranks.world import agreement, by_rank, gather
from ullage.training.batches import counting
from ullage.training.batches.reading import BatchReader
from ullage.training.saving.background import saves_in_background
from ullage.training.saving.checkpoints import WholeCheckpointMixin
from ullage.training.setup.arguments import empty_step_of
from ullage.training.setup.sharding import sharding_of
from ullage.training.step.packing import Packer

_logger = logging.getLogger(__name__)


def require_equal_ranks(trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
    """Refuse data that cannot be trained on, and ranks whose arguments or data differ. Collective.

    Raises ``InputError`` for an empty data set, and under packing for a sequence that is known to be over the capacity;
    ``DistributedError`` on every rank where one failed, and where arguments or data differ.
    """
    args = trainer.args
    dataset: Any = trainer.train_dataset
    several = args.world_size > 1
    # A dataloader of a trainer's own may hold other data on every rank, and other samples than the data set.
    standard = type(trainer).get_train_dataloader is transformers.Trainer.get_train_dataloader
    described: dict[str, Any] = {}
    with agreement("looking at its training data", several):
        empty_step_of(args)
        _require_whole_checkpoints(trainer)
        if dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:
            raise InputError("the training dataset is empty", where="train_dataset", expected="at least one sample")
        if standard and dataset is not None:
            _require_capacity(trainer, reader, packer)
            if packer.options is not None and args.remove_unused_columns and trainer.is_world_process_zero():
                _tell_of_unused(trainer, dataset)
            described = describe_data(dataset, reader.main_input) if several else {}
    if several:
        ranks = gather((describe_arguments(args), described), several)
        require_same_run([arguments for arguments, _ in ranks], [data for _, data in ranks])


def _tell_of_unused(trainer: transformers.Trainer, dataset: Any) -> None:
    """Name once the columns that the model does not take; a method of TRL's has its own use of columns."""
    rows = dataset[:1] if isinstance(dataset, list) else []
    names = getattr(dataset, "column_names", None) or [name for row in rows if isinstance(row, dict) for name in row]
    trainer._set_signature_columns_if_needed()
    unused = [repr(name) for name in names if name not in (trainer._signature_columns or names)]
    if unused and not any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        _logger.warning("columns of train_dataset that the model does not take are not used: %s", listed(unused, 8))


def _require_capacity(trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
    """Raise ``InputError`` for a sequence over the capacity, where lengths are known without reading samples."""
    dataset, options = trainer.train_dataset, packer.options
    if options is None or options.oversize != "error":
        return
    lengths = stored_lengths(dataset, reader.main_input, getattr(trainer.args, "length_column_name", "length"))
    large = np.zeros(0, np.int64) if lengths is None else np.flatnonzero(lengths > options.capacity)
    if lengths is None or not len(large):
        return
    # A stored sequence may be longer than what is trained on, so ask the collator about the first one before refusing.
    first = int(large[0])
    batch = collated(trainer, reader, dataset, [first])
    if batch is None or batch.max_seqlen <= options.capacity:
        return  # what is stored is padded, or cut by the collator: the steps will tell
    error = counting.over_capacity(first, options.capacity, int(lengths[first]), truncates=packer.truncates)
    raise error.at(listed([f"train_dataset[{index}]" for index in large], most=1))


def collated(
    trainer: transformers.Trainer, reader: BatchReader, dataset: Any, indices: list[int]
) -> RaggedBatch | None:
    """Samples of a training data set as the collator gives them; None if that is not known."""
    # Reading a sample may draw random numbers; the run is to draw the same as without this look.
    with random_states_kept(holders=[dataset, trainer.data_collator]):
        try:
            if type(dataset).__module__.startswith("datasets."):
                dataset = trainer._remove_unused_columns(dataset)
                collate: Any = trainer.data_collator
            else:
                collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
            return reader.as_ragged(collate([dataset[index] for index in indices]))
        except Exception:  # it is said when the sample's turn comes
            return None


def _require_whole_checkpoints(trainer: object) -> None:
    """Raise ``InputError`` where saves in the background are asked of a trainer that saves as transformers does."""
    if saves_in_background(getattr(trainer, "args", None)) and not isinstance(trainer, WholeCheckpointMixin):
        raise InputError(
            "this trainer's checkpoints are written by transformers itself",
            where="TrainingArguments.async_save",
            expected="WholeCheckpointMixin among the bases",
            found=type(trainer).__name__,
            hint="take a Trainer of ullage.training, or leave async_save out",
        )


def refuse_dispatching(accelerator: Any) -> None:
    """Raise ``InputError`` where one process would read the batches of all, and cut them by rows."""
    if accelerator.dispatch_batches:
        raise InputError(
            "dispatch_batches would cut packed batches apart",
            where="TrainingArguments.accelerator_config",
            expected="None or False",
            found=True,
            hint="leave it out: each process reads its own batches",
        )


#: Arguments that decide how many steps there are, what is in them, and when ranks meet beside them.
_SAME = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "train_sampling_strategy",
    "dataloader_drop_last",
    "average_tokens_across_devices",
    "logging_strategy",
    "logging_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "packing_global_batch_size",
    "packing_capacity",
    "packing_plan_strategy",
    "packing_oversize",
    "packing_loss_weighting",
    "packing_chunked_loss",
    "packing_verify",
    "empty_step",
)
#: Samples at either end whose lengths are compared.
_ENDS = 3


def describe_arguments(arguments: Any) -> dict[str, str]:
    """The arguments that ranks must have alike, as text."""
    return {name: str(getattr(arguments, name)) for name in _SAME if hasattr(arguments, name)}


def describe_data(dataset: Any, main_input: str) -> dict[str, Any]:
    """Description of a rank's training data: their kind, their length where there is one, and a few samples.

    Reads up to eight samples twice, and the first and last three, of a data set with indices; leaves the random states
    as they were. Samples that cannot be read, or differ from one reading to the next, are not described.
    """
    is_map = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    described: dict[str, Any] = {"kind": "map-style" if is_map else "iterable"}
    if not has_length(dataset):
        return described
    described["length"] = len(dataset)
    if is_map:
        with random_states_kept(holders=[dataset]):
            try:
                content = fingerprint(dataset)
                if content:
                    described |= {"ends": _ends(dataset, main_input), "content": content}
            except Exception:  # what cannot be read is found, and said, when it is its turn
                pass
    return described


def _ends(dataset: Any, main_input: str) -> str:
    """The lengths of the first and the last samples."""

    def lengths(indices: Sequence[int]) -> str:
        samples = [dataset[i] for i in indices]
        return ", ".join(
            str(len(s[main_input])) if isinstance(s, Mapping) and main_input in s else "?" for s in samples
        )

    size = len(dataset)
    if size <= 2 * _ENDS:
        return lengths(range(size))
    return f"{lengths(range(_ENDS))}, ..., {lengths(range(size - _ENDS, size))}"


def require_same_run(arguments: Sequence[Mapping[str, str]], data: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``DistributedError`` where ranks differ, with the value of each.

    Both sequences have one entry per rank, and are the same on every rank.
    """
    for name in dict.fromkeys(name for each in arguments for name in each):
        values = [each.get(name, "not there") for each in arguments]
        if len(set(values)) > 1:
            raise DistributedError(
                "ranks were given different arguments",
                where=name,
                expected="one value",
                found=by_rank(values),
                hint="start every process with the same arguments",
            )
    # From coarse to fine: the first difference that is found explains the later ones.
    for names in (("kind",), ("length",), ("ends", "content")):
        if len({tuple(each.get(name) for name in names) for each in data}) == 1:
            continue
        if names[-1] == "content" and not all("content" in each for each in data):
            continue  # not known
        raise DistributedError(
            "ranks hold different training data, so samples would be trained twice or never",
            where="train_dataset",
            expected="the same samples in the same order on every rank",
            found=by_rank([_description(each) for each in data]),
            hint="load, filter and shuffle alike on every rank (with one seed): the Trainer deals samples out to ranks",
        )


def _description(data: Mapping[str, Any]) -> str:
    parts = [f"{data['length']:,} samples" if "length" in data else f"{data['kind']} without a length"]
    if "ends" in data:
        parts += [f"of {data['ends']} tokens", f"content {data['content'][:8]}"]
    return " ".join(parts[:2]) + "".join(f", {part}" for part in parts[2:])


# What packing brings

#: Batches that are drawn to see how much padding they have.
_DRAWN = 256
#: Below this share of padding there is nothing to save; above the second a run that pads hears of it.
_NOTHING, _MUCH = 0.02, 0.2


def padding_share(lengths: Int64, batch_size: int) -> float:
    """The part of padded batches that is padding, for sequences of these lengths in random order.

    >>> padding_share(np.array([5, 5, 5]), 2), padding_share(np.array([2, 4]), 2)
    (0.0, 0.25)
    """
    size = max(1, min(batch_size, len(lengths)))
    number = max(1, min(_DRAWN, len(lengths) // size))
    drawn = np.random.default_rng(0).permutation(lengths)[: number * size].reshape(number, size)
    slots = int(drawn.max(axis=1).sum()) * size
    return 1 - int(drawn.sum()) / slots if slots else 0.0


def capacity_for(lengths: Int64, batch_size: int) -> int:
    """A capacity for these lengths: a power of 2 that holds the longest, and about a batch of the mean length."""
    wanted = max(int(lengths.max()), round(float(lengths.mean()) * batch_size))
    return 1 << max(0, wanted - 1).bit_length()


def may_hold_padding(dataset: Any, lengths: Int64) -> bool:
    """Whether stored samples of one length may hold padding themselves, told by a mask beside their tokens."""
    if int(lengths.min()) != int(lengths.max()):
        return False
    names = getattr(dataset, "column_names", None)
    if names is None and isinstance(dataset, (list, tuple)):
        names = dataset[0]
    return names is not None and "attention_mask" in names


def packing_advice(
    lengths: Int64, batch_size: int, *, packed: bool, pads: bool, option: str | None = "packing_capacity={}"
) -> tuple[str, bool]:
    """A line on what packing brings or would bring: it saves the padding; and whether it costs much to miss it.

    Args:
        lengths: of the sequences, in tokens, at least one.
        batch_size: sequences of a batch on one rank.
        packed: whether the run packs.
        pads: whether batches are padded that are not packed.
        option: how a capacity is asked for, in the words of who reads the line; ``None`` where the model takes none.
    """
    share = padding_share(lengths, batch_size)
    them = f"these lengths ({int(lengths.min()):,} to {int(lengths.max()):,} tokens)"
    percent = f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"
    if packed:
        if share < _NOTHING:
            return f"packing brings nothing: padded batches of {batch_size} would be {percent} padding for {them}", True
        return f"packed: batches of {batch_size} would be {percent} padding for {them}", False
    if not pads:
        return f"nothing is packed, and nothing is padded: the model takes sequences of {them} as they are", False
    if share < _NOTHING:
        line = f"nothing is packed, and packing would bring nothing: batches of {batch_size} are {percent} padding"
        return f"{line} for {them}", False
    line = f"nothing is packed: batches of {batch_size} are {percent} padding for {them}"
    way = "a PackedSequence (docs/coming_from/pack_padded_sequence.md)"
    line += f"; {option.format(capacity_for(lengths, batch_size)) if option else way} would compute none"
    return line, share >= _MUCH


def advice_for(trainer: Any, reader: BatchReader, packer: Packer, option: str) -> tuple[str | None, bool]:
    """:func:`packing_advice` for a trainer, where its lengths are known without reading samples; else ``None``."""
    args, dataset = trainer.args, trainer.train_dataset
    lengths = stored_lengths(dataset, reader.main_input, getattr(args, "length_column_name", "length"))
    if lengths is None or not len(lengths) or sharding_of(trainer.model) is not None:
        return None, False
    theirs = getattr(args, "packing", False) or getattr(args, "padding_free", False)  # TRL's own ways
    if packer.padded_loss is not None or theirs or may_hold_padding(dataset, lengths):
        return None, False
    packed = packer.options is not None
    try:
        pads = not packed and reader.form != "flattened"
    except InputError:  # a model that takes none of our forms
        return None, False
    way = option if isinstance(bare(trainer.model), transformers.PreTrainedModel) else None
    size = args.per_device_train_batch_size
    return packing_advice(lengths, size, packed=packed, pads=pads, option=way)
