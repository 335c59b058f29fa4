"""Forward and backward of every family of models on a pretended CUDA device: values, waits, kernels and their dtypes."""

from collections import Counter

import pytest
import torch

from maintenance.tiny import tiny_model
from tests.gpu.comparing import TOLERANCE, assert_close, assert_same_outcome
from tests.pretended.cases import FAMILIES, made, outcomes, row_of, run
from tests.pretended.device import CUDA, Mixed, pretending
from tests.pretended.kernels import stand_ins
from ullage import pack_model, to_device
from ullage.attention import explain
from ullage.attention.varlen import FLEX, VARLEN, warn_of_slower
from ullage.mixers.packed_model import way_of

PARAMETERS = [pytest.param(name, family, id=name) for name, family in FAMILIES.items()]


@pytest.mark.matrix(keep=0.5)
@pytest.mark.parametrize(("name", "family"), PARAMETERS)
def test_a_packed_row_is_the_cpus(name, family):
    found, expected = outcomes(name, family.kind)
    assert_same_outcome((found.logits, found.loss, found.gradients), expected, TOLERANCE[torch.float32])
    assert found.stray == []
    assert found.kernels == Counter({f"{family.kernel} float32": family.layers} if family.kernel else {})
    # What were done once a layer would be more.
    assert found.forward.total() == family.waits, found.forward
    assert found.backward.total() == family.waits_backward, found.backward
    assert found.copies.total() == family.copies, found.copies
    assert [line for line in found.forward if "ullage/" in line and "attention/packed_call" not in line] == []


@pytest.mark.matrix(keep=0.5)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.waits])
def test_no_layer_waits(name):
    shallow, _ = outcomes(name, FAMILIES[name].kind, times=1)
    deep, _ = outcomes(name, FAMILIES[name].kind, times=2)
    assert deep.kernels.total() == 2 * shallow.kernels.total()
    assert (deep.forward, deep.backward, deep.copies) == (shallow.forward, shallow.backward, shallow.copies)


@pytest.mark.matrix(keep=0.5)
@pytest.mark.parametrize("how", [{"autocast": True}, {"dtype": torch.bfloat16}], ids=["autocast", "weights"])
@pytest.mark.parametrize(("name", "family"), PARAMETERS)
def test_every_kernel_gets_bfloat16(name, family, how):
    found, (logits, *_) = outcomes(name, family.kind, **how)
    assert found.kernels == Counter({f"{family.half} bfloat16": family.layers} if family.half else {})
    assert found.forward.total() == family.waits, found.forward
    # Experts are chosen anew where two are nearly alike.
    assert_close(
        found.logits, logits, 0.3 if name in ("gpt_oss", "llama4_text", "qwen3_next") else TOLERANCE[torch.bfloat16]
    )


@pytest.mark.parametrize("name", ["lfm2", "bert", "lstm"])
def test_lengths_of_a_row_from_elsewhere_are_read_twice_and_not_in_layers(name):
    model = made(name, FAMILIES[name].kind)
    row = row_of(model, FAMILIES[name].kind)
    found = run(model, row, known=False)
    assert found.forward.total() == 2
    assert all("core/rows.py" in line for line in found.forward)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_model_is_packed_on_its_device_as_on_the_cpu(name):
    models = [tiny_model(name, "causal") for _ in range(2)]
    pack_model(models[0], verify=False)
    with pretending() as tally, stand_ins(tally):
        models[1].to(CUDA)
        pack_model(models[1], verify=False)
        expected, found = map(way_of, models)
    assert (found.kind, found.paths) == (expected.kind, expected.paths)


def test_the_device_tells_tensors_apart_and_counts_waits():
    with pretending() as tally:
        host, there = torch.arange(3), torch.ones(3, device=CUDA)
        assert there.device == CUDA
        assert there[1:].is_cuda
        assert torch.nn.Parameter(there).is_cuda
        with pytest.raises(Mixed):
            host + there
        assert (there * torch.tensor(2.0)).is_cuda
        with pytest.raises(TypeError):
            there.numpy()
        assert tally.waits.total() == 0
        assert float(there.sum()) == 3
        assert there.nonzero().shape == (3, 1)
        assert there[host].is_cuda
        assert host.to(CUDA).tolist() == [0, 1, 2]
        assert {line.split()[0]: number for line, number in tally.waits.items()} == {
            "_local_scalar_dense": 1, "nonzero": 1, "copy": 2, "read": 1,
        }  # fmt: skip
        tally.clear()
        assert host.pin_memory().to(CUDA, non_blocking=True).is_cuda
        assert (tally.waits.total(), tally.copies.total()) == (0, 1)
        trained = torch.ones(3, requires_grad=True)
        (trained.to(CUDA) * 2).sum().backward()
        assert not trained.grad.is_cuda


@pytest.mark.parametrize(("name", "dtype", "told"), [
    ("llama", torch.bfloat16, 0), ("llama", torch.float32, 1), ("gemma2", torch.bfloat16, 0),
])  # fmt: skip
def test_a_slower_kernel_is_told_once_and_explained(name, dtype, told, caplog):
    warn_of_slower.cache_clear()
    with pretending() as tally, stand_ins(tally) as kernels:
        model = made(name, "causal").to(CUDA, dtype)
        assert not kernels
        found = explain(model)
        assert sum(found.values()) == kernels.total()
        names = {"varlen": VARLEN, "flex": FLEX}
        assert {each.kernel for each in found} == {names[called.split()[0]] for called in kernels}
        assert caplog.records == []
        for _ in range(2):
            model(**to_device(row_of(model, "causal"), CUDA)).loss.backward()
    if any(called.startswith("flex") for called in kernels):
        assert torch._dynamo.config.recompile_limit >= 64  # behind which torch runs flex attention unfused
    messages = [each.getMessage() for each in caplog.records if "slower" in each.getMessage()]
    assert len(messages) == told
    assert all("LlamaAttention" in each and "float16 and bfloat16 alone" in each for each in messages)
