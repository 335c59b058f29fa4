"""Cross-entropy of a linear head without its logits: head and loss run on a few tokens at a time.

The logits [T, words] of a long row are the peak of a step: those of 8,192 tokens and 131,072 words take 4 GiB in
float32, and their softmax and its gradient as much again. Here the tokens whose label does not count are dropped first,
and the others run in chunks. The gradient of a chunk's scores is known as soon as the scores are (softmax minus one at
the label), so the forward pass also makes the gradients of the hidden states and of the head. Backward only scales
them; nothing is computed twice, and no chunk's logits outlive it.

Gradients of the head are summed over chunks in float32 or better: bfloat16 would round at every chunk.

Source of the method: Hsu et al. 2024, Liger Kernel, arXiv:2410.10989.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError

#: Scores in a chunk, by kind of device: 64 MiB in float32; larger chunks were not faster on a CPU. On an H200 a head of
#: 128,256 words took 110 ms for 8,192 tokens in chunks as small, 36 ms in these of 512 MiB, and 30 ms in one.
_SCORES = {"cpu": 1 << 24, "cuda": 1 << 27}
#: Fewest tokens in a chunk: below, adding to the head's gradient takes as long as computing what is added.
_FEWEST = 64

#: Whether this torch adds a product of half precision to float32 without rounding it first; it does so on CUDA alone.
_SUMS_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")

Transform = Callable[[Tensor], Tensor]


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    transform: Transform | None = None,
    parameters: Sequence[Tensor] = (),
    chunk: int | None = None,
    counted: int | None = None,
) -> Tensor:
    """Sum over tokens of weight times cross-entropy of ``head(hidden)`` against ``labels``, in chunks of tokens.

    Waits for the device unless it is told how many labels count. Its gradients are made in the forward pass: backward
    goes through it once, and not to a second order. Raises ``InputError`` for shapes that do not fit each other.

    Args:
        hidden: [T, H], what the head reads.
        head: an ``nn.Linear``, or any module that makes [n, words] of [n, H], each token by itself. Its ``forward`` is
            called without its hooks.
        labels: [T], int64, not to be shifted any more; a token of label -100 is not computed.
        weights: [T] or a number in a tensor; of every token alike, 1 by default. No gradient reaches them.
        transform: of scores [n, words], each token by itself: a scale, a soft cap. Its last dim may become smaller.
        parameters: tensors within ``transform`` that need a gradient.
        chunk: tokens at once; chosen by the number of words if None.
        counted: labels that count, at most; those that do not are computed with a weight of zero.

    >>> head, hidden, labels = nn.Linear(4, 9), torch.randn(5, 4), torch.tensor([1, -100, 8, 0, 3])
    >>> loss = chunked_cross_entropy(hidden, head, labels, chunk=2)
    >>> torch.allclose(loss, nn.functional.cross_entropy(head(hidden), labels, reduction="sum"))
    True
    """
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or (chunk is not None and chunk < 1):
        raise InputError(
            "head and loss in chunks take hidden states and labels by token",
            where="chunked_cross_entropy",
            expected="hidden [T, H], labels [T], chunk >= 1",
            found=f"{list(hidden.shape)}, {list(labels.shape)}, {chunk}",
        )
    labels = labels.to(hidden.device)
    if weights is not None:
        weights = weights.detach().to(hidden.device).expand(labels.shape)
    counts = labels != IGNORED_LABEL
    if counted is None and not bool(counts.all()):
        index = counts.nonzero().squeeze(1)
        hidden, labels = hidden.index_select(0, index), labels[index]
        weights = None if weights is None else weights[index]
    elif counted is not None:
        # Those that count first, in their order, which takes no number from the device.
        torch._assert_async(counts.sum() <= counted, "more labels count than the batch has")  # pyright: ignore
        index = counts.byte().argsort(descending=True, stable=True)[:counted]
        hidden, labels = hidden.index_select(0, index), labels[index].clamp(min=0)
        weights = counts[index].to(hidden.dtype) if weights is None else weights[index] * counts[index]
    # A parameter may stand in both, and gets one gradient.
    trained = {id(each): each for each in (*head.parameters(), *parameters) if each.requires_grad}
    sums = _Sums(trained if torch.is_grad_enabled() else {}, torch.is_grad_enabled())
    projection = _Linear(head, sums) if is_plain(head) else _Module(head, sums)
    scores = _Scores(projection, transform, sums)
    return _ChunkedLoss.apply(hidden, labels, weights, scores, chunk, *sums.parameters)


def is_plain(head: nn.Module) -> bool:
    """Whether a head is torch's own linear layer, so that its gradients are two products."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)


