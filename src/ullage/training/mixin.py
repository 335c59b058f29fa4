"""Training on sequences of unequal length, as a mixin over transformers' Trainer.

The Trainer takes batches apart in a dozen places, each by a rule of its own. The mixin replaces the rules, not the
loop. It is the list of the methods that it replaces; each hands on to the object that knows the rule:

==================  =================================================================================================
``BatchReader``     what the model expects of a batch, and how a batch gets to its device (``batches.reading``)
``Packer``          plans a step, exchanges it, and trains on its microbatches (``step.packing``)
``StepSource``      draws the batches of a step, and agrees with the other ranks on it (``step.drawing``)
``Evaluator``       what transformers' evaluation loop is given, and its loss (``evaluation``)
``Rehearsal``       evaluates a few samples before the first step (``run``)
``CapacityFinder``  finds a capacity by dry runs before the first step (``run``)
``Continuation``    loads a checkpoint of another layout (``deepspeed.continuing``)
``LossRule``        weighs the model's loss by the labels of the step (``step.loss_rule``)
``TokenMeter``      counts tokens, padding and FLOPs (``step.metering``)
==================  =================================================================================================

Source: transformers 5.23 ``trainer.py``, whose method names these are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, unwrap_peft_model
from transformers.utils import logging
from transformers.utils.generic import find_labels

from ullage.core.errors import InputError, TrainingError, listed
from ullage.core.replacing import replaced
from ullage.mixers.packed_model import require_module
from ullage.mixers.wrappers import bare
from ullage.models.modeling import RecurrentModel
from ullage.ranks.ending import end_groups_at_exit
from ullage.ranks.lost import LostRanks
from ullage.training.batches.packed_batch import SharedPart
from ullage.training.batches.reading import BatchReader
from ullage.training.deepspeed.continuing import Continuation, Conversion
from ullage.training.evaluation import Evaluator
from ullage.training.loss.divisions import RaggedLabelSmoother
from ullage.training.run.beginning import advice_for, refuse_dispatching, require_equal_ranks
from ullage.training.run.capacity import CapacityFinder
from ullage.training.run.layouts import LayoutHistory
from ullage.training.run.rehearsal import Rehearsal
from ullage.training.saving.background import BackgroundSave
from ullage.training.saving.checkpoints import load_renamed, newest_unharmed, require_folder, require_same_model
from ullage.training.saving.resuming import checkpoint_for
from ullage.training.setup import fsdp
from ullage.training.setup.arguments import PackingOptions, form_process_group, global_batch_of
from ullage.training.setup.releases import TrainerOfAnyRelease, settle_loss
from ullage.training.setup.sharding import data_ranks, require_trainable, sharding_of
from ullage.training.step.drawing import StepSource
from ullage.training.step.loss_rule import LossRule
from ullage.training.step.metering import TokenMeter
from ullage.training.step.packing import PackedBatch, Packer
from ullage.training.step.sharing import StepSharing
from ullage.training.step.stopping import StopFlag
from ullage.training.trl_losses import image_problem, padded_loss_of, picture_collator

logger = logging.get_logger(__name__)


class ConstructorSignature:
    """``__signature__`` of a class whose bases put ``__init__(*args, **kwargs)`` before the constructor that is meant.

    It stands in the body of the base that hands on, and belongs to every class made of it: the signature is that of the
    first ``__init__`` in the order of bases that is not the base's own.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._between = owner

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        constructors = (each.__dict__["__init__"] for each in owner.__mro__
                        if each is not self._between and "__init__" in each.__dict__)  # fmt: skip
        signature = inspect.signature(next(constructors))
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # without ``self``


