"""Numbers from one device held against those from another."""

from typing import Any

import torch
from torch import Tensor, nn

#: How far a dtype may be from the CPU's float32, as a share.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Equal up to ``tolerance`` of the largest expected value; in half precision in the mean square.

    Single elements are far off there where a kink (ReLU) or a cancellation lies in between.
    """
    assert found.shape == expected.shape, what
    if not expected.numel():
        return
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    size = torch.linalg.vector_norm if tolerance > 1e-3 else lambda values: values.abs().max()
    off, scale = float(size(found - expected)), max(float(size(expected)), 1e-3)
    assert off <= tolerance * scale, f"{what}: {off:.3g} of {scale:.3g}"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().cpu().float() for name, p in model.named_parameters() if p.grad is not None}


def outcome(model: nn.Module, keywords: dict[str, Any], name: str = "logits") -> tuple[Tensor, Tensor, dict]:
    """Output, loss and gradients of one forward and backward, on the host in float32."""
    model.zero_grad()
    out = model(**keywords)
    out.loss.backward()
    return getattr(out, name).detach().cpu().float(), out.loss.detach().cpu().float(), gradients(model)


def assert_same_outcome(found: tuple, expected: tuple, tolerance: float) -> None:
    assert_close(found[0], expected[0], tolerance, "output")
    assert_close(found[1], expected[1], tolerance, "loss")
    assert found[2].keys() == expected[2].keys()
    assert found[2]
    for name, gradient in expected[2].items():
        assert_close(found[2][name], gradient, tolerance, name)