class _Sums:
    """Gradients of parameters, summed over chunks in float32 or, where those are, in float64.

    ``parameters``: those that need one, by id. ``enabled``: whether gradients are asked for at all.
    """

    def __init__(self, parameters: dict[int, Tensor], enabled: bool) -> None:
        self.parameters, self.enabled = list(parameters.values()), enabled
        self._sums: dict[int, Tensor] = {}

    def of(self, parameter: Tensor | None) -> Tensor | None:
        """The sum so far, to add to in place; None for a parameter that needs no gradient."""
        if parameter is None or not any(each is parameter for each in self.parameters):
            return None
        if id(parameter) not in self._sums:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._sums[id(parameter)] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return self._sums[id(parameter)]

    def backward(self, outputs: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of ``inputs``, of which ``outputs`` were made; those of the parameters are added to the sums."""
        wanted = [inputs, *self.parameters]
        found = torch.autograd.grad(outputs, wanted, gradient.to(outputs.dtype), allow_unused=True)
        for parameter, part in zip(self.parameters, found[1:], strict=True):
            total = self.of(parameter)
            if part is not None and total is not None:
                total.add_(part)
        return torch.zeros_like(inputs) if found[0] is None else found[0]

    def take(self) -> list[Tensor]:
        """The sums, each in the dtype of its parameter; they are then forgotten."""
        taken = []
        for parameter in self.parameters:
            total = self.of(parameter)
            assert total is not None
            del self._sums[id(parameter)]
            taken.append(total.to(parameter.dtype))
        return taken


class _Linear:
    """Projection by a linear layer. Under autocast it runs in autocast's dtype, into which its weight is cast once."""

    def __init__(self, head: nn.Linear | Any, sums: _Sums) -> None:
        self.head, self.sums = head, sums
        device = head.weight.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
        self.weight = head.weight.detach().to(self.dtype)
        self.bias = None if head.bias is None else head.bias.detach().to(self.dtype)
        self._buffer: Tensor | None = None

    def scores(self, rows: Tensor) -> Tensor:
        """[n, words] of rows [n, H], valid until it is called again."""
        # One buffer for all chunks: a new one would be given new pages of memory each time.
        if self._buffer is None or len(self._buffer) < len(rows):
            self._buffer = rows.new_empty(len(rows), len(self.weight), dtype=self.dtype)
        scores = torch.mm(rows.to(self.dtype), self.weight.T, out=self._buffer[: len(rows)])
        return scores if self.bias is None else scores.add_(self.bias)

    def backward(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the rows; those of weight and bias are added to the sums. ``gradient``: of their scores."""
        gradient, rows = gradient.to(self.dtype), rows.to(self.dtype)
        weight, bias = self.sums.of(self.head.weight), self.sums.of(self.head.bias)
        if weight is not None and weight.dtype == self.dtype:
            weight.addmm_(gradient.T, rows)
        elif weight is not None and rows.is_cuda and weight.dtype == torch.float32 and _SUMS_PRODUCTS:
            torch.addmm(weight, gradient.T, rows, out_dtype=torch.float32, out=weight)
        elif weight is not None:
            weight.add_(gradient.T @ rows)
        if bias is not None:
            bias.add_(gradient.sum(0, dtype=bias.dtype))
        return gradient @ self.weight


class _Module:
    """Projection by any module, such as a linear layer with adapters; autograd goes through it chunk by chunk."""

    def __init__(self, head: nn.Module, sums: _Sums) -> None:
        self.head, self.sums = head, sums
        self._graph: tuple[Tensor, Tensor] | None = None

    def scores(self, rows: Tensor) -> Tensor:
        """[n, words] of rows [n, H]."""
        if not self.sums.enabled:
            return self.head.forward(rows)
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            scores = self.head.forward(rows)
        self._graph = rows, scores
        return scores.detach()

    def backward(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the rows; those of the head's parameters are added to the sums."""
        assert self._graph is not None
        rows, scores = self._graph
        self._graph = None
        return self.sums.backward(scores, rows, gradient) if scores.requires_grad else torch.zeros_like(rows)


class _Scores:
    """Scores of chunks, as the loss compares them, and the way back from their gradient."""

    def __init__(self, projection: _Linear | _Module, transform: Transform | None, sums: _Sums) -> None:
        self.projection, self.transform, self.sums = projection, transform, sums

    def loss_of(self, rows: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weighed loss of one chunk, and the gradient of its rows [n, H]; None where none is asked for."""
        logits = self.projection.scores(rows)
        if self.transform is None:
            given = made = logits
        else:
            with torch.enable_grad() if self.sums.enabled else contextlib.nullcontext():
                # A leaf of its own, behind which the projection goes on by itself.
                given = logits.detach().requires_grad_(self.sums.enabled)
                made = self.transform(given)
        # The loss is computed in float32 or better, in place where nobody needs the scores any more.
        dtype = torch.promote_types(made.dtype, torch.float32)
        mine = made.detach().to(dtype, copy=made is not logits or isinstance(self.projection, _Module))
        # -log softmax = log Σ exp(s - max) - (s at the label - max)
        mine.sub_(mine.amax(1, keepdim=True))
        of_labels = mine.gather(1, labels[:, None]).squeeze(1)
        total = mine.exp_().sum(1)
        losses = total.log() - of_labels
        weighed = losses if weights is None else losses * weights.to(dtype)
        if not self.sums.enabled:
            return weighed.sum(), None
        # Its gradient: softmax minus one at the label, times the weight. Of scores [2, 0, 0] with label 0 softmax is
        # [0.79, 0.11, 0.11], and the gradient [-0.21, 0.11, 0.11].
        scale = total.reciprocal_() if weights is None else weights.to(dtype) / total
        mine.mul_(scale[:, None])
        ones = torch.ones_like(scale) if weights is None else weights.to(dtype)
        mine.scatter_add_(1, labels[:, None], -ones[:, None])
        if self.transform is not None:
            mine = self.sums.backward(made, given, mine)
        return weighed.sum(), self.projection.backward(rows, mine)


class _ChunkedLoss(torch.autograd.Function):
    """The loss as one node of the graph, whose gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        scores: _Scores,
        chunk: int | None,
        *parameters: Tensor,
    ) -> Tensor:
        sums, needs_hidden = scores.sums, hidden.requires_grad
        loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        gradient = torch.zeros_like(hidden) if sums.enabled and needs_hidden else None
        for part in _chunks(len(labels), scores.projection.head, chunk, hidden.device.type):
            rows = hidden[part].detach()
            with _autocast_for(scores.projection, hidden.device.type):
                weighed, of_rows = scores.loss_of(rows, labels[part], None if weights is None else weights[part])
            loss += weighed
            if gradient is not None and of_rows is not None:
                gradient[part] = of_rows
        ctx.gradients = [gradient, *sums.take()] if sums.enabled else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "backward goes once through a loss in chunks: packing_chunked_loss=False keeps the graph"
            )
        # In place: nobody else has them.
        hidden, *others = [None if each is None else each.mul_(outer[0].to(each.dtype)) for each in gradients]
        return hidden, None, None, None, None, *others


def _chunks(number: int, head: nn.Module, chunk: int | None, device: str) -> list[slice]:
    """Slices of tokens of nearly equal size, none over ``chunk``."""
    if chunk is None:
        words: Any = getattr(head, "out_features", 1 << 15)
        chunk = max(_FEWEST, _SCORES.get(device, _SCORES["cpu"]) // words)
    if not number:
        return []
    # Nine tokens, at most four at once, are three chunks of 3, not 4, 4 and 1.
    size = -(-number // -(-number // chunk))
    return [slice(start, min(start + size, number)) for start in range(0, number, size)]


def _autocast_for(projection: _Linear | _Module, device: str) -> Any:
    """No autocast for a plain layer, which has cast by itself; for a module, one that keeps nothing over chunks."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    if isinstance(projection, _Linear):
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
