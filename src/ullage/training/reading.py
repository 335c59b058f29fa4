"""How a Trainer reads a batch: what the model expects of it, where its labels are, and its way to the device.

What a model takes is told by the parameters of its ``forward``, through whatever wraps it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.models.modeling import RecurrentPreTrainedModel
from ullage.movement import to_device
from ullage.training import counting, forms

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
        """Whether the model's loss shifts labels; None if its class does not tell."""
        loss = LOSS_MAPPING.get(str(getattr(self._bare_model, "loss_type", None)))
        if loss is None:
            return None
        config = getattr(self._bare_model, "config", None)
        return loss is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False)

    def _form_of_model(self) -> str:
        if self._form is None:
            self._form = forms.form_of(self.model)  # pyright: ignore[reportArgumentType]
        return self._form

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and self._bare_model is not self.model:
            self._signature_columns = [*self._forward_parameters, "label", "label_ids", *self.label_names]
        super()._set_signature_columns_if_needed()

    def _prepare_input(self, data: Any) -> Any:
        plugin = self.accelerator.state.deepspeed_plugin
        dtype = None if plugin is None else plugin.hf_ds_config.dtype()
        return to_device(data, self.args.device, non_blocking=self.accelerator.non_blocking, float_dtype=dtype)

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """The batch on the device, as keywords of the model."""
        if isinstance(inputs, RaggedBatch):
            return forms.keywords_of(self._prepare_input(inputs), self._form_of_model(), shifts=self._shifts)
        if isinstance(inputs, PackedSequence):
            inputs = {self._main_input: inputs}
        if len(inputs) == 0:
            raise InputError(
                "the batch is empty",
                expected=f"at least one of {self._forward_parameters}",
                hint="set remove_unused_columns=False if the collator needs columns that forward does not name",
            )
        lengths = inputs.get("input_lengths")
        prepared = self._prepare_input(inputs)
        if isinstance(lengths, Tensor):  # packing wants lengths on the host
            prepared["input_lengths"] = lengths
        return prepared

    def _label_elements(self, inputs: Any) -> Tensor | None:
        if self._label_name is None:
            return None
        labels = inputs.get(self._label_name) if hasattr(inputs, "get") else None
        ours = isinstance(self._bare_model, RecurrentPreTrainedModel)  # others' own losses count as they please
        if ours and self._shifts and isinstance(labels, PackedSequence):
            return labels.data[int(labels.batch_sizes[0]) :].flatten()  # first labels come first, and count nowhere
        flattened = isinstance(inputs, RaggedBatch) and self._form_of_model() == "flattened"
        return counting.label_elements(inputs, self._label_name, shifts=self._shifts, flattened=flattened)

    def _check_ids(self, inputs: Any) -> None:
        size = _embedding_of(self._bare_model)
        if size is not None and self._main_input == "input_ids":
            counting.check_vocabulary(inputs, self._main_input, size)


def _embedding_of(model: nn.Module) -> int | None:
    """How many ids the model's input embedding knows; None if it has none."""
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embedding, "num_embeddings", None)
