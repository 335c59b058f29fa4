"""Evaluation by transformers' own loop, where each sample counts once and the loss is a mean over all labels.

The loop gets padded rows where outputs are asked for, whatever form a batch had; where only the loss is, it gets the
batches that training has, packed rows within the capacity. Losses are means over the label elements that count;
Σ loss · n / Σ n is the same at every batch size and on any ranks. The ranks meet at every batch, so that a problem on
one of them is raised by all.

Source: transformers 5.23 ``trainer.py``, ``evaluation_loop`` and ``prediction_step``; accelerate 1.15
``data_loader.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, has_length

from ullage.attention.heads import package_of
from ullage.attention.releases import CACHE_NAMES
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, LENGTHS_NAMES
from ullage.core.errors import DistributedError, InputError
from ullage.core.layout import Layout
from ullage.core.replacing import replaced
from ullage.mixers.wrappers import bare
from ullage.ranks import Axis, gather_agreed, tried
from ullage.ranks.wire import gather_objects
from ullage.training.batches import counting, forms
from ullage.training.batches.reading import BatchReader, defining_class
from ullage.training.setup import fsdp
from ullage.training.setup.arguments import weight_field
from ullage.training.setup.sharding import data_ranks, sharding_of
from ullage.training.step.call_metrics import Taken
from ullage.training.step.packing import Packer

if TYPE_CHECKING:
    import transformers

_DOING = "evaluating its batches"


class Rows(dict[str, Any]):
    """An evaluation batch as transformers' loop reads it: its fields, padded rows [N, L, ...] if outputs are asked for.

    Attributes:
        given: the batch that the model is to get.
        sequences: its sequences, where they are known.
        num: rows that the ranks gather of the batch, which is filled up to them.
        num_real: of those, the ones that count.
    """

    def __init__(self, fields: Mapping[str, Any], given: Any, sequences: RaggedBatch | None, num: int, real: int):
        super().__init__(fields)
        self.given, self.sequences, self.num, self.num_real = given, sequences, num, real


class RankBatches:
    """This rank's batches of an evaluation data set: every ``ranks``-th one, in the order of the data set.

    A rank that would have one batch less than another runs one sample more, which counts for nothing: sharded models
    need every rank. So the last batch of a rank may have fewer rows, or none, that count.

    Attributes:
        size: samples of a batch.
        number: samples of the data set; None until a stream has ended.
    """

    def __init__(self, size: int, rank: int, ranks: int, number: int | None = None) -> None:
        self.size, self.number, self._rank, self._ranks = size, number, rank, ranks

    @property
    def remainder(self) -> int:
        """Samples that count in the last batches of all ranks together; 0 if those are full."""
        return (self.number or 0) % (self.size * self._ranks)

    @property
    def num_last(self) -> int:
        """Samples that count in this rank's last batch."""
        # Of 13 samples in batches of 3 on 2 ranks the last round has one that counts: rank 0 has it, rank 1 none.
        rest = self.remainder or self.size * self._ranks
        return min(max(rest - self._rank * self.size, 0), self.size)

    def indices(self) -> list[list[int]]:
        """The batches of a data set of known size."""
        assert self.number is not None
        firsts = range(0, self.number, self.size * self._ranks)
        begins = [first + self._rank * self.size for first in firsts]
        return [list(range(begin, min(begin + self.size, self.number))) or [0] for begin in begins]

    def of_stream(self, samples: Iterable[Any]) -> Iterator[Any]:
        """The samples of a data set that every rank reads through."""
        number, spare = 0, []
        for number, sample in enumerate(samples, start=1):
            spare = spare or [sample]
            if (number - 1) // self.size % self._ranks == self._rank:
                yield sample
        self.number = number
        if number and not self.num_last:
            yield from spare


class _Stream(IterableDataset):
    def __init__(self, dataset: Any, share: RankBatches) -> None:
        self.dataset, self.share = dataset, share

    def __iter__(self) -> Iterator[Any]:
        return self.share.of_stream(self.dataset)


class _Batches:
    """The batches of an evaluation, read by all ranks together. In all else it is the dataloader."""

    def __init__(self, loader: Any, read: Callable[[Any], Rows], meet: Callable[..., list[Any]]) -> None:
        self._loader, self._read, self._meet = loader, read, meet

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Rows]:
        batches = iter(self._loader)
        while True:
            # What has gone wrong on one rank is heard of by all in the place of a batch.
            batch, failure = tried(lambda: [self._read(each) for each in [next(batches, None)] if each is not None])
            there = self._meet(bool(batch), failure)
            if any(there) != all(there):
                raise DistributedError(
                    "the ranks have read different evaluation data",
                    expected="the same samples in the same order on every rank",
                    found=f"batches left on ranks {[rank for rank, left in enumerate(there) if left]}",
                )
            if not batch:
                return
            yield batch[0]


