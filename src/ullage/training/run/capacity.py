"""``packing_capacity="auto"``: a capacity whose forward and backward fit into the memory of the device.

Before the first step the ranks run two packed rows, measure the peak of each, and run what the line through them
promises, with a tenth of margin, until the largest row that fits has itself been run. They exchange what each run took,
so that all make the same runs and take the smallest capacity of all. What the first step will allocate beside it is
kept free: the gradients, and the optimizer's state.

A dry run leaves nothing behind. Its gradients are returned instead of accumulated (``torch.autograd.grad``), so no
engine's hook sees them and no rank waits for another in the backward pass; random states, buffers and modes of the
modules are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ullage.core.batch import RaggedBatch
from ullage.core.display import memory_size
from ullage.core.errors import InputError
from ullage.core.layout import Layout
from ullage.datasets.stored import stored_lengths
from ullage.mixers.at_rest import modules_kept, random_states_kept
from ullage.planning import plan
from ullage.ranks.world import agreement, gather
from ullage.training.batches import targets
from ullage.training.batches.reading import BatchReader
from ullage.training.run.beginning import collated
from ullage.training.setup.arguments import PackingOptions
from ullage.training.setup.device_memory import DeviceMemory
from ullage.training.setup.releases import recomputed
from ullage.training.step.packing import Packer
from ullage.training.step.verifying import within_engine

if TYPE_CHECKING:
    import transformers

logger = logging.get_logger(__name__)

#: Where a checkpoint keeps the capacity that was found.
_FOUND = "ullage_packing_capacity"
#: The largest capacity looked at where nobody knows how many tokens a step has.
_MOST = 1 << 17
#: Samples that stand for the data where lengths are not known, and tokens of one that is made up.
_SAMPLES, _MADE_UP = 8, 512


class CapacityFinder:
    """The capacity of a trainer's run whose arguments say ``packing_capacity="auto"``.

    ``trainer``: whose model, data and arguments count. ``reader``: of its batches. ``packer``: is told the number.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer

    def begin_run(self) -> None:
        """Forget the number of an earlier run. Raises ``InputError`` where none can be found."""
        self._packer.found_capacity = None
        self._packer.forget_options()
        args, options = self._trainer.args, self._packer.options
        if options is None or not options.is_open:
            return
        kwargs = recomputed(args) or {}
        problem = "FSDP" if self._trainer.is_fsdp_enabled else None
        problem = "a loss over pairs or rollouts" if self._packer.padded_loss is not None else problem
        problem = "use_reentrant=True, which gives no gradients to ask for" if kwargs.get("use_reentrant") else problem
        if problem is not None:
            raise InputError(
                "a capacity cannot be found by dry runs here",
                where="TrainingArguments.packing_capacity",
                expected="a number",
                found=f"'auto' under {problem}",
            )
        DeviceMemory(args.device)  # raises where a peak cannot be measured

    def settle(self, model: nn.Module) -> None:
        """Find the capacity, or take that of the checkpoint, once per run. Collective.

        ``model``: as the training loop calls it. Raises ``InputError`` on every rank if nothing fits.
        """
        options = self._packer.options
        if options is None or not options.is_open:
            return
        kept: Any = self._trainer.state.stateful_callbacks
        if _FOUND not in kept:
            kept[_FOUND] = self._find(model, options)
        self._packer.found_capacity = kept[_FOUND]
        self._packer.forget_options()

    def _find(self, model: nn.Module, options: PackingOptions) -> int:
        """The capacity that dry runs find, the same on every rank. Collective."""
        several = self._trainer.args.world_size > 1
        with self._nothing_left_behind(model):
            with agreement("preparing the search for a capacity", several):
                rows = _Rows.of(self._trainer, self._reader, keeps_whole=options.oversize == "error")
                memory = DeviceMemory(self._trainer.args.device)
            # What a first run allocates once and keeps is part of the ground that the others are measured from.
            self._run(model, rows, min(FIRST, rows.most), memory)
            # So is what the planner loads.
            plan([2, 1], ranks=self._trainer.args.world_size, capacity=MULTIPLE, strategy=options.strategy)
            memory.settle()
            limit = memory.limit(getattr(self._trainer.args, "packing_memory", None))
            room = min(gather(limit - memory.ground - self._bytes_beside(model), several))
            most, needed = max(gather(rows.most, several)), max(gather(rows.longest, several))
            runs: list[tuple[int, float]] = []
            while (tokens := next_run(runs, room, most, needed)) is not None:
                runs.append((tokens, self._run(model, rows, tokens, memory)))
            memory.settle()  # gives back what the runs have left
        found = fitting(runs, room)
        told = ", ".join(f"{tokens:,} tokens {memory_size(used)}" for tokens, used in runs)
        if found < max(needed, 1):
            raise InputError(
                "no capacity fits into the memory that there is",
                where="TrainingArguments.packing_capacity='auto'",
                expected=f"room for the longest sequence, {needed:,} tokens" if needed else "room for 64 tokens",
                found=f"{memory_size(room)} free beside weights, gradients and the optimizer's state; measured: {told}",
                hint="shorten sequences (packing_oversize), raise packing_memory, or take activation_checkpointing",
            )
        if self._trainer.is_world_process_zero():
            logger.warning(
                f"packing_capacity='auto' found {found:,} tokens: {memory_size(room)} are free beside weights, "
                f"gradients and the optimizer's state on the rank that has least; measured: {told}"
            )
        return found

    # One dry run.

    def _run(self, model: nn.Module, rows: _Rows, tokens: int, memory: DeviceMemory) -> float:
        """Bytes that forward and backward of a row of ``tokens`` take, the most of all ranks. Collective."""
        several, used = self._trainer.args.world_size > 1, inf
        doing = "running a row to find a capacity"
        with agreement(doing, several), contextlib.suppress(torch.OutOfMemoryError):
            memory.begin()
            # Twice, as microbatches follow each other: the second meets what the first has left to the allocator.
            for _ in range(2):
                self._forward_and_backward(model, rows.row(tokens))
            used = memory.peak()
        return max(gather(used, several))

    def _forward_and_backward(self, model: nn.Module, row: RaggedBatch) -> None:
        trainer = self._trainer
        # Not through DDP or the engine: their hooks on outputs and gradients belong to steps.
        module = within_engine(model)
        module.train()
        batch: Any = targets.split_targets(row)
        inputs = trainer._prepare_inputs(batch)
        labels = self._reader.label_elements(inputs)
        count = None if labels is None else torch.tensor(max(1, self._reader.num_labels(inputs)), device=row.device)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(module, inputs, num_items_in_batch=count)
        trained = [each for each in module.parameters() if each.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)

    @contextlib.contextmanager
    def _nothing_left_behind(self, model: nn.Module) -> Iterator[None]:
        """Put random states, buffers, modes and plain attributes of all modules back, and the trainer's own ones."""
        own, device = dict(vars(self._trainer)), self._trainer.args.device
        try:
            devices = [device] if device.type == "cuda" else []
            with random_states_kept(devices, model.modules()), modules_kept(model):
                yield
        finally:
            for name in set(vars(self._trainer)) - set(own):
                delattr(self._trainer, name)
            vars(self._trainer).update(own)

    def _bytes_beside(self, model: nn.Module) -> int:
        """Bytes that the first step allocates on this rank and keeps: gradients, and the optimizer's state."""
        trained = [each for each in model.parameters() if each.requires_grad]
        ranks = self._trainer.args.world_size
        sizes = [getattr(each, "ds_numel", None) or each.numel() for each in trained]
        gradients = sum(size * each.element_size() for size, each in zip(sizes, trained, strict=True))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            gradients *= 2  # its buckets
        if any(hasattr(each, "ds_numel") for each in trained):
            gradients = -(-gradients // ranks)  # ZeRO 3
        optimizer: Any = self._trainer.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            inner = getattr(optimizer, "optimizer", None)
            if inner is None:
                return gradients + 8 * sum(sizes)
            optimizer = inner
        if len(optimizer.state):
            return gradients  # its state is there already
        held = [each for group in optimizer.param_groups for each in group["params"]]
        return gradients + int(state_bytes(optimizer) * sum(each.numel() for each in held))


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state for each element of a parameter, by one of its kind for a parameter of its own."""
    held = next((each for group in optimizer.param_groups for each in group["params"]), None)
    dtype = torch.float32 if held is None else held.dtype
    try:
        probe = nn.Parameter(torch.zeros(1024, dtype=dtype))
        again: Any = type(optimizer)([probe], **optimizer.defaults)
        probe.grad = torch.zeros_like(probe)
        again.step()
        kept = [each for each in again.state[probe].values() if isinstance(each, Tensor) and each.numel() > 1]
        return sum(each.numel() * each.element_size() for each in kept) / probe.numel()
    except Exception:  # one that takes other arguments, or runs on a device only: as Adam in float32
        return 8.0


@dataclass
class _Rows:
    """Rows for dry runs, made of the longest sample of the data, or of a few where lengths are not known.

    Attributes:
        samples: what a row repeats.
        longest: tokens of the longest sequence, where it has to fit and is known; 0 otherwise.
        most: the largest capacity that a step could fill, a multiple of 64.
        may_cut: whether a sample may be cut to fill a row.
    """

    samples: RaggedBatch
    longest: int
    most: int
    may_cut: bool

    @classmethod
    def of(cls, trainer: transformers.Trainer, reader: BatchReader, *, keeps_whole: bool) -> _Rows:
        """``keeps_whole``: a row has to hold the longest sample, because none may be cut or left out."""
        dataset: Any = trainer.train_dataset
        most = _MOST
        length_column = getattr(trainer.args, "length_column_name", "length")
        lengths = None if dataset is None else stored_lengths(dataset, reader.main_input, length_column)
        indices: list[int] = []
        if lengths is not None and len(lengths):
            indices = [int(np.argmax(lengths))]
        elif dataset is not None and hasattr(dataset, "__getitem__") and has_length(dataset):
            indices = list(range(min(_SAMPLES, len(dataset))))
        batch = collated(trainer, reader, dataset, indices) if indices else None
        if not isinstance(batch, RaggedBatch):
            return cls(_made_up(reader), 0, _MOST, True)
        joined = targets.join_targets(batch)
        step = trainer.get_total_train_batch_size(trainer.args)
        longest = int(joined.max_seqlen) if lengths is not None else 0
        if longest:
            most = -(-min(step * longest, _MOST) // MULTIPLE) * MULTIPLE
            most = max(most, -(-longest // MULTIPLE) * MULTIPLE)
        required = longest if keeps_whole else 0
        return cls(joined, required, most, not (batch.per_sequence or batch.items) and not targets.is_joined(joined))

    def row(self, tokens: int) -> RaggedBatch:
        """One row of ``tokens`` tokens; of at most as many where no sample may be cut, and of one sample at least."""
        samples, made, size = self.samples.samples(), [], 0
        for place in range(tokens):
            sample = samples[place % len(samples)]
            length = int(self.samples.layout.lengths[place % len(samples)])
            if size + length > tokens:
                if self.may_cut and size < tokens:
                    made.append({name: value[: tokens - size] for name, value in sample.items()})
                elif not made:
                    made.append(sample)
                break
            made.append(sample)
            size += length
        whole, items = self.samples.per_sequence, self.samples.per_item
        return RaggedBatch.from_samples(made, per_sequence=whole, per_item=items)


def _made_up(reader: BatchReader) -> RaggedBatch:
    """A sample of zeros, a valid id and a valid label of every head by token, for data without indices."""
    config: Any = getattr(reader.model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or reader.main_input != "input_ids":
        raise InputError(
            "a capacity cannot be found without samples to run",
            where="TrainingArguments.packing_capacity",
            expected="a number, or a training data set with indices",
            found="'auto'",
        )
    length = min(_MADE_UP, getattr(config, "max_position_embeddings", None) or _MADE_UP)
    names = ["input_ids"] if reader.label_name is None else ["input_ids", reader.label_name]
    return RaggedBatch({name: torch.zeros(length, dtype=torch.int64) for name in names}, Layout([length]))


#: A capacity is a multiple of it.
MULTIPLE = 64
#: Tokens of the first run; a run is at most so many times as long as one that fitted.
FIRST, _GROWTH = 256, 4
#: Of the room that a line promises, a tenth is left: heaps differ from run to run.
_TAKEN = 0.9
#: A run that is not longer by so much is not worth its time.
_GAIN = 1.05


def fitting(runs: Sequence[tuple[int, float]], room: float) -> int:
    """Tokens of the largest run that fitted; 0 without one."""
    return max((tokens for tokens, used in runs if used <= room), default=0)


def next_run(runs: Sequence[tuple[int, float]], room: float, most: int, least: int = 0) -> int | None:
    """Tokens of the next run on the way to one that takes nine tenths of the room; None where there is nothing to gain.

    Args:
        runs: tokens and bytes of the runs so far; ``inf`` bytes for one that failed.
        room: bytes that a run may take.
        most: the largest capacity worth looking at, a multiple of 64.
        least: what the longest sequence needs, which may take all of the room.
    """
    fitted, failed = fitting(runs, room), [run for run in runs if run[1] > room]
    bound = min([most, *(tokens - MULTIPLE for tokens, _ in failed)])
    if not runs:
        return min(FIRST, most)
    if not fitted:  # not even the first one
        return max(MULTIPLE, bound // 2 // MULTIPLE * MULTIPLE) if bound >= MULTIPLE else None
    wanted: float = min(_GROWTH * fitted, bound)
    if len(runs) > 1:
        # The line through the two runs around the room, or the two largest: where 256 tokens took 1 GB and 1,024 took
        # 5 GB, a room of 3 GB is for 640. Of a run without memory nobody knows by how much it failed.
        (low, used), (high, more) = [*sorted(run for run in runs if run not in failed), *sorted(failed)[:1]][-2:]
        promised = low + (high - low) * (room * _TAKEN - used) / (more - used) if more > used else bound
        wanted = min(wanted, (low + high) / 2 if more == inf else promised)
    tokens = int(wanted) // MULTIPLE * MULTIPLE
    if tokens > fitted * _GAIN:
        return tokens
    least = -(-least // MULTIPLE) * MULTIPLE
    return least if fitted < least <= bound else None
