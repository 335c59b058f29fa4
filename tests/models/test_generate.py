"""generate() of decoders and encoder-decoders: beams against all continuations, batches against single prompts."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import ullage
from ullage.attention.releases import CACHE
from ullage.core.errors import InputError
from ullage.models import (
    GRUCell,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
    RecurrentForCausalLM,
)
from ullage.models.cells import CELLS

pytestmark = pytest.mark.parity

PAD, START, END = 0, 1, 2
NEW = 7
KINDS = ("decoder", "additive", "dot")

Model = RecurrentForCausalLM | RecurrentEncoderDecoder


def _model(kind: str, cell: str = "lstm", vocab_size: int = 40, **changes: Any) -> Any:
    """A model with opinions: weights large enough that scores lie apart and depend on the prompt."""
    torch.manual_seed(5)
    options = {"cell": cell, "vocab_size": vocab_size, "hidden_size": 12, "num_hidden_layers": 2}
    options |= {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, **changes}
    if kind == "decoder":
        model: Model = RecurrentForCausalLM(RecurrentConfig(**options))
        embedding = model.model.embed_tokens
    else:
        model = RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(attention=kind, **options))
        embedding = model.encoder.embed_tokens
        with torch.no_grad():
            model.decoder.embed_tokens.weight.mul_(8)
            model.combine.weight.mul_(6)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
        for name, weight in model.named_parameters():
            if cell.startswith("min") and name.endswith("cells.0.weight"):
                weight.mul_(4)
        embedding.weight.mul_(8)
    return model.double().eval()


def _prompts(vocab_size: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in (3, 8, 1, 5, 8)]


def _batch(prompts: list[Tensor]) -> ullage.RaggedBatch:
    return ullage.RaggedBatch.from_samples([{"input_ids": prompt} for prompt in prompts])


def _new(model: Any, rows: Tensor, width: int) -> list[list[int]]:
    """What was generated, up to the end of the text."""
    begin = 1 if model.config.is_encoder_decoder else width
    return [row[: row.index(END) + 1] if END in row else row for row in rows[:, begin:].tolist()]


def _generated(model: Any, prompts: list[Tensor], **how: Any) -> list[list[int]]:
    inputs = _batch(prompts).to_padded(side="left")
    rows = model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **how})
    return _new(model, rows, inputs["input_ids"].shape[1])


HOWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams, several": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "penalties": {"num_beams": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", ["lstm", "mingru"])
def test_unequal_prompts_equal_single_prompts(cell: str, kind: str, how: str) -> None:
    model, prompts = _model(kind, cell), _prompts()
    together = _generated(model, prompts, **HOWS[how])
    alone = [row for prompt in prompts for row in _generated(model, [prompt], **HOWS[how])]
    assert together == alone
    assert len({tuple(row) for row in together}) > 1  # the prompt matters


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", ["gru", "minlstm"])
def test_cached_equals_uncached(cell: str, kind: str, how: str) -> None:
    model, prompts = _model(kind, cell), _prompts()
    cached = _generated(model, prompts, **HOWS[how])
    assert cached == _generated(model, prompts, use_cache=False, **HOWS[how])


@pytest.mark.parametrize("cell", CELLS)
def test_greedy_equals_a_loop_by_hand(cell: str) -> None:
    model, prompt = _model("decoder", cell), _prompts()[1]
    ids = prompt[None]
    for _ in range(NEW):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert _generated(model, [prompt]) == _new(model, ids, len(prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_draws_the_same_with_and_without_a_cache(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    for how in ({"num_return_sequences": 4}, {"num_beams": 3, "num_return_sequences": 2, "top_k": 12}):
        draws = []
        for use_cache in (True, False, True):
            torch.manual_seed(11)
            draws.append(_generated(model, prompts, do_sample=True, use_cache=use_cache, **how))
        assert draws[0] == draws[1] == draws[2]
        assert len(draws[0]) == len(prompts) * how["num_return_sequences"]
        torch.manual_seed(12)
        assert _generated(model, prompts, do_sample=True, **how) != draws[0]


def _continuations(vocab_size: int, steps: int, end: int | None) -> Iterator[tuple[int, ...]]:
    """Every text of ``steps`` tokens, or of fewer that ends with ``end``."""
    for text in product(range(vocab_size), repeat=steps):
        stop = text.index(end) + 1 if end in text else steps
        if all(token == 0 for token in text[stop:]):  # one way to write what has ended
            yield text[:stop]


def _scores(model: Any, prompt: Tensor, texts: list[tuple[int, ...]]) -> list[float]:
    """The log-probability of each text behind ``prompt``, without a cache; texts of one length together."""
    found: dict[tuple[int, ...], float] = {}
    for length in sorted(set(map(len, texts))):
        group = [text for text in texts if len(text) == length]
        labels, before = torch.tensor(group), prompt.expand(len(group), -1)
        if model.config.is_encoder_decoder:
            logits = model(input_ids=before, labels=labels, use_cache=False).logits
        else:
            rows = torch.cat([before, labels], 1)
            logits = model(input_ids=rows, use_cache=False).logits[:, len(prompt) - 1 : -1]
        scores = logits.log_softmax(-1).gather(2, labels[..., None]).sum((1, 2))
        found |= dict(zip(group, scores.tolist()))
    return [found[text] for text in texts]


@pytest.mark.matrix
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.7, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_enough_beams_find_the_best_of_all_continuations(kind: str, penalty: float) -> None:
    vocabulary, steps, kept = 5, 4, 6
    model = _model(kind, vocab_size=vocabulary, num_hidden_layers=1)
    for prompt in (torch.tensor([3, 4]), torch.tensor([4, 4, 3, 1, 3])):
        texts = list(_continuations(vocabulary, steps, END))
        scores = [score / len(text) ** penalty for score, text in zip(_scores(model, prompt, texts), texts)]
        ranked = sorted(zip(scores, texts), reverse=True)[:kept]
        for use_cache in (True, False):
            outputs = model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                num_beams=vocabulary**steps,
                num_return_sequences=kept,
                max_new_tokens=steps,
                length_penalty=penalty,
                early_stopping="never",
                use_cache=use_cache,
                return_dict_in_generate=True,
                output_scores=True,
            )
            found = [tuple(row) for row in _new(model, outputs.sequences, len(prompt))]
            assert found == [text for _, text in ranked]
            expected = torch.tensor([score for score, _ in ranked])
            assert torch.allclose(outputs.sequences_scores, expected, rtol=0, atol=1e-5)
    if penalty <= 0:  # which does not make up for every token of length
        assert any(len(text) < steps for text in found)
    assert min(a[0] - b[0] for a, b in pairwise(ranked)) > 1e-5  # no ties


def _ways(prompts: list[Tensor]) -> dict[str, dict[str, Any]]:
    batch = _batch(prompts)
    right, left = batch.to_padded(19, side="right"), batch.to_padded(19, side="left")
    unmasked = {side: batch.to_padded(PAD, side=side)["input_ids"] for side in ("right", "left")}
    lengths = [len(prompt) for prompt in prompts]
    return {
        "mask, left": left,
        "mask, right": right,
        "no mask, left": {"input_ids": unmasked["left"]},
        "no mask, right": {"inputs": unmasked["right"]},
        "lengths, list": {"input_ids": right["input_ids"], "input_lengths": lengths},
        "lengths, tensor": {"input_ids": right["input_ids"], "input_lengths": torch.tensor(lengths)},
        "list of tensors": {"inputs": prompts},
        "list of lists": {"input_ids": [prompt.tolist() for prompt in prompts]},
        "list of arrays": {"inputs": [prompt.numpy() for prompt in prompts]},
        "ragged": {"inputs": batch},
        "packed": {"inputs": pack_sequence(prompts, enforce_sorted=False)},
        "flattened": batch.to_flattened(),
    }


@pytest.mark.matrix
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("kind", ["decoder", "additive"])
def test_every_way_in_gives_the_same(kind: str, num_beams: int) -> None:
    model, prompts = _model(kind), _prompts()
    expected = _generated(model, prompts, num_beams=num_beams)
    for name, keywords in _ways(prompts).items():
        rows = model.generate(**keywords, num_beams=num_beams, max_new_tokens=NEW, do_sample=False)
        assert _new(model, rows, max(map(len, prompts))) == expected, name
        if kind == "decoder":
            padded = _batch(prompts).to_padded(PAD, side="left")["input_ids"]
            kept = rows[:, : padded.shape[1]]
            assert torch.equal(kept[padded != PAD], padded[padded != PAD]), name


@pytest.mark.parametrize("kind", ["decoder", "dot"])
def test_embeddings_as_prompts(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    padded = _batch(prompts).to_padded(side="right")
    embedded = model.get_input_embeddings()(padded.pop("input_ids"))
    rows = model.generate(inputs_embeds=embedded, **padded, max_new_tokens=NEW, do_sample=False)
    begin = 1 if model.config.is_encoder_decoder else 0
    found = [row[: row.index(END) + 1] if END in row else row for row in rows[:, begin:].tolist()]
    assert found == _generated(model, prompts)


def test_targets_begun_by_the_user() -> None:
    model, prompts = _model("additive"), _prompts()
    begun = [torch.tensor(row) for row in ([5], [6, 7, 8], [9, 9], [START, 4], [10])]
    alone = [
        model.generate([p], decoder_input_ids=b[None], max_new_tokens=NEW, do_sample=False)
        for p, b in zip(prompts, begun)
    ]
    for how in ({}, {"num_beams": 1, "use_cache": False}):
        rows = model.generate(prompts, decoder_input_ids=begun, max_new_tokens=NEW, do_sample=False, **how)
        for row, single, own in zip(rows.tolist(), alone, begun):
            start = next(i for i, token in enumerate(row) if token == START)
            expected = [START, *[t for t in own.tolist() if t != START], *single[0, -NEW:].tolist()]
            assert row[start:] == expected


def test_encoded_once_or_given_it_is_the_same() -> None:
    model, prompts = _model("additive"), _prompts()
    padded = _batch(prompts).to_padded(side="left")
    encoded = model.get_encoder()(**padded, use_cache=True)
    before = encoded.last_hidden_state.clone()
    mask = padded["attention_mask"]
    for num_beams in (1, 3):
        rows = model.generate(encoder_outputs=encoded, attention_mask=mask, num_beams=num_beams, max_new_tokens=NEW)
        assert _new(model, rows, 0) == _generated(model, prompts, num_beams=num_beams)
    assert torch.equal(encoded.last_hidden_state, before)  # the user's, not ours to repeat
    calls: list[int] = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    _generated(model, prompts, num_beams=3)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["dot", "decoder"])
def test_one_step_a_token_once_a_state_is_there(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    widths: list[int] = []
    stepping = model.model if kind == "decoder" else model.decoder
    stepping.register_forward_hook(
        lambda _, __, kwargs, ___: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    _generated(model, prompts, max_new_tokens=4, min_new_tokens=4)
    first = sum(map(len, prompts)) if kind == "decoder" else len(prompts)
    assert widths == [first, *[len(prompts)] * 3]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_alignments_come_along(num_beams: int) -> None:
    model, prompts = _model("additive"), _prompts()
    outputs = model.generate(
        prompts, num_beams=num_beams, max_new_tokens=4, return_dict_in_generate=True, output_attentions=True
    )
    for (step,) in outputs.cross_attentions:
        assert step.shape == (len(prompts) * num_beams, 1, 1, max(map(len, prompts)))
        assert torch.allclose(step.sum(-1), torch.ones_like(step[..., 0]))
        assert not step[0, ..., len(prompts[0]) :].any()


@pytest.mark.matrix
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_given_state_is_gone_on_from(cell: str, num_beams: int) -> None:
    model = _model("decoder", cell)
    prompts = _prompts()
    how = {"num_beams": num_beams, "max_new_tokens": NEW, "do_sample": False}
    whole = torch.stack([prompts[1], prompts[4]])
    expected = _new(model, model.generate(whole, **how), 8)
    for cut in (1, 3, 5, 7):  # what comes after is shorter, or longer, than what was seen
        state = model(input_ids=whole[:, :cut], use_cache=True)[CACHE]
        before = [[part.clone() for part in layer] for layer in state.layers]
        rest = model.generate(whole[:, cut:], cache=state, **how)
        assert torch.equal(rest[:, : 8 - cut], whole[:, cut:])
        assert _new(model, rest, 8 - cut) == expected
        again = model.generate(whole, cache=state, **how)  # whole rows, as transformers has it
        assert torch.equal(again[:, :8], whole)
        assert _new(model, again, 8) == expected
        mask = torch.ones_like(whole)
        told = model.generate(whole[:, cut:], attention_mask=mask, cache=state, **how)
        assert torch.equal(told, rest)
        assert all(torch.equal(a, b) for x, y in zip(before, state.layers) for a, b in zip(x, y))
        assert state.num_sequences == 2


def test_a_state_of_unequal_sequences_is_gone_on_from() -> None:
    model, prompts = _model("decoder"), _prompts()
    more = [torch.tensor(row) for row in ([7], [8, 9, 10, 11], [12, 13], [5, 5, 5], [30])]
    expected = _generated(model, [torch.cat(pair) for pair in zip(prompts, more)])
    state = model(**_batch(prompts).to_flattened(), use_cache=True)[CACHE]
    rows = model.generate(more, cache=state, max_new_tokens=NEW, do_sample=False)
    assert _new(model, rows, 4) == expected


@pytest.mark.parametrize("kind", ["decoder", "additive"])
def test_what_generate_returned_is_gone_on_from(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    long = model.generate(prompts, max_new_tokens=9, **how)
    first = model.generate(prompts, max_new_tokens=4, return_dict_in_generate=True, **how)
    side = {"decoder_input_ids": first.sequences} if kind == "additive" else {"input_ids": first.sequences}
    sources = {"inputs": prompts} if kind == "additive" else {}
    then = model.generate(**sources, **side, cache=first[CACHE], max_new_tokens=5, **how)
    assert torch.equal(then, long)


class _Colliding(GRUCell):
    reorderable = False


def test_beams_and_a_cell_that_cannot_be_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CELLS, "colliding", _Colliding)
    for kind in KINDS:
        model, prompts = _model(kind, "colliding"), _prompts()
        for how in ({"num_beams": 2}, {"num_beams": 3, "do_sample": True}):
            with pytest.raises(InputError, match=r"this cell says that its state cannot be \(cell 'colliding'\)"):
                _generated(model, prompts, **how)
        assert _generated(model, prompts) == _generated(_model(kind, "gru"), prompts)
        uncached = _generated(model, prompts, num_beams=2, use_cache=False)
        assert uncached == _generated(_model(kind, "gru"), prompts, num_beams=2)


@pytest.mark.parametrize("kind", KINDS)
def test_assisted_decoding_is_refused_of_a_recurrent_model_and_by_one(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    for how in ({"assistant_model": _model(kind)}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            _generated(model, prompts[:1], **how)
    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama: Any = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).double().eval()
    if kind == "decoder":
        with pytest.raises(InputError, match="a recurrent model cannot assist another"):
            llama.generate(torch.tensor([[3, 4, 5]]), assistant_model=model, max_new_tokens=6)


#: Prompts, what else is given, and what is said.
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (torch.tensor([[3, 4, 5]]), {"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask has holes"),
    (torch.tensor([3, 4]), {}, r"prompts come in rows, or as a list of them: expected \[N, L\], found shape"),
    ([3, 4], {}, r"prompts come in rows, or as a list of them: expected \[N, L\], found shape"),
    ([[3], []], {}, "a sequence is empty"),
]


@pytest.mark.parametrize(("prompts", "more", "words"), WRONG)
def test_prompts_that_do_not_fit(prompts: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        _model("decoder").generate(prompts, **more, max_new_tokens=2)


def test_states_that_do_not_fit() -> None:
    model, prompts = _model("decoder"), _prompts()
    state = model(**_batch(prompts).to_flattened(), use_cache=True)[CACHE]
    with pytest.raises(InputError, match="the state is of another batch"):
        model.generate(prompts[:2], cache=state, max_new_tokens=2)
    seq2seq = _model("dot")
    with pytest.raises(InputError, match="generate\\(\\) needs sources"):
        seq2seq.generate(max_new_tokens=2)
    with pytest.raises(InputError, match="decoder_input_ids do not begin with what the state has seen"):
        seq2seq.generate(prompts, cache=state, max_new_tokens=2)
