"""Rows in other places: each way undoes the other, and gradients are those of an index_select and an index_copy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ullage.core.rows import Places, permute

pytestmark = pytest.mark.property


@given(st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_each_way_undoes_the_other_and_has_the_gradient_of_torchs_own(rows, num_padding, random):
    chosen = random.sample(range(rows + num_padding), rows)
    places = Places.of(np.array(chosen), rows + num_padding, torch.device("cpu"))
    assert (places.padding is None) == (num_padding == 0)
    index = torch.tensor(chosen)
    values = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
    placed = places.place(values)
    assert torch.equal(placed, placed.new_zeros(rows + num_padding, 2).index_copy(0, index, values))
    assert torch.equal(places.take(placed), values)
    run = torch.randn(rows + num_padding, 2, dtype=torch.float64, requires_grad=True)
    for ours, theirs, given_to in (
        (places.place(values), placed.new_zeros(rows + num_padding, 2).index_copy(0, index, values), values),
        (places.take(run), run.index_select(0, index), run),
    ):
        weights = torch.randn_like(ours)
        gradients = (torch.autograd.grad((out.square() * weights).sum(), given_to)[0] for out in (ours, theirs))
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_gradients_have_gradients_and_padding_has_none():
    places = Places.of(np.array([3, 0, 1]), 5, torch.device("cpu"))
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    placed = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([2, 0, 1])
    for function, values in (
        (lambda v: places.place(v).square(), rows),
        (lambda v: places.take(v).square(), placed),
        (lambda v: permute(v, order, order.argsort()).square(), rows),
    ):
        assert torch.autograd.gradcheck(function, values)
        assert torch.autograd.gradgradcheck(function, values)
    assert not torch.autograd.grad(places.take(placed).sum(), placed)[0][[2, 4]].any()
