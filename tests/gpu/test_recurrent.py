"""Recurrent models on a device against the CPU in float32: cuDNN's kernels, our loops and scans, forward and backward."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the recurrent models are transformers' PreTrainedModels")

from tests.gpu.comparing import TOLERANCE, assert_close, assert_same_outcome, outcome
from ullage import RaggedBatch, to_device
from ullage.models import (
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    linear_scan,
)
from ullage.models.cells import CELLS, cell_class
from ullage.models.schedule import Schedule

LENGTHS = (5, 1, 9, 3, 9, 40)
VOCABULARY = 37
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def model_of(kind, cell, **changes):
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    return kind(RecurrentConfig(cell=cell, **sizes, **changes))


def samples(lengths=LENGTHS, labels=None):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]
    return [{"input_ids": row, "labels": row % 2 if labels == 2 else row.clone()} for row in rows]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lengths", [LENGTHS, (7, 7, 7)], ids=["ragged", "equal"])
def test_a_language_model_is_the_cpus(device, cell, dtype, lengths):
    model = model_of(RecurrentForCausalLM, cell)
    batch = RaggedBatch.from_samples(samples(lengths), pad_to_multiple_of=4)
    padded = batch.to_padded()
    # What lies on padding is nobody's.
    forms = [(padded, padded["attention_mask"].bool())]
    forms += [(batch.to_flattened(), (torch.zeros(1, dtype=torch.long), torch.from_numpy(batch.layout.token_index())))]
    for keywords, real in forms:
        expected = outcome(model.float().cpu(), keywords)
        found = outcome(model.to(device, dtype), to_device(keywords, device))
        # Forty steps of a ReLU in bfloat16: which side of its kink a state lies on differs.
        tolerance = 0.15 if (cell, dtype) == ("rnn_relu", torch.bfloat16) else TOLERANCE[dtype]
        assert_same_outcome(at(real, found), at(real, expected), max(tolerance, TOLERANCE[torch.float32]))


def at(real, outcome):
    """An outcome whose logits are those of real tokens alone."""
    logits, *rest = outcome
    return logits[real], *rest


@pytest.mark.parametrize("cell", CELLS)
def test_autocast_is_near_float32(device, cell, recwarn):
    model = model_of(RecurrentForCausalLM, cell)
    keywords = RaggedBatch.from_samples(samples()).to_flattened()
    expected = outcome(model, keywords)
    with torch.autocast(device.type, torch.bfloat16):
        found = outcome(model.to(device), to_device(keywords, device))
    assert_same_outcome(found, expected, 0.15)  # forty steps in bfloat16
    outcome(model, to_device(keywords, device))  # and cuDNN finds the weights in one buffer
    assert not [warning for warning in recwarn if "contiguous chunk" in str(warning.message)]


@pytest.mark.parametrize("cell", ["lstm", "gru", "mingru"])
@pytest.mark.parametrize("kind", [RecurrentForSequenceClassification, RecurrentForTokenClassification])
def test_a_bidirectional_classifier_is_the_cpus(device, kind, cell):
    rows = samples(labels=2)
    if kind is RecurrentForSequenceClassification:
        rows = [{**row, "labels": row["labels"][0]} for row in rows]
    model = model_of(kind, cell, bidirectional=True, num_labels=2)
    keywords = RaggedBatch.from_samples(rows).to_padded()
    expected = outcome(model, keywords)
    found = outcome(model.to(device), to_device(keywords, device))
    real = keywords["attention_mask"].bool() if kind is RecurrentForTokenClassification else ...
    assert_same_outcome(at(real, found), at(real, expected), TOLERANCE[torch.float32])


@pytest.mark.parametrize("cell", ["lstm", "gru", "mingru"])
def test_a_translator_is_the_cpus_and_writes_the_same(device, cell):
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(cell=cell, **sizes))
    keywords = RaggedBatch.from_samples(samples()).to_padded()
    expected = outcome(model, keywords)
    prompts = {name: keywords[name] for name in ("input_ids", "attention_mask")}
    written = model.eval().generate(**prompts, max_new_tokens=6, do_sample=False)
    found = outcome(model.train().to(device), to_device(keywords, device))
    real = keywords["attention_mask"].bool()
    assert_same_outcome(at(real, found), at(real, expected), TOLERANCE[torch.float32])
    again = model.eval().generate(**to_device(prompts, device), max_new_tokens=6, do_sample=False)
    assert torch.equal(again.cpu(), written)


@pytest.mark.parametrize("cell", CELLS)
def test_generation_is_the_cpus(device, cell):
    model = model_of(RecurrentForCausalLM, cell).eval()
    prompts = RaggedBatch.from_samples([{"input_ids": row["input_ids"]} for row in samples()]).to_padded(side="left")
    expected = model.generate(**prompts, max_new_tokens=6, do_sample=False)
    found = model.to(device).generate(**to_device(prompts, device), max_new_tokens=6, do_sample=False)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("run_order", ["packed", "staircase"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_run_order_gives_outputs_and_final_states(device, cell, run_order):
    """A sequence of no tokens keeps its state, whatever lies beside it."""
    lengths = np.array([6, 0, 9, 1, 9])
    torch.manual_seed(1)
    layer = cell_class(cell)(4, 8)
    layer.reset_parameters()
    order = layer.run_order(device)
    if order == "flat":
        run_order = "flat"  # a scan has no other
    values = torch.randn(int(lengths.sum()), 4)
    state = tuple(torch.randn(len(lengths), 8) for _ in layer.state_names)
    weights = torch.randn(len(values), 8)

    def run(where, order):
        schedule = Schedule.ragged(lengths, 8, where, order)
        inputs = values.to(where).requires_grad_()
        outputs, final = layer.to(where)(schedule.place(inputs), schedule, tuple(part.to(where) for part in state))
        outputs = schedule.take(outputs)
        loss = (outputs * weights.to(where)).sum() + sum(part.square().sum() for part in final)
        grads = torch.autograd.grad(loss, [inputs, *layer.parameters()])
        return [outputs, *final, *grads]

    expected = [part.detach().cpu().clone() for part in run(torch.device("cpu"), run_order)]
    for one, other in zip(run(device, run_order), expected, strict=True):
        assert_close(one, other, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scan_is_the_cpus(device, dtype):
    generator = torch.Generator().manual_seed(0)
    decay, inflow = torch.rand(300, 8, generator=generator), torch.randn(300, 8, generator=generator)
    starts = torch.tensor([0, 1, 100, 101, 256])
    state = torch.randn(5, 8, generator=generator)

    def run(where, kind):
        inputs = [tensor.to(where, kind).requires_grad_() for tensor in (decay, inflow, state)]
        found = linear_scan(inputs[0], inputs[1], starts.to(where), inputs[2])
        return [found, *torch.autograd.grad(found.sum(), inputs)]

    for one, other in zip(run(device, dtype), run("cpu", torch.float32), strict=True):
        assert_close(one, other, max(TOLERANCE[dtype], TOLERANCE[torch.float32]))


def test_a_compiled_model_is_the_cpus(device):
    model = model_of(RecurrentForCausalLM, "lstm")
    keywords = RaggedBatch.from_samples(samples((7, 7, 7))).to_padded()
    del keywords["attention_mask"]
    expected = outcome(model, keywords)
    torch._dynamo.reset()
    found = outcome(torch.compile(model.to(device), backend="aot_eager"), to_device(keywords, device))
    found = (*found[:2], {name.removeprefix("_orig_mod."): gradient for name, gradient in found[2].items()})
    assert_same_outcome(found, expected, TOLERANCE[torch.float32])
