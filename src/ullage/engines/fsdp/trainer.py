"""Trainer over the engine of this package, with the arguments, callbacks and names of transformers' Trainer.

The loop is the engine's own; when to log, evaluate, save and stop is decided by transformers' own callback, by the same
arguments. A checkpoint holds ``trainer_state.json``, the model's config and, in ``model_and_optimizer``, what
:func:`ullage.engines.fsdp.save` writes, so a run continues on any other topology.

Source: transformers 5.23 ``trainer.py``: the names, the two groups of the optimizer, and what a callback is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback, get_scheduler
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl, TrainerState

from ullage.batch import RaggedBatch
from ullage.checkpoint.locate import MODEL_AND_OPTIMIZER
from ullage.engines.fsdp.checkpoint import load, save, save_pretrained
from ullage.engines.fsdp.mesh import make_topology
from ullage.engines.fsdp.model import parallelize
from ullage.engines.fsdp.step import StepResult, evaluate_step, train_step
from ullage.engines.fsdp.trainer_checkpoint import decaying_first
from ullage.errors import CheckpointError, InputError
from ullage.exchange import PackedIterator, PackedStep
from ullage.ranks import Topology
from ullage.ranks.wire import device_of
from ullage.training.arguments import AUTO, form_process_group, peak_flops_of
from ullage.training.costing import cost_of, model_flops, num_parameters
from ullage.training.metering import TokenMeter
from ullage.training.saving import save_checkpoint
from ullage.training.stopping import StopFlag

#: The folder of a checkpoint that holds what ``ullage.engines.fsdp.save`` wrote.
WEIGHTS = MODEL_AND_OPTIMIZER
_STATE = "trainer_state.json"
#: Slots a rank holds in a microbatch unless packing_capacity is given: this engine always packs.
_CAPACITY = 8192
#: Arguments that this loop does not implement, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "deepspeed": (None,),
    "fsdp": (None, "", [], False),
    "fp16": (False,),
    "torch_compile": (False,),
    "label_smoothing_factor": (0, 0.0),
    "load_best_model_at_end": (False,),
    "group_by_length": (False,),
    "push_to_hub": (False,),
    "enable_jit_checkpoint": (False,),
    "gradient_accumulation_steps": (1,),
    "dataloader_drop_last": (False,),
    "empty_step": ("warn",),
    "packing_loss_weighting": ("token",),
}


class Trainer:
    """Trains a Hugging Face causal language model on packed steps over dp, cp and tp.

    The part of ``transformers.Trainer`` that a training run needs, by its names: :meth:`train`, :meth:`evaluate`,
    :meth:`save_model`, callbacks, ``state`` and ``args``. Override :meth:`training_step` to see each step::

        trainer = fsdp.Trainer(model, arguments, train_dataset=samples, topology=fsdp.make_topology(cp=2))
        trainer.train()

    Args:
        model: a model of transformers, changed in place by :func:`ullage.engines.fsdp.parallelize`.
        args: ``ullage.training.TrainingArguments``, or transformers' own, with the defaults of ours for packing. A step
            has ``per_device_train_batch_size`` × dp sequences. Without ``packing_capacity`` a microbatch has 8192
            slots.
        data_collator: makes a RaggedBatch of a list of one sample, such as ``RaggedCollator()``; None takes samples as
            they are: dicts with ``input_ids`` and, unless these are predicted too, ``labels``.
        train_dataset: the samples by index, the same on every rank.
        eval_dataset: the samples that :meth:`evaluate` takes; None evaluates nothing.
        processing_class: a tokenizer, saved beside the model.
        callbacks: of transformers; those that it adds by itself are there already.
        topology: the ranks of dp, cp and tp; None is all processes of ``torchrun`` as dp.
        cp_method: how cp shares attention: ``"auto"``, ``"ulysses"`` (heads) or ``"gather"`` (keys).

    Collective. Raises ``InputError`` on every rank for an argument that this loop does not implement, an empty
    dataset, and whatever ``parallelize`` refuses.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        data_collator: Callable[[list[Any]], RaggedBatch] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
        *,
        topology: Topology | None = None,
        cp_method: str = "auto",
    ) -> None:
        self.args = args
        form_process_group(args)
        _require_supported(args)
        if train_dataset is None or not len(train_dataset):
            raise InputError("there is nothing to train on", where="train_dataset", expected="at least one sample")
        self.topology = topology or make_topology()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator, self.processing_class = data_collator, processing_class
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self._cost, self._num_parameters = cost_of(model), num_parameters(model)
        dtype = torch.bfloat16 if args.bf16 else None
        self.model = parallelize(model, self.topology, dtype=dtype, cp_method=cp_method)
        self.optimizer = _optimizer(self.model, args)
        self.global_batch_size = args.per_device_train_batch_size * self.topology.dp.size
        self.steps_per_epoch = math.ceil(len(train_dataset) / self.global_batch_size)
        self.state, self.control = self._first_state(), TrainerControl()
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=args.get_warmup_steps(self.state.max_steps),
            num_training_steps=self.state.max_steps,
            scheduler_specific_kwargs=cast(Any, args.lr_scheduler_kwargs),
        )
        # In the order of transformers' Trainer: flow control, reporting, the user's, the display.
        shown = PrinterCallback if args.disable_tqdm else ProgressCallback
        reporting = get_reporting_integration_callbacks(args.report_to)
        self._handler = CallbackHandler(
            [DefaultFlowCallback, *reporting, *callbacks, shown],
            self.model,
            processing_class,
            self.optimizer,
            self.scheduler,
        )
        self._since_log: list[StepResult] = []
        self.meter, self.stop = TokenMeter(), StopFlag()
        self.meter.begin_run(
            args.device,
            self.topology.dp.group,
            num_devices=args.world_size,
            peak_flops=peak_flops_of(args),
            oversize=self._oversize,
        )
        # A group for the stop flag, which is a host tensor: NCCL takes none, and asking on the device would wait for
        # it.
        self._host_group = None
        world = dist.group.WORLD if args.world_size > 1 else None
        if world is not None and device_of(world).type != "cpu":
            self._host_group = dist.new_group(backend="gloo")

    def _first_state(self) -> TrainerState:
        state, steps = TrainerState(), self.args.max_steps
        # As in transformers' Trainer, max_steps decides over the number of epochs if it is given.
        state.max_steps = steps if steps > 0 else math.ceil(float(self.args.num_train_epochs) * self.steps_per_epoch)
        state.num_train_epochs = math.ceil(state.max_steps / self.steps_per_epoch)
        state.is_world_process_zero = state.is_local_process_zero = self.args.should_save
        state.train_batch_size = self.global_batch_size
        state.compute_steps(self.args, state.max_steps)
        return state

    @property
    def _oversize(self) -> str:
        return getattr(self.args, "packing_oversize", "error")

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as transformers' Trainer does."""
        self._handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback or the one of this class, as transformers' Trainer does."""
        self._handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: str | None = None, *, allow_changed_checkpoint: bool = False) -> None:
        """Train to the end, or until a callback says stop. Collective.

        Args:
            resume_from_checkpoint: a folder ``checkpoint-N`` of such a run, on any topology with steps of the same
                size.
            allow_changed_checkpoint: take files that were changed since they were written.

        Raises ``CheckpointError`` on every rank for a checkpoint that is damaged or of another model or step size.
        """
        if resume_from_checkpoint is not None:
            self._load(Path(resume_from_checkpoint), allow_changed_checkpoint)
        self.model.train()
        self.control = self._handler.on_train_begin(self.args, self.state, self.control)
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            self._train_epoch(self.state.global_step // self.steps_per_epoch)
        self._count_empty_steps()
        closing = self.meter.closing()
        if closing:
            self._log(closing)
        self.control = self._handler.on_train_end(self.args, self.state, self.control)

    def evaluate(self) -> dict[str, float]:
        """The mean loss over the labels of the held-out texts; logged. Collective; waits for the device."""
        began, loss, count = time.perf_counter(), 0.0, 0
        batch = self.args.per_device_eval_batch_size * self.topology.dp.size
        with self._steps(self.eval_dataset, batch) as steps:
            for step in steps:
                result = evaluate_step(self.model, step)
                # A step's loss is a mean over its labels, so it counts by their number.
                loss += float(result.loss) * int(result.num_labels)
                count += int(result.num_labels)
        metrics = {"eval_loss": loss / max(count, 1), "eval_runtime": round(time.perf_counter() - began, 3)}
        self._log(metrics)
        self.control = self._handler.on_evaluate(self.args, self.state, self.control, metrics=metrics)
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the whole model and its tokenizer, so that ``from_pretrained`` reads them. Collective.

        Args:
            output_dir: the folder, by default that of the arguments.
        """
        others = () if self.processing_class is None else (self.processing_class,)
        save_pretrained(self.model, output_dir or self.args.output_dir or ".", *others)

    def _train_epoch(self, epoch: int) -> None:
        """Train on the rest of an epoch. Each epoch has an order of its own, the same on every layout."""
        # Seed and epoch alone decide the order, not the layout: that of accelerate's sampler, so of a plain Trainer.
        # A continued run leaves out the steps that were made.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed + epoch))
        done = self.state.global_step % self.steps_per_epoch * self.global_batch_size
        left = torch.utils.data.Subset(self.train_dataset, order[done:].tolist())
        with self._steps(left, self.global_batch_size) as steps:
            for step in steps:
                self.control = self._handler.on_step_begin(self.args, self.state, self.control)
                self._since_log.append(self.training_step(step))
                self.state.global_step += 1
                self.state.epoch = self.state.global_step / self.steps_per_epoch
                self.control = self._handler.on_step_end(self.args, self.state, self.control)
                self._act()
                if self.control.should_training_stop:
                    return
        self.control = self._handler.on_epoch_end(self.args, self.state, self.control)
        self._act()

    def training_step(self, step: PackedStep) -> StepResult:
        """Forward, backward and the optimizer's step of one packed step. Collective; does not wait for the device."""
        flops = model_flops(self._cost, self._num_parameters, step.microbatches)
        self.meter.add_packed(step.microbatches, step.plan, flops)
        # Started before the step and read after it, so that the two run side by side.
        stop = self._reduce_stop()
        limit = self.args.max_grad_norm or None
        result = train_step(self.model, self.optimizer, step, max_grad_norm=limit, scheduler=self.scheduler)
        self.stop.agreed = stop()
        return result

    def _reduce_stop(self) -> Callable[[], int]:
        """The signal that asks any rank to stop, 0 for none; the step hides the reduction. Does not wait for a device.

        The reductions of the step itself lie on the device, and none is over all ranks.
        """
        if self.args.world_size == 1:
            return lambda: self.stop.requested
        stop = torch.tensor(self.stop.requested)
        work = dist.all_reduce(stop, dist.ReduceOp.MAX, group=self._host_group, async_op=True)

        def agreed() -> int:
            assert work is not None
            work.wait()
            return int(stop)

        return agreed

    def _act(self) -> None:
        """Log, evaluate and save, where the callbacks asked for it."""
        if self.control.should_log and self._since_log:
            losses = [float(result.loss) for result in self._since_log]
            norm = self._since_log[-1].grad_norm
            self._count_empty_steps()
            logs = {"loss": sum(losses) / len(losses), "grad_norm": float(norm) if norm is not None else 0.0}
            self._since_log = []
            self._log({**logs, "learning_rate": float(self.scheduler.get_last_lr()[0]), **self.meter.rates()})
        if self.control.should_evaluate and self.eval_dataset is not None:
            self.evaluate()
        if self.control.should_save:
            self._save()
            self.control = self._handler.on_save(self.args, self.state, self.control)

    def _count_empty_steps(self) -> None:
        """Count the steps since the last log in which no label counted. Waits for the device."""
        self.meter.left_out.empty_steps += sum(int(result.num_labels) == 0 for result in self._since_log)

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch or 0.0
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self._handler.on_log(self.args, self.state, self.control, logs=logs)

    def _steps(self, dataset: Any, global_batch_size: int) -> PackedIterator:
        return PackedIterator(
            dataset if self.data_collator is None else _Collated(dataset, self.data_collator),
            self.topology,
            global_batch_size=global_batch_size,
            capacity=getattr(self.args, "packing_capacity", None) or _CAPACITY,
            shared=True,
            cp_order=None,  # rows are cut where the model runs
            cost=self._cost,
            strategy=getattr(self.args, "packing_plan_strategy", "balanced"),
            oversize=self._oversize,
        )

    def _save(self) -> None:
        # A plain Trainer that goes on from here looks for its own entry.
        kept = [each for each in (*self._handler.callbacks, self.control) if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = {type(each).__name__: each.state() for each in kept}

        def write(place: Path) -> None:
            save(place / WEIGHTS, self.model, self.optimizer, scheduler=self.scheduler)
            if self.args.should_save:
                self.model.config.save_pretrained(place)
                self.state.save_to_json(str(place / _STATE))

        save_checkpoint(Path(self.args.output_dir or "."), self.state.global_step, write, self.args)

    def _load(self, folder: Path, allow_changed: bool) -> None:
        saved = TrainerState.load_from_json(str(folder / _STATE))
        is_ours = (folder / WEIGHTS).is_dir()
        self._require_same_steps(folder, saved, is_ours)
        place = folder / WEIGHTS if is_ours else folder
        load(place, self.model, self.optimizer, allow_changed=allow_changed, scheduler=self.scheduler)
        self.state.global_step, self.state.log_history = saved.global_step, saved.log_history
        self.state.epoch = saved.global_step / self.steps_per_epoch

    def _require_same_steps(self, folder: Path, saved: TrainerState, is_ours: bool) -> None:
        """Raise ``CheckpointError`` for a run whose steps had another number of sequences."""
        expected = f"{saved.train_batch_size} sequences"
        same = saved.train_batch_size == self.global_batch_size
        if not is_ours:
            # A plain Trainer's state has the batch of one rank. The epoch tells the steps that it took.
            steps = saved.global_step / saved.epoch if saved.epoch else self.steps_per_epoch
            same = abs(steps - self.steps_per_epoch) < 0.5
            expected = f"{steps:.0f} steps in an epoch; here {self.steps_per_epoch}"
        if not same:
            raise CheckpointError(
                "the run would go on with steps of another size",
                where=str(folder),
                expected=expected,
                found=f"{self.global_batch_size} sequences: {self.topology.dp.size} ranks of dp with "
                f"{self.args.per_device_train_batch_size} each",
                hint="choose per_device_train_batch_size and dp whose product is that of the run",
            )


class _Collated:
    """The samples of a dataset as a collator prepares them, one at a time."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], RaggedBatch]) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._collate([self._dataset[index]]).samples()[0]


def _require_supported(arguments: Any) -> None:
    if getattr(arguments, "packing_capacity", None) == AUTO:
        raise InputError(
            "a capacity is not found by itself over ullage.engines.fsdp, which --dp, --cp and --tp use",
            where="packing_capacity",
            expected="a number",
            found=AUTO,
        )
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(arguments, name, harmless[0])
        if value not in harmless:
            more = name == "gradient_accumulation_steps"
            raise InputError(
                f"{name} is not supported over ullage.engines.fsdp, which --dp, --cp and --tp use",
                expected=harmless[0],
                found=value,
                hint="multiply per_device_train_batch_size instead" if more else "leave it out",
            )


def _optimizer(model: Any, arguments: Any) -> torch.optim.Optimizer:
    """Trainer's optimizer of these arguments, with Trainer's two groups."""
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(decaying_first(model), (arguments.weight_decay, 0.0), strict=True)
    ]
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    # Factories, and optimizers that want more than groups of parameters (GaLore, LOMO, layer-wise ones), are made by
    # code of Trainer that is not taken over here.
    if not issubclass(kind, torch.optim.Optimizer) or {"params", "model", "optimizer_dict"} & set(options):
        raise InputError("this optim is not supported over ullage.engines.fsdp", found=str(arguments.optim))
    # Both, even where one has no parameters: then a checkpoint has the groups of Trainer's.
    return kind(groups, **options)
