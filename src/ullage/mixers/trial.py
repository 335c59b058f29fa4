"""The calls of a proof: a few sequences, each by itself and all in one packed row."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ullage.attention.heads import (
    is_loss_known,
    loss_author,
    loss_shifts,
    package_of,
    spans_sequences,
    works_by_sequence,
)
from ullage.attention.support import special_tokens, usable_tokens
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL, is_target
from ullage.core.errors import InputError
from ullage.core.items import ITEM_LENGTHS, UnequalRows
from ullage.core.layout import Layout
from ullage.mixers.at_rest import Leaf, at_rest, embedded_inputs
from ullage.mixers.items import PIXELS, alone_form, takes_items

#: Fields of labels with one entry per sequence, beside ``labels`` of a head by sequence.
_BY_SEQUENCE = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label", "mc_labels")


@dataclass(frozen=True)
class Trial:
    """Keywords of the calls that a proof compares.

    Attributes:
        alone: of each sequence in a call of its own: tensors [1, L, ...], or [1, ...] by sequence, without lengths.
        packed: of one packed row of the same sequences, in this order.
        sizes: tokens of each sequence.
        target_sizes: tokens of each target of an encoder-decoder; None for others.
        counts: by what the loss of each sequence is weighed in that of the row; None where the loss is not compared.
    """

    alone: Sequence[Mapping[str, Any]]
    packed: Mapping[str, Any]
    sizes: Sequence[int]
    target_sizes: Sequence[int] | None = None
    counts: Sequence[float] | None = None


# Sequences drawn for a model, where nobody has given any.

#: Tokens of each: two are alike, and two are longer than what most windows of tiny models reach.
_LENGTHS = (5, 12, 3, 49, 72, 12)
#: Tokens of the targets of an encoder-decoder.
_TARGETS = (4, 5, 7, 17, 24, 5)
#: Names in configs of how many tokens a sequence may have, and parts of the paths of tables of positions.
_MOST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "max_target_positions")
_POSITIONS = re.compile(r"pos|wpe")


def most_tokens(model: nn.Module) -> int | None:
    """How many tokens a sequence may have, by the config and the tables of positions; None where nothing tells."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = [value for name in _MOST if type(value := getattr(text, name, None)) is int and value > 0]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            # A table may begin behind the index of padding.
            limits.append(module.num_embeddings - 2)
    return min(limits, default=None)


def drawn_samples(model: nn.Module) -> list[dict[str, Tensor]]:
    """A few sequences drawn for a model, as :func:`trial_of` takes them, with labels where it takes such of text.

    They depend on the model's class and configuration alone. Runs the model to find out what it takes, at rest and
    without gradients. Raises what the model raises.
    """
    failure: Exception | None = None
    with at_rest(model, training=False), torch.no_grad():
        for least in (1, 2, 4, 8, 16):
            # Models of images compute a loss of text by rules of their own: a run's first step proves it.
            for has_labels in (False,) if takes_items(model) else (True, False):
                samples = _drawn(model, least, has_labels=has_labels)
                try:
                    for sample in (samples[2], samples[4]):
                        TrialRun(model, trial_of(model, [sample]), call=model, backward=False).alone(0)
                except Exception as error:  # whatever it is: another length is tried
                    failure = failure or error
                    continue
                return samples
    assert failure is not None
    raise failure


def _drawn(model: nn.Module, least: int, *, has_labels: bool) -> list[dict[str, Tensor]]:
    random, usable, most = torch.Generator().manual_seed(0), usable_tokens(model), most_tokens(model)
    if not len(usable):
        raise InputError("nobody can tell which tokens this model takes", where=type(model).__name__)
    taken = inspect.signature(model.forward).parameters if has_labels else ()
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def tokens(length: int) -> Tensor:
        return usable[torch.randint(len(usable), (length,), generator=random)]

    samples = []
    for length, size in zip(_LENGTHS, _TARGETS):
        sample = {"input_ids": tokens(max(min(length, most or length), least))}
        if is_pair:
            sample["labels" if "labels" in taken else "decoder_input_ids"] = tokens(size)
        elif "labels" in taken and works_by_sequence(model):
            kinds = max(int(getattr(model.config, "num_labels", 2)), 1)  # type: ignore[union-attr]
            sample["labels"] = torch.randint(kinds, (), generator=random)
        elif "labels" in taken:
            classes = getattr(getattr(model, "config", None), "num_labels", None) if is_tagging(model) else None
            sample["labels"] = sample["input_ids"].clone() if classes is None else sample["input_ids"] % classes
            if classes is None:
                sample["labels"][:1] = IGNORED_LABEL
        samples.append(sample)
    return samples


