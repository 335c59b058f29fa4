"""The sequences of an audit, alone and in a packed row, and what the model makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ullage.attention.heads import works_by_sequence
from ullage.attention.support import special_tokens, usable_tokens
from ullage.core.columns import IGNORED_LABEL, is_media
from ullage.mixers.forwards import FoundForward
from ullage.mixers.items import alone_form
from ullage.mixers.proof import is_routed
from ullage.mixers.trial import Trial, most_tokens, moved, row_of, trial_of
from ullage.mixers.wrappers import bare

#: Tokens of the target of a source, so that the lengths of both differ: a source of 7 has a target of 5.
_TARGETS = (5, 4, 2, 6, 3, 4)
#: Lengths of the longest sequence, of which the first is taken that a model takes.
_LONGEST = (72, 40, 24, 16)


@dataclass(frozen=True)
class Sample:
    """One sequence: tokens [L], and labels [L], or of an encoder-decoder [target tokens]."""

    input_ids: Tensor
    labels: Tensor
    #: The kinds of its tokens, by token, and the fields of its images.
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def items(self) -> dict[str, Tensor]:
        """The fields of its images and clips."""
        return {name: value for name, value in self.others.items() if is_media(name)}


class Samples:
    """Sequences for one model, and its outputs for them.

    Args:
        model: in the state in which it is audited.
        collate: makes the keywords of a packed row from samples; None for ``RaggedBatch.to_flattened``.
        seed: of the tokens.
        pictures: has ``takes_images``, ``takes_clips`` and ``picture_samples``; None for text alone.
    """

    def __init__(self, model: nn.Module, collate: Callable[..., Any] | None, seed: int, pictures: Any = None) -> None:
        self.model, self.collate, self.seed, self.pictures = model, collate, seed, pictures
        config: Any = getattr(model, "config", None)
        self.config = config
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.by_sequence = works_by_sequence(model)
        #: Whether the model computes a loss of text alone; some take labels with images only.
        self.has_loss = True
        #: Tokens of the shortest and of the longest sequence that the model takes, as :meth:`settle` finds.
        self.least, self.most = 1, 16
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.special = special_tokens(model)
        #: What sequences have beside text, and why a model that takes images gets none; as :meth:`settle` finds.
        self.images, self.without_images = "", ""
        #: The first module in which a difference has appeared, with its class.
        self.where = ""
        #: Tokens to draw from, in order.
        self.usable = usable_tokens(model)

    @cached_property
    def shares_chunks(self) -> bool:
        """Whether kernels of its mixers get whole rows, and may compute what meets in a chunk together."""
        parts = (vars(module).get("forward") for module in self.model.modules())
        return any(isinstance(each, FoundForward) and bool(each.length_keywords) for each in parts)

    @property
    def is_routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return is_routed(self.model)

    def draw(self, lengths: Sequence[int], images: Sequence[int] = (), clips: Sequence[int] = ()) -> list[Sample]:
        """Sequences of these lengths. Labels are the tokens, but for each sequence's first, which nothing predicts.

        ``images``, ``clips``: how many each has beside, if the model takes any.
        """
        if self.images and any(images):
            return self._draw_pictures(lengths, images, clips if self.pictures.takes_clips(bare(self.model)) else ())
        random, usable = torch.Generator().manual_seed(self.seed), self.usable
        samples = []
        for place, length in enumerate(lengths):
            tokens = usable[torch.randint(len(usable), (length,), generator=random)]
            if self.is_encoder_decoder:
                size = max(_TARGETS[place % len(_TARGETS)], length // 3 if length > 16 else 0) if length else 0
                labels = usable[torch.randint(len(usable), (size,), generator=random)]
            elif self.by_sequence:
                labels = torch.randint(int(self.config.num_labels), (), generator=random)
            else:
                labels = tokens.clone()
                labels[:1] = IGNORED_LABEL
            samples.append(Sample(tokens.to(self.device), labels.to(self.device)))
        return samples

    def _draw_pictures(self, lengths: Sequence[int], images: Sequence[int], clips: Sequence[int]) -> list[Sample]:
        """Sequences with text of these lengths before, between and behind their images."""
        model: Any = bare(self.model)
        texts = []
        for place, (length, count) in enumerate(zip(lengths, images)):
            parts = 1 + count + (clips[place] if clips else 0)
            texts += [max(length // parts + (part < length % parts), min(length, 1)) for part in range(parts)]
        drawn = self.pictures.picture_samples(model, seed=self.seed, images=images, videos=clips or None, texts=texts)
        samples = []
        for fields in drawn:
            held = {name: value.to(self.device) for name, value in fields.items()}
            held |= {name: value.to(self.dtype) for name, value in held.items() if value.is_floating_point()}
            samples.append(Sample(held.pop("input_ids"), held.pop("labels"), held))
        return samples

    def _run_alone(self, row: Sequence[Sample]) -> list[Tensor]:
        """The logits of each sequence in a call of its own."""
        return [
            _logits(self.model(**alone_form(bare(self.model), fields), **self._without_cache()))
            for fields in self.fields(row)
        ]

    @torch.no_grad()
    def settle(self) -> None:
        """Find out how short and how long a sequence may be, in tokens, and whether there is a loss of text alone."""
        failure: Exception | None = None
        self._settle_images()
        for self.least in (1, 2, 4, 8, 16):
            for self.has_loss in (True, False):
                try:
                    self._run_alone(self.draw([self.least, max(self.least, 7)], (0, 1)))
                except Exception as error:  # whatever it is: another length is tried
                    failure = failure or error
                    continue
                self.most = self._longest()
                return
        assert failure is not None
        raise failure

    def _settle_images(self) -> None:
        """Find out whether images can be made for the model, and text with them is run."""
        model: Any = bare(self.model)
        if self.is_encoder_decoder or self.collate is not None:
            return
        if self.pictures is None:
            takes_them = "pixel_values" in inspect.signature(model.forward).parameters
            self.without_images = "the proof before a run's first step has the run's own" if takes_them else ""
            return
        if not self.pictures.takes_images(model):
            return
        self.images = "images and clips" if self.pictures.takes_clips(model) else "images"
        try:
            row = self.draw([7], [1])
            pixels = {name: value for name, value in row[0].items.items() if value.is_floating_point()}
            noise = {name: value + torch.randn_like(value) for name, value in pixels.items()}
            other = [replace(row[0], others={**row[0].others, **noise})]
            if all(map(torch.equal, self._run_alone(row), self._run_alone(other))):
                self.images, self.without_images = "", "another image changes nothing"
        except Exception as error:  # whatever the model raises: it is audited on text alone
            self.images, self.without_images = "", " ".join(f"{type(error).__name__}: {error}".split())

    def _longest(self) -> int:
        """The longest of some lengths that the model takes: as it tells, for on a GPU a trial would end the process."""
        most = most_tokens(self.model)
        lengths = [length for length in _LONGEST if most is None or length <= most] or [16]
        for length in lengths if self.device.type == "cpu" else ():
            try:
                self._run_alone(self.draw([length]))
                return length
            except Exception:  # the next, shorter one
                continue
        return lengths[0] if self.device.type != "cpu" else 16

    def trial(self, row: Sequence[Sample]) -> Trial:
        """The calls of a proof: each sequence that has tokens by itself, and the row."""
        if self.by_sequence:
            row = [sample for sample in row if len(sample.input_ids)]
        trial = trial_of(self.model, self.fields(row), believed=True)
        return trial if self.collate is None else replace(trial, packed=self._row(row))

    def for_trials(self) -> list[dict[str, Tensor]]:
        """Three sequences, as ``pack_model(model, verify=...)`` takes them."""
        return self.fields(self.draw([min(max(length, self.least), self.most) for length in (24, 3, 9)]))

    def fields(self, row: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """Samples as ``RaggedBatch.from_samples`` takes them, with the labels where the model computes a loss."""
        name = "labels" if self.has_loss else "decoder_input_ids" if self.is_encoder_decoder else None
        labels = [{} if name is None else {name: each.labels} for each in row]
        return [{"input_ids": each.input_ids} | label | dict(each.others) for each, label in zip(row, labels)]

    # Keywords.

    def _row(self, row: Sequence[Sample]) -> dict[str, Any]:
        if self.collate is not None:
            return dict(self.collate([{"input_ids": each.input_ids, "labels": each.labels} for each in row]))
        keywords = moved(row_of(self.model, self.fields(row)), self.device)
        # In double precision, as the weights are.
        return {
            name: value.to(self.dtype) if is_media(name) and value.is_floating_point() else value
            for name, value in keywords.items()
        }

    def _without_cache(self) -> dict[str, Any]:
        return {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]
        if isinstance(outputs.get("start_logits"), Tensor):  # question answering
            return torch.stack([outputs["start_logits"], outputs["end_logits"]], -1)
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return next(part for part in parts if isinstance(part, Tensor) and part.ndim >= 2)
