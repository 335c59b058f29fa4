"""Head and loss in chunks: the loss and the gradients of all logits at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ullage import InputError
from ullage.training.loss.chunked_loss import chunked_cross_entropy

HIDDEN, WORDS = 5, 11


def whole(hidden, head, labels, weights=None, transform=None):
    """The same by all logits."""
    scores = head(hidden) if transform is None else transform(head(hidden))
    losses = nn.functional.cross_entropy(scores, labels, reduction="none")
    return (losses if weights is None else losses * weights).sum()


def gradients(loss, tensors):
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(tensor) if each is None else each for each, tensor in zip(found, tensors, strict=True)]


def assert_equal(head, hidden, labels, *, chunk=None, **options):
    tensors = [hidden, *(each for each in head.parameters() if each.requires_grad)]
    expected = whole(hidden, head, labels, **options)
    found = chunked_cross_entropy(hidden, head, labels, chunk=chunk, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # Scaled by what comes from behind, as the divisor of a step does.
    for mine, theirs in zip(gradients(found / 7, tensors), gradients(expected / 7, tensors), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@st.composite
def cases(draw):
    tokens = draw(st.sampled_from([0, 1, 2, 7, 16]))
    labels = draw(st.lists(st.sampled_from([-100, 0, 3, WORDS - 1]), min_size=tokens, max_size=tokens))
    chunk = draw(st.sampled_from([None, 1, 2, max(tokens, 1), tokens + 1]))
    return (
        torch.tensor(labels, dtype=torch.int64),
        chunk,
        draw(st.booleans()),
        draw(st.sampled_from(["", "one", "each"])),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases(), capped=st.booleans(), seed=st.integers(0, 9))
def test_loss_and_gradients_are_those_of_all_logits(case, capped, seed):
    labels, chunk, bias, weighing = case
    torch.manual_seed(seed)
    head = nn.Linear(HIDDEN, WORDS, bias=bias, dtype=torch.float64)
    hidden = torch.randn(len(labels), HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = {"": None, "one": torch.tensor(0.3), "each": torch.rand(len(labels), dtype=torch.float64)}[weighing]
    transform = (lambda scores: 2 * torch.tanh(scores * 1.7 / 2)) if capped else None
    assert_equal(head, hidden, labels, chunk=chunk, weights=weights, transform=transform)


@pytest.mark.parametrize("trained", ["all", "adapters", "nothing"])
def test_a_head_with_adapters_and_a_frozen_one(trained):
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, WORDS, dtype=torch.float64)
    if trained != "nothing":
        config = LoraConfig(r=2, lora_alpha=8)
        head = LoraLinear(head, "default", config=config, r=2, lora_alpha=8, init_lora_weights=False).double()
    head.requires_grad_(trained == "all")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(trained == "all" or (trained == "adapters" and "lora_" in name))
    hidden = torch.randn(9, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert_equal(head, hidden, torch.tensor([1, -100, 4, 4, 0, 10, -100, 2, 9]), chunk=2)


def test_without_gradients_the_loss_alone_is_computed():
    head, hidden, labels = nn.Linear(HIDDEN, WORDS), torch.randn(4, HIDDEN), torch.tensor([1, 2, -100, 3])
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, head, labels, chunk=2)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(hidden, head, labels))


def test_nan_at_a_token_that_does_not_count_reaches_nothing():
    head, hidden = nn.Linear(HIDDEN, WORDS), torch.randn(3, HIDDEN)
    hidden[1] = torch.nan
    chunked_cross_entropy(hidden.requires_grad_(), head, torch.tensor([4, -100, 2])).backward()
    assert head.weight.grad.isfinite().all()
    assert hidden.grad[1].eq(0).all()


def test_bfloat16_is_summed_in_float32_over_chunks():
    """One token per chunk: bfloat16 would lose most of a thousand small terms."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, WORDS, bias=False, dtype=torch.bfloat16)
    hidden, labels = torch.ones(1000, HIDDEN, dtype=torch.bfloat16), torch.full((1000,), 3)
    loss = chunked_cross_entropy(hidden, head, labels, chunk=1)
    loss.backward()
    exact = nn.Linear(HIDDEN, WORDS, bias=False)
    exact.weight.data.copy_(head.weight.float())
    whole(hidden.float(), exact, labels).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(head.weight.grad.float(), exact.weight.grad, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("head", ["plain", "adapters"])
def test_under_autocast_as_all_logits_are(head):
    torch.manual_seed(0)
    layer = nn.Linear(HIDDEN, WORDS)
    if head == "adapters":
        layer = LoraLinear(layer, "default", config=LoraConfig(r=2), r=2, init_lora_weights=False)
    hidden, labels = torch.randn(6, HIDDEN, requires_grad=True), torch.tensor([1, 2, 3, -100, 5, 6])
    tensors = [hidden, *(each for each in layer.parameters() if each.requires_grad)]
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, layer, labels, chunk=2)
        expected = whole(hidden, layer, labels)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    for mine, theirs in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


def test_backward_goes_through_it_once():
    loss = chunked_cross_entropy(torch.randn(2, HIDDEN), nn.Linear(HIDDEN, WORDS), torch.tensor([1, 2]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="packing_chunked_loss=False"):
        loss.backward()


@pytest.mark.parametrize(
    ("shape", "labels", "chunk"), [((2, 3, HIDDEN), 2, None), ((4, HIDDEN), 3, None), ((4, HIDDEN), 4, 0)]
)
def test_shapes_that_do_not_fit_are_refused(shape, labels, chunk):
    with pytest.raises(InputError, match=r"expected hidden \[T, H\], labels \[T\], chunk >= 1"):
        chunked_cross_entropy(
            torch.randn(shape), nn.Linear(HIDDEN, WORDS), torch.zeros(labels, dtype=torch.int64), chunk=chunk
        )