class InRows(nn.Module):
    """A model of packed or sorted sequences as one that gives padded rows: it runs on ``given``.

    Args:
        model: as the loop calls it.
        prepare: makes keywords of ``given``, on the device.
        given: a batch that has, or is, a ``PackedSequence``; one of packed rows; or rows with the longest first.
        layout: of its sequences, in the order of the rows.
    """

    def __init__(self, model: nn.Module, prepare: Callable[[Any], Any], given: Any, layout: Layout) -> None:
        super().__init__()
        self.model, self._prepare, self._given, self._layout = model, prepare, given, layout

    def forward(self, **_: Any) -> Any:
        outputs = self.model(**self._prepare(self._given))
        if isinstance(outputs, Mapping):
            return {name: self._in_rows(value) for name, value in outputs.items()}
        return tuple(map(self._in_rows, (outputs,) if isinstance(outputs, (Tensor, PackedSequence)) else outputs))

    def _in_rows(self, value: Any) -> Any:
        given = self._given
        fields = list(given.values()) if isinstance(given, Mapping) else [given]
        packed = [each for each in fields if isinstance(each, PackedSequence)]
        in_order = packed and isinstance(value, Tensor) and value.shape[:1] == packed[0].data.shape[:1]
        in_order = in_order and value.shape[:2] != (self._layout.num_items, self._layout.max_seqlen)
        # Sequences of one token each may also have one value each, as the labels tell.
        if in_order and (len(value) > self._layout.num_items or all(_is_packed(v) or v.ndim > 1 for v in fields)):
            value = packed[0]._replace(data=value)  # the entries of a packed sequence, without their bounds
        if isinstance(value, PackedSequence):
            return RaggedBatch.from_packed_sequence(value, "value").to_padded(IGNORED_LABEL)["value"]
        if not isinstance(value, Tensor):
            return value
        if isinstance(given, RaggedBatch) and value.shape[:2] == (1, self._layout.size):
            return RaggedBatch({"value": value[0]}, self._layout).to_padded(IGNORED_LABEL)["value"]
        back = torch.from_numpy(forms.longest_first(self._layout)).argsort().to(value.device)
        is_sorted = isinstance(given, Mapping) and not packed and any(name in given for name in LENGTHS_NAMES)
        return value[back] if is_sorted and value.shape[:1] == back.shape else value


