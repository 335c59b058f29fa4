"""Loss of a batch in a step: weighed by the labels that count in the whole step, over all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import has_compiled_regions, is_compiled_module
from torch import Tensor, nn

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError
from ullage.core.rows import on_host
from ullage.mixers.packed_model import runs_whole
from ullage.training.batches import counting
from ullage.training.batches.reading import BatchReader
from ullage.training.loss.divisions import OwnLoss, part_of_step
from ullage.training.loss.lazy_logits import head_in_chunks, head_problem
from ullage.training.loss.sequence_weights import kind_of_loss, weighted_sequence_loss, weighted_token_loss
from ullage.training.setup.sharding import sharding_of
from ullage.training.step.packing import Packer

if TYPE_CHECKING:
    import transformers

_logger = logging.getLogger(__name__)


class LossRule:
    """The weight of a model's loss in a trainer's step.

    ``trainer``: whose arguments and accelerator count. ``reader``: of its batches. ``packer``: of its steps.
    """

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader, packer: Packer) -> None:
        self._trainer, self._reader, self._packer = trainer, reader, packer
        #: Why logits were needed, as last told.
        self._told: str | None = None

    def compute(
        self,
        compute: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool,
        num_items_in_batch: Any,
    ) -> Any:
        """The model's loss; where the model returns a mean, it is weighed by its share of the step's labels.

        Asks for outputs only where they are needed: some trainers return none. Returns what ``compute_loss`` does.

        Args:
            compute: transformers' ``compute_loss``, or the override of the trainer under the mixin.
            model: as the training loop calls it.
            inputs: keywords of the model.
            return_outputs: whether the caller wants the outputs too.
            num_items_in_batch: labels that count in the step, over all ranks; None where none were counted.
        """
        self._require_labels(inputs)
        inputs = self._with_decoder_inputs(inputs)
        with self._head(model, inputs, return_outputs):
            return self._weighed(compute, model, inputs, return_outputs, num_items_in_batch)

    def _require_labels(self, inputs: dict[str, Any]) -> None:
        """Raise ``InputError`` for a batch without labels, of which a causal language model has no loss."""
        trainer, reader = self._trainer, self._reader
        if reader.label_name is None or reader.label_name in inputs or not reader.shifts:
            return
        if trainer.compute_loss_func is None and not reader.overridden("compute_loss"):
            raise InputError(
                f"a batch for {type(reader.model).__name__} has no labels",
                expected=reader.label_name,
                found=list(inputs),
                hint="give the samples labels, or pass data_collator=RaggedCollator(labels_from='input_ids')",
            )

    def _weighed(
        self, compute: Callable[..., Any], model: nn.Module, inputs: Any, return_outputs: bool, num_items_in_batch: Any
    ) -> Any:
        """The loss of :meth:`compute`, whose parameters these are."""
        if self._packer.weigher.labels is not None:
            return self._by_weights(model, inputs, return_outputs, self._packer.weigher.labels)
        if num_items_in_batch is not None and not self._reader.divides_by_count:
            if self._trainer.loss_is_scaled_for_ga is not False:
                return self._mean_by_share(compute, model, inputs, return_outputs, num_items_in_batch)
            num_items_in_batch = None  # declared a mean per batch: transformers divides it by the number of batches
        return compute(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    def _by_weights(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, weights: Tensor) -> Any:
        """The loss of a packed microbatch whose labels have weights of their own, which sum up to one over the step.

        ``weights``: one per label element of the inputs; the others are those of :meth:`compute`.
        """
        found: list[Tensor] = []

        def add_loss(head: nn.Module, _: Any, outputs: Any) -> Any:
            found.append(self._weighed_loss(head, inputs, outputs, weights))
            if isinstance(outputs, dict):
                outputs["loss"] = found[0]
            return outputs

        # Given labels, the model would compute a loss of its own. Ours is computed within the model's call, too: what
        # wraps the model (DDP, ZeRO) looks through its outputs for the parameters that were used. A compiled model
        # keeps the hooks that it was compiled with.
        is_compiled = has_compiled_regions(model) or is_compiled_module(model)
        hook = None if is_compiled else self._reader.model.register_forward_hook(add_loss)
        try:
            hidden = (self._reader.label_name, "shift_labels")
            outputs = model(**{key: value for key, value in inputs.items() if key not in hidden})
        finally:
            if hook is not None:
                hook.remove()
        if hook is None:
            add_loss(self._reader.model, None, outputs)
        loss, auxiliary = found[0], outputs.get("aux_loss") if isinstance(outputs, dict) else None
        factor = getattr(getattr(self._reader.model, "config", None), "router_aux_loss_coef", None)
        if auxiliary is not None and factor is not None:  # the balance of experts, a mean over tokens
            loss = loss + self._packer.share_of_step * factor * auxiliary.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def _weighed_loss(self, head: nn.Module, inputs: dict[str, Any], outputs: Any, weights: Tensor) -> Tensor:
        assert self._reader.label_name is not None
        labels = inputs[self._reader.label_name]
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if kind_of_loss(head) == "sequence":
            return weighted_sequence_loss(logits, labels, weights, head.config)
        if "shift_labels" in inputs:
            return weighted_token_loss(logits, inputs["shift_labels"], weights, shifts=False)
        return weighted_token_loss(logits, labels, weights, shifts=bool(self._reader.shifts))

    def _head(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> AbstractContextManager[Any]:
        """The way of the model's head in one call: in chunks with its loss where it can, else as it is."""
        reason = "outputs are asked for" if return_outputs else self._needs_logits(model)
        if reason is None:
            labels = inputs.get("shift_labels", inputs.get(self._reader.label_name or ""))
            known = on_host(labels) if isinstance(labels, Tensor) and labels.is_cuda and not labels.is_nested else None
            return head_in_chunks(self._reader.model, None if known is None else int((known != IGNORED_LABEL).sum()))
        if reason != self._told:
            _logger.debug("head and loss run on all tokens at once: %s", reason)
            self._told = reason
        return contextlib.nullcontext()

    def _needs_logits(self, model: nn.Module) -> str | None:
        """Why the logits of a packed row have to be computed; None where the loss alone is used."""
        trainer, options = self._trainer, self._packer.options
        if options is None or not options.chunked_loss:
            return "packing_chunked_loss is off"
        if not model.training or not torch.is_grad_enabled():
            return "not training"
        if OwnLoss.of(trainer) is not None or trainer.label_smoother is not None:
            return "the loss is not the model's own"
        if trainer.args.fp16 or trainer.accelerator.mixed_precision == "fp16":
            return "fp16 scales the loss before its gradients are made"
        is_sharded = trainer.is_fsdp_enabled or sharding_of(trainer.model) is not None
        if is_sharded or has_compiled_regions(model) or is_compiled_module(model):
            return "FSDP and torch.compile keep the model's forward as it is"
        if self._packer.weigher.is_on and runs_whole(self._reader.model):
            return "the logits that are weighed are joined from several calls"
        return head_problem(self._reader.model)

    def _mean_by_share(
        self, compute: Callable[..., Any], model: nn.Module, inputs: Any, return_outputs: bool, num_items_in_batch: Any
    ) -> Any:
        """The mean that a model returns, times its share of the step's labels, so that losses add up over the step.

        The parameters are those of :meth:`compute`.
        """
        # With num_items_in_batch=None the model returns its own mean, and compute_loss multiplies by nothing. Σ over
        # batches of mean · labels in it / labels in the step is the mean over the step.
        elements = self._reader.label_elements(inputs)
        assert elements is not None
        count = counting.count_labels(elements)
        loss, outputs = compute(model, inputs, True, num_items_in_batch=None)
        ranks = self._trainer.accelerator.num_processes if self._trainer.args.average_tokens_across_devices else 1
        # training_step must not divide by the number of batches as well.
        self._trainer.loss_is_scaled_for_ga = True
        loss = part_of_step(loss, count, num_items_in_batch, ranks)
        return (loss, outputs) if return_outputs else loss

    def _with_decoder_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Add what a decoder reads, made of the labels where those are taken away before the model sees them.

        transformers' collators do so if they are given the model. Labels are padded [n, L], jagged [n, j], or lie end
        to end [1, T] between the bounds ``decoder_cu_seq_lens_q``.
        """
        # For a loss function and for label smoothing compute_loss pops the labels, from which the model would have made
        # its decoder inputs.
        labels = counting.value_of(inputs, "labels")
        shift = getattr(self._reader.model, "prepare_decoder_input_ids_from_labels", None)
        taken = self._trainer.compute_loss_func is not None or self._trainer.label_smoother is not None
        taken = taken or self._packer.weigher.labels is not None
        if not taken or shift is None or not isinstance(labels, Tensor) or "decoder_input_ids" in inputs:
            return inputs
        bounds = inputs.get("decoder_cu_seq_lens_q")
        # Shift each target by itself: shifted as one row, a target would begin with the last token of the one before.
        if labels.is_nested:
            rows = [shift(labels=row[None])[0] for row in labels.unbind()]
            read = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        elif bounds is not None:
            rows = labels[0].split(bounds.diff().tolist())
            read = torch.cat([shift(labels=row[None]) for row in rows], 1)
        else:
            read = shift(labels=labels)
        return {**inputs, "decoder_input_ids": read}
