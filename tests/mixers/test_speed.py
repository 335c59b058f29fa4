"""What makes packed hybrids fast leaves their numbers alone: short chunks of a scan."""

import functools

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import ullage
from ullage import RaggedBatch

pytestmark = pytest.mark.parity

SCANS = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 256}
LENGTHS = (7, 100, 1, 48, 49, 300, 7)


def build():
    torch.manual_seed(0)
    config = Mamba2Config(vocab_size=97, num_hidden_layers=2, hidden_size=32, expand=2, **SCANS)
    return Mamba2ForCausalLM(config).eval()


def samples_of(lengths):
    return [{"input_ids": torch.randint(3, 97, (length,)), "labels": torch.zeros(length).long()} for length in lengths]


def test_short_chunks_give_what_the_scan_gives(monkeypatch):
    model, samples = build(), samples_of(LENGTHS)
    expected = torch.cat([model(input_ids=each["input_ids"][None]).logits[0] for each in samples])
    sizes = []
    kind = next(type(part) for part in model.modules() if isinstance(getattr(part, "chunk_size", None), int))
    own = kind.forward

    def forward(module, *arguments, **keywords):
        sizes.append(module.chunk_size)
        return own(module, *arguments, **keywords)

    with ullage.pack_model(model):
        # Not before, because a forward of the test's own could do anything, and the model would run as a whole.
        monkeypatch.setattr(kind, "forward", functools.wraps(own)(forward))
        outputs = model(**RaggedBatch.from_samples(samples).to_flattened())
        outputs.loss.backward()
        assert 1 < max(sizes) <= 48
        assert (outputs.logits[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    mixers = [part for part in model.modules() if isinstance(getattr(part, "chunk_size", None), int)]
    assert {part.chunk_size for part in mixers} == {256}
    assert all(part.grad is not None for part in mixers[0].parameters())