class Evaluator:
    """Evaluation of a trainer's model. ``sequences``: of the batch that runs, where they are known.

    Args:
        trainer: whose arguments, model, state and callbacks count.
        reader: of its batches.
        packer: cuts a large batch into microbatches.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        self._begin(None, needs_loss=False)

    def _begin(self, loader: Any, *, needs_loss: bool) -> None:
        self._loader, self._needs_loss = loader, needs_loss
        #: (mean, label elements or samples that it is over) of each call of the model, and their samples.
        self._losses: list[tuple[Tensor, Tensor]] = []
        self._num_samples = 0
        self._calls: list[Taken] = []
        #: What this rank has told the others at the last meeting.
        self._told: Exception | None = None
        self.sequences: RaggedBatch | None = None

    # The dataloader.

    def loader(
        self, make: Callable[..., Any], dataset: Any, description: str, batch_size: int, *options: Any, **more: Any
    ) -> Any:
        """transformers' dataloader (``make``), of every sample in the order of the data set, also of the last ones.

        Raises ``InputError`` for a data set that is known to be empty, and on several ranks for one that is divided.
        """
        trainer, args = self._trainer, self._trainer.args
        require_undivided(dataset, description.lower(), args.world_size)
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        settings: dict[str, Any] = {"dataloader_drop_last": False}
        if is_stream:  # read in this process: worker processes would each read all of it
            settings |= {
                "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False
            }  # fmt: skip
            dataset = dataset if isinstance(dataset, IterableDataset) else _Stream(dataset, RankBatches(1, 0, 1))
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                stack.enter_context(replaced(args, name, value))
            stack.enter_context(replaced(trainer.accelerator, "device_placement", False))
            loader = make(dataset, description, batch_size, *options, **more)
        # A DataLoader's own setter refuses others after construction.
        inner = getattr(loader, "base_dataloader", loader)
        share = RankBatches(batch_size, *data_ranks(trainer.model, args), None if is_stream else len(inner.dataset))
        vars(inner).update({"dataset": _Stream(dataset, share)} if is_stream else {"batch_sampler": share.indices()})
        loader.share = share
        return loader

    # The loop.

    def run(
        self,
        loop: Callable[..., EvalLoopOutput],
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None,
        ignore_keys: list[str] | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """transformers' ``loop`` over the batches; ``eval_loss`` = Σ loss · n / Σ n over all label elements that count.

        Collective; waits for the device. Raises ``InputError`` for a data set that turns out to be empty. The other
        parameters are those of ``evaluation_loop``.
        """
        trainer = self._trainer
        loss_only: bool = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        sharding = sharding_of(trainer.model)
        if sharding is not None and sharding.topology.cp.size > 1 and not loss_only:
            raise InputError(
                "compute_metrics needs whole sequences, and cp shares them",
                where="compute_metrics",
                expected="cp 1",
                found=f"cp {sharding.topology.cp.size}",
            )
        self._begin(dataloader, needs_loss=description == "Evaluation" and self._asks_for_loss(loss_only))
        fsdp.shard_for_evaluation(trainer)
        if sharding is not None:
            trainer.gather_function = functools.partial(
                _gathered, axis=sharding.topology.dp, accelerator=trainer.accelerator
            )
        step = functools.partial(self._step, trainer.prediction_step)
        batches = _Batches(dataloader, functools.partial(self._read, loss_only=loss_only), self._meet)
        try:
            with replaced(trainer, "prediction_step", step), self._joined_once() as joined:
                output = joined(loop(batches, description, prediction_loss_only, ignore_keys, prefix))
        except Exception as error:
            # The others hear of what went wrong between two meetings at their next one.
            if not isinstance(error, DistributedError) and error is not self._told:
                self._meet(None, error)
            raise
        finally:
            if dataloader in trainer.accelerator.gradient_state.dataloader_references[1:]:
                dataloader.end()  # pyright: ignore  of an evaluation that an error has ended
            fsdp.reshard(trainer.model)  # pyright: ignore[reportArgumentType]
        return self._with_loss(output, prefix)

    @contextlib.contextmanager
    def _joined_once(self) -> Iterator[Callable[[EvalLoopOutput], EvalLoopOutput]]:
        """Within it the loop keeps what it gathers batch by batch, on the host; gives what joins it.

        transformers would join all batches before each new one: of *n* batches n² / 2 are copied.
        """
        trainer, args, compute = self._trainer, self._trainer.args, self._trainer.compute_metrics
        made: list[tuple[Any, Any]] = []

        def joined(given: EvalPrediction, **options: Any) -> Any:
            assert compute is not None
            parts = {
                name: _joined(getattr(given, name, None)) for name in ("predictions", "label_ids", "inputs", "losses")
            }
            made.append((parts["predictions"], parts["label_ids"]))
            return compute(EvalPrediction(**parts), **options)

        def finished(output: EvalLoopOutput) -> EvalLoopOutput:
            predictions, labels = made.pop() if made else (_joined(output.predictions), _joined(output.label_ids))
            return output._replace(predictions=predictions, label_ids=labels)

        if not args.eval_do_concat_batches or args.batch_eval_metrics:
            yield lambda output: output
            return
        with (
            replaced(args, "eval_do_concat_batches", False),
            replaced(args, "eval_accumulation_steps", args.eval_accumulation_steps or 1),
            replaced(trainer, "compute_metrics", None if compute is None else joined),
        ):
            yield finished

    def _meet(self, record: Any, failure: Exception | None) -> list[Any]:
        """The record of each rank, or an error on every rank if one has a ``failure``. Collective."""
        self._told = failure
        axis = Axis.world() if self._trainer.args.world_size > 1 else Axis("world")
        return gather_agreed(record, axis, _DOING, failure)

    def _with_loss(self, output: EvalLoopOutput, prefix: str) -> EvalLoopOutput:
        """The output with the mean loss over all labels, and the number of samples. Collective."""
        sums = torch.zeros(3, dtype=torch.float64)
        for loss, number in self._losses:
            if n := float(number):  # a mean over no labels is nan, and nan times zero too
                sums[:2] += torch.tensor([float(loss) * n, n], dtype=torch.float64)
        sums[2] = self._num_samples
        # Ranks that evaluate the same samples add each up as often as there are such ranks.
        copies = self._trainer.args.world_size // data_ranks(self._trainer.model, self._trainer.args)[1]
        ranks = self._meet([*sums.tolist(), bool(self._losses)], None)
        loss, count, samples = (sum(each) / copies for each in list(zip(*ranks))[:3])
        if not samples:
            raise InputError("the dataset is empty", where="evaluation", expected="at least one sample")
        if any(has_loss for *_, has_loss in ranks):
            output.metrics[f"{prefix}_loss"] = loss / count if count else float("nan")  # pyright: ignore
        self._packer.metrics.merge(self._calls, "eval")
        return output._replace(num_samples=int(samples))

    # Batches.

    def _read(self, batch: Any, *, loss_only: bool) -> Rows:
        """A batch of this rank as the loop and the model get it. Raises ``InputError`` for ids that the model lacks."""
        reader, wanted = self._reader, self._trainer.args.include_for_metrics
        reader.require_ids(batch)
        sequences = self._sequences(batch, loss_only)
        number = (find_batch_size(batch) or 1) if sequences is None else len(sequences)
        share, state = getattr(self._loader, "share", None), self._trainer.accelerator.gradient_state
        num, real = number, number
        if share is not None and state.end_of_dataloader and state.active_dataloader is self._loader:
            # What the gathering drops: accelerate cannot know it.
            self._loader.remainder, real = share.remainder, share.num_last
            num = share.size if share.remainder and self._trainer.args.world_size > 1 else number
        fields: Any = batch if isinstance(batch, Mapping) else {}
        if sequences is not None and (not loss_only or "inputs" in wanted):
            fields = self._in_rows(sequences)
        if num > number and "inputs" in wanted:
            fields = tree_map_only(Tensor, lambda it: _filled(it, number, num), dict(fields))
        return Rows(fields, batch if sequences is None or _is_packed(batch) else sequences, sequences, num, real)

    def _sequences(self, batch: Any, loss_only: bool) -> RaggedBatch | None:
        """The sequences of a batch that is not of padded rows; of any under packing, where only the loss is wanted."""
        main_input = self._reader.main_input
        if isinstance(batch, PackedSequence):
            return RaggedBatch.from_packed_sequence(batch, main_input)
        if _is_packed(batch):
            packed = {name: value for name, value in batch.items() if isinstance(value, PackedSequence)}
            parts = {name: RaggedBatch.from_packed_sequence(value, name) for name, value in packed.items()}
            layout = next(iter(parts.values())).layout
            whole = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.shape[:1] == (layout.num_items,)}
            return RaggedBatch({name: each[name] for name, each in parts.items()} | whole, layout, tuple(whole))
        main = counting.value_of(batch, main_input)
        is_row = isinstance(batch, Mapping) and "attention_mask" not in batch and isinstance(main, Tensor)
        is_row = is_row and len(main) == 1 and not {"cu_seq_lens_q", "position_ids", "seq_idx"}.isdisjoint(batch)
        if isinstance(batch, RaggedBatch) or is_row or (loss_only and self._packer.options is not None):
            with contextlib.suppress(InputError):  # what does not tell its sequences is evaluated as it is
                return self._reader.as_ragged(batch)
        return None

    def _in_rows(self, sequences: RaggedBatch, form: str = "mask") -> dict[str, Any]:
        field = weight_field(self._trainer.args)
        sequences = sequences.select(name for name in sequences.names if name != field)
        padding = self._reader.pad_token_id
        return forms.keywords_of(sequences, form, shifts=self._reader.shifts, pad_token_id=padding)

    # One batch.

    def _step(
        self,
        run: Callable[..., Any],
        model: nn.Module,
        inputs: Rows,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """``prediction_step`` (``run``), whoever wrote it, over the rows that count. Collective."""
        if ignore_keys is None and not prediction_loss_only:
            config = getattr(bare(model), "config", None)
            ignore_keys = [*getattr(config, "keys_to_ignore_at_inference", ()), *CACHE_NAMES]
        compute = self._loss_of if prediction_loss_only else self._predict
        self.sequences = inputs.sequences
        found, failure = tried(lambda: compute(run, model, inputs, ignore_keys))
        self._meet(None, failure)
        assert found is not None
        self._num_samples += inputs.num_real
        return found

    def _loss_of(self, run: Callable[..., Any], model: nn.Module, rows: Rows, ignore_keys: Any) -> tuple[Any, Any, Any]:
        """The mean loss of a batch, in microbatches within the capacity under packing."""
        if _is_packed(rows.given):  # which transformers' step takes apart
            return self._predict(run, model, rows, ignore_keys or [])[0], None, None
        parts: list[Any] = [rows.given]
        if self._packer.options is not None and isinstance(rows.given, RaggedBatch):
            self._packer.proof.before_evaluation(model, rows.given)
            parts = self._packer.within_capacity(rows.given)
        found = []
        for part in parts:
            number = len(part) if isinstance(part, RaggedBatch) else max(rows.num_real, 1)
            loss = self._call(run, model, part, number if rows.num_real else 0, True, ignore_keys)[0]
            if loss is None:
                return None, None, None
            found.append((loss, self._losses[-1][1].to(loss.device)))
        means, counts = map(torch.stack, zip(*found))
        return found[0][0] if len(found) == 1 else (means * counts).nansum() / counts.sum().clamp(min=1), None, None

    def _predict(self, run: Callable[..., Any], model: nn.Module, rows: Rows, ignore_keys: Any) -> tuple[Any, Any, Any]:
        """Loss, outputs and labels of a batch, in padded rows: as many as the ranks gather."""
        given, sequences, number = rows.given, rows.sequences, max(rows.num_real, 1)
        if sequences is not None:
            own = given if _is_packed(given) else self._own_form(model, sequences)
            if own is not None:
                model = InRows(model, self._trainer._prepare_inputs, own, sequences.layout)
            given = self._in_rows(sequences)
        counted = number if rows.num_real else 0
        loss, outputs, labels = self._call(run, model, given, counted, False, ignore_keys)
        if number < rows.num:
            outputs, labels = tree_map_only(Tensor, lambda it: _filled(it, number, rows.num), (outputs, labels))
        return loss, outputs, labels

    def _own_form(self, model: nn.Module, sequences: RaggedBatch) -> Any:
        """The sequences as a model takes them that knows no mask; None for one that does."""
        form = forms.padded_form(bare(model))
        if form == "mask":
            return None
        return sequences if form == "rows" and self._reader.form == "flattened" else self._in_rows(sequences, form)

    def _call(
        self, run: Callable[..., Any], model: nn.Module, batch: Any, number: int, loss_only: bool, ignore_keys: Any
    ) -> tuple[Any, Any, Any]:
        """One call of ``run``, whose loss and metrics are kept. ``number``: of samples that count."""
        trainer, reader, metrics = self._trainer, self._reader, self._packer.metrics
        weights = reader.weights(batch, number) if metrics.are_kept and number else {}
        with metrics.collect(self._calls, "eval", weights):
            loss, outputs, labels = run(model, batch, loss_only, ignore_keys=ignore_keys)
        if loss is None and self._needs_loss:
            fields = list(batch) if isinstance(batch, (RaggedBatch, Mapping)) else [reader.main_input]
            raise missing_labels(trainer.label_names, reader.forward_parameters, fields, reader.main_input)
        if loss is not None:
            if (sharding := sharding_of(trainer.model)) is not None:
                loss = sharding.whole_loss(loss)
            # A mean is weighed by the labels that it is over; without labels to count, by samples.
            elements = reader.label_elements(batch) if number else None
            count = torch.tensor(number) if elements is None else counting.count_labels(elements)
            self._losses.append((loss, count))
        return loss, outputs, labels

    def divisor_of(self, inputs: Any) -> Tensor | None:
        """The divisor for the user's ``compute_loss_func`` in evaluation: the labels of this batch on this rank.

        Multiplied by the processes where ``compute_loss`` multiplies the loss by them, so that a mean is left. None
        without such a function or without labels.
        """
        elements = self._reader.label_elements(inputs) if self._trainer.compute_loss_func is not None else None
        if elements is None:
            return None
        shared = self._trainer.accelerator.num_processes if self._trainer.args.average_tokens_across_devices else 1
        return counting.count_labels(elements).clamp(min=1) * shared

    def _asks_for_loss(self, loss_only: bool) -> bool:
        """Whether a batch without a loss leaves unreported what was asked for.

        Metrics need labels as the loss does. A trainer's own ``evaluate`` knows what it reads of the outputs.
        """
        trainer, reader = self._trainer, self._reader
        if reader.overridden("prediction_step"):
            return False
        if trainer.is_in_train and str(trainer.args.metric_for_best_model).removeprefix("eval_") == "loss":
            return True
        own = defining_class(type(trainer), "evaluate")
        if own is not None and package_of(own) != "trl":
            return False
        return loss_only or trainer.compute_metrics is not None


def require_undivided(dataset: Any, where: str, ranks: int) -> None:
    """Raise ``InputError`` for a data set that is known to be empty, or is divided among several ranks already."""
    if has_length(dataset) and len(dataset) == 0:
        raise InputError("the dataset is empty", where=where, expected="at least one sample")
    if ranks > 1 and getattr(dataset, "_distributed", None) is not None:
        raise InputError(
            "an evaluation data set that is divided already would be divided once more, and most of it never read",
            where=where,
            expected="the whole data set on every rank",
            found="a part that split_dataset_by_node has made",
            hint="give it undivided: each sample is evaluated once, on one rank",
        )


def _joined(blocks: Any) -> Any:
    """A list of what batches gave as one: arrays [n, ...], filled with -100 up to the largest, in tuples and dicts too.

    The list is emptied, so that at no time all of it is there twice. None, and an empty list, as None.
    """
    if not blocks:
        return None
    if isinstance(blocks[0], (tuple, list, Mapping)):
        names = list(blocks[0]) if isinstance(blocks[0], Mapping) else range(len(blocks[0]))
        parts = {name: [block[name] for block in blocks] for name in names}
        blocks.clear()
        found = {name: _joined(parts.pop(name)) for name in names}
        return tuple(found.values()) if isinstance(names, range) else found
    # Blocks [3, 5, V] and [2, 9, V] become [5, 9, V], the first three rows with -100 behind their five.
    blocks[:] = [np.atleast_1d(block) for block in blocks]
    shape = [max(sizes) for sizes in zip(*(block.shape for block in blocks))]
    shape[0] = sum(map(len, blocks))
    # Pages of an empty array come into memory as they are written, while those of the blocks go.
    made, at = np.empty(shape, np.result_type(*{block.dtype for block in blocks})), 0
    blocks.reverse()
    while blocks:
        block = blocks.pop()
        rows = made[at : at + len(block)]
        if list(block.shape[1:]) != shape[1:]:
            rows[...] = IGNORED_LABEL
        rows[tuple(map(slice, block.shape))] = block
        at += len(block)
    return made


def _filled(tensor: Tensor, number: int, num: int) -> Tensor:
    """``number`` rows as ``num``, the last one repeated: what the gathering drops."""
    if tensor.shape[:1] != (number,):
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(num - number, *tensor.shape[1:])])


def _gathered(value: Any, *, axis: Axis, accelerator: Any) -> Any:
    """Rows of the ranks along ``axis``, end to end on the host, without those that fill up the last batch."""
    state = accelerator.gradient_state
    last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    return tree_map_only(Tensor, lambda it: torch.cat(gather_objects(it.cpu(), axis))[:last], value)


def _is_packed(batch: Any) -> bool:
    """Whether a batch is, or has, a ``PackedSequence``."""
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    return any(isinstance(value, PackedSequence) for value in values)


def missing_labels(label_names: list[str], parameters: list[str], fields: list[str], main_input: str) -> InputError:
    """Why ``evaluate()`` can compute no loss: which parameter is at fault, and which ``label_names`` to set."""
    absent = [name for name in label_names if name not in fields]
    present = [name for name in label_names if name in fields]
    if label_names and absent:
        return InputError(
            "evaluate() would report no loss: a parameter of forward is taken for labels and is not in the batch",
            where=", ".join(absent),
            expected=f"all of {label_names}, because their names contain 'label'",
            found=f"a batch of {fields}",
            hint=f"set label_names={present or ['<your labels>']} in TrainingArguments",
        )
    known = {main_input, "attention_mask", *LENGTHS_NAMES, "position_ids", "token_type_ids"}
    named = [name for name in parameters[1:] if name in fields and name not in known]
    candidates = named or [name for name in fields if name not in known and name != next(iter(parameters), None)]
    return InputError(
        "evaluate() would report no loss: no parameter of forward is recognised as labels",
        where=f"forward({', '.join(parameters)})",
        expected="a parameter whose name contains 'label'",
        found=f"a batch of {fields}",
        hint=f"set label_names={candidates[:1] or ['<your labels>']} in TrainingArguments",
    )
