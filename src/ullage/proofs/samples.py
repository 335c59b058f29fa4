"""Sequences for the audit of one model, alone and in a packed row, and what the model makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ullage.attention.heads import loss_shifts, works_by_sequence
from ullage.batch import RaggedBatch
from ullage.errors import InputError
from ullage.layout import Layout
from ullage.schema import IGNORED_LABEL

#: Tokens of the target of a source, so that the lengths of both differ: a source of 7 has a target of 5.
_TARGETS = (5, 4, 2, 6, 3, 4)
_EXPERTS_BY = "_experts_implementation"


@dataclass(frozen=True)
class Sample:
    """One sequence: tokens [L], and labels [L], or of an encoder-decoder [target tokens]."""

    input_ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a model made of a row: for each sequence its logits, and the loss of all; None without labels."""

    logits: list[Tensor]
    loss: Tensor | None


class Samples:
    """Sequences for one model, and its outputs for them.

    Args:
        model: in the state in which it is audited.
        collate: makes the keywords of a packed row from samples; None for ``RaggedBatch.to_flattened``.
        seed: of the tokens.
    """

    def __init__(self, model: nn.Module, collate: Callable[..., Any] | None, seed: int) -> None:
        self.model, self.collate, self.seed = model, collate, seed
        config: Any = getattr(model, "config", None)
        self.config = config
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.by_sequence = works_by_sequence(model)
        #: Whether the model computes a loss of text alone; some take labels with images only.
        self.has_loss = True
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        table: Any = _embedding(model)
        self.vocabulary = int(getattr(text, "vocab_size", None) or table.weight.shape[0])
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.special = {
            value
            for part in (config, text)
            for name, value in vars(part).items()
            if name.endswith("token_id") and isinstance(value, int)
        }

    @property
    def is_routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return any("expert" in type(module).__name__.lower() for module in self.model.modules())

    def draw(self, lengths: Sequence[int]) -> list[Sample]:
        """Sequences of these lengths. Labels are the tokens, but for each sequence's first, which nothing predicts."""
        random = torch.Generator().manual_seed(self.seed)
        usable = torch.tensor([token for token in range(self.vocabulary) if token not in self.special][:1000])
        samples = []
        for place, length in enumerate(lengths):
            tokens = usable[torch.randint(len(usable), (length,), generator=random)]
            if self.is_encoder_decoder:
                size = _TARGETS[place % len(_TARGETS)] if length else 0
                labels = usable[torch.randint(len(usable), (size,), generator=random)]
            elif self.by_sequence:
                labels = torch.randint(int(self.config.num_labels), (), generator=random)
            else:
                labels = tokens.clone()
                labels[:1] = IGNORED_LABEL
            samples.append(Sample(tokens.to(self.device), labels.to(self.device)))
        return samples

    def with_other_tokens(self, row: Sequence[Sample], place: int) -> list[Sample]:
        """The row with other tokens in one sequence, of the same length."""
        other = self._again(self.seed + 1).draw([len(sample.input_ids) for sample in row])[place]
        labels = other.labels if self.is_encoder_decoder else row[place].labels
        return [*row[:place], replace(other, labels=labels), *row[place + 1 :]]

    # Runs.

    def alone(self, row: Sequence[Sample]) -> Outcome:
        """Each sequence in a call of its own, and the mean of their losses over all labels."""
        logits, losses, counts = [], [], []
        for sample in row:
            if not len(sample.input_ids):
                logits.append(sample.input_ids.new_zeros(0, dtype=self.dtype))
                continue
            outputs = self.model(input_ids=sample.input_ids[None], **self._labels(sample), **self._without_cache())
            found = _logits(outputs)[0]
            logits.append(found.detach())
            count = 1 if self.by_sequence else int((sample.labels != IGNORED_LABEL).sum())
            loss = _loss(outputs) if self.has_loss else self._stand_in(found, len(logits) - 1)
            if loss is not None and count:
                losses.append(loss * count)
                counts.append(count)
        return Outcome(logits, torch.stack(losses).sum() / sum(counts) if counts else None)

    def settle(self) -> int:
        """Find out how short a sequence of this model may be, in tokens, and whether it has a loss of text alone."""
        failure: Exception | None = None
        for least in (1, 2, 4, 8, 16):
            for has_loss in (True, False):
                self.has_loss = has_loss
                try:
                    self.alone(self.draw([least, max(least, 7)]))
                    return least
                except Exception as error:  # whatever it is: another length is tried
                    failure = failure or error
        assert failure is not None
        raise failure

    def _stand_in(self, logits: Tensor, place: int) -> Tensor:
        """A loss of one sequence's logits, for a model without one: their distance from random numbers."""
        random = torch.Generator().manual_seed(place)
        aim = torch.randn(logits.shape, generator=random, dtype=torch.float64)
        return (logits - aim.to(logits)).square().mean()

    def packed(self, row: Sequence[Sample]) -> Outcome:
        """All sequences in one row."""
        outputs = self.model(**self._row(row), **self._without_cache())
        logits, loss = _logits(outputs), _loss(outputs)
        if self.by_sequence:
            there = [len(sample.input_ids) > 0 for sample in row]
            return Outcome([each.detach() if some else each[:0].detach() for each, some in zip(logits, there)], loss)
        sizes = [len(sample.labels if self.is_encoder_decoder else sample.input_ids) for sample in row]
        flat = logits[0] if logits.ndim == 3 else logits
        if len(flat) != sum(sizes):
            raise InputError(
                "the model's outputs do not lie end to end",
                expected=f"[1, {sum(sizes)}, ...]",
                found=list(logits.shape),
            )
        parts = flat.split(sizes)
        if not self.has_loss:
            counts = [int((each.labels != IGNORED_LABEL).sum()) for each in row]
            losses = [self._stand_in(part, at) * count for at, (part, count) in enumerate(zip(parts, counts)) if count]
            loss = torch.stack(losses).sum() / sum(counts)
        return Outcome([part.detach() for part in parts], loss)

    def gradients_differ(self, packed: Tensor | None, alone: Tensor | None) -> float:
        """Largest difference of any parameter's gradient, relative to the largest of that parameter.

        Gradients that are rounding noise beside the largest of all are compared with a thousandth of that.
        """
        if packed is None or alone is None:
            return 0.0
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        ours, theirs = (
            torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True) for loss in (packed, alone)
        )
        largest = max(float(each.abs().max()) for each in theirs if each is not None)
        worst = 0.0
        for mine, other in zip(ours, theirs):
            if mine is None and other is None:
                continue
            shape = mine if mine is not None else other
            assert shape is not None
            mine, other = (torch.zeros_like(shape) if each is None else each for each in (mine, other))
            scale = max(float(other.abs().max()), 1e-3 * largest)
            difference = float((mine - other).abs().max()) / scale
            worst = max(worst, difference if difference == difference else float("inf"))
        return worst

    @contextmanager
    def poisoned(self, row: Sequence[Sample], place: int) -> Iterator[list[Sample]]:
        """The row with one sequence whose embeddings are nan: its tokens are one id, which no other sequence has."""
        used = {int(token) for sample in row for token in (*sample.input_ids, *sample.labels.flatten())}
        poison = next(token for token in range(self.vocabulary) if token not in used | self.special)
        sample = replace(row[place], input_ids=torch.full_like(row[place].input_ids, poison))

        def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
            tokens = inputs[0] if inputs else None
            if (
                isinstance(tokens, Tensor)
                and isinstance(output, Tensor)
                and output.shape[: tokens.ndim] == tokens.shape
            ):
                return output.masked_fill((tokens == poison)[..., None], torch.nan)
            return output

        hook = _embedding(self.model).register_forward_hook(spoil)
        try:
            yield [*row[:place], sample, *row[place + 1 :]]
        finally:
            hook.remove()

    @contextmanager
    def in_double(self) -> Iterator[Samples]:
        """The same in float64, experts by plain products: the grouped ones take no float64."""
        configs: dict[int, Any] = {
            id(part.config): part.config for part in self.model.modules() if hasattr(part, "config")
        }
        experts = [(each, each._experts_implementation) for each in configs.values() if hasattr(each, _EXPERTS_BY)]
        for config, _ in experts:
            config._experts_implementation = "eager"
        before = {name: value.dtype for name, value in self.model.state_dict().items()}
        weights = copy.deepcopy(self.model.state_dict())
        self.model.double()
        try:
            yield self._again(self.seed)
        finally:
            for config, implementation in experts:
                config._experts_implementation = implementation
            self.model.to(self.dtype)
            self.model.load_state_dict({name: value.to(before[name]) for name, value in weights.items()})

    def _again(self, seed: int) -> Samples:
        again = Samples(self.model, self.collate, seed)
        again.has_loss = self.has_loss
        return again

    # Keywords.

    def _labels(self, sample: Sample) -> dict[str, Tensor]:
        if not self.has_loss:
            return {"decoder_input_ids": sample.labels[None]} if self.is_encoder_decoder else {}
        return {"labels": sample.labels[None]} if sample.labels.ndim else {"labels": sample.labels.reshape(1)}

    def _row(self, row: Sequence[Sample]) -> dict[str, Any]:
        if self.collate is not None:
            return dict(self.collate([{"input_ids": each.input_ids, "labels": each.labels} for each in row]))
        # Not from_samples, which refuses empty sequences: a plan may leave one in a row.
        fields = {"input_ids": torch.cat([each.input_ids for each in row])}
        if not self.is_encoder_decoder and not self.by_sequence:
            fields["labels"] = torch.cat([each.labels for each in row])
        keywords = RaggedBatch(fields, Layout([len(each.input_ids) for each in row])).to_flattened()
        if self.by_sequence:
            keywords["labels"] = torch.stack([each.labels for each in row])
        if not self.has_loss:
            keywords.pop("labels", None)
        if self.is_encoder_decoder:
            name = "labels" if self.has_loss else "decoder_input_ids"
            keywords[name] = torch.nested.nested_tensor([each.labels for each in row], layout=torch.jagged)
        elif self.has_loss and loss_shifts(self.model) is not True and not self.by_sequence:
            keywords["labels"] = torch.cat([each.labels for each in row])[None]
        return keywords

    def _without_cache(self) -> dict[str, Any]:
        import inspect

        return {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}


def _embedding(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_input_embeddings", None)
    found = None
    if get is not None:
        try:
            found = get()
        except NotImplementedError:
            found = None
    if found is None:
        found = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if found is None:
        raise InputError("the model has no embedding of tokens", where=type(model).__name__)
    return found


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]
        if isinstance(outputs.get("start_logits"), Tensor):  # question answering
            return torch.stack([outputs["start_logits"], outputs["end_logits"]], -1)
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return next(part for part in parts if isinstance(part, Tensor) and part.ndim >= 2)


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, dict) else None
