"""How a Trainer reads a batch: what the model expects of it, where its labels are, and its way to the device.

What a model takes is told by the parameters of its ``forward``, through whatever wraps it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.trainer_utils import unwrap_peft_model

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.models.modeling import RecurrentPreTrainedModel
from ullage.movement import to_device
from ullage.training import counting, forms
from ullage.training.losses import defining_class, loss_divides_by_count, loss_shifts

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class ReadingMixin(_Base):
    """The part of :class:`RaggedTrainerMixin` that knows the model and reads batches for it."""

    _form: str | None = None

    @property
    def _bare_model(self) -> nn.Module:
        return forms.bare(self.model)  # pyright: ignore[reportArgumentType]

    @property
    def _main_input(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    @property
    def _forward_parameters(self) -> list[str]:
        return list(inspect.signature(self._bare_model.forward).parameters)

    @property
    def _label_name(self) -> str | None:
        names = self.label_names
        return "labels" if "labels" in names else (names[0] if names else None)

    @property
    def _shifts(self) -> bool | None:
        """Whether the model's loss shifts labels; None if that is not known."""
        return loss_shifts(self._bare_model)

    def _theirs(self, name: str) -> type | None:
        """The class under the mixin that has a method of its own in place of transformers' Trainer's, if one has."""
        return defining_class(type(self), name, below=ReadingMixin)

    @functools.cached_property
    def _evaluates_itself(self) -> bool:
        """Whether the trainer under the mixin has an evaluation of its own, which the mixin then leaves to it.

        So does one with a loop or a sampler of its own, and one with a loss or a ``prediction_step`` of its own that
        keeps no column of labels, so that there are none to count (preference pairs, rewards).
        """
        if self._theirs("evaluation_loop") or self._theirs("_get_eval_sampler"):
            return True
        if not self._theirs("prediction_step") and not self._theirs("compute_loss"):
            return False
        self._set_signature_columns_if_needed()
        return not set(self.label_names) & set(self._signature_columns or ())

    @property
    def _divides_by_count(self) -> bool:
        """Whether what transformers' ``compute_loss`` gives is a sum divided by ``num_items_in_batch``.

        Any ``**kwargs`` in a model's forward makes transformers believe it. A trainer under the mixin that computes its
        own loss, and a function that does, divide as they please.
        """
        if self.compute_loss_func is not None or self._theirs("compute_loss"):
            return True
        return bool(self.model_accepts_loss_kwargs) and loss_divides_by_count(self._bare_model)

    def _form_of_model(self) -> str:
        if self._form is None:
            self._form = forms.form_of(self.model)  # pyright: ignore[reportArgumentType]
        return self._form

    def _set_signature_columns_if_needed(self) -> None:
        """Columns as the trainer chooses them; the model's own where transformers would read a wrapper's forward."""
        known = self._signature_columns is not None
        super()._set_signature_columns_if_needed()
        inspected = unwrap_peft_model(self.model)
        if known or self._bare_model in (self.model, inspected):
            return
        chosen, wrapper = self._signature_columns or [], inspect.signature(inspected.forward).parameters
        if set(wrapper) <= set(chosen):  # transformers' own method was asked, by a trainer that adds to it, perhaps
            self._signature_columns = [*self._forward_parameters, *(name for name in chosen if name not in wrapper)]

    def _prepare_input(self, data: Any) -> Any:
        plugin = self.accelerator.state.deepspeed_plugin
        dtype = None if plugin is None else plugin.hf_ds_config.dtype()
        return to_device(data, self.args.device, non_blocking=self.accelerator.non_blocking, float_dtype=dtype)

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """The batch on the device, as keywords of the model, in a dict of its own.

        A trainer that makes its own inputs of a batch gets its batches as they are, and ragged ones as keywords.
        """
        if isinstance(inputs, RaggedBatch):
            keywords = forms.keywords_of(self._prepare_input(inputs), self._form_of_model(), shifts=self._shifts)
            return super()._prepare_inputs(keywords) if self._theirs("_prepare_inputs") else keywords
        if isinstance(inputs, PackedSequence):
            inputs = {self._main_input: inputs}
        if self._theirs("_prepare_inputs"):
            return super()._prepare_inputs(inputs)
        if len(inputs) == 0:
            raise InputError(
                "the batch is empty",
                expected=f"at least one of {self._forward_parameters}",
                hint="set remove_unused_columns=False if the collator needs columns that forward does not name",
            )
        lengths = counting.value_of(inputs, "input_lengths")
        prepared = self._prepare_input(inputs)
        if prepared is inputs:  # nothing moved; whoever takes a field out takes it out of a copy
            prepared = copy.copy(prepared)
        if isinstance(lengths, Tensor):  # packing wants lengths on the host
            prepared["input_lengths"] = lengths
        return prepared

    def _num_tokens(self, inputs: Any) -> int:
        """Real tokens of a batch on its way to the model; without a mask, what is not the tokenizer's padding."""
        pad_token_id = getattr(self.processing_class, "pad_token_id", None)
        return counting.num_tokens(inputs, self._main_input, pad_token_id)

    def _label_elements(self, inputs: Any) -> Tensor | None:
        if self._label_name is None:
            return None
        labels = counting.value_of(inputs, self._label_name)
        ours = isinstance(self._bare_model, RecurrentPreTrainedModel)  # others' own losses count as they please
        if ours and self._shifts and isinstance(labels, PackedSequence):
            return labels.data[int(labels.batch_sizes[0]) :].flatten()  # first labels come first, and count nowhere
        flattened = isinstance(inputs, RaggedBatch) and self._form_of_model() == "flattened"
        return counting.label_elements(inputs, self._label_name, shifts=self._shifts, flattened=flattened)

    def _require_ids(self, inputs: Any) -> None:
        size = _embedding_of(self._bare_model)
        if size is not None and self._main_input == "input_ids":
            counting.require_vocabulary(inputs, self._main_input, size)


def _embedding_of(model: nn.Module) -> int | None:
    """How many ids the model's input embedding knows; None if it has none."""
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embedding, "num_embeddings", None)