@torch.no_grad()
def vary(model: nn.Module) -> None:
    """Draw every parameter anew whose values are all equal or not finite: noise around its value."""
    for parameter in model.parameters():
        other = _drawn_anew(parameter)
        if other is not None:
            parameter.copy_(other)


@contextmanager
def varied(model: nn.Module) -> Iterator[None]:
    """Other values within the block where all of a parameter are equal: a gate of zeros would hide what lies behind.

    The parameters keep their memory, and what a backward has kept of them.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        changed = [(each, each.data, other) for each in model.parameters() if (other := _drawn_anew(each)) is not None]
    for parameter, _, other in changed:
        parameter.data = other
    try:
        yield
    finally:
        for parameter, own, _ in changed:
            parameter.data = own


def _drawn_anew(values: Tensor) -> Tensor | None:
    """Noise around values that are all equal or not finite; None for others."""
    if not values.is_floating_point() or not values.numel():
        return None
    first = float(values.detach().flatten()[0])
    if values.numel() == 1:
        return None if first else torch.empty_like(values).uniform_(0.3, 0.7)  # a gate that is closed
    if not torch.isfinite(values).all():
        return torch.empty_like(values).normal_(0.0, 0.1)
    if not (values == first).all():
        return None
    # A tiny constant (a layer scale of 1e-5) would close its path as much as a zero does.
    size = abs(first)
    return values + torch.randn_like(values) * (0.1 if size < 0.1 else 0.1 * size)


def is_tagging(model: nn.Module) -> bool:
    """Whether the labels of a model are classes of tokens, by the name of its class."""
    return any("ForTokenClassification" in each.__name__ for each in type(model).__mro__)


def trial_of(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    *,
    device: torch.device | None = None,
    per_sequence: Iterable[str] = (),
    believed: bool = False,
) -> Trial:
    """The trial of samples as ``RaggedBatch.from_samples`` takes them.

    Args:
        model: bare; its class tells how it counts labels.
        samples: the sequences.
        device: of the calls; the model's if None.
        per_sequence: fields of arrays with one entry per sequence.
        believed: whether a loss of another author is compared too: as a mean over labels, or over sequences.

    Raises ``InputError`` for no sample. One without tokens is in the row alone.
    """
    if not len(samples):
        raise InputError("a proof needs sequences to run", where="verify", expected="a few samples", found="none")
    if device is None:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
    samples = [{name: torch.as_tensor(value) for name, value in sample.items()} for sample in samples]
    packed = row_of(model, samples, per_sequence)
    samples = [sample for sample in samples if not _is_empty(sample)]
    targets = _targets_of(model, samples[0])
    alone = [alone_form(model, sample) for sample in samples]
    if targets and package_of(loss_author(model)[0]) == "ullage":
        # Ours takes -100 in padded targets for padding, and not in ragged ones.
        alone = [each | {name: _as_nested(each[name]) for name in targets} for each in alone]
    return Trial(
        [moved(each, device) for each in alone],
        moved(packed, device),
        [length for length in packed["cu_seq_lens_q"].diff().tolist() if length],
        [len(sample[targets[0]]) for sample in samples] if targets else None,
        counts_of(model, alone) if believed or is_loss_known(model) else None,
    )


def row_of(
    model: nn.Module, samples: Sequence[Mapping[str, Tensor]], per_sequence: Iterable[str] = ()
) -> dict[str, Any]:
    """The keywords of one packed row of samples. Those without tokens, as a plan may leave them, stay in it empty."""
    targets = _targets_of(model, samples[0])
    fields = [{name: value.cpu() for name, value in sample.items() if name not in targets} for sample in samples]
    there = [place for place, each in enumerate(fields) if not _is_empty(each)]
    whole = [name for name in per_sequence if name not in targets]
    batch = RaggedBatch.from_samples([fields[place] for place in there], per_sequence=whole)
    if len(there) < len(fields):
        lengths = np.zeros(len(fields), np.int64)
        lengths[there] = batch.layout.lengths
        items = {name: _with_gaps(rows, there, len(fields)) for name, rows in batch.items.items()}
        batch = RaggedBatch({name: batch[name] for name in batch.names}, Layout(lengths), items=items)
    packed = batch.to_flattened() | {name: batch[name] for name in batch.per_sequence}
    if "labels" in batch and "labels" not in batch.per_sequence and loss_shifts(model) is False:
        packed["labels"] = batch["labels"][None]  # no shift: the first label of a sequence counts too
    for name in targets:
        packed[name] = torch.nested.nested_tensor([sample[name] for sample in samples], layout=torch.jagged)
    return packed


def _with_gaps(rows: Layout, there: Sequence[int], number: int) -> Layout:
    """The rows of items of as many sequences, of which only some are ``there``."""
    counts = np.zeros(number, np.int64)
    counts[there] = rows.lengths
    if not isinstance(rows, UnequalRows):
        return Layout(counts)
    dims = [(0,) * len(rows.dims[0])] * number
    for place, each in zip(there, rows.dims):
        dims[place] = each
    return UnequalRows(counts, dims)


def _targets_of(model: nn.Module, sample: Mapping[str, Tensor]) -> list[str]:
    """The fields of a sample that are targets of an encoder-decoder; none of any other model."""
    is_pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return [name for name, value in sample.items() if is_pair and is_target(name) and value.ndim]


def _is_empty(sample: Mapping[str, Tensor]) -> bool:
    return not next(iter(sample.values())).numel()


def counts_of(model: nn.Module, alone: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """By what the loss of each sequence is weighed.

    None without labels, and where labels by token and by sequence meet in one call: their losses are added up.
    """
    per_sequence = [name for name in _BY_SEQUENCE if name in alone[0]]
    labels = [each.get("labels") for each in alone]
    if not all(isinstance(each, Tensor) for each in labels):
        # An answer behind its sequence counts for nothing, and the mean of starts may be over others than that of ends.
        of_spans = spans_sequences(model) and bool(per_sequence) and all(map(_holds_its_answer, alone))
        return [1.0] * len(alone) if of_spans else None
    shifts = loss_shifts(model)
    if per_sequence or (shifts is None and not works_by_sequence(model)):
        return None
    counts = []
    for value in labels:
        assert isinstance(value, Tensor)
        if works_by_sequence(model):
            counts.append(float(value.is_floating_point() or bool((value != IGNORED_LABEL).any())))
        else:
            counts.append(float((value[:, 1:] if shifts else value).ne(IGNORED_LABEL).sum()))
    return counts


def _as_nested(rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def _holds_its_answer(sequence: Mapping[str, Any]) -> bool:
    """Whether the places of a sequence's answer lie in it."""
    length = sequence["input_ids"].shape[1] if "input_ids" in sequence else 0
    places = [sequence[name] for name in ("start_positions", "end_positions") if name in sequence]
    return all(int(place.max()) < length for place in places)


