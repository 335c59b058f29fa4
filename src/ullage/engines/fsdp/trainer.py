"""``ullage train --dp --cp --tp``: the same run over ``ullage.engines.fsdp``, packed.

:class:`ParallelTrainer` has the part of Trainer's face that the command uses, over the engine's own loop. When to log,
evaluate, save and stop is decided by transformers' own callback, by the same arguments. A checkpoint holds
``trainer_state.json``, the model's config and, in ``model_and_optimizer``, what :func:`ullage.engines.fsdp.save` wrote,
so a run goes on with any other ``--dp --cp --tp``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from transformers import DefaultFlowCallback, Trainer, get_scheduler
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from ullage.cli.train.layout import WEIGHTS
from ullage.engines import fsdp
from ullage.errors import CheckpointError, InputError
from ullage.exchange import PackedIterator, PackedStep
from ullage.planning import Statistics, TransformerCost
from ullage.ranks.wire import device_of
from ullage.training.arguments import form_process_group
from ullage.training.costing import cost_of
from ullage.training.counting import LeftOut
from ullage.training.packing import PackedBatch
from ullage.training.saving import save_checkpoint

if TYPE_CHECKING:
    from ullage.cli.train.arguments import TrainCommand

_STATE = "trainer_state.json"
#: Slots a rank holds in a microbatch unless --packing_capacity says otherwise: this engine always packs.
_CAPACITY = 8192
#: Arguments of Trainer that this loop does not honour, and the values that ask for nothing.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
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
}


class Watched:
    """What people watch, since the last log: the plans tell it of all ranks."""

    def __init__(self) -> None:
        self._since, self._tokens, self._flops = time.perf_counter(), 0, 0.0
        self._ullage: list[float] = []
        self._imbalance: list[float] = []

    def add(self, step: PackedStep, statistics: Statistics, cost: Any) -> None:
        """Counts a step; model FLOPs are of real tokens, forward and backward, attention's causal half."""
        self._ullage.append(statistics.ullage)
        self._imbalance.append(statistics.rank_imbalance)
        self._tokens += step.num_tokens
        if isinstance(cost, TransformerCost):
            self._flops += cost.training_flops(step.num_tokens, step.sum_squared_lengths)

    def rates(self) -> dict[str, float]:
        """By the names that Trainer's packed runs log."""
        seconds, steps = time.perf_counter() - self._since, len(self._ullage)
        return {
            "tokens_per_second": round(self._tokens / seconds, 1),
            "ullage": round(sum(self._ullage) / steps, 4),
            "imbalance": round(sum(self._imbalance) / steps, 4),
            "flops_per_second": self._flops / seconds,
        }


