"""Kernels that take lengths, the packages' own on the device: against the stand-ins of the other tests, and in models."""

import importlib

import pytest
import torch

from tests.gpu.comparing import assert_close
from tests.support import kernel_standins

LENGTHS = (70, 1, 130, 3, 40)
HEADS, DIM = 4, 64
#: Products of float32 are made of TF32 in Triton, with ten bits.
TOLERANCE = 2e-2


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bounds(where):
    return torch.tensor([0, *LENGTHS], device=where).cumsum(0)


def numbers(where):
    counted = torch.arange(len(LENGTHS), dtype=torch.int32)
    return torch.repeat_interleave(counted, torch.tensor(LENGTHS))[None].to(where)


def delta(function, where, q, k, v, beta, g):
    gate = torch.nn.functional.logsigmoid(g)
    return function(
        q, k, v, g=gate, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True, cu_seqlens=bounds(where)
    )[0]  # fmt: skip


def convolution(function, where, x):
    weight = random(HEADS * DIM, 4).to(where)
    return function(x.transpose(1, 2), weight, None, numbers(where), activation="silu").transpose(1, 2)


def scan(function, where, x, dt, b, c):
    decay, skip, bias = (random(HEADS, seed=seed).to(where) for seed in (1, 2, 3))
    options = {"D": skip, "dt_bias": bias, "dt_softplus": True, "seq_idx": numbers(where)}
    return function(x, dt, -decay.exp(), b, c, 64, **options)


def fused(function, where, zxbcdt):
    inner = HEADS * DIM
    mixed = inner + 2 * DIM
    drawn = (random(mixed, 4), random(mixed, seed=1), *(random(HEADS, seed=seed) for seed in (2, 3, 4)))
    weight, bias, dt_bias, decay, skip = (each.to(where) for each in drawn)
    options = {"rmsnorm_weight": random(inner).to(where), "outproj_weight": random(32, inner).to(where)}
    return function(
        zxbcdt, weight, bias, dt_bias, -decay.exp(), skip, 64, seq_idx=numbers(where), headdim=DIM,
        norm_before_gate=False, **options,
    )  # fmt: skip


QKV = ((HEADS, DIM),) * 3
#: Function -> its module, how it is called, and what each input has per token.
FUNCTIONS = {
    "causal_conv1d_fn": ("causal_conv1d", convolution, ((HEADS * DIM,),)),
    "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", delta, (*QKV, (HEADS,), (HEADS,))),
    "chunk_kda": ("fla.ops.kda", delta, (*QKV, (HEADS,), (HEADS, DIM))),
    "mamba_chunk_scan_combined": (
        "mamba_ssm.ops.triton.ssd_combined", scan, ((HEADS, DIM), (HEADS,), (1, DIM), (1, DIM)),
    ),
    "mamba_split_conv1d_scan_combined": (
        "mamba_ssm.ops.triton.ssd_combined", fused, ((2 * HEADS * DIM + 2 * DIM + HEADS,),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_packages_function_is_its_stand_in_forward_and_backward(device, name):
    module, call, shapes = FUNCTIONS[name]
    if device.type == "cpu":
        theirs = getattr(kernel_standins, name)  # the tests' own arithmetic
    else:
        theirs = getattr(pytest.importorskip(module), name)

    def run(function, where):
        inputs = [random(1, sum(LENGTHS), *shape, seed=at) for at, shape in enumerate(shapes)]
        inputs = [each.to(where).requires_grad_() for each in inputs]
        out = call(function, where, *inputs)
        weights = random(*out.shape, seed=9).to(where)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]

    for found, expected in zip(run(theirs, device), run(getattr(kernel_standins, name), torch.device("cpu"))):
        assert_close(found, expected, TOLERANCE, name)


#: Model type -> the packages that its mixers call.
TYPES = {
    "qwen3_next": ("fla", "causal_conv1d"), "qwen3_5_text": ("fla", "causal_conv1d"),
    "kimi_linear": ("fla", "causal_conv1d"), "lfm2": ("causal_conv1d",), "mamba2": ("mamba_ssm", "causal_conv1d"),
    "bamba": ("mamba_ssm", "causal_conv1d"), "falcon_h1": ("mamba_ssm", "causal_conv1d"),
    "granitemoehybrid": ("mamba_ssm", "causal_conv1d"), "nemotron_h": ("mamba_ssm", "causal_conv1d"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_by_kernels_calls_a_mixer_once_and_gives_each_sequence_what_it_gets_alone(device, model_type):
    pytest.importorskip("transformers", reason="these are its models")
    if device.type == "cpu":
        pytest.skip("the packages compute on a GPU")
    for package in TYPES[model_type]:
        importlib.import_module(package) if importlib.util.find_spec(package) else pytest.skip(f"no {package}")
    from maintenance.tiny import tiny_model
    from tests.mixers.test_kernels import alone, packed_row, rows_of, split, told_parts
    from ullage import pack_model, to_device

    model = tiny_model(model_type, "causal").to(device).train()
    with torch.no_grad():
        expected = alone(model, device)
    row = packed_row(rows_of())
    calls = []
    with pack_model(model):
        mixers = [part.module for part in told_parts(model)]
        assert mixers, "every mixer runs by lengths though its packages are installed"
        for mixer in mixers:
            mixer.register_forward_hook(lambda *_: calls.append(1))
        logits = model(**{name: to_device(value, device) for name, value in row.items()}).logits[0]
        logits.square().mean().backward()
    assert len(calls) == len(mixers)
    assert_close(split(row, logits), expected, TOLERANCE)
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)
