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

from collections.abc import Callable
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
        transform: of scores [n, words], each token by itself: a scale, a soft cap. What it is made of gets no gradient.
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
    enabled = torch.is_grad_enabled()
    trained = [each for each in head.parameters() if each.requires_grad] if enabled else []
    return _ChunkedLoss.apply(hidden, labels, weights, head, transform, chunk, enabled, *trained)


class _Linear:
    """Projection by a linear layer. Under autocast it runs in autocast's dtype, into which its weight is cast once.

    ``sums``: by id of a parameter, its gradient so far; the others need none.
    """

    def __init__(self, head: nn.Linear | Any, sums: dict[int, Tensor]) -> None:
        device = head.weight.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
        self.weight = head.weight.detach().to(self.dtype)
        self.bias = None if head.bias is None else head.bias.detach().to(self.dtype)
        self._of_weight, self._of_bias = sums.get(id(head.weight)), sums.get(id(head.bias))
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
        gradient, rows, total = gradient.to(self.dtype), rows.to(self.dtype), self._of_weight
        if total is not None and total.dtype == self.dtype:
            total.addmm_(gradient.T, rows)
        elif total is not None and rows.is_cuda and total.dtype == torch.float32 and _SUMS_PRODUCTS:
            torch.addmm(total, gradient.T, rows, out_dtype=torch.float32, out=total)
        elif total is not None:
            total.add_(gradient.T @ rows)
        if self._of_bias is not None:
            self._of_bias.add_(gradient.sum(0, dtype=self._of_bias.dtype))
        return gradient @ self.weight


class _Module:
    """Projection by any module, such as a linear layer with adapters; autograd goes through it chunk by chunk."""

    def __init__(self, head: nn.Module, sums: dict[int, Tensor]) -> None:
        self._head, self._sums = head, sums
        self._trained = [each for each in head.parameters() if id(each) in sums]

    def scores(self, rows: Tensor) -> Tensor:
        """[n, words] of rows [n, H]."""
        with torch.enable_grad():
            self._rows = rows.detach().requires_grad_()
            self._scores = self._head.forward(self._rows)
        return self._scores.detach().clone()

    def backward(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the rows; those of the head's parameters are added to the sums."""
        wanted = [self._rows, *self._trained]
        found, *parts = torch.autograd.grad(self._scores, wanted, gradient.to(self._scores.dtype), allow_unused=True)
        for parameter, part in zip(self._trained, parts, strict=True):
            if part is not None:
                self._sums[id(parameter)].add_(part)
        return found


def _loss_of(
    scores: Tensor, labels: Tensor, weights: Tensor | None, transform: Transform | None, enabled: bool
) -> tuple[Tensor, Tensor]:
    """The weighed loss of a chunk, and the gradient of its scores [n, words] if ``enabled``. Overwrites them."""
    given = made = scores
    if transform is not None:
        with torch.set_grad_enabled(enabled):
            given = scores.requires_grad_(enabled)
            made = transform(given)
    # The loss is computed in float32 or better, in place where nobody needs the scores any more.
    dtype, rows = torch.promote_types(made.dtype, torch.float32), made.detach()
    casts = rows.is_cuda and rows.dtype != dtype  # as it reads and writes, which a CPU does by a copy
    if casts:
        logps = torch.log_softmax(rows, 1, dtype=dtype)
    else:
        rows = rows.to(dtype, copy=transform is not None)
        logps = torch.log_softmax(rows, 1, out=rows)
    of_labels = logps.gather(1, labels[:, None])
    gradient = logps
    if enabled:
        # Its gradient: softmax minus one at the label, times the weight. Of scores [2, 0, 0] with label 0 softmax is
        # [0.79, 0.11, 0.11], and the gradient [-0.21, 0.11, 0.11].
        gradient = torch.exp(logps, out=scores.detach() if casts and transform is None else logps)
        gradient.scatter_(1, labels[:, None], of_labels.expm1().to(gradient.dtype))
        if weights is not None:
            gradient.mul_(weights.to(dtype)[:, None])
        if transform is not None:
            (gradient,) = torch.autograd.grad(made, given, gradient.to(made.dtype))
    return -(of_labels if weights is None else of_labels * weights.to(dtype)[:, None]).sum(), gradient


class _ChunkedLoss(torch.autograd.Function):
    """The loss as one node of the graph, whose gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        head: nn.Module,
        transform: Transform | None,
        chunk: int | None,
        enabled: bool,
        *parameters: Tensor,
    ) -> Tensor:
        device, is_plain = hidden.device.type, _is_linear(head)
        dtypes = [torch.promote_types(each.dtype, torch.float32) for each in parameters]
        sums = {id(each): torch.zeros_like(each, dtype=dtype) for each, dtype in zip(parameters, dtypes, strict=True)}
        projection = (_Linear if is_plain else _Module)(head, sums)
        loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        gradient = torch.zeros_like(hidden) if enabled and hidden.requires_grad else None
        # A plain layer has cast by itself; for a module, autocast keeps nothing over chunks.
        autocast = torch.is_autocast_enabled(device) and not is_plain
        for part in _chunks(len(labels), head, chunk, device):
            rows = hidden[part].detach()
            with torch.autocast(device, torch.get_autocast_dtype(device), enabled=autocast, cache_enabled=False):
                given = None if weights is None else weights[part]
                weighed, of_scores = _loss_of(projection.scores(rows), labels[part], given, transform, enabled)
                of_rows = projection.backward(rows, of_scores) if enabled else None
            loss += weighed
            if gradient is not None and of_rows is not None:
                gradient[part] = of_rows
        ctx.gradients = [gradient, *(sums.pop(id(each)).to(each.dtype) for each in parameters)] if enabled else None
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
        return hidden, None, None, None, None, None, None, *others


def _is_linear(head: nn.Module) -> bool:
    """Whether a head is torch's own linear layer, so that its gradients are two products."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)


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
