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
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback, get_scheduler
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ullage.batch import RaggedBatch
from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER
from ullage.engines.fsdp.checkpoint import load, save, save_pretrained
from ullage.engines.fsdp.evaluation import Evaluation
from ullage.engines.fsdp.mesh import make_topology
from ullage.engines.fsdp.model import parallel_of, parallelize
from ullage.engines.fsdp.objective import SEQUENCE
from ullage.engines.fsdp.samples import PreparedSamples
from ullage.engines.fsdp.step import StepResult, train_step
from ullage.engines.fsdp.trainer_arguments import make_optimizer, require_supported
from ullage.errors import CheckpointError, InputError
from ullage.exchange import PackedIterator, PackedStep
from ullage.mixers.wrappers import bare
from ullage.ranks import Topology
from ullage.ranks.groups import make_group
from ullage.ranks.wire import device_of
from ullage.training.arguments import form_process_group, peak_flops_of
from ullage.training.metering import TokenMeter, cost_of, model_flops, num_parameters
from ullage.training.saving import save_checkpoint
from ullage.training.stopping import StopFlag

#: The folder of a checkpoint that holds what ``ullage.engines.fsdp.save`` wrote.
WEIGHTS = MODEL_AND_OPTIMIZER
_STATE = "trainer_state.json"
#: Slots a rank holds in a microbatch unless packing_capacity is given: this engine always packs.
_CAPACITY = 8192


