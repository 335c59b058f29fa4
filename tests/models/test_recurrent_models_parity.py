"""A ragged batch through a recurrent model, its heads or the bare backbone equals its sequences one by one, in every way."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ullage
from tests.support.recurrent_ways import WAYS, Result, Samples, Way, assert_gives, gradients, padded
from ullage.attention.releases import CACHE
from ullage.models import (
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    RecurrentModel,
)
from ullage.models.cells import CELLS, cell_class
from ullage.models.schedule import Schedule

pytestmark = pytest.mark.parity

CPU = torch.device("cpu")
CLASSICAL = ("lstm", "gru", "rnn_tanh", "rnn_relu")
LENGTHS = (5, 1, 9, 3, 9, 14)
VOCABULARY = 37


POOLINGS = ("last", "mean", "attention")
#: Of a classifier, by sequence or by token.
CLASSES = {"num_hidden_layers": 2, "num_labels": 4, "layer_norm": True}


def _config(cell: str = "lstm", **changes: Any) -> RecurrentConfig:
    return RecurrentConfig(cell=cell, **{"vocab_size": VOCABULARY, "hidden_size": 12, "pad_token_id": 0, **changes})


def _model(cell: str = "lstm", kind: str = "causal", **changes: Any) -> Any:
    """A causal model, or a classifier of tokens or by a pooling."""
    torch.manual_seed(3)
    if kind == "causal":
        return RecurrentForCausalLM(_config(cell, **changes))
    if kind == "tokens":
        return RecurrentForTokenClassification(_config(cell, **CLASSES, **changes))
    return RecurrentForSequenceClassification(_config(cell, pooling=kind, **CLASSES, **changes))


def _samples(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, kind: str = "causal") -> Samples:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        row = torch.randint(3, VOCABULARY, (length,), generator=generator)
        classes = torch.randint(0, 4, (length,) if kind == "tokens" else (), generator=generator)
        samples.append({"input_ids": row, "labels": row.clone() if kind == "causal" else classes})
    return samples


def _one_by_one(model: Any, samples: Samples) -> Result:
    """From single dense rows; of a causal model by torch's own loss: its mean over all tokens."""
    is_causal = isinstance(model, RecurrentForCausalLM)
    count = sum(sample["labels"].numel() - is_causal for sample in samples)
    logits, losses = [], []
    for sample in samples:
        ids, labels = (sample[name][None] for name in ("input_ids", "labels"))
        if is_causal:
            outputs = model(input_ids=ids)
            summed = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[0, 1:], reduction="sum")
            losses.append(summed / count)
        else:
            outputs = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(count))
            losses.append(outputs.loss)
        logits.append(outputs.logits.flatten(0, -2))
    loss = torch.stack(losses).sum()
    loss.backward()
    return torch.cat(logits).detach(), loss.detach(), gradients(model)


def _way(name: str, samples: Samples, kind: str = "causal") -> Way:
    """A way in; what comes out by sequence is in the order given."""
    keywords, real = WAYS[name](samples)
    return keywords, real if kind in ("causal", "tokens") else lambda logits: logits


SHAPES = {
    "one layer": {},
    "three, normed": {"num_hidden_layers": 3, "residual": True, "layer_norm": True},
    "two, residual": {"num_hidden_layers": 2, "residual": True},
    "tied": {"tie_word_embeddings": True},
}


CASES = [*(("causal", shape) for shape in SHAPES), *((kind, "a classifier") for kind in (*POOLINGS, "tokens"))]


@pytest.mark.matrix
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_every_way_in_equals_one_by_one(cell: str, kind: str, shape: str) -> None:
    samples = _samples(kind=kind)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        changes = SHAPES[shape] if kind == "causal" else {"bidirectional": dtype == torch.float64}
        model = _model(cell, kind, **changes).to(dtype).train()
        expected = _one_by_one(model, samples)
        assert kind == "causal" or float(expected[0].std()) > 1e-2  # the oracle is not vacuous
        for way in WAYS if dtype == torch.float64 else ["flattened"]:
            assert_gives(model, _way(way, samples, kind), expected, tolerance, way)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.sampled_from(sorted(CELLS)),
    st.sampled_from(["causal", *POOLINGS]),
    st.integers(0, 99),
)
def test_any_lengths_equal_one_by_one(lengths: list[int], cell: str, kind: str, seed: int) -> None:
    samples = _samples((*lengths, 2), seed, kind)
    changes = {"num_hidden_layers": 2} if kind == "causal" else {"bidirectional": True}
    model = _model(cell, kind, **changes).double().train()
    assert_gives(model, _way("flattened", samples, kind), _one_by_one(model, samples), 1e-9)


def test_rectangles_that_pad_equal_one_by_one() -> None:
    """Long and many enough that the cheapest staircase runs rows past their end."""
    lengths = tuple(range(40, 0, -3))
    schedule = Schedule.ragged(np.array(lengths), 12, CPU, keep_state=False)
    assert 1 < len(schedule.windows) < len(lengths)
    assert schedule.size > sum(lengths)
    samples = _samples(lengths)
    model = _model(num_hidden_layers=2, layer_norm=True).train()
    assert_gives(model, WAYS["flattened"](samples), _one_by_one(model, samples), 1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_no_bit_and_gets_zero_logits(side: str) -> None:
    model = _model().train()
    results = []
    for poison in (0, 36):
        rows, mask = padded(_samples(), side, poison)
        outputs = model(**rows)
        outputs.loss.backward()
        assert not outputs.logits[~mask].any()
        results.append((outputs.logits, outputs.loss, gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2])


def _torch_layer(cell: Any) -> torch.nn.RNNBase:
    """Torch's own layer with the cell's weights."""
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell.kernel, torch.nn.RNN)
    more = {"nonlinearity": cell.kernel[4:]} if kind is torch.nn.RNN else {}
    layer = kind(cell.input_size, cell.hidden_size, **more).to(cell.weight_ih_l0.dtype)
    layer.load_state_dict(cell.state_dict())
    return layer


