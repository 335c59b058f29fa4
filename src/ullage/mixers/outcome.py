"""What one call of a proof gave: outputs, loss, and gradients of what the model embedded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ullage.mixers.at_rest import Leaf, embedded_inputs
from ullage.mixers.trial import Trial


@dataclass
class CallOutcome:
    """What one call gave.

    Attributes:
        outputs: by name, [1, L, ...] or [1, ...] of a sequence, a list of such for a row; those that can be compared.
        loss: of the call, without a balance of experts; None without one.
        leaves: what was embedded.
        gradients: of the weighed outputs with respect to each leaf; empty if none were asked for.
        parts: what the loss was left without.
    """

    outputs: dict[str, list[Tensor]]
    loss: Tensor | None
    leaves: list[Leaf]
    gradients: list[Tensor | None]
    parts: list[str]


class TrialRun:
    """Calls of one trial.

    ``model``: bare and at rest. ``call``: what is called, the model or what wraps it. ``backward``: whether gradients
    are asked for.
    """

    def __init__(self, model: nn.Module, trial: Trial, *, call: nn.Module, backward: bool) -> None:
        self.model, self.trial, self._call, self._backward = model, trial, call, backward
        #: Names of the outputs that are looked at; all if None.
        self.only: frozenset[str] | None = None
        #: Whether the loss is differentiated too, where it is known what it is a mean of.
        self.with_loss = True
        taken = inspect.signature(model.forward).parameters
        self._without_cache = {"use_cache": False} if "use_cache" in taken else {}

    def alone(self, place: int) -> CallOutcome:
        """One sequence in a call of its own."""
        with torch.set_grad_enabled(self._backward), embedded_inputs(self.model) as embedded:
            given = self._with_leaves(self.trial.alone[place], embedded.leaves)
            outputs = self._call(**given, **self._without_cache)
            named = {
                name: [_with_rows(value)] for name, value in _tensors(outputs).items() if self._is_told(value, place)
            }
            named = {name: parts for name, parts in named.items() if self.only is None or name in self.only}
            loss, parts = self._loss(outputs)
            count = 0.0 if self.trial.counts is None else self.trial.counts[place]
            gradients = self._gradients(named, [place], embedded.leaves, (loss, count))
        return CallOutcome(_detached(named), None if loss is None else loss.detach(), embedded.leaves, gradients, parts)

    def packed(self, alone: Sequence[CallOutcome]) -> CallOutcome:
        """All sequences in one row; ``alone``: each by itself, which tells what belongs to a token."""
        with torch.set_grad_enabled(self._backward), embedded_inputs(self.model) as embedded:
            given = self._with_leaves(self.trial.packed, embedded.leaves)
            outputs = self._call(**given, **self._without_cache)
            named = {}
            for name, value in _tensors(outputs).items():
                parts = self._parts(value, [each.outputs[name][0] for each in alone if name in each.outputs])
                if parts is not None and (self.only is None or name in self.only):
                    named[name] = parts
            loss, left = self._loss(outputs)
            gradients = self._gradients(named, range(len(alone)), embedded.leaves, (loss, sum(self.trial.counts or ())))
        return CallOutcome(_detached(named), None if loss is None else loss.detach(), embedded.leaves, gradients, left)

    def _is_told(self, value: Tensor, place: int) -> bool:
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
        for name in ("inputs_embeds", "input_values", "input_features", getattr(self.model, "main_input_name", "")):
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
    ) -> list[Tensor | None]:
        """Gradients of weighed outputs and of the sum of losses, by what is embedded. ``loss``: a mean, and of what."""
        weighed = [
            _weighed(part) * (1 + place / 7)
            for _, parts in sorted(named.items())
            for place, part in zip(places, parts, strict=True)
            if part.requires_grad
        ]
        mean, count = loss
        if self.with_loss and mean is not None and mean.requires_grad and count:
            weighed.append(mean * count)
        if not weighed or not leaves:
            return []
        total = torch.stack([each.float() for each in weighed]).sum()
        return list(torch.autograd.grad(total, [leaf.value for leaf in leaves], allow_unused=True))

    def _loss(self, outputs: Any) -> tuple[Tensor | None, list[str]]:
        """The loss of a call, without the balance of experts, which is a mean over all tokens of the call."""
        loss = _entries(outputs).get("loss")
        if loss is None and isinstance(outputs, tuple) and outputs:
            loss = outputs[0]
        if not isinstance(loss, Tensor) or loss.ndim:
            return None, []
        auxiliary = _entries(outputs).get("aux_loss")
        factor = getattr(getattr(self.model, "config", None), "router_aux_loss_coef", None)
        if isinstance(auxiliary, Tensor) and auxiliary.ndim == 0 and factor is not None:
            return loss - factor * auxiliary.to(loss), ["the balance of experts, a mean over all tokens"]
        return loss, []


def _weighed(part: Tensor) -> Tensor:
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


def _tensors(outputs: Any) -> dict[str, Tensor]:
    """The tensors among outputs that may have an entry for each token or sequence, by name."""
    entries = {"outputs": outputs} if isinstance(outputs, Tensor) else _entries(outputs)
    return {
        name: value
        for name, value in entries.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and not value.is_nested
    }


def _with_rows(value: Tensor) -> Tensor:
    return value[:, None] if value.ndim == 1 else value


def _detached(named: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    return {name: [part.detach() for part in parts] for name, parts in named.items()}
