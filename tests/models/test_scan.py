"""The parallel scan against a loop over time: any lengths, any states, decays that vanish and decays that hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ullage.models import linear_scan
from ullage.models.cells import cell_class
from ullage.models.schedule import Schedule

pytestmark = pytest.mark.property

CPU = torch.device("cpu")


def _loop(decay: Tensor, inflow: Tensor, lengths: list[int], state: Tensor) -> Tensor:
    """The recurrence one token at a time, by autograd."""
    outputs = []
    blocks = zip(decay.split(lengths), inflow.split(lengths), state, strict=True)
    for decays, inflows, hidden in blocks:
        for now, into in zip(decays, inflows, strict=True):
            hidden = now * hidden + into
            outputs.append(hidden)
    return torch.stack(outputs)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.booleans(), st.integers(0, 99))
def test_scan_equals_a_loop(lengths: list[int], with_state: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), 3)
    decay = torch.rand(shape, generator=generator, dtype=torch.float64)
    decay = torch.where(torch.rand(shape, generator=generator) < 0.2, 1e-300, decay)  # forgets all
    decay = torch.where(torch.rand(shape, generator=generator) < 0.2, 1.0, decay)  # forgets nothing
    inflow = torch.randn(shape, generator=generator, dtype=torch.float64)
    state = torch.randn(len(lengths), 3, generator=generator, dtype=torch.float64)
    if not with_state:
        state = torch.zeros_like(state)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    inputs = [tensor.requires_grad_() for tensor in (decay, inflow, state)]
    expected = _loop(decay, inflow, lengths, state)
    found = linear_scan(decay, inflow, starts, state if with_state else None)
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)
    used = inputs if with_state else inputs[:2]
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), used), torch.autograd.grad((expected * weights).sum(), used)
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


def test_a_thousand_steps_lose_no_digits_in_float32() -> None:
    torch.manual_seed(0)
    decay, inflow = torch.rand(3000, 8).sqrt(), torch.randn(3000, 8)
    starts = torch.tensor([0, 1000, 1001])
    found = linear_scan(decay, inflow, starts)
    expected = _loop(decay.double(), inflow.double(), [1000, 1, 1999], torch.zeros(3, 8).double())
    assert torch.allclose(found.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
def test_minimal_cells_equal_their_equations(cell: str) -> None:
    """The paper's equations, one token at a time, gates written out; a sequence of no tokens keeps its state."""
    torch.manual_seed(1)
    layer = cell_class(cell)(4, 3).double()
    layer.reset_parameters()
    parameters = dict(layer.named_parameters())
    lengths = [5, 0, 1, 7]
    values = (3 * torch.randn(13, 4, dtype=torch.float64)).requires_grad_()
    state = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def equations(values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, final = [], []
        for part, hidden in zip(values.split(lengths), state):
            for token in part:
                *gates, v = (parameters["weight"] @ token + parameters["bias"]).split(3)
                gates = [torch.sigmoid(gate) for gate in gates]
                forget, take = (1 - gates[0], gates[0]) if cell == "mingru" else gates
                proposed = torch.where(v >= 0, v + 0.5, torch.sigmoid(v))
                hidden = (forget * hidden + take * proposed) / (forget + take)
                outputs.append(hidden)
            final.append(hidden)
        return torch.stack(outputs), torch.stack(final)

    schedule = Schedule.ragged(torch.tensor(lengths).numpy(), 3, CPU, "flat")
    outputs, final = layer(values, schedule, (state,))
    expected, ends = equations(values, state)
    assert torch.allclose(outputs, expected, rtol=0, atol=1e-12)
    assert torch.allclose(final[0], ends, rtol=0, atol=1e-12)
    inputs = (values, state, *layer.parameters())
    found = torch.autograd.grad(outputs.square().sum() + final[0].sum(), inputs)
    oracle = torch.autograd.grad(expected.square().sum() + ends.sum(), inputs)
    assert all(torch.allclose(f, o, rtol=0, atol=1e-9) for f, o in zip(found, oracle))


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
def test_gates_far_from_zero_stay_numbers(cell: str) -> None:
    layer = cell_class(cell)(2, 2)
    torch.nn.init.constant_(layer.get_parameter("weight"), 1.0)
    values = torch.tensor([[200.0, 200.0], [-200.0, -200.0], [0.0, 0.0]], requires_grad=True)
    outputs, _ = layer(values, Schedule.dense(1, 3, 2, "flat"))
    outputs.sum().backward()
    assert values.grad is not None
    assert torch.isfinite(outputs).all()
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_sequence(spoiled: float) -> None:
    """0 times nan is nan, so that a decay of zero alone would let it through, forwards and in the gradient."""
    lengths = [9, 30, 1, 17, 43]
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    torch.manual_seed(0)
    decay, inflow, weights = torch.rand(100, 4), torch.randn(100, 4), torch.randn(100, 4)
    expected = linear_scan(decay, inflow, starts)
    for place, (start, length) in enumerate(zip(starts.tolist(), lengths)):
        others = torch.ones(100, dtype=torch.bool)
        others[start : start + length] = False
        for poisoned in ({"inflow"}, {"decay"}, {"decay", "inflow"}):
            inputs = []
            for name, values in (("decay", decay), ("inflow", inflow)):
                values = values.clone()
                if name in poisoned:
                    values[~others] = spoiled
                inputs.append(values.requires_grad_())
            found = linear_scan(*inputs, starts)
            assert torch.equal(found[others], expected[others]), place
            gradients = torch.autograd.grad((found * weights).sum(), inputs)
            assert all(torch.isfinite(gradient[others]).all() for gradient in gradients), place