@pytest.mark.parametrize("cell", CLASSICAL)
@pytest.mark.parametrize("packed", [False, True], ids=["staircase", "packed"])
def test_cells_equal_torch_on_single_sequences(cell: str, packed: bool) -> None:
    torch.manual_seed(1)
    layer: Any = cell_class(cell)(6, 4).double()
    reference = _torch_layer(layer)
    lengths = np.array([3, 0, 7, 1, 7, 4])
    values = torch.randn(int(lengths.sum()), 6, dtype=torch.float64)
    start = tuple(torch.randn(6, 4, dtype=torch.float64) for _ in layer.state_names)
    schedule = Schedule.ragged(lengths, 4, CPU, keep_state=True, run_order="packed" if packed else "staircase")
    run, final = layer(schedule.place(values), schedule, start)
    outputs = schedule.take(run).split(lengths.tolist())
    assert final is not None
    for i, part in enumerate(values.split(lengths.tolist())):
        own = tuple(s[i : i + 1] for s in start)
        if not len(part):  # a sequence of no tokens keeps its state
            assert all(torch.equal(f[i : i + 1], s) for f, s in zip(final, own))
            continue
        expected, end = reference(part, own if len(start) > 1 else own[0])
        assert torch.allclose(outputs[i], expected, rtol=0, atol=1e-12)
        ends = end if isinstance(end, tuple) else (end,)
        assert all(torch.allclose(f[i : i + 1], e, rtol=0, atol=1e-12) for f, e in zip(final, ends))


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_values_and_states_are_right(cell: str) -> None:
    torch.manual_seed(2)
    layer = cell_class(cell)(3, 3).double()
    lengths = np.array([2, 4, 1])
    values = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    start = tuple(torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in layer.state_names)
    schedule = Schedule.ragged(lengths, 3, CPU, layer.run_order(CPU))

    def run(values: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        outputs, final = layer(schedule.place(values), schedule, start)
        return schedule.take(outputs), *final

    assert torch.autograd.gradcheck(run, (values, *start))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_bidirectional_layer_equals_torchs(cell: str) -> None:
    torch.manual_seed(4)
    model = RecurrentModel(_config(cell, bidirectional=True)).double().eval()
    both = (torch.nn.LSTM if cell == "lstm" else torch.nn.GRU)(12, 12, bidirectional=True).double()
    first: Any = model.layers[0]
    for suffix, one in zip(("", "_reverse"), first.cells):
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            getattr(both, name + suffix).data.copy_(getattr(one, name))
    embedded = model.embed_tokens(_samples()[0]["input_ids"])
    run, *_ = first(embedded, Schedule.dense(1, len(embedded), 12))
    assert torch.allclose(run, both(embedded)[0], rtol=0, atol=1e-12)


def test_the_loss_counts_what_it_is_told_to_count() -> None:
    model = _model().double().train()
    batch = ullage.RaggedBatch.from_samples(_samples())
    counted = sum(length - 1 for length in LENGTHS)
    with torch.no_grad():
        mean = float(model(**batch.to_flattened()).loss)
        total = float(model(**batch.to_flattened(), num_items_in_batch=torch.tensor(2 * counted)).loss)
        shifted = float(model(**batch.with_shift_labels().to_flattened()).loss)
        raw = batch.to_flattened()
        raw["labels"] = batch["labels"][None]  # first labels not ignored: they count nowhere all the same
        unmarked = float(model(**raw).loss)
        silent = float(model(**batch.placeholder().to_flattened(), num_items_in_batch=counted).loss)
    assert mean == pytest.approx(2 * total, abs=1e-12)
    assert shifted == pytest.approx(mean, abs=1e-12)
    assert unmarked == pytest.approx(mean, abs=1e-12)
    assert silent == 0.0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_gradient_checkpointing_changes_no_gradient(cell: str, reentrant: bool) -> None:
    model = _model(cell, num_hidden_layers=3, residual=True).double().train()
    batch = ullage.RaggedBatch.from_samples(_samples()).to_flattened()
    model(**batch).loss.backward()
    plain = gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    layers: Any = model.model.layers
    assert all(layer.gradient_checkpointing for layer in layers)
    model(**batch).loss.backward()
    again = gradients(model)
    assert all(torch.allclose(again[name], plain[name], rtol=0, atol=1e-12) for name in plain)


def test_dropout_works_in_training_alone() -> None:
    model = _model(num_hidden_layers=2, dropout=0.5)
    batch = ullage.RaggedBatch.from_samples(_samples()).to_flattened()
    model.eval()
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    model.train()
    assert not torch.equal(model(**batch).logits, model(**batch).logits)


@pytest.mark.matrix
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_hidden_and_final_states_come_back_in_the_order_given(cell: str, bidirectional: bool) -> None:
    torch.manual_seed(6)
    model = RecurrentModel(_config(cell, bidirectional=bidirectional, **CLASSES)).double().eval()
    samples = _samples(kind="tokens")
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
    model: Any = _model(cell, "mean", bidirectional=True).double().eval()
    samples = _samples(kind="mean")
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
    model = RecurrentModel(_config(cell, **CLASSES)).double().train()
    parts = [_samples(lengths, kind="tokens") for lengths in ((3, 8, 1), (6, 2, 2), (1, 4, 9))]

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
