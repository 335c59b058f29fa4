"""Attention on packed rows: every kernel that the device has, and the models above them, against the CPU in float32."""

import pytest
import torch

from tests.gpu.comparing import TOLERANCE, assert_close, assert_same_outcome, outcome
from ullage import RaggedBatch, to_device

LENGTHS = [1, 7, 130, 2, 20, 7, 0, 64, 1]
VOCABULARY = 97
#: Name: query heads, key heads, head dimension of queries and keys, of values.
SHAPES = {
    "plain": (4, 4, 16, 16),
    "grouped": (4, 2, 32, 32),
    "odd dimension": (4, 2, 20, 20),
    "small dimension": (4, 2, 8, 8),
    "smaller than any kernel takes": (2, 2, 4, 4),
    "other values": (4, 4, 24, 16),
}


def tensors(shape):
    heads, key_heads, dim, value_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, dim), (key_heads, dim), (key_heads, value_dim), (heads, value_dim))
    return [torch.randn(sum(LENGTHS), *size, generator=generator) for size in sizes]


def run(attend, shape, where, dtype):
    """Output and the gradients of queries, keys and values, on the host in float32."""
    *inputs, weights = (tensor.to(where, dtype) for tensor in tensors(shape))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    mixed = attend(*inputs)
    return [mixed, *torch.autograd.grad((mixed * weights).sum(), inputs)]


def assert_all_close(found, expected, dtype):
    for one, other, name in zip(found, expected, ("output", "queries", "keys", "values"), strict=True):
        assert_close(one, other, max(TOLERANCE[dtype], TOLERANCE[torch.float32]), name)


pytest.importorskip("transformers", reason="the attention is registered with transformers")

#: Kernel -> the dtypes that it is tried in.
KERNELS = {
    "by lengths": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "varlen": (torch.float16, torch.bfloat16), "flex": (torch.float32, torch.bfloat16),
}  # fmt: skip
TRIED = [pytest.param(kernel, dtype, id=f"{kernel}-{dtype}") for kernel, dtypes in KERNELS.items() for dtype in dtypes]


def attending(kernel, shape, device, dtype, **options):
    """Attention over packed rows by the kernel; skips where the device has none for the shape."""
    from ullage.attention import packed_attention, varlen

    if kernel == "by lengths":
        if device.type == "cpu" and dtype == torch.float16:
            pytest.skip("float16 is a GPU's")
        return lambda q, k, v: packed_attention(q, k, v, LENGTHS, **options)
    query, _, value, _ = (tensor.to(device, dtype) for tensor in tensors(shape))
    problem = varlen.varlen_problem if kernel == "varlen" else varlen.flex_problem
    dims = query.shape[-1], value.shape[-1]
    if (kernel, device.type) != ("flex", "cpu") and problem(query.device, query.dtype, dims):
        pytest.skip(f"the {kernel} kernel does not take {shape} here")
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    if kernel == "varlen":
        return lambda q, k, v: varlen.varlen_attention(q, k, v, bounds, max(LENGTHS), **options)
    return lambda q, k, v: varlen.flex_attention(q, k, v, bounds, training=True, **options)


def expected_of(shape, **options):
    from ullage.attention import packed_attention

    return run(lambda q, k, v: packed_attention(q, k, v, LENGTHS, **options), shape, "cpu", torch.float32)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "dtype"), TRIED)
def test_attention_is_the_cpus(device, kernel, dtype, shape, window):
    options = {"window": window} | ({"scale": 0.3} if kernel == "varlen" else {})
    attend, expected = attending(kernel, shape, device, dtype, **options), expected_of(shape, **options)
    if (kernel, device.type) == ("flex", "cpu"):  # forward alone, where torch has no backward of it
        with torch.no_grad():
            found = attend(*(tensor.to(dtype) for tensor in tensors(shape)[:3]))
        return assert_close(found, expected[0], max(TOLERANCE[dtype], TOLERANCE[torch.float32]))
    return assert_all_close(run(attend, shape, device, dtype), expected, dtype)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("option", ["soft cap", "sinks", "both"])
@pytest.mark.parametrize("kernel", ["by lengths", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_soft_caps_and_sinks_are_the_cpus(device, dtype, kernel, option, window):
    """Scores far beyond the cap, and a sink that takes nearly all of a head's weight."""
    if (kernel, device.type) == ("flex", "cpu"):
        pytest.skip("torch has neither a backward nor the sum of the weights of flex attention on a CPU")

    def options(where):
        sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], device=where) if option != "soft cap" else None
        return {"window": window, "softcap": 0.5 if option != "sinks" else None, "sinks": sinks}

    attend = attending(kernel, "grouped", device, dtype, **options(device))
    assert_all_close(run(attend, "grouped", device, dtype), expected_of("grouped", **options("cpu")), dtype)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {"head_dim": 16},
    "qwen2": {"num_attention_heads": 8},  # a head dimension of 8
}


def model_of(name, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    import ullage.attention  # noqa: F401  registers "ullage"

    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name], **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="ullage", dtype=torch.float32)


def batch_of():
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS if n]
    return RaggedBatch.from_samples([{"input_ids": row, "labels": row} for row in rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_is_the_cpus(device, name, dtype):
    model = model_of(name)
    keywords = batch_of().to_flattened()
    expected = outcome(model, keywords)
    found = outcome(model.to(device, dtype), to_device(keywords, device))
    assert_same_outcome(found, expected, max(TOLERANCE[dtype], TOLERANCE[torch.float32]))
    del keywords["max_length_q"], keywords["max_length_k"]  # then the lengths are read from the device
    again = outcome(model, to_device(keywords, device))
    assert_same_outcome(again, expected, max(TOLERANCE[dtype], TOLERANCE[torch.float32]))


def test_dropout_autocast_and_recomputation_are_near_float32(device):
    """With dropout, which the kernel by lengths serves, of next to nothing, so that the numbers can be compared."""
    model = model_of("llama", attention_dropout=1e-12).train()
    keywords = batch_of().to_flattened()
    expected = outcome(model, keywords)
    assert_same_outcome(outcome(model.to(device), to_device(keywords, device)), expected, TOLERANCE[torch.float32])
    model.gradient_checkpointing_enable()
    with torch.autocast(device.type, torch.bfloat16):
        found = outcome(model, {**to_device(keywords, device), "use_cache": False})
    assert_same_outcome(found, expected, TOLERANCE[torch.bfloat16])


def test_padded_rows_are_the_cpus(device):
    model = model_of("llama")
    keywords = batch_of().to_padded()
    real = keywords["attention_mask"].bool()
    expected = outcome(model, keywords)
    found = outcome(model.to(device), to_device(keywords, device))
    found, expected = ((logits[real], *rest) for logits, *rest in (found, expected))
    assert_same_outcome(found, expected, TOLERANCE[torch.float32])


def test_lengths_on_the_device_are_read_anew_when_they_change(device):
    from ullage.attention.varlen import host_lengths

    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    assert host_lengths(cu_seqlens) == [3, 2]
    cu_seqlens.copy_(torch.tensor([0, 1, 5]))
    assert host_lengths(cu_seqlens) == [1, 4]
