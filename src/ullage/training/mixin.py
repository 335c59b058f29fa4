"""What a Trainer needs to train on sequences of unequal length, as a mixin over transformers' own.

The Trainer takes batches apart in a dozen places, each by a rule of its own. The mixin replaces the rules, not the
loop: how a batch is moved (``to_device``, once), in which form it reaches the model (``forms``), what is counted
(``counting``: real tokens, labels that a loss counts), how the ranks agree on a step (``steps``), and how evaluation
puts samples back together (``evaluation``).

Source: transformers 5.23 ``trainer.py``, whose method names these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import has_length, unwrap_peft_model
from transformers.utils import logging
from transformers.utils.generic import find_labels

from ullage.batch import RaggedBatch
from ullage.errors import InputError, TrainingError
from ullage.ranks.ending import end_groups_at_exit
from ullage.training import counting, forms
from ullage.training.arguments import form_process_group, require_sharding
from ullage.training.continuing import ContinuingMixin
from ullage.training.evaluation import EvaluationMixin
from ullage.training.losses import RaggedLabelSmoother
from ullage.training.metering import TokenMeter
from ullage.training.noise import NoiseHooks
from ullage.training.packing import PackedBatch
from ullage.training.saving import require_same_model
from ullage.training.shares import EvaluationLoader
from ullage.training.steps import StepMixin

logger = logging.get_logger(__name__)


class RaggedTrainerMixin(ContinuingMixin, StepMixin, EvaluationMixin):
    """Put before a transformers Trainer in the bases of a class: ``class MyTrainer(RaggedTrainerMixin, TheirTrainer)``.

    Batches may be a :class:`RaggedBatch`, a dict with ``PackedSequence`` or nested tensors, or padded tensors. A class
    with a ``compute_loss`` of its own sets ``packing_loss`` to be packed. What the trainer under the mixin does by
    itself is left to it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if arguments is not None:
            form_process_group(arguments)
        end_groups_at_exit()
        super().__init__(*args, **kwargs)
        require_sharding(self.args)
        found = find_labels(type(unwrap_peft_model(self.model)))
        if self.args.label_names is None and self.label_names == found:  # not chosen by the trainer
            model = forms.bare(self.model)  # pyright: ignore[reportArgumentType]
            # A compiled model's own forward has no names; shifted labels are extra.
            self.label_names = [name for name in find_labels(type(model)) if name != "shift_labels"]
        if type(self.label_smoother) is LabelSmoother:
            self.label_smoother = RaggedLabelSmoother(**vars(self.label_smoother), shifts=lambda: self._shifts)
        self._evaluating = False
        world = self.args.world_size
        self.meter = TokenMeter(self.args.device, dist.group.WORLD if world > 1 else None, num_devices=world)
        if self.accelerator.dispatch_batches:
            raise InputError(
                "dispatch_batches would cut packed batches apart",
                where="TrainingArguments.accelerator_config",
                expected="None or False",
                found=True,
                hint="leave it out: each process reads its own batches",
            )
        self._prepare_packing(collator_given=kwargs.get("data_collator") is not None or len(args) > 2)

    # Batches on their way to the model.

    def train(
        self, resume_from_checkpoint: Any = None, *args: Any, allow_changed_checkpoint: bool = False, **kwargs: Any
    ) -> Any:
        """As transformers' own; one of another layout is converted first, and one with no step left trains nothing.

        ``resume_from_checkpoint``: every file that the checkpoint's manifest lists is compared with it before anything
        is loaded; ``True`` takes the newest checkpoint that is whole. ``allow_changed_checkpoint`` takes files that
        were changed on purpose. Raises ``CheckpointError`` on every rank for a checkpoint that is damaged, naming the
        newest whole one before it, and for one of another model.
        """
        resume_from_checkpoint = self._whole_checkpoint(resume_from_checkpoint, allow_changed_checkpoint)
        checkpoint = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        if checkpoint is not None:
            require_same_model(getattr(self._bare_model, "config", None), checkpoint)
        with self._continuing(checkpoint):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, with NEFTune's noise scaled by sequence, not by row."""
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
            model: Any = self.accelerator.unwrap_model(self.model)
            self.neftune_hook_handle = NoiseHooks(model, forms.bare(model).get_input_embeddings())  # pyright: ignore
        return super()._inner_training_loop(*args, **kwargs)

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
        if is_training:
            placement, self.accelerator.device_placement = self.accelerator.device_placement, False
            try:
                return super()._get_dataloader(dataset, description, batch_size, sampler_fn, True, dataloader_key)
            finally:
                self.accelerator.device_placement = placement
        if self._evaluates_itself:
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, False, dataloader_key)
        size = len(dataset) if has_length(dataset) else None  # pyright: ignore[reportArgumentType]
        if size == 0:
            raise InputError("the dataset is empty", where=description.lower(), expected="at least one sample")
        collator = self.data_collator
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
        loader = EvaluationLoader.over(
            dataset,  # pyright: ignore[reportArgumentType]
            batch_size,
            self.args.process_index,
            self.args.world_size,
            self.args.dataloader_num_workers,
            collate_fn=collator,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    # Counting.

    def floating_point_ops(self, inputs: Any) -> int:
        """Of real tokens, forward and backward: six times tokens times parameters; the model's formula if packed."""
        if isinstance(inputs, PackedBatch):
            return self._model_flops(inputs)
        if self._theirs("floating_point_ops"):
            return super().floating_point_ops(inputs)
        if not hasattr(self.model, "num_parameters"):
            return 0
        parameters = self.model.num_parameters(exclude_embeddings=True)  # pyright: ignore
        return 6 * self._num_tokens(inputs) * parameters

    def _track_num_input_tokens(self, inputs: Any) -> None:
        kind = self.args.include_num_input_tokens_seen
        if kind == "no":
            return
        if isinstance(inputs, PackedBatch):
            number = inputs.numel()
        elif kind == "all" and not _is_ragged(inputs):
            number = counting.num_elements(inputs, self._main_input)
        else:
            if getattr(self.processing_class, "pad_token_id", None) is None:
                self._warn_of_unknown_padding(inputs)
            number = self._num_tokens(inputs)
        tokens = torch.tensor(number, device=self.args.device)
        gathered = self.accelerator.gather(tokens)
        assert isinstance(gathered, Tensor)
        self.state.num_input_tokens_seen += int(gathered.sum())

    def _warn_of_unknown_padding(self, inputs: Any) -> None:
        if not counting.knows_padding(inputs, self._main_input) and self.is_world_process_zero():
            logger.warning_once(
                "padding cannot be told from tokens, so all count as tokens: the batch has no attention_mask, and the "
                "Trainer no processing_class with a pad_token_id"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as transformers does, with the metrics of :class:`~ullage.training.metering.TokenMeter` added.

        Collective for the entries of training: one small reduction.
        """
        if "loss" in logs:
            logs.update(self.meter.rates())
        if "train_loss" in logs:  # the closing entry, which train() returns too
            logs.update(self.meter.closing())
        super().log(logs, start_time)

    # The loss.

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The model's loss; a mean of its own is weighed by its share of the step's labels.

        Outputs are asked for only where they are needed, because some trainers have none to give.
        """
        inputs = self._with_decoder_inputs(inputs)
        if num_items_in_batch is not None and not self._divides_by_count:
            if self.loss_is_scaled_for_ga is not False:
                return self._mean_by_share(model, inputs, return_outputs, num_items_in_batch)
            num_items_in_batch = None  # declared a mean per batch: transformers divides it by the number of batches
        auxiliary = num_items_in_batch is not None and self._adds_auxiliary
        result = super().compute_loss(model, inputs, return_outputs or auxiliary, num_items_in_batch=num_items_in_batch)
        if not auxiliary:
            return result
        loss, outputs = result
        loss = self._weigh_auxiliary(loss, outputs)
        return (loss, outputs) if return_outputs else loss

    def _mean_by_share(self, model: nn.Module, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        """The mean that a model gives, times its share of the step's labels, such that the step's losses add up."""
        elements = self._label_elements(inputs)
        assert elements is not None
        count = counting.count_labels(elements)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=None)
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        weight = count / num_items_in_batch * ranks
        self.loss_is_scaled_for_ga = True
        loss = torch.where(count > 0, loss, torch.zeros_like(loss)) * weight.to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def _with_decoder_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What a decoder reads, made of the labels where those are taken away before the model sees them.

        transformers' collators do so if they are given the model. Labels are padded [n, L], jagged [n, j], or lie end
        to end [1, T] between the bounds ``decoder_cu_seq_lens_q``.
        """
        labels = counting.value_of(inputs, "labels")
        shift = getattr(self._bare_model, "prepare_decoder_input_ids_from_labels", None)
        taken = self.compute_loss_func is not None or self.label_smoother is not None
        if not taken or shift is None or not isinstance(labels, Tensor) or "decoder_input_ids" in inputs:
            return inputs
        bounds = inputs.get("decoder_cu_seq_lens_q")
        if labels.is_nested:
            rows = [shift(labels=row[None])[0] for row in labels.unbind()]
            read = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        elif bounds is not None:
            rows = labels[0].split(bounds.diff().tolist())
            read = torch.cat([shift(labels=row[None]) for row in rows], 1)
        else:
            read = shift(labels=labels)
        return {**inputs, "decoder_input_ids": read}

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm, which is the same on every rank: where it is no number, all of them stop here."""
        norm = super()._get_grad_norm(model, grad_norm)
        scaled = self.accelerator.scaler is not None or self.args.fp16  # overflow is part of loss scaling
        if norm is not None and not scaled and not torch.isfinite(torch.as_tensor(norm)):
            raise TrainingError(
                "the loss or its gradient is not a number",
                where=f"step {self.state.global_step + 1}",
                expected="a finite gradient norm",
                found=float(norm),
                hint="lower learning_rate or max_grad_norm, and look for infinities in the data; "
                "the weights are those before this step",
            )
        return norm


def _is_ragged(inputs: Any) -> bool:
    """Whether the batch itself says how long its sequences are, other than by a mask."""
    if isinstance(inputs, Mapping):
        return "input_lengths" in inputs or any(isinstance(value, PackedSequence) for value in inputs.values())
    return isinstance(inputs, (RaggedBatch, PackedBatch, PackedSequence))
