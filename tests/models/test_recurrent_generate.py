"""generate(): a batch of unequal prompts equals single prompts, and a cached state equals running anew."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import ullage
from ullage.models import RecurrentConfig, RecurrentForCausalLM

pytestmark = pytest.mark.parity

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NEW = 9


def _model(cell: str, vocab_size: int = 40, seed: int = 0, **changes: Any) -> RecurrentForCausalLM:
    torch.manual_seed(seed)
    config = RecurrentConfig(
        cell=cell, vocab_size=vocab_size, hidden_size=16, pad_token_id=0, eos_token_id=2, **changes
    )
    model = RecurrentForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # away from ties
        model.model.embed_tokens.weight.mul_(8)  # and from a fixed point
    return model.eval()


def _prompts(vocab_size: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in (3, 8, 1, 5, 8)]


def _left_padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    return ullage.RaggedBatch.from_samples([{"input_ids": prompt} for prompt in prompts]).to_padded(side="left")


def _continuations(model: RecurrentForCausalLM, inputs: dict[str, Tensor], **how: Any) -> list[list[int]]:
    """What was generated behind each prompt, up to the end of the text."""
    width = inputs["input_ids"].shape[1]
    rows = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **how)[:, width:].tolist()  # pyright: ignore
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_unequal_prompts_equal_single_prompts(cell: str, num_beams: int) -> None:
    model = _model(cell, num_hidden_layers=2)
    prompts = _prompts()
    together = _continuations(model, _left_padded(prompts), num_beams=num_beams)
    alone = [_continuations(model, {"input_ids": prompt[None]}, num_beams=num_beams)[0] for prompt in prompts]
    assert together == alone
    assert len({tuple(row) for row in together}) > 1  # the prompt matters


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_cached_equals_uncached(cell: str, num_beams: int) -> None:
    model = _model(cell)
    inputs = _left_padded(_prompts())
    cached = _continuations(model, inputs, num_beams=num_beams, use_cache=True)
    assert cached == _continuations(model, inputs, num_beams=num_beams, use_cache=False)


@pytest.mark.parametrize("cell", CELLS)
def test_greedy_equals_a_loop_by_hand(cell: str) -> None:
    model = _model(cell)
    prompt = _prompts()[1]
    ids = prompt[None]
    for _ in range(NEW):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        if ids[0, -1] == 2:
            break
    assert _continuations(model, {"input_ids": prompt[None]})[0] == ids[0, len(prompt) :].tolist()


def test_one_call_a_token_once_a_state_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("lstm")
    widths: list[int] = []
    forward = model.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", counting)
    prompts = _prompts()
    model.generate(**_left_padded(prompts), max_new_tokens=4, min_new_tokens=4, do_sample=False)  # pyright: ignore
    assert widths == [sum(map(len, prompts)), *[len(prompts)] * 3]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_beams_as_wide_as_the_vocabulary_find_the_best_of_all(cell: str) -> None:
    vocabulary, steps = 6, 3
    torch.manual_seed(5)
    config = RecurrentConfig(cell=cell, vocab_size=vocabulary, hidden_size=8, pad_token_id=0, eos_token_id=None)
    model = RecurrentForCausalLM(config).double().eval()
    prompt = torch.tensor([[3, 4]])
    everything = torch.tensor(list(product(range(vocabulary), repeat=steps)))
    rows = torch.cat([prompt.expand(len(everything), 2), everything], 1)
    scores = model(input_ids=rows).logits.log_softmax(-1)[:, 1:-1].gather(2, everything[..., None]).sum((1, 2))
    best = everything[scores.argmax()].tolist()
    found = model.generate(  # pyright: ignore
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=vocabulary**2,
        max_new_tokens=steps,
        do_sample=False,
    )
    assert found[0, 2:].tolist() == best