def given_argument(name: str, cls: type, after: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that a constructor of ``cls`` was called with, by name or by position; None if it was not given.

    Args:
        name: of the parameter.
        cls: what is constructed.
        after: the base that hands ``args`` and ``kwargs`` on. The first constructor behind it, in the order of bases,
            that does not hand them on itself has the order of positions.
        args: arguments by position.
        kwargs: arguments by name.
    """
    behind = cls.__mro__[cls.__mro__.index(after) + 1 :]
    for constructor in (each.__dict__["__init__"] for each in behind if "__init__" in each.__dict__):
        parameters = list(inspect.signature(constructor).parameters.values())[1:]  # without ``self``
        if all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in parameters):
            places = dict(zip((each.name for each in parameters), args))
            return kwargs.get(name, places.get(name))
    return kwargs.get(name)


class RaggedTrainerMixin(TrainerOfAnyRelease):
    """Put before a transformers Trainer in the bases of a class: ``class MyTrainer(RaggedTrainerMixin, TheirTrainer)``.

    Batches may be a :class:`RaggedBatch`, a dict with ``PackedSequence`` or nested tensors, or padded tensors. What the
    trainer under the mixin does by itself is left to it.

    ``packing_loss``, on the class of a Trainer that computes a loss of its own, says how that loss is divided: "sum",
    "token_mean" or "sequence_mean" (:mod:`ullage.training.loss.divisions`); without it such a trainer is not packed.
    ``meter``: the metrics of the run. ``stop``: the request to stop after a step. ``lost_ranks``: what notices them.
    """

    packing_loss: str | None = None
    _begun_at = 0

    if not TYPE_CHECKING:
        # For a type checker the constructor is that of the trainer beneath, and so it is for ``inspect.signature``.
        __signature__ = ConstructorSignature()

        def __init__(self, *args, **kwargs):
            self._before_constructor(args, kwargs)
            super().__init__(*args, **kwargs)
            self._after_constructor(args, kwargs)

    def _before_constructor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the parts, and check the arguments that the trainer beneath is about to get."""
        # The parts read nothing of the trainer before it is asked for, so they may stand before its own constructor,
        # which already calls some of the methods below.
        self.meter, self.stop, self._background = TokenMeter(), StopFlag(), BackgroundSave(self)
        self._reader = BatchReader(self, RaggedTrainerMixin)
        self._packer = Packer(self, self._reader, self.meter, padded_loss_of, image_problem)
        self.lost_ranks = LostRanks(self._what_is_saved)
        self._sharing = StepSharing(self, self._reader, self._packer)
        parts = (self.meter, self.stop, self._background, self._sharing, self.lost_ranks)
        self._steps = StepSource(self, self._reader, self._packer, *parts)
        self._evaluator = Evaluator(self, self._reader, self._packer)
        self._continuation = Continuation(self)
        self._capacity = CapacityFinder(self, self._reader, self._packer)
        self._rehearsal = Rehearsal(self, self._reader)
        self._loss_rule = LossRule(self, self._reader, self._packer)
        data = given_argument("train_dataset", type(self), RaggedTrainerMixin, args, kwargs)
        if isinstance(data, dict) and any(isinstance(column, list) for column in data.values()):
            hint, found = "datasets.Dataset.from_dict makes one of columns", listed([*data])
            raise InputError("a dict is no data set", where="train_dataset", found=found, hint=hint)
        arguments = given_argument("args", type(self), RaggedTrainerMixin, args, kwargs)
        if isinstance(arguments, transformers.TrainingArguments):
            form_process_group(arguments)
            require_folder(arguments)
            fsdp.require_possible(arguments)
            global_batch_of(arguments)
            options = PackingOptions.of(arguments)  # raises for bad ones before the trainer prepares its data
            model = given_argument("model", type(self), RaggedTrainerMixin, args, kwargs)
            # Trainers of TRL load a model by its name.
            if isinstance(model, str) and not any(base.__module__.startswith("trl.") for base in type(self).__mro__):
                require_module(model, type(self).__name__)
            require_trainable(model, arguments, options)
        end_groups_at_exit()

    def _after_constructor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put ours in place of what the trainer beneath has set, and check what it has made of its arguments."""
        fsdp.require_sharding(self)
        found = find_labels(type(unwrap_peft_model(self.model)))
        if self.args.label_names is None and self.label_names == found:  # not chosen by the trainer
            # A compiled model's own forward has no names; shifted labels are extra.
            self.label_names = [name for name in find_labels(type(self._reader.model)) if name != "shift_labels"]
        if type(self.label_smoother) is LabelSmoother:
            self.label_smoother = RaggedLabelSmoother(**vars(self.label_smoother), shifts=lambda: self._reader.shifts)
        refuse_dispatching(self.accelerator)
        if given_argument("data_collator", type(self), RaggedTrainerMixin, args, kwargs) is None:
            self._take_collator()
        self._packer.require_packable()
        self._sharing.require_possible()
        self._reader.refuse_texts()
        self.add_callback(LayoutHistory())

    def _take_collator(self) -> None:
        """Take the collator of a trainer that was given none."""
        padded, packs = self._packer.padded_loss, self._packer.options is not None
        collator = picture_collator(self, padded) if packs else None
        if collator is None and padded is None:
            collator = self._reader.default_collator(packs=packs)
        if collator is not None and collator is not self.data_collator:
            self.data_collator, self._signature_columns = collator, None  # the columns depend on the collator

    # The run.

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        allow_changed_checkpoint: bool = False,
    ) -> TrainOutput:
        """Train as transformers does; a checkpoint of another layout is taken too.

        ``resume_from_checkpoint``: every file that the checkpoint's manifest lists is compared with it before anything
        is loaded; ``True`` takes the newest checkpoint that is whole. So does ``"auto"``, which begins where there is
        none: one call for a run that is started again and again, on whatever ranks there are.
        ``allow_changed_checkpoint`` takes files that were changed on purpose. Raises ``CheckpointError`` on every rank
        for a checkpoint that is damaged, naming the newest whole one before it, and for one of another model. With no
        step left, nothing is trained. Where another rank is lost, raises :class:`~ullage.ranks.lost.RankLost`.
        """
        with self.lost_ranks.on():
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval, allow_changed_checkpoint)

    def _train(self, resumed: Any, trial: Any, ignore_keys_for_eval: list[str] | None, allow_changed: bool) -> Any:
        whole = checkpoint_for(self, resumed, allow_changed)
        checkpoint = whole if isinstance(whole, str) else None
        if checkpoint is not None:
            require_same_model(getattr(self._reader.model, "config", None), checkpoint)
        state = Path(checkpoint or "") / TRAINER_STATE_NAME
        self._begun_at = TrainerState.load_from_json(str(state)).global_step if checkpoint and state.is_file() else 0
        self._rehearsal.begin_run(ignore_keys_for_eval)
        conversion = None if checkpoint is None else self.conversion_for(checkpoint)
        with self._continuation.converted(checkpoint, conversion):
            return super().train(whole, trial, ignore_keys_for_eval)

    def conversion_for(self, checkpoint: str | Path) -> Conversion | None:
        """What ``train(resume_from_checkpoint=checkpoint)`` does for another layout; None if it loads as it is.

        Collective; reads no tensor data, changes nothing.
        """
        if sharding_of(self.model) is not None:  # it takes any layout
            return None
        fsdp.require_readable(Path(checkpoint), self.is_fsdp_enabled)
        return self._continuation.conversion_for(checkpoint)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' loop after a check that the ranks agree. A search has set a trial's arguments by now.

        NEFTune's noise is scaled by the length of each sequence, not of the row.
        """
        # train() has just put transformers' own hook on the embedding; ours takes its place and its handle.
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
            model: Any = self.accelerator.unwrap_model(self.model)
            self.neftune_hook_handle = NoiseHooks(model, bare(model).get_input_embeddings())  # pyright: ignore
        self._packer.begin_run()
        self._capacity.begin_run()
        options, world = self._packer.options, self.args.world_size
        sharding = sharding_of(self.model)
        everyone = dist.group.WORLD if world > 1 else None
        self.meter.begin_run(
            self.args.device,
            everyone if sharding is None else sharding.topology.dp.group,
            num_devices=world,
            oversize="error" if options is None else options.oversize,
            peak_flops=None if options is None else options.peak_flops,
        )
        self._steps.begin_run()
        require_equal_ranks(self, self._reader, self._packer)
        self._say_what_packing_does()
        return super()._inner_training_loop(*args, **kwargs)

    def _say_what_packing_does(self) -> None:
        """Log what packing brings at the lengths of this run, where they are known without reading samples."""
        line, is_urgent = self.packing_advice()
        if line is not None and self.is_world_process_zero():
            (logger.warning if is_urgent else logger.info)(line)

    def packing_advice(self, option: str = "packing_capacity={}") -> tuple[str | None, bool]:
        """A line on what packing brings or would bring to this run, or ``None``; and whether it costs much to miss it.

        ``option``: how a capacity is asked for.
        """
        return advice_for(self, self._reader, self._packer, option)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run transformers' epoch, unless no step is left to train: upstream looks only after it has trained one."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        self._capacity.settle(kwargs["model"])
        self._rehearsal.run()
        with self._steps.epoch(**kwargs) as progress:
            if progress is not None:
                super()._run_epoch(*args, **progress)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.lost_ranks.end_step(is_quiet=not (self.control.should_save or self.control.should_evaluate))
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _what_is_saved(self) -> str:
        """The checkpoint that a run goes on from, for a message."""
        newest = newest_unharmed(self.args.output_dir or ".")
        if newest is None:
            return f"no checkpoint is in {self.args.output_dir} yet, so the run begins anew"
        return f"the newest whole checkpoint is {newest}: go on from it"

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        settle_loss(self, self._begun_at)
        self.lost_ranks.end_step(is_quiet=False)
        return super()._finalize_training(*args, **kwargs)

    def get_tp_size(self) -> int:
        sharding = sharding_of(self.model)
        return super().get_tp_size() if sharding is None else sharding.topology.tp.size

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with fsdp.sharded_once(self):
            prepared = super()._prepare_for_training(*args, **kwargs)
        if (sharding := sharding_of(self.model)) is not None:
            sharding.require_optimizer(self.model, getattr(self.optimizer, "optimizer", self.optimizer))
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if sharding_of(self.model) is None and not self._continuation.loads_weights(model):
            whole = not self.is_deepspeed_enabled and not self.is_fsdp_enabled
            if whole and load_renamed(self.model if model is None else model, Path(resume_from_checkpoint)):
                return
            with fsdp.read_as_written(self.accelerator, resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Of a sharded model everything is loaded here, its weights too.
        if checkpoint is not None and (sharding := sharding_of(self.model)) is not None:
            sharding.load(Path(checkpoint), self.model, self.optimizer, self.lr_scheduler)
        elif not self._continuation.loads_optimizer(checkpoint):
            with fsdp.read_as_written(self.accelerator, checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)

    # Batches on their way to the model.

    def _set_signature_columns_if_needed(self) -> None:
        """Columns as the trainer chooses them; the model's own where transformers would read a wrapper's forward."""
        known = self._signature_columns is not None
        super()._set_signature_columns_if_needed()
        if not known and self._signature_columns is not None:
            self._signature_columns = self._reader.columns(self._signature_columns)

    def _prepare_input(self, data: Any) -> Any:
        """A batch on the device, as keywords of the model; anything else on the device."""
        return self._reader.prepare(data)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Training batches as transformers makes them, but left on the host; evaluation batches each sample once.

        A trainer with an evaluation of its own gets its own evaluation batches.
        """
        options = (dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        if is_training:
            size = self._sharing.size_for(dataset, batch_size)
            with replaced(self.accelerator, "device_placement", False), self._drawn_by(size):
                loader = super()._get_dataloader(dataset, description, size or batch_size, *options[3:])
            return self._steps.read_from(loader, dataset, None if size is None else batch_size)
        if self._reader.evaluates_itself:
            return super()._get_dataloader(*options)
        with self._drawn_by(None):  # without a sampler: in the order of the data set
            return self._evaluator.loader(super()._get_dataloader, *options[:3], dataloader_key=dataloader_key)

    @contextlib.contextmanager
    def _drawn_by(self, size: int | None) -> Iterator[None]:
        """Within it accelerate divides batches among the ranks that draw different ones.

        ``size``: of a global batch, which it does not divide; a sampler groups samples by the size in the arguments.
        """
        state, (rank, number) = self.accelerator.state, data_ranks(self.model, self.args)
        with contextlib.ExitStack() as stack:
            if size is not None:
                rank, number = 0, 1
                stack.enter_context(replaced(state, "device_mesh", None))  # which would say other numbers
                if self._sharing.size is not None:
                    stack.enter_context(replaced(self.args, "per_device_train_batch_size", size))
            stack.enter_context(replaced(state, "process_index", rank))
            stack.enter_context(replaced(state, "num_processes", number))
            yield

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Samples of a step over all ranks."""
        if self._sharing.size is None and (sharding := sharding_of(self.model)) is not None:
            return self._train_batch_size * sharding.topology.dp.size
        return self._sharing.size or super().get_total_train_batch_size(args)

    # One step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """This rank's batches of a step, one packed batch under packing, and the labels that count over all ranks.

        Collective: one reduction, which waits for the device. Raises on every rank if one has a problem.
        """
        return self._steps.draw_step(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not torch.is_grad_enabled():  # of an evaluation
            return self._evaluator.divisor_of(batch_samples[0])
        return self._steps.num_items(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on one batch; one that is packed or shared runs as all its microbatches.

        The loss of a step without labels is zero.
        """
        run, padded = super().training_step, self._packer.padded_loss
        if padded is not None and padded.makes_batches:
            inputs = self._packer.pack([padded.make_batch(model, inputs)])
        if isinstance(inputs, SharedPart) and not inputs.number:  # drawn from the dataloader by hand
            (inputs,), num_items_in_batch = self._steps.take_part(inputs, self.args.device)
        if isinstance(inputs, PackedBatch):
            loss = self._packer.train_step(run, model, inputs, num_items_in_batch)
        elif isinstance(inputs, SharedPart):
            loss = self._sharing.train_step(run, model, inputs, num_items_in_batch)
        else:
            loss = run(model, inputs, num_items_in_batch)
        return self._steps.without_nan(model, loss)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's loss; a mean of its own is weighed by its share of the step's labels."""
        padded = self._packer.padded_loss
        with contextlib.nullcontext() if padded is None else padded.packed_rows():
            return self._loss_rule.compute(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = super().compute_loss_context_manager()
        if (sharding := sharding_of(self.model)) is not None:
            stack.enter_context(sharding.context())
        return stack

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        sharding = sharding_of(self.model)
        return super()._clip_grad_norm(model) if sharding is None else sharding.clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm, the same on every rank; ``TrainingError`` on all of them if it is not finite."""
        if grad_norm is None and (sharding := sharding_of(self.model)) is not None:
            grad_norm = sharding.clip(model, None)
        norm = super()._get_grad_norm(model, grad_norm)
        scaled = self.accelerator.scaler is not None or self.args.fp16  # overflow is part of loss scaling
        if norm is not None and not scaled:
            require_finite(norm, self.state.global_step + 1)
        return norm

    # Counting.

    def floating_point_ops(self, inputs: Any) -> int:
        """Of real tokens, forward and backward: six times tokens times parameters; the model's formula if packed."""
        if isinstance(inputs, PackedBatch):
            # Added up over all ranks, of which some share their batches.
            return self._packer.flops(inputs) // (self.args.world_size // data_ranks(self.model, self.args)[1])
        if isinstance(inputs, SharedPart):
            return sum(self.floating_point_ops(batch) for batch in inputs.batches)
        if self._reader.overridden("floating_point_ops"):
            return super().floating_point_ops(inputs)
        if not hasattr(self.model, "num_parameters"):
            return 0
        return 6 * self._reader.num_tokens(inputs) * self.model.num_parameters(exclude_embeddings=True)  # pyright: ignore

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        if isinstance(inputs, PackedBatch):
            number = inputs.numel()
        else:
            batches = inputs.batches if isinstance(inputs, SharedPart) else [inputs]
            number = sum(map(self._reader.num_tokens_seen, batches))
        gathered = self.accelerator.gather(torch.tensor(number, device=self.args.device))
        assert isinstance(gathered, Tensor)
        self.state.num_input_tokens_seen += int(gathered.sum())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as transformers does, with the metrics of :class:`~ullage.training.step.metering.TokenMeter` added.

        Collective for the entries of training: one small reduction.
        """
        if "loss" in logs:
            logs.update(self.meter.rates())
        if "train_loss" in logs:  # the closing entry, which train() returns too
            logs.update(self.meter.closing())
        super().log(logs, start_time)

    # Evaluation.

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Each sample once (:meth:`ullage.training.evaluation.Evaluator.run`).

        A trainer with an evaluation of its own runs that.
        """
        options = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._reader.evaluates_itself:
            return super().evaluation_loop(*options)
        return self._evaluator.run(super().evaluation_loop, *options)


def require_finite(norm: Any, step: int) -> None:
    """Raise ``TrainingError`` for a gradient norm that is NaN or Inf, naming the step. Waits for the device."""
    if not torch.isfinite(torch.as_tensor(norm)):
        raise TrainingError(
            "the loss or its gradient is not a number",
            where=f"step {step}",
            expected="a finite gradient norm",
            found=float(norm),
            hint="lower learning_rate or max_grad_norm, and look for infinities in the data; "
            "the weights are those before this step",
        )


class NoiseHooks:
    """Hooks that add NEFTune's noise to what a model embeds while it trains. ``remove()`` takes them off.

    NEFTune adds noise from the uniform distribution over ±alpha / sqrt(L · d) to the embeddings [L, d] of a sequence.
    transformers takes the row's length for L, so a sequence in a packed row would get less noise the more neighbours it
    has. Here each sequence has its own L. Padded rows keep transformers' own hook. Source: Jain et al. 2023,
    arXiv:2310.05914; transformers 5.23 ``integrations/neftune.py``.

    ``model`` as it is called; ``embedding``: its input embedding, with transformers' ``neftune_noise_alpha``. Raises
    ``InputError`` for a recurrent model.
    """

    def __init__(self, model: nn.Module, embedding: nn.Module) -> None:
        # A recurrent backbone reorders tokens before it embeds them, so a hook on its embedding cannot tell whose they
        # are.
        if any(isinstance(module, RecurrentModel) for module in model.modules()):
            raise InputError(
                "a recurrent model takes no noise on its embeddings",
                where="TrainingArguments.neftune_noise_alpha",
                found=embedding.neftune_noise_alpha,
                hint="leave it out",
            )
        self._lengths: Tensor | None = None
        self._handles = [
            model.register_forward_pre_hook(self._read_lengths, with_kwargs=True),
            embedding.register_forward_hook(self._add),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _read_lengths(self, model: nn.Module, positional: Any, keywords: dict[str, Any]) -> None:
        """Note how long the sequence of each token is, [T] in the order of the row; None for padded rows."""
        bounds = keywords.get("cu_seq_lens_q")
        self._lengths = None
        if bounds is not None:
            # Of the bounds [0, 3, 5], the lengths are [3, 2], and by token [3, 3, 3, 2, 2].
            lengths = torch.as_tensor(bounds).diff()
            self._lengths = lengths.repeat_interleave(lengths)

    def _add(self, embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        lengths = self._lengths
        # Also where something embeds other tokens than the batch's, such as a second call within forward.
        if lengths is None or output.shape[:-1].numel() != len(lengths):
            return neftune_post_forward_hook(embedding, inputs, output)
        if not embedding.training:
            return output
        by_token = lengths.view(output.shape[:-1]).to(output.device)
        bound = embedding.neftune_noise_alpha / (by_token * output.shape[-1]).sqrt()  # pyright: ignore
        return output + torch.zeros_like(output).uniform_(-1, 1) * bound[..., None].to(output.dtype)
