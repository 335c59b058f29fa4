"""Classifiers and the bare backbone: a ragged batch equals its sequences one by one, in every way, cell and direction."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ullage
from tests.support.recurrent_ways import WAYS, Result, Samples, Way, assert_gives, gradients
from ullage.attention.releases import CACHE
from ullage.models import (
    RecurrentConfig,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
)
from ullage.models.cells import CELLS

pytestmark = pytest.mark.parity

POOLINGS = ("last", "mean", "attention")
LENGTHS = (5, 1, 9, 3, 9, 14)
VOCABULARY = 31


def _config(cell: str, **changes: Any) -> RecurrentConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 10, "num_hidden_layers": 2, "num_labels": 4}
    return RecurrentConfig(cell=cell, layer_norm=True, **{**sizes, **changes})


def _classifier(cell: str, pooling: str, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    if pooling == "tokens":
        return RecurrentForTokenClassification(_config(cell, **changes)).train()
    return RecurrentForSequenceClassification(_config(cell, pooling=pooling, **changes)).train()


def _samples(pooling: str, lengths: tuple[int, ...] = LENGTHS) -> Samples:
    torch.manual_seed(len(lengths))
    return [
        {
            "input_ids": torch.randint(0, VOCABULARY, (length,)),
            "labels": torch.randint(0, 4, (length,) if pooling == "tokens" else ()),
        }
        for length in lengths
    ]


def _one_by_one(model: torch.nn.Module, samples: Samples) -> Result:
    count = torch.tensor(sum(sample["labels"].numel() for sample in samples))
    logits, losses = [], []
    for sample in samples:
        row = {name: values[None] for name, values in sample.items()}
        outputs = model(**row, num_items_in_batch=count)
        outputs.loss.backward()
        logits.append(outputs.logits.flatten(0, -2).detach())
        losses.append(outputs.loss.detach())
    return torch.cat(logits), torch.stack(losses).sum(), gradients(model)


def _way(name: str, samples: Samples, pooling: str) -> Way:
    """A way in; what comes out by sequence is in the order given."""
    keywords, real = WAYS[name](samples)
    return keywords, real if pooling == "tokens" else lambda logits: logits


@pytest.mark.matrix
@pytest.mark.parametrize("pooling", [*POOLINGS, "tokens"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_way_into_a_classifier_equals_one_by_one(cell: str, pooling: str) -> None:
    samples = _samples(pooling)
    for dtype, bidirectional, tolerance in ((torch.float64, True, 1e-9), (torch.float32, False, 1e-5)):
        model = _classifier(cell, pooling, bidirectional=bidirectional).to(dtype)
        expected = _one_by_one(model, samples)
        assert float(expected[0].std()) > 1e-2  # the oracle is not vacuous
        for way in WAYS if dtype == torch.float64 else ["flattened"]:
            assert_gives(model, _way(way, samples, pooling), expected, tolerance, way)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=16), st.sampled_from(sorted(CELLS)), st.sampled_from(POOLINGS))
def test_any_lengths_pool_as_one_by_one(lengths: list[int], cell: str, pooling: str) -> None:
    samples = _samples(pooling, tuple(lengths))
    model = _classifier(cell, pooling, bidirectional=True).double()
    assert_gives(model, _way("flattened", samples, pooling), _one_by_one(model, samples), 1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_hidden_and_final_states_come_back_in_the_order_given(cell: str, bidirectional: bool) -> None:
    torch.manual_seed(6)
    model = RecurrentModel(_config(cell, bidirectional=bidirectional)).double().eval()
    samples = _samples("tokens")
    alone = [model(input_ids=sample["input_ids"][None], use_cache=True) for sample in samples]
    hidden = torch.cat([one.last_hidden_state[0] for one in alone])
    for way, make in WAYS.items():
        keywords, real = make(samples)
        del keywords["labels"]
        outputs = model(**keywords, use_cache=True, output_hidden_states=True)
        assert torch.allclose(real(outputs.last_hidden_state), hidden, rtol=0, atol=1e-9), way
        assert [real(states).shape[0] for states in outputs.hidden_states] == [len(hidden)] * 3
        assert torch.equal(real(outputs.hidden_states[-1]), real(outputs.last_hidden_state))
        for number, layer in enumerate(outputs[CACHE].layers):
            for part, state in enumerate(layer):
                expected = torch.cat([one[CACHE].layers[number][part] for one in alone])
                assert torch.allclose(state, expected, rtol=0, atol=1e-9), way


@pytest.mark.parametrize("cell", CELLS)
def test_embeddings_given_in_every_form_equal_ids(cell: str) -> None:
    model: Any = _classifier(cell, "mean", bidirectional=True).double().eval()
    samples = _samples("mean")
    batch = ullage.RaggedBatch.from_samples(samples)
    expected = model(**batch.to_flattened()).logits
    embedded = ullage.RaggedBatch({"e": model.model.embed_tokens(batch["input_ids"])}, batch.layout)
    left = embedded.to_padded(padding_value=float("nan"), side="left")
    forms = (
        {"inputs_embeds": embedded["e"][None], "cu_seq_lens_q": batch.cu_seqlens},
        {"inputs_embeds": left["e"], "attention_mask": left["attention_mask"]},
        {"inputs_embeds": embedded.to_packed_sequence("e")},
    )
    for form in forms:
        assert torch.allclose(model(**form).logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_backpropagation_truncated_across_batches_is_that_of_one_long_run(cell: str) -> None:
    """Three parts of unequal length, the state handed on in the caller's order: whole if kept, cut if detached."""
    torch.manual_seed(7)
    model = RecurrentModel(_config(cell)).double().train()
    parts = [_samples("tokens", lengths) for lengths in ((3, 8, 1), (6, 2, 2), (1, 4, 9))]

    def run(cut: bool) -> tuple[Tensor, list[Tensor]]:
        state, total = None, torch.zeros((), dtype=torch.float64)
        for part in parts:
            batch = ullage.RaggedBatch.from_samples(part)
            keywords = batch.to_flattened()
            del keywords["labels"]
            outputs = model(**keywords, cache=state, use_cache=True)
            total = total + outputs.last_hidden_state.square().sum()
            state = outputs[CACHE].detach() if cut else outputs[CACHE]
        gradients = torch.autograd.grad(total, list(model.parameters()))
        return total.detach(), list(gradients)

    joined = [torch.cat([part[i]["input_ids"] for part in parts])[None] for i in range(3)]
    whole = sum(model(input_ids=ids).last_hidden_state.square().sum() for ids in joined)
    expected = torch.autograd.grad(whole, list(model.parameters()))  # pyright: ignore
    total, gradients = run(cut=False)
    assert torch.allclose(total, whole, rtol=1e-12)  # pyright: ignore
    assert all(torch.allclose(g, e, rtol=0, atol=1e-9) for g, e in zip(gradients, expected))
    total, gradients = run(cut=True)
    assert torch.allclose(total, whole, rtol=1e-12)  # pyright: ignore
    assert not all(torch.allclose(g, e, rtol=0, atol=1e-6) for g, e in zip(gradients, expected))
