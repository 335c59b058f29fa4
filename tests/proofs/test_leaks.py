"""Planted faults of the kinds that an audit in evaluation mode on short rows does not see, and exact models like them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.leaks import BY_NUMBER, Leak, exact_lookalikes, make, make_exact, missed_leaks
from ullage import audit
from ullage.mixers import pack_model

pytestmark = pytest.mark.parity


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("leak", missed_leaks(), ids=str)
def test_the_audit_finds_what_it_missed(leak):
    model = make(leak)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = audit(model, pack=False)  # its forward names cu_seq_lens_q: it answers for itself
    assert report.verdict == "leak", report
    assert any(check.leaks and not check.passed for check in report.checks)
    # Running statistics, modes and gradients are those of before.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.matrix
@pytest.mark.parametrize("drawn", exact_lookalikes(), ids=str)
def test_exact_models_in_the_same_clothes_are_called_exact(drawn):
    assert audit(make_exact(drawn)).verdict == "exact"


@pytest.mark.parametrize("kind", BY_NUMBER)
def test_a_model_that_only_counts_differs_and_does_not_leak(kind):
    report = audit(make(Leak(kind, place="before the head")), pack=False)
    assert report.verdict == "differs", report


@pytest.mark.regression
def test_a_leak_that_begins_at_a_later_token_is_a_leak_and_no_difference():
    """In tokens 12 to 15 alone it was told from no other difference, because other tokens were tried on shorter rows."""
    report = audit(make(Leak("attention", beyond=12)), pack=False)
    assert report.verdict == "leak", report


class PenalisedLlama(LlamaForCausalLM):
    """A loss of one's own in the model's precision, beside that of transformers, which is float32 whatever comes."""

    def forward(self, *arguments, **keywords):
        outputs = super().forward(*arguments, **keywords)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 1e-3 * outputs.logits.square().mean()
        return outputs


@pytest.mark.regression
def test_a_loss_that_is_partly_float32_is_compared_as_such():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = PenalisedLlama(LlamaConfig(vocab_size=61, **sizes)).double()
    with pack_model(
        model, verify=[{"input_ids": torch.arange(3, 3 + n), "labels": torch.arange(3, 3 + n)} for n in (9, 4)]
    ):
        report = audit(model)
    loss = next(check for check in report.checks if check.name == "loss")
    assert loss.limit == 1e-6  # of float64, as the proof's table explains it
    assert loss.passed, report
    assert loss.value > 1e-10  # what was called a difference
