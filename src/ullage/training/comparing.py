"""Comparison of the ranks before the first step: what must be alike on all of them.

Every rank runs a loop of its own over batches of its own, and meets the others in each step. With another number of
steps, another batch size or another data set the ranks meet in different collectives, which abort or wait for each
other; with the same samples in another order nothing breaks, and samples are trained twice or never.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from ullage.errors import DistributedError
from ullage.exchange.source import fingerprint

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
        with random_states_kept():
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


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever a data set draws within the block, it draws again afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what data sets draw from
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def compare_ranks(arguments: Sequence[Mapping[str, str]], data: Sequence[Mapping[str, Any]]) -> None:
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
                found=_by_rank(values),
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
            found=_by_rank([_told(each) for each in data]),
            hint="load, filter and shuffle alike on every rank (with one seed): the Trainer deals samples out to ranks",
        )


def _told(data: Mapping[str, Any]) -> str:
    parts = [f"{data['length']:,} samples" if "length" in data else f"{data['kind']} without a length"]
    if "ends" in data:
        parts += [f"of {data['ends']} tokens", f"content {data['content'][:8]}"]
    return " ".join(parts[:2]) + "".join(f", {part}" for part in parts[2:])


def _by_rank(values: Sequence[str]) -> str:
    """``rank 0, 2: this; rank 1: that``."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"rank {', '.join(which)}: {value}" for value, which in ranks.items())