class ParallelTrainer:
    """Trains over the engine; what ``ullage train`` asks of a Trainer, by Trainer's names."""

    #: As in ``RaggedTrainerMixin``.
    _stop_wish = _stop_agreed = 0

    def __init__(
        self, command: TrainCommand, model: Any, tokenizer: Any, training: Any, held_out: Any, meter: Any
    ) -> None:
        self.args = command.training
        form_process_group(self.args)
        self._refuse()
        sizes = command.parallel
        self.topology = fsdp.make_topology(dp=sizes.dp, cp=sizes.cp or 1, tp=sizes.tp or 1)
        self.dataset, self.eval_dataset, self._tokenizer, self._meter = training, held_out, tokenizer, meter
        if self.args.gradient_checkpointing:
            model.activation_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        self._cost = cost_of(model)
        dtype = torch.bfloat16 if self.args.bf16 else None
        self.model = fsdp.parallelize(model, self.topology, dtype=dtype, cp_method=sizes.cp_method)
        self.optimizer = _optimizer(self.model, self.args)
        self.global_batch_size = self.args.per_device_train_batch_size * self.topology.dp.size
        self.steps_per_epoch = math.ceil(len(training) / self.global_batch_size)
        self.state, self.control = TrainerState(), TrainerControl()
        epochs = float(self.args.num_train_epochs)
        given = self.args.max_steps
        self.state.max_steps = given if given > 0 else math.ceil(epochs * self.steps_per_epoch)
        self.state.num_train_epochs = math.ceil(self.state.max_steps / self.steps_per_epoch)
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.args.should_save
        self.state.train_batch_size = self.global_batch_size
        self.state.compute_steps(self.args, self.state.max_steps)
        self.scheduler = get_scheduler(
            self.args.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=self.args.get_warmup_steps(self.state.max_steps),
            num_training_steps=self.state.max_steps,
            scheduler_specific_kwargs=cast(Any, self.args.lr_scheduler_kwargs),
        )
        self._handler = CallbackHandler(
            [DefaultFlowCallback(), meter, *get_reporting_integration_callbacks(self.args.report_to)],
            self.model,
            tokenizer,
            self.optimizer,
            self.scheduler,
        )
        self._since_log: list[fsdp.StepResult] = []
        self._watched = Watched()
        self._left_out = LeftOut(self.args.packing_oversize)
        self._host_group = None
        world = dist.group.WORLD if self.args.world_size > 1 else None
        if world is not None and device_of(world).type != "cpu":
            self._host_group = dist.new_group(backend="gloo")

    def add_callback(self, callback: Any) -> None:
        """As Trainer's."""
        self._handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """As Trainer's."""
        self._handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: str | None = None, *, allow_changed_checkpoint: bool = False) -> None:
        """Trains to the end, or until a callback says stop. Collective."""
        if resume_from_checkpoint is not None:
            self._load(Path(resume_from_checkpoint), allow_changed_checkpoint)
        self.model.train()
        self.control = self._handler.on_train_begin(self.args, self.state, self.control)
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            self._train_epoch(self.state.global_step // self.steps_per_epoch)
        self._count_empty_steps()
        totals = self._left_out.totals()
        if totals:
            self._log(totals)
        self.control = self._handler.on_train_end(self.args, self.state, self.control)

    def evaluate(self) -> dict[str, float]:
        """The mean loss over the labels of the held-out texts; logged. Collective; waits for the device."""
        began, loss, count = time.perf_counter(), 0.0, 0
        batch = self.args.per_device_eval_batch_size * self.topology.dp.size
        with self._steps(self.eval_dataset, batch) as steps:
            for step in steps:
                result = fsdp.evaluate_step(self.model, step)
                loss += float(result.loss) * int(result.num_labels)
                count += int(result.num_labels)
        metrics = {"eval_loss": loss / max(count, 1), "eval_runtime": round(time.perf_counter() - began, 3)}
        self._log(metrics)
        self.control = self._handler.on_evaluate(self.args, self.state, self.control, metrics=metrics)
        return metrics

    def save_model(self) -> None:
        """The whole model and its tokenizer, so that ``from_pretrained`` reads them. Collective."""
        fsdp.save_pretrained(self.model, self.args.output_dir or ".", self._tokenizer)

    def _train_epoch(self, epoch: int) -> None:
        """What is left of an epoch: each has an order of its own, the same on every layout."""
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.args.seed + epoch))
        done = self.state.global_step % self.steps_per_epoch * self.global_batch_size
        left = torch.utils.data.Subset(self.dataset, order[done:].tolist())
        with self._steps(left, self.global_batch_size) as steps:
            for step in steps:
                self.control = self._handler.on_step_begin(self.args, self.state, self.control)
                self._train_step(step)
                self.control = self._handler.on_step_end(self.args, self.state, self.control)
                self._act()
                if self.control.should_training_stop:
                    return
        self.control = self._handler.on_epoch_end(self.args, self.state, self.control)
        self._act()

    def _train_step(self, step: PackedStep) -> None:
        speaks = self.topology.cp.rank == self.topology.tp.rank == 0  # the others have the same sequences
        if speaks:
            self._meter.count(PackedBatch(tuple(step.microbatches), step.plan))
        statistics = step.plan.statistics()
        self._watched.add(step, statistics, self._cost)
        self._left_out.add(statistics)
        wish = self._tell_wish()
        limit = self.args.max_grad_norm or None
        result = fsdp.train_step(self.model, self.optimizer, step, max_grad_norm=limit, scheduler=self.scheduler)
        self._stop_agreed = wish()
        self._since_log.append(result)
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.steps_per_epoch

    def _tell_wish(self) -> Callable[[], int]:
        """The signal that asks any rank to stop, 0 for none; the step hides the reduction. Does not wait for a device.

        The reductions of the step itself lie on the device, and none is over all ranks.
        """
        if self.args.world_size == 1:
            return lambda: self._stop_wish
        wish = torch.tensor(self._stop_wish)
        work = dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._host_group, async_op=True)

        def agreed() -> int:
            assert work is not None
            work.wait()
            return int(wish)

        return agreed

    def _act(self) -> None:
        """Logs, evaluates and saves, where the callbacks asked for it."""
        if self.control.should_log and self._since_log:
            losses = [float(result.loss) for result in self._since_log]
            norm = self._since_log[-1].grad_norm
            self._count_empty_steps()
            logs = {"loss": sum(losses) / len(losses), "grad_norm": float(norm) if norm is not None else 0.0}
            rates, self._since_log, self._watched = self._watched.rates(), [], Watched()
            rates |= self._left_out.since()
            self._log({**logs, "learning_rate": float(self.scheduler.get_last_lr()[0]), **rates})
        if self.control.should_evaluate and self.eval_dataset is not None:
            self.evaluate()
        if self.control.should_save:
            self._save()
            self.control = self._handler.on_save(self.args, self.state, self.control)

    def _count_empty_steps(self) -> None:
        """Those since the last log in which no label counted. Waits for the device."""
        self._left_out.empty_steps += sum(int(result.num_labels) == 0 for result in self._since_log)

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch or 0.0
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self._handler.on_log(self.args, self.state, self.control, logs=logs)

    def _steps(self, dataset: Any, global_batch_size: int) -> PackedIterator:
        return PackedIterator(
            dataset,
            self.topology,
            global_batch_size=global_batch_size,
            capacity=self.args.packing_capacity or _CAPACITY,
            shared=True,
            cp_order=None,  # rows are cut where the model runs
            cost=self._cost,
            strategy=self.args.packing_plan_strategy,
            oversize=self.args.packing_oversize,
        )

    def _save(self) -> None:
        def write(place: Path) -> None:
            fsdp.save(place / WEIGHTS, self.model, self.optimizer, scheduler=self.scheduler)
            if self.args.should_save:
                self.model.config.save_pretrained(place)
                self.state.save_to_json(str(place / _STATE))

        save_checkpoint(Path(self.args.output_dir or "."), self.state.global_step, write, self.args)

    def _load(self, folder: Path, allow_changed: bool) -> None:
        saved = TrainerState.load_from_json(str(folder / _STATE))
        if saved.train_batch_size != self.global_batch_size:
            raise CheckpointError(
                "the run would go on with steps of another size",
                where=str(folder),
                expected=f"{saved.train_batch_size} sequences",
                found=f"{self.global_batch_size}: {self.topology.dp.size} ranks of dp with "
                f"{self.args.per_device_train_batch_size} each",
                hint="give --per_device_train_batch_size and --dp that multiply to it",
            )
        fsdp.load(folder / WEIGHTS, self.model, self.optimizer, allow_changed=allow_changed, scheduler=self.scheduler)
        self.state.global_step, self.state.log_history = saved.global_step, saved.log_history
        self.state.epoch = saved.global_step / self.steps_per_epoch

    def _refuse(self) -> None:
        for name, harmless in _NOT_HERE.items():
            value = getattr(self.args, name, harmless[0])
            if value not in harmless:
                raise InputError(
                    f"--{name} is not for a run with --dp, --cp or --tp",
                    found=value,
                    hint="multiply --per_device_train_batch_size instead"
                    if name == "gradient_accumulation_steps"
                    else "leave it out",
                )


def _optimizer(model: Any, arguments: Any) -> torch.optim.Optimizer:
    """Trainer's optimizer of these arguments, with Trainer's two groups."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if (name in decayed) is chosen], "weight_decay": decay}
        for chosen, decay in ((True, arguments.weight_decay), (False, 0.0))
    ]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    if not issubclass(kind, torch.optim.Optimizer) or {"params", "model", "optimizer_dict"} & set(options):
        raise InputError("--optim is not for a run with --dp, --cp or --tp", found=str(arguments.optim))
    return kind([group for group in groups if group["params"]], **options)
