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


def tensors(shape, seed=0):
    heads, key_heads, dim, value_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, dim), (key_heads, dim), (key_heads, value_dim), (heads, value_dim))
    return [torch.randn(sum(LENGTHS), *size, generator=generator) for size in sizes]


def run(attend, shape, where, dtype):
    """Output and the gradients of queries, keys and values, on the host in float32."""
    *inputs, weights = (tensor.to(where, dtype) for tensor in tensors(shape))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    mixed = attend(*inputs)
    return [mixed, *torch.autograd.grad((mixed * weights).sum(), inputs)]


def expected_of(shape, window, scale=None):
    from ullage.attention import packed_attention

    return run(
        lambda q, k, v: packed_attention(q, k, v, LENGTHS, window=window, scale=scale), shape, "cpu", torch.float32
    )


def assert_all_close(found, expected, dtype):
    for one, other, name in zip(found, expected, ("output", "queries", "keys", "values"), strict=True):
        assert_close(one, other, max(TOLERANCE[dtype], TOLERANCE[torch.float32]), name)


pytest.importorskip("transformers", reason="the attention is registered with transformers")


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_by_lengths_is_the_cpus(device, dtype, shape, window):
    from ullage.attention import packed_attention

    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("float16 is a GPU's")
    found = run(lambda q, k, v: packed_attention(q, k, v, LENGTHS, window=window), shape, device, dtype)
    assert_all_close(found, expected_of(shape, window), dtype)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("option", ["soft cap", "sinks", "both"])
@pytest.mark.parametrize("kernel", ["by lengths", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_soft_caps_and_sinks_are_the_cpus(device, dtype, kernel, option, window):
    """Scores far beyond the cap, and a sink that takes nearly all of a head's weight."""
    from ullage.attention import packed_attention
    from ullage.attention.varlen import flex_attention, serves_flex

    def options(where):
        sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], device=where) if option != "soft cap" else None
        return {"window": window, "softcap": 0.5 if option != "sinks" else None, "sinks": sinks}

    expected = run(
        lambda q, k, v: packed_attention(q, k, v, LENGTHS, **options("cpu")), "grouped", "cpu", torch.float32
    )
    if kernel == "by lengths":
        found = run(lambda q, k, v: packed_attention(q, k, v, LENGTHS, **options(device)), "grouped", device, dtype)
        return assert_all_close(found, expected, dtype)
    query, _, value, _ = tensors("grouped")
    if device.type == "cpu":
        pytest.skip("torch has neither a backward nor the sum of the weights of flex attention on a CPU")
    if not serves_flex(query.to(device, dtype), value.to(device, dtype), 0.0):
        pytest.skip("flex attention does not take this shape here")
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    found = run(
        lambda q, k, v: flex_attention(q, k, v, cu_seqlens, training=True, **options(device)), "grouped", device, dtype
    )
    return assert_all_close(found, expected, dtype)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_torchs_varlen_kernel_is_the_cpus(device, dtype, shape, window):
    from ullage.attention.varlen import serves_varlen, varlen_attention

    query, _, value, _ = tensors(shape)
    if not serves_varlen(query.to(device, dtype), value.to(device, dtype), 0.0):
        pytest.skip(f"the varlen kernel does not take {shape} here")
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    found = run(
        lambda q, k, v: varlen_attention(q, k, v, cu_seqlens, max(LENGTHS), window=window, scale=0.3),
        shape,
        device,
        dtype,
    )
    assert_all_close(found, expected_of(shape, window, scale=0.3), dtype)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_is_the_cpus(device, dtype, shape, window):
    """Forward alone on a CPU, where torch has no backward of it."""
    from ullage.attention.varlen import flex_attention, serves_flex

    query, _, value, _ = tensors(shape)
    if device.type == "cuda" and not serves_flex(query.to(device, dtype), value.to(device, dtype), 0.0):
        pytest.skip(f"flex attention does not take {shape} here")
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)

    def attend(q, k, v):
        return flex_attention(q, k, v, cu_seqlens, window=window, training=True)

    if device.type == "cpu":
        with torch.no_grad():
            found = [attend(*(tensor.to(dtype) for tensor in tensors(shape)[:3]))]
        expected = expected_of(shape, window)[:1]
        assert_close(found[0], expected[0], max(TOLERANCE[dtype], TOLERANCE[torch.float32]))
        return
    assert_all_close(run(attend, shape, device, dtype), expected_of(shape, window), dtype)


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


def batch_of(seed=3, pad_to_multiple_of=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS if n]
    return RaggedBatch.from_samples(
        [{"input_ids": row, "labels": row} for row in rows], pad_to_multiple_of=pad_to_multiple_of
    )


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


def test_autocast_and_recomputation_are_near_float32(device):
    model = model_of("llama")
    keywords = batch_of().to_flattened()
    expected = outcome(model, keywords)
    model.to(device).train().gradient_checkpointing_enable()
    with torch.autocast(device.type, torch.bfloat16):
        found = outcome(model, {**to_device(keywords, device), "use_cache": False})
    assert_same_outcome(found, expected, TOLERANCE[torch.bfloat16])


def test_dropout_is_served_by_lengths(device):
    """With dropout of next to nothing, so that the numbers can be compared."""
    model = model_of("llama", attention_dropout=1e-12).train()
    keywords = batch_of().to_flattened()
    expected = outcome(model, keywords)
    found = outcome(model.to(device), to_device(keywords, device))
    assert_same_outcome(found, expected, TOLERANCE[torch.float32])


def test_padded_rows_are_the_cpus(device):
    model = model_of("llama")
    keywords = batch_of().to_padded()
    real = keywords["attention_mask"].bool()
    (logits, *rest), expected = (outcome(model, keywords), None)
    expected = (logits[real], *rest)
    logits, *rest = outcome(model.to(device), to_device(keywords, device))
    assert_same_outcome((logits[real], *rest), expected, TOLERANCE[torch.float32])


def test_lengths_on_the_device_are_read_anew_when_they_change(device):
    from ullage.attention.varlen import host_lengths

    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    assert host_lengths(cu_seqlens) == [3, 2]
    cu_seqlens.copy_(torch.tensor([0, 1, 5]))
    assert host_lengths(cu_seqlens) == [1, 4]
