"""A ragged batch through the encoder-decoder equals its pairs run one by one, whichever way they come in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import ullage
from tests.support.recurrent_ways import Result, Samples, Way, assert_gives, gradients
from ullage.attention.releases import CACHE
from ullage.models import RecurrentEncoderDecoder, RecurrentEncoderDecoderConfig
from ullage.models.cells import CELLS
from ullage.models.decoder_attention import ATTENTIONS, AdditiveAttention, Blocks
from ullage.training import Seq2SeqCollator

pytestmark = pytest.mark.parity

SOURCES = (5, 1, 9, 3, 9, 14)
TARGETS = (2, 7, 1, 4, 3, 11)
VOCABULARY = 31


def _model(**changes: Any) -> RecurrentEncoderDecoder:
    torch.manual_seed(3)
    options = {"vocab_size": VOCABULARY, "hidden_size": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(**{**options, **changes}))


def _samples(sources: tuple[int, ...] = SOURCES, targets: tuple[int, ...] = TARGETS, seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (length,), generator=generator)

    return [{"input_ids": draw(source), "labels": draw(target)} for source, target in zip(sources, targets)]


def _alone(model: RecurrentEncoderDecoder, source: Tensor, labels: Tensor) -> Tensor:
    """Logits [L, vocabulary] of one pair, its attention written out step by step."""
    encoded = model.encoder(input_ids=source[None], use_cache=True)
    memory = encoded.last_hidden_state[0]
    state = model._first_state(type("Memory", (), {"state": encoded[CACHE]})())  # pyright: ignore
    read = torch.cat([torch.tensor([1]), labels[:-1]])[None]
    hidden = model.decoder(input_ids=read, cache=state).last_hidden_state[0]
    attention: Any = model.attention
    out = []
    for step in hidden:
        if isinstance(attention, AdditiveAttention):
            scores = attention.energy(torch.tanh(attention.query(step) + attention.key(memory)))[:, 0]
        else:
            scores = attention.key(memory) @ step / len(step) ** 0.5
        context = scores.softmax(0) @ memory
        out.append(model.lm_head(torch.tanh(model.combine(torch.cat([context, step])))))
    return torch.stack(out)


def _one_by_one(model: RecurrentEncoderDecoder, samples: Samples) -> Result:
    logits = [_alone(model, sample["input_ids"], sample["labels"]) for sample in samples]
    losses = [
        torch.nn.functional.cross_entropy(row, sample["labels"], reduction="sum")
        for row, sample in zip(logits, samples)
    ]
    loss = torch.stack(losses).sum() / sum(map(len, logits))
    loss.backward()
    return torch.cat(logits).detach(), loss.detach(), gradients(model)


def _nested(samples: Samples) -> Way:
    batch: Any = Seq2SeqCollator()(samples)
    return {**batch.to_flattened(), "labels": batch["labels"]}, lambda logits: logits[0]


def _end_to_end(samples: Samples) -> Way:
    keywords: Any = Seq2SeqCollator(flattened=True)(samples)
    return keywords, lambda logits: logits[0]


def _packed(samples: Samples) -> Way:
    fields = {name: [sample[name] for sample in samples] for name in ("input_ids", "labels")}
    packed = {name: pack_sequence(rows, enforce_sorted=False) for name, rows in fields.items()}
    return packed, lambda logits: logits[0]


def _padded(source_side: str, target_side: str, poison: int, *, given: bool = False) -> Callable[[Samples], Way]:
    """Padded rows; ``given``: with decoder_input_ids and their mask beside the labels."""

    def way(samples: Samples) -> Way:
        sources = ullage.RaggedBatch.from_samples([{"input_ids": s["input_ids"]} for s in samples])
        targets = ullage.RaggedBatch.from_samples([{"labels": s["labels"]} for s in samples])
        rows = targets.to_padded(side=target_side)
        keywords = sources.to_padded(padding_value=poison, side=source_side) | {"labels": rows["labels"]}
        real = rows["attention_mask"].bool()
        if given:
            read = [torch.cat([torch.tensor([1]), s["labels"][:-1]]) for s in samples]
            begun = ullage.RaggedBatch.from_samples([{"decoder_input_ids": row} for row in read])
            keywords["decoder_input_ids"] = begun.to_padded(poison, side=target_side)["decoder_input_ids"]
            keywords["decoder_attention_mask"] = rows["attention_mask"]
            keywords["labels"] = keywords["labels"].masked_fill(~real, poison)
        return keywords, lambda logits: logits[real]

    return way


def _lengths(samples: Samples) -> Way:
    keywords, real = _padded("right", "right", 7)(samples)
    del keywords["attention_mask"]
    return {**keywords, "input_lengths": [len(sample["input_ids"]) for sample in samples]}, real


WAYS: dict[str, Callable[[Samples], Way]] = {
    "nested": _nested,
    "end to end": _end_to_end,
    "packed": _packed,
    "padded right": _padded("right", "right", 9),
    "padded left": _padded("left", "left", 9),
    "decoder_input_ids": _padded("left", "right", 9, given=True),
    "decoder_input_ids left": _padded("right", "left", 5, given=True),
    "lengths": _lengths,
}


def _check(model: Any, samples: Samples, way: str, dtype: torch.dtype = torch.float64) -> None:
    model = model.to(dtype).train()
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert_gives(model, WAYS[way](samples), _one_by_one(model, samples), tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_ragged_batch_equals_its_pairs(cell: str, bidirectional: bool, attention: str) -> None:
    for dtype in (torch.float64, torch.float32):
        model = _model(cell=cell, bidirectional=bidirectional, attention=attention, num_hidden_layers=2)
        _check(model, _samples(), "nested", dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_way_in_equals_one_by_one(attention: str, way: str) -> None:
    _check(_model(attention=attention), _samples(), way)


@pytest.mark.parametrize("shape", [
    {"num_hidden_layers": 1, "num_decoder_layers": 3},
    {"num_hidden_layers": 3, "num_decoder_layers": 1, "bidirectional": False},
    {"num_hidden_layers": 2, "residual": True, "layer_norm": True},
    {"tie_word_embeddings": True},
])  # fmt: skip
def test_every_shape_equals_one_by_one(shape: dict[str, Any]) -> None:
    _check(_model(**shape), _samples(), "nested")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=40))
def test_blocks_hold_every_pair_and_waste_little(lengths: list[tuple[int, int]]) -> None:
    targets, sources = (np.array(side) for side in zip(*lengths))
    blocks = Blocks.of(targets, sources, torch.device("cpu"))
    assert sorted(np.concatenate(blocks.members).tolist()) == list(range(len(lengths)))
    held = sum(rows * target * source for rows, target, source in blocks.shapes)
    real = int((targets * sources).sum())
    assert real <= held <= 1.25 * real + 2**12 * len(blocks.shapes)
    flat = torch.arange(1, int(targets.sum()) + 1)
    assert torch.equal(blocks.targets.join(blocks.targets.cut(flat)), flat)
    for ids, mask, (rows, _, _) in zip(blocks.members, blocks.masks(), blocks.shapes):
        assert len(ids) == rows
        assert mask is None or mask.sum(1).tolist() == sources[ids].tolist()


@pytest.mark.parametrize("sides", [("right", "right"), ("left", "left")])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_changes_no_bit_and_gets_zero_logits(attention: str, sides: tuple[str, str]) -> None:
    model = _model(attention=attention).train()
    results = []
    for poison in (0, 30):
        keywords, _ = _padded(*sides, poison, given=True)(_samples())
        outputs = model(**keywords)
        outputs.loss.backward()
        assert not outputs.logits[~keywords["decoder_attention_mask"].bool()].any()
        results.append((outputs.logits, outputs.loss, gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2])


def test_gradients_of_the_additive_score_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("ullage.models.decoder_attention.MAX_ELEMENTS", 24)  # many pieces, cut along rows and steps
    attention = AdditiveAttention(3, 4).double()
    queries = torch.randn(3, 5, 3, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    plain = torch.tanh(attention.query(queries)[:, :, None] + keys[:, None]) @ attention.energy.weight[0]
    assert torch.allclose(attention.score(queries, keys), plain, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(attention.score, (queries, keys))
    for parameter in attention.parameters():
        if parameter is not attention.key.weight:
            expected = torch.autograd.grad(plain.square().sum(), parameter, retain_graph=True)[0]
            found = torch.autograd.grad(attention.score(queries, keys).square().sum(), parameter)[0]
            assert torch.allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_weights_are_those_of_single_pairs(attention: str) -> None:
    model = _model(attention=attention).double().eval()
    samples = _samples()
    (weights,) = model(**_nested(samples)[0], output_attentions=True).cross_attentions
    assert weights.shape == (len(samples), 1, max(TARGETS), max(SOURCES))
    for i, sample in enumerate(samples):
        single = model(input_ids=sample["input_ids"][None], labels=sample["labels"][None], output_attentions=True)
        (alone,) = single.cross_attentions
        target, source = alone.shape[2:]
        assert torch.allclose(weights[i, :, :target, :source], alone[0], rtol=0, atol=1e-12)
        assert torch.allclose(alone.sum(-1), torch.ones_like(alone[..., 0]), rtol=0, atol=1e-12)
        assert not weights[i, :, target:].any()
        assert not weights[i, :, :, source:].any()


def test_the_loss_counts_what_it_is_told_to_count() -> None:
    model = _model().double().train()
    keywords, _ = _nested(_samples())
    counted = sum(TARGETS)
    with torch.no_grad():
        mean = float(model(**keywords).loss)
        total = float(model(**keywords, num_items_in_batch=torch.tensor(2 * counted)).loss)
        ignored, _ = _padded("right", "right", 0)(_samples())
        ignored["labels"][1, 2] = ignored["labels"][4] = -100  # one token, and a whole target
        ignored["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(ignored["labels"])
        log_probs = model(**ignored).logits.log_softmax(-1)
        real = ignored["labels"] != -100
        picked = log_probs.gather(2, ignored["labels"].clamp(min=0)[..., None])[..., 0][real]
        assert float(model(**ignored).loss) == pytest.approx(-float(picked.mean()), abs=1e-12)
        del ignored["decoder_input_ids"]
        assert float(model(**ignored).loss) == pytest.approx(-float(picked.mean()), abs=1e-12)
    assert mean == pytest.approx(2 * total, abs=1e-12)


def test_embeddings_given_equal_embeddings_looked_up() -> None:
    model = _model().eval()
    keywords, _ = _padded("left", "right", 0)(_samples())
    looked_up = model(**keywords)
    embedded = model.encoder.embed_tokens(keywords.pop("input_ids"))
    assert torch.equal(model(inputs_embeds=embedded, **keywords).logits, looked_up.logits)


def test_bfloat16_stays_close() -> None:
    model = _model(attention="additive").eval()
    keywords, _ = _nested(_samples())
    exact = model(**keywords).logits
    try:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**keywords)
            outputs.loss.backward()
    except RuntimeError as error:
        if "primitive descriptor for the LSTM" not in str(error):
            raise
        pytest.skip("torch has no LSTM in bfloat16 on this processor")
    assert torch.allclose(outputs.logits.float(), exact, rtol=0, atol=0.05)
    rounded = model.bfloat16()(**keywords)
    assert rounded.logits.dtype == torch.bfloat16
    assert torch.allclose(rounded.logits.float(), exact, rtol=0, atol=0.05)