class Trainer:
    """Trains a Hugging Face language model or classifier on packed steps over dp, cp and tp.

    The part of ``transformers.Trainer`` that a training run needs, by its names: :meth:`train`, :meth:`evaluate`,
    :meth:`save_model`, callbacks, ``state`` and ``args``. Override :meth:`training_step` to see each step::

        trainer = fsdp.Trainer(model, arguments, train_dataset=samples, topology=fsdp.make_topology(cp=2))
        trainer.train()

    Args:
        model: a model of transformers, changed in place by :func:`ullage.engines.fsdp.parallelize`.
        args: ``ullage.training.TrainingArguments``, or transformers' own, with the defaults of ours for packing. A step
            has ``per_device_train_batch_size`` × ``gradient_accumulation_steps`` × dp sequences. Without
            ``packing_capacity`` a microbatch has 8192 slots.
        data_collator: makes a RaggedBatch of a list of one sample; None is ``RaggedCollator()`` on the columns that the
            model takes: ``input_ids``, and ``labels`` unless the ids are predicted, or TRL's ``completion_mask`` and
            ``assistant_masks``.
        train_dataset: the samples by index, the same on every rank.
        eval_dataset: the samples that :meth:`evaluate` takes; None evaluates nothing.
        processing_class: a tokenizer, saved beside the model.
        callbacks: of transformers; those that it adds by itself are there already.
        compute_metrics: of transformers' Trainer; called on every rank with the outputs of all samples, an array per
            sample, or one array for classes of sequences.
        preprocess_logits_for_metrics: of transformers' Trainer; called on one sample's logits as a batch of one.
        topology: the ranks of dp, cp and tp; None is all processes of ``torchrun`` as dp.
        dp_replicate: groups of dp ranks that each hold all parameters, see :func:`parallelize`.
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
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = (),
        *,
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        topology: Topology | None = None,
        dp_replicate: int = 1,
        cp_method: str = "auto",
    ) -> None:
        self.args = args
        form_process_group(args)
        require_supported(args)
        if train_dataset is None or not len(train_dataset):
            raise InputError("there is nothing to train on", where="train_dataset", expected="at least one sample")
        self.topology = topology or make_topology()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator, self.processing_class = data_collator, processing_class
        self.compute_metrics, self._preprocess = compute_metrics, preprocess_logits_for_metrics
        if args.gradient_checkpointing:
            inner: Any = bare(model)
            inner.activation_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self._cost, self._num_parameters = cost_of(model), num_parameters(model)
        dtype = torch.bfloat16 if args.bf16 else None
        self.model = parallelize(model, self.topology, dtype=dtype, cp_method=cp_method, dp_replicate=dp_replicate)
        self.optimizer = make_optimizer(self.model, args)
        # Accumulated batches are one step: its plan says how many microbatches it has.
        self.global_batch_size = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * self.topology.dp.size
        )
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
            [DefaultFlowCallback, *reporting, *(callbacks or ()), shown],
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
            self._host_group = make_group(range(args.world_size), name="stop flag")

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
        self._load_best()
        self._count_empty_steps()
        closing = self.meter.closing()
        if closing:
            self._log(closing)
        self.control = self._handler.on_train_end(self.args, self.state, self.control)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The mean loss over the labels of the held-out samples, and the metrics of them; logged.

        Collective; waits for the device. Raises ``InputError`` if there are no samples.
        """
        began, dataset = time.perf_counter(), self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None or not len(dataset):
            raise InputError("there is nothing to evaluate on", where="eval_dataset", expected="at least one sample")
        batch = self.args.per_device_eval_batch_size * self.topology.dp.size
        evaluation = Evaluation(self.model, self.compute_metrics, self._preprocess)
        with self._steps(dataset, batch, numbered=self.compute_metrics is not None) as steps:
            found = evaluation.run(steps)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.perf_counter() - began, 3)
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
        """Train on the rest of an epoch."""
        with self.steps_of_epoch(epoch) as steps:
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

    def steps_of_epoch(self, epoch: int) -> PackedIterator:
        """The planned steps of an epoch that are left to make; each epoch has an order, the same on every layout."""
        # Seed and epoch alone decide the order, not the layout: that of accelerate's sampler, so of a plain Trainer.
        # A continued run leaves out the steps that were made.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed + epoch))
        done = self.state.global_step % self.steps_per_epoch * self.global_batch_size
        left = torch.utils.data.Subset(self.train_dataset, order[done:].tolist())
        return self._steps(left, self.global_batch_size)

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
            is_best = self._note_best(self.evaluate())
            # As transformers: with save_strategy="best" the metric decides alone.
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            self._save()
            self.control = self._handler.on_save(self.args, self.state, self.control)

    def _note_best(self, metrics: dict[str, float]) -> bool:
        """Whether these metrics are the best so far; then the checkpoint of this step is, if one is written."""
        chosen = self.args.metric_for_best_model
        if chosen is None:
            return False
        name = chosen if chosen.startswith("eval_") else f"eval_{chosen}"
        if name not in metrics:
            raise InputError("metric_for_best_model is not among the metrics", expected=list(metrics), found=name)
        value, best = metrics[name], self.state.best_metric
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        saves = self.control.should_save or self.args.save_strategy == SaveStrategy.BEST
        if saves:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.state.best_model_checkpoint = str(Path(self.args.output_dir or ".") / folder)
        return True

    def _load_best(self) -> None:
        """Load the weights of the best checkpoint. Raises ``CheckpointError`` if it is damaged."""
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            load(Path(best) / WEIGHTS, self.model)

    def _count_empty_steps(self) -> None:
        """Count the steps since the last log in which no label counted. Waits for the device."""
        self.meter.left_out.empty_steps += sum(int(result.num_labels) == 0 for result in self._since_log)

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch or 0.0
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self._handler.on_log(self.args, self.state, self.control, logs=logs)

    def _steps(self, dataset: Any, global_batch_size: int, *, numbered: bool = False) -> PackedIterator:
        objective = parallel_of(self.model).objective
        samples = PreparedSamples(
            dataset,
            self.model,
            objective,
            self.data_collator,
            every_column=not getattr(self.args, "remove_unused_columns", True),
            numbered=numbered,
        )
        return PackedIterator(
            samples,
            self.topology,
            global_batch_size=global_batch_size,
            capacity=getattr(self.args, "packing_capacity", None) or _CAPACITY,
            shared=True,
            per_sequence=("labels",) if objective == SEQUENCE else (),
            cp_order=None,  # rows are cut where the model runs
            cost=self._cost,
            strategy=getattr(self.args, "packing_plan_strategy", "balanced"),
            oversize=self._oversize,
        )

    def _save(self) -> None:
        # A plain Trainer that goes on from here looks for its own entry.
        kept = [each for each in (*self._handler.callbacks, self.control) if isinstance(each, ExportableState)]
        states: Any = {type(each).__name__: each.state() for each in kept}
        self.state.stateful_callbacks = states

        def write(place: Path) -> None:
            save(place / WEIGHTS, self.model, self.optimizer, scheduler=self.scheduler)
            if self.args.should_save:
                self.model.config.save_pretrained(place)
                self.state.save_to_json(str(place / _STATE))

        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        save_checkpoint(Path(self.args.output_dir or "."), self.state.global_step, write, self.args, best=best)

    def _load(self, folder: Path, allow_changed: bool) -> None:
        saved = TrainerState.load_from_json(str(folder / _STATE))
        is_ours = (folder / WEIGHTS).is_dir()
        self._require_same_steps(folder, saved, is_ours)
        place = folder / WEIGHTS if is_ours else folder
        load(place, self.model, self.optimizer, allow_changed=allow_changed, scheduler=self.scheduler)
        self.state.global_step, self.state.log_history = saved.global_step, saved.log_history
        self.state.epoch = saved.global_step / self.steps_per_epoch
        self.state.best_metric, self.state.best_global_step = saved.best_metric, saved.best_global_step
        self.state.best_model_checkpoint = saved.best_model_checkpoint

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