def moved(keywords: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Keywords with their tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in keywords.items()}


# What one call of a proof gave: outputs, loss, and gradients of what the model embedded.


@dataclass
class CallOutcome:
    """What one call gave.

    Attributes:
        outputs: by name, [1, L, ...] or [1, ...] of a sequence, a list of such for a row; those that can be compared.
        loss: of the call, without a balance of experts; None without one.
        leaves: what was embedded.
        gradients: of the weighed outputs with respect to each leaf; empty if none were asked for.
        of_parameters: the same with respect to the parameters that the run is asked about.
        parts: what the loss was left without.
    """

    outputs: dict[str, list[Tensor]]
    loss: Tensor | None
    leaves: list[Leaf]
    gradients: list[Tensor | None]
    of_parameters: list[Tensor | None]
    parts: list[str]


class TrialRun:
    """Calls of one trial.

    ``model``: bare and at rest. ``call``: what is called, the model or what wraps it. ``backward``: whether gradients
    are asked for.
    """

    def __init__(self, model: nn.Module, trial: Trial, *, call: nn.Module, backward: bool) -> None:
        self.model, self.trial, self._call, self._backward = model, trial, call, backward
        self.device = next((each.device for each in model.parameters()), torch.device("cpu"))
        #: Names of the outputs that are looked at; all if None.
        self.only: frozenset[str] | None = None
        #: Whether the loss is differentiated too, where it is known what it is a mean of.
        self.with_loss = True
        #: Whether that of a row is, too, where it is not known what it is a mean of.
        self.has_any_loss = False
        #: Parameters whose gradients are wanted beside those of what is embedded.
        self.parameters: list[Tensor] = []
        taken = inspect.signature(model.forward).parameters
        self._without_cache = {"use_cache": False} if "use_cache" in taken else {}

    def alone(self, place: int) -> CallOutcome:
        """One sequence in a call of its own."""
        with torch.set_grad_enabled(self._backward), embedded_inputs(self.model) as leaves:
            given = self._with_leaves(self.trial.alone[place], leaves)
            outputs = self._call(**given, **self._without_cache)
            named = {
                name: [_with_rows(value)]
                for name, value in outputs_by_name(outputs).items()
                if self._has_entries(value, place)
            }
            named = {name: parts for name, parts in named.items() if self.only is None or name in self.only}
            loss, parts = self._loss(outputs)
            count = 0.0 if self.trial.counts is None else self.trial.counts[place]
            gradients = self._gradients(named, [place], leaves, (loss, count))
        return CallOutcome(_detach(named), _detach_loss(loss), leaves, *gradients, parts)

    def packed(self, alone: Sequence[CallOutcome], keywords: Mapping[str, Any] | None = None) -> CallOutcome:
        """All sequences in one row; ``alone``: each by itself, which tells what belongs to a token.

        ``keywords``: of the row, where they are not those of the trial.
        """
        with torch.set_grad_enabled(self._backward), embedded_inputs(self.model) as leaves:
            given = self._with_leaves(self.trial.packed if keywords is None else keywords, leaves)
            outputs = self._call(**given, **self._without_cache)
            named = {}
            for name, value in outputs_by_name(outputs).items():
                parts = self._parts(value, [each.outputs[name][0] for each in alone if name in each.outputs])
                if parts is not None and (self.only is None or name in self.only):
                    named[name] = parts
            loss, left = self._loss(outputs)
            count = sum(self.trial.counts or ()) or sum(self.trial.sizes) * self.has_any_loss
            gradients = self._gradients(named, range(len(alone)), leaves, (loss, count))
        return CallOutcome(_detach(named), _detach_loss(loss), leaves, *gradients, left)

    def forward_only(self) -> TrialRun:
        """The same calls without gradients."""
        return TrialRun(self.model, self.trial, call=self._call, backward=False)

    def with_other_tokens(self, token: int | None = None) -> dict[str, Any]:
        """The keywords of the row with other tokens, and images, in every second sequence.

        Tokens with a meaning stay. ``token``: the only other one; images are nan beside it.
        """
        trial, special = self.trial, torch.tensor([IGNORED_LABEL, *special_tokens(self.model)])
        keywords = dict(trial.packed)
        random = torch.Generator().manual_seed(2)
        fields = {"input_ids": trial.sizes, "decoder_input_ids": trial.target_sizes, "labels": trial.target_sizes}
        for name, sizes in fields.items() if token is None else [("input_ids", trial.sizes)]:
            value = keywords.get(name)
            if sizes is None or not isinstance(value, Tensor) or value.is_floating_point():
                continue
            is_row = not value.is_nested and tuple(value.shape) == (1, sum(sizes))
            rows = list(value.unbind()) if value.is_nested else list(value[0].split(list(sizes))) if is_row else []
            if len(rows) != len(sizes):
                continue
            tokens = torch.cat(rows).cpu()
            pool = tokens[~torch.isin(tokens, special)].unique() if token is None else torch.tensor([token])
            for place, row in enumerate(rows):
                if place % 2 and len(pool):
                    drawn = pool[torch.randint(len(pool), (len(row),), generator=random)].to(row)
                    rows[place] = torch.where(torch.isin(row, special.to(row)), row, drawn)
            joined = torch.nested.nested_tensor(rows, layout=torch.jagged) if value.is_nested else torch.cat(rows)[None]
            keywords[name] = joined
        there = trial.packed["cu_seq_lens_q"].diff().nonzero().flatten().tolist() if ITEM_LENGTHS in keywords else []
        for name, bounds in keywords.get(ITEM_LENGTHS, {}).items():
            if name.startswith("pixel_") and keywords[name].is_floating_point():
                keywords[name] = keywords[name].clone()
                for place in there[1::2]:
                    rows = keywords[name][int(bounds[place]) : int(bounds[place + 1])]
                    drawn = torch.randn(rows.shape, generator=random).to(rows) if token is None else torch.nan
                    rows.copy_(torch.where(rows == 0, rows, drawn))  # what is empty stays so
        return keywords

    def _has_entries(self, value: Tensor, place: int) -> bool:
        """Whether an output of a sequence alone has an entry for each token, or is one for the sequence."""
        sizes = (self.trial.sizes, self.trial.target_sizes)
        tokens = [each[place] for each in sizes if each is not None]
        return value.ndim < 3 or value.shape[1] in tokens

    def _parts(self, value: Tensor, alone: Sequence[Tensor]) -> list[Tensor] | None:
        """An output of a row by sequence; None where it has no entry for each token or sequence."""
        trial = self.trial
        if len(alone) != len(trial.alone):
            return None
        for sizes in (trial.target_sizes, trial.sizes):
            if sizes is None or any(each.ndim < 2 or each.shape[1] != size for each, size in zip(alone, sizes)):
                continue
            if value.ndim == alone[0].ndim and tuple(value.shape[:2]) == (1, sum(sizes)):
                return list(value.split(list(sizes), dim=1))
            if value.ndim == alone[0].ndim - 1 and value.shape[0] == sum(sizes):
                return [part[None] for part in value.split(list(sizes))]
        value = _with_rows(value)
        if value.shape[0] == len(alone) and all(each.shape == (1, *value.shape[1:]) for each in alone):
            return list(value.split(1))
        return None

    def _with_leaves(self, keywords: Mapping[str, Any], leaves: list[Leaf]) -> dict[str, Any]:
        """The keywords, with numbers by token (not labels, nor weights) as leaves of the graph."""
        given = dict(keywords)
        main = getattr(self.model, "main_input_name", "")
        for name in dict.fromkeys(("inputs_embeds", "input_values", "input_features", *PIXELS.values(), main)):
            value = given.get(name)
            if self._backward and isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested:
                leaf = value.detach().requires_grad_()
                leaves.append(Leaf(name, None, leaf))
                given[name] = leaf.clone()
        return given

    def _gradients(
        self,
        named: Mapping[str, Sequence[Tensor]],
        places: Sequence[int],
        leaves: Sequence[Leaf],
        loss: tuple[Tensor | None, float],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of weighed outputs and of the sum of losses, by what is embedded and by the parameters.

        ``loss``: a mean, and of what.
        """
        weighed = [
            _weigh(part) * (1 + place / 7)
            for _, parts in sorted(named.items())
            for place, part in zip(places, parts, strict=True)
            if part.requires_grad
        ]
        mean, count = loss
        if self.with_loss and mean is not None and mean.requires_grad and count:
            weighed.append(mean * count)
        wanted = [*(leaf.value for leaf in leaves), *self.parameters]
        if not weighed or not wanted:
            return [], []
        total = torch.stack([each.float() for each in weighed]).sum()
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        return list(gradients[: len(leaves)]), list(gradients[len(leaves) :])

    def _loss(self, outputs: Any) -> tuple[Tensor | None, list[str]]:
        """The loss of a call, without the balance of experts, which is a mean over all tokens of the call."""
        loss = _entries(outputs).get("loss")
        if loss is None and isinstance(outputs, tuple) and outputs:
            loss = outputs[0]
        if not isinstance(loss, Tensor) or loss.ndim:
            return None, []
        return without_balance(self.model, loss, outputs)


def without_balance(model: nn.Module, loss: Tensor, outputs: Any) -> tuple[Tensor, list[str]]:
    """The loss of a call without the balance of experts that the model adds, and what is left out then."""
    auxiliary = _entries(outputs).get("aux_loss")
    factor = getattr(getattr(model, "config", None), "router_aux_loss_coef", None)
    if isinstance(auxiliary, Tensor) and auxiliary.ndim == 0 and factor is not None:
        return loss - factor * auxiliary.to(loss), ["the balance of experts, a mean over all tokens"]
    return loss, []


def _weigh(part: Tensor) -> Tensor:
    """Numbers [1, L, ...] weighed by what depends on their places alone, and added up."""
    flat = part.reshape(part.shape[1] if part.ndim > 1 else 1, -1)
    rows, columns = (_weights(size, part) for size in flat.shape)
    return rows @ (flat @ columns) / flat.shape[1] ** 0.5


def _weights(size: int, like: Tensor) -> Tensor:
    """Weights [size] between 0.5 and 1 with signs that follow no order."""
    place = torch.arange(1, size + 1, dtype=torch.float64)
    turned = torch.frac(place * place * 0.6180339887498949 + place * 0.4142135623730951)
    return (torch.where(turned < 0.5, -1.0, 1.0) * (0.5 + torch.frac(turned * 2) / 2)).to(like)


def _entries(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {str(place): each for place, each in enumerate(outputs)} if isinstance(outputs, (tuple, list)) else {}


def outputs_by_name(outputs: Any) -> dict[str, Tensor]:
    """The tensors among outputs that may have an entry for each token or sequence, by name."""
    entries = {"outputs": outputs} if isinstance(outputs, Tensor) else _entries(outputs)
    return {
        name: value
        for name, value in entries.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and not value.is_nested
    }


def _with_rows(value: Tensor) -> Tensor:
    return value[:, None] if value.ndim == 1 else value


def _detach_loss(loss: Tensor | None) -> Tensor | None:
    return None if loss is None else loss.detach()


def _detach(named: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    return {name: [part.detach() for part in parts] for name, parts in named.items()}
