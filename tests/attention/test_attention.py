"""Packed attention of Hugging Face models against the same models on one sequence after another, and against sdpa."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from maintenance.tiny import tiny_model
from ullage import InputError, RaggedBatch, pack_model
from ullage.attention import packed_attention, packing_problem, require_packing, supports_packing
from ullage.attention.kernels import Scores, attend
from ullage.attention.releases import CACHE
from ullage.attention.segments import arrange, attention_of_row, host_lengths
from ullage.attention.varlen import _block_mask, chunked, flex_attention, flex_problem, varlen_attention

pytestmark = pytest.mark.parity

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "attn_pdrop": 0.0}
WINDOWED = {"sliding_window": 8}
MIXED = ["full_attention", "sliding_attention"]
GEMMA3 = {**WINDOWED, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
MODELS = {
    "llama": {}, "qwen3": {}, "mistral": WINDOWED, "gemma3_text": GEMMA3, "gpt2": GPT2,
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip
MORE_MODELS = {
    "qwen2": {},
    "qwen2-windowed": {**WINDOWED, "use_sliding_window": True, "max_window_layers": 0, "layer_types": MIXED},
    "phi3": WINDOWED,
    "olmo2": {},
    "olmo3": WINDOWED,
    "qwen3_moe": EXPERTS,
    "smollm3": {},
    "gpt_neox": {},
    "cohere2": {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": WINDOWED,
    "deepseek_v3": LATENT,
}
LENGTHS = (1, 7, 33, 2, 20, 7, 7, 150, 1)


def build(name, implementation="ullage", auto=AutoModelForCausalLM, **sizes):
    config = AutoConfig.for_model(name.partition("-")[0], **{**SIZES, **sizes})
    torch.manual_seed(1)
    return auto.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()


def samples_of(lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator) for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def gradients(model):
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out


def packed(model, samples, **keywords):
    out = model(**RaggedBatch.from_samples(samples).to_flattened(), **keywords)
    out.loss.backward()
    return out.logits[0].detach(), float(out.loss.detach()), gradients(model)


def one_by_one(model, samples):
    model.set_attn_implementation("sdpa")
    logits, loss = [], 0.0
    counted = sum(len(sample["labels"]) - 1 for sample in samples)
    for sample in samples:
        out = model(input_ids=sample["input_ids"][None]).logits[0]
        logits.append(out.detach())
        if len(out) > 1:
            part = F.cross_entropy(out[:-1], sample["labels"][1:], reduction="sum") / counted
            part.backward()
            loss += float(part.detach())
    model.set_attn_implementation("ullage")
    return torch.cat(logits), loss, gradients(model)


def assert_same(found, expected, tolerance=1e-5):
    assert (found[0] - expected[0]).abs().max() < tolerance
    assert abs(found[1] - expected[1]) < tolerance
    assert found[2].keys() == expected[2].keys()
    worst = max((float((found[2][name] - g).abs().max()), name) for name, g in expected[2].items())
    assert worst[0] < tolerance, worst
    assert max(float(g.abs().max()) for g in expected[2].values()) > 1e-3  # there is something to compare


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MODELS)])
def test_packed_equals_one_by_one(name):
    model = build(name, **{**MODELS, **MORE_MODELS}[name])
    assert supports_packing(model)
    samples = samples_of(LENGTHS)
    assert_same(packed(model, samples), one_by_one(model, samples))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_cache_of_a_plain_call_changes_nothing(name):
    model = build(name, **MODELS[name])
    batch = RaggedBatch.from_samples(samples_of(LENGTHS)).to_flattened()
    default = model(**batch)
    assert default.get(CACHE) is not None
    without = model(**batch, use_cache=False)
    assert without.get(CACHE) is None
    assert torch.equal(default.logits, without.logits)


def test_bfloat16_and_float64():
    samples = samples_of(LENGTHS)
    model = build("llama").double()
    found, expected = packed(model, samples), one_by_one(model, samples)
    assert_same(found, expected, 1e-6)
    model = model.bfloat16()
    assert (packed(model, samples)[0] - expected[0]).abs().max() < 0.05


def test_dropout_keeps_sequences_apart():
    model = build("llama", attention_dropout=0.5).train()
    first, other, second = (sample["input_ids"] for sample in samples_of((9, 9, 14)))
    rows = []
    for head in (first, other):
        torch.manual_seed(0)
        batch = RaggedBatch.from_samples([{"input_ids": head}, {"input_ids": second}])
        rows.append(model(**batch.to_flattened()).logits[0, 9:])
    assert torch.equal(*rows)
    assert (rows[0] - model.eval()(input_ids=second[None]).logits[0]).abs().max() > 1e-3


def test_a_sequence_that_is_not_a_number_stays_alone():
    model = build("mistral", **WINDOWED)
    samples = samples_of((90, 5, 33, 33))
    batch = RaggedBatch.from_samples(samples)
    keywords = batch.to_flattened()
    del keywords["input_ids"]
    embedded = model.get_input_embeddings()(batch["input_ids"])[None].detach()
    embedded[0, 0:95] = float("nan")
    logits = model(inputs_embeds=embedded, **keywords).logits[0]
    assert logits[:95].isnan().all()
    expected = torch.cat([model(input_ids=sample["input_ids"][None]).logits[0] for sample in samples[2:]])
    assert (logits[95:] - expected).abs().max() < 1e-5


def test_slots_with_padding_and_the_placeholder_run():
    model = build("llama")
    batch = RaggedBatch.from_samples(samples_of((3, 6)), pad_to_multiple_of=8)
    logits = model(**batch.to_flattened()).logits[0]
    alone = model(input_ids=batch["input_ids"][None, 8:14]).logits[0]
    assert (logits[8:14] - alone).abs().max() < 1e-5
    assert model(**batch.placeholder().to_flattened()).logits.shape == (1, 1, SIZES["vocab_size"])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_training_equals_sdpa(name, side):
    model = build(name, **MODELS[name])
    padded = RaggedBatch.from_samples(samples_of((5, 30, 1, 17))).to_padded(side=side)
    results = []
    for implementation in ("ullage", "sdpa"):
        model.set_attn_implementation(implementation)
        out = model(**padded)
        out.loss.backward()
        results.append((out.logits.detach(), float(out.loss.detach()), gradients(model)))
    assert_same(*results, 1e-7)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generation_equals_sdpa(name, options):
    model = build(name, **MODELS[name])
    padded = RaggedBatch.from_samples(samples_of((5, 12, 1))).to_padded(side="left")
    out = []
    for implementation in ("ullage", "sdpa"):
        model.set_attn_implementation(implementation)
        out.append(
            model.generate(
                input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], max_new_tokens=9,
                do_sample=False, output_scores=True, return_dict_in_generate=True, disable_compile=True, **options,
            )
        )  # fmt: skip
    assert torch.equal(out[0].sequences, out[1].sequences)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(out[0].scores, out[1].scores))


def test_unpadded_and_four_dimensional_masks_equal_sdpa():
    model = build("llama")
    ids = torch.stack([sample["input_ids"] for sample in samples_of((11, 11))])
    mask = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    mask[:, :, 5:, :3] = False
    for keywords in ({}, {"attention_mask": mask}, {"attention_mask": torch.ones(2, 11)}):
        model.set_attn_implementation("sdpa")
        expected = model(input_ids=ids, **keywords).logits
        model.set_attn_implementation("ullage")
        assert torch.equal(model(input_ids=ids, **keywords).logits, expected)


# What is refused.

REFUSED = {
    "bert": ("first token", {"is_decoder": False}),
    "llama4_text": ("places in the row", {"num_local_experts": 2, "no_rope_layers": [1, 0]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_before_and_in_forward(name):
    told, sizes = REFUSED[name]
    model = build(name, auto=AutoModel, **sizes)
    assert not supports_packing(model)
    assert told in (packing_problem(model) or "")
    with pytest.raises(InputError, match=f"packed sequences see each other: .*{told}"):
        require_packing(model)
    batch = RaggedBatch.from_samples([{"input_ids": sample["input_ids"]} for sample in samples_of((9, 30))])
    with pytest.raises(InputError, match=told):
        model(**batch.to_flattened())


ALONE = "do not get what they get alone"
MEETING = dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "rwkv", "lfm2"), ALONE)
MEETING |= {"nemotron": "cu_seq_lens_q was given to the model, but did not reach its attention"}
MEETING |= dict.fromkeys(("bloom", "mpt", "doge"), "this model changes the attention mask itself")


@pytest.mark.parametrize("name", MEETING)
def test_a_model_whose_tokens_meet_elsewhere_is_refused(name):
    model = tiny_model(name, "causal", attn_implementation="ullage")
    with pytest.raises(InputError, match=MEETING[name]) as caught:
        require_packing(model)
    assert MEETING[name] != ALONE or type(model).__name__ in str(caught.value)


def test_position_bias_is_refused():
    config = AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=64)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="ullage").eval()
    with pytest.raises(InputError, match="encoder-decoder"):
        require_packing(model)
    ids = samples_of((9,))[0]["input_ids"][None]
    with pytest.raises(InputError, match="position_bias"):
        model(input_ids=ids, labels=ids)


def test_another_implementation_and_a_cache_beside_the_lengths_are_refused():
    with pytest.raises(InputError, match=r"attn_implementation='sdpa', which does not read cu_seq_lens.*Load it with"):
        require_packing(build("llama", implementation="sdpa"))
    model = build("llama")
    batch = RaggedBatch.from_samples(samples_of((4, 6)))
    keywords = batch.to_flattened()
    filled = model(input_ids=batch["input_ids"][None])[CACHE]
    with pytest.raises(InputError, match=r"cannot continue a cache.*20 keys, 10 queries"):
        model(**keywords, **{CACHE: filled})


def test_positions_that_start_anew_without_lengths_are_refused():
    model = build("gpt2", **GPT2)
    batch = RaggedBatch.from_samples(samples_of((4, 6))).to_flattened()
    only = {name: batch[name] for name in ("input_ids", "position_ids")}
    for use_cache in (True, False):
        with pytest.raises(InputError, match="position_ids restart within a row"):
            model(**only, use_cache=use_cache)
    later = torch.arange(5, 15)[None]  # one sequence from a later position is none of our business
    model(input_ids=batch["input_ids"], position_ids=later)


@pytest.mark.parametrize(("change", "message"), [
    ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "does not tile the row.*sum to 10 tokens.*9 in 2"),
    ({"cu_seq_lens_k": torch.tensor([0, 5, 10])}, "cu_seq_lens_k differs"),
    ({"attention_mask": torch.ones(1, 10, dtype=torch.int64)}, "attention_mask was given together with cu_seq_lens"),
    ({"cu_seq_lens_q": None}, "cu_seq_lens_k came without cu_seq_lens_q"),
    ({"cu_seq_lens_q": torch.tensor([0.0, 10.0])}, "must hold cumulated lengths.*float32"),
    ({"something": torch.ones(1)}, "does not honour the keyword 'something'"),
    ({"output_attentions": True}, "attention weights as an output"),
    ({"input_ids": torch.ones(2, 10, dtype=torch.int64)}, "one row.*batch size 1, found 2"),
], ids=str)  # fmt: skip
def test_bad_keywords_are_named(change, message):
    model = build("llama")
    keywords = {**RaggedBatch.from_samples(samples_of((4, 6))).to_flattened(), **change}
    del keywords["labels"]
    if "cu_seq_lens_q" in change and change["cu_seq_lens_q"] is not None:
        keywords["cu_seq_lens_k"] = keywords["cu_seq_lens_q"]
    with pytest.raises(InputError, match=message):
        model(**keywords)


def oracle(query, key, value, lengths, window, scale, causal=True, softcap=None, sinks=None):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(sequence))
    distance = place[:, None] - place
    mask = sequence[:, None] == sequence
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(query)], value)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90) | st.sampled_from([63, 64, 65, 128, 129, 200]), min_size=1, max_size=9).filter(
        any
    ),
    window=st.none() | st.integers(1, 100),
    groups=st.sampled_from([1, 2, 4]),
    scale=st.none() | st.floats(0.1, 2),
    causal=st.booleans(),
    softcap=st.none() | st.sampled_from([0.01, 2.0, 1e4]),
    sink=st.none() | st.sampled_from([-1e4, 0.0, 3.0, 1e4]),
    dims=st.sampled_from([(8, 8), (8, 4), (4, 8)]),
    is_one_call=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_attention_is_that_of_the_block_mask(
    lengths, window, groups, scale, causal, softcap, sink, dims, is_one_call, seed
):
    generator = torch.Generator().manual_seed(seed)
    total, heads = sum(lengths), 4 // groups
    shapes = [(total, 4, dims[0]), (total, heads, dims[0]), (total, heads, dims[1]), (total, 4, dims[1])]
    *inputs, direction = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    sinks = None if sink is None else torch.randn(4, dtype=torch.float64, generator=generator) + sink
    inputs += [] if sinks is None else [sinks]
    for tensor in inputs:
        tensor.requires_grad_()
    options = {"window": window, "scale": scale, "causal": causal, "softcap": softcap, "sinks": sinks}
    # A compiled graph has it as one operator.
    if is_one_call:
        bounds = torch.tensor([0, *np.cumsum(lengths)])
        found = attention_of_row(*inputs[:3], bounds, chunk=None, **options)
    else:
        found = packed_attention(*inputs[:3], lengths, **options)
    expected = oracle(*inputs[:3], lengths, window, scale, causal, softcap, sinks)
    assert torch.allclose(found, expected, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, direction), torch.autograd.grad(expected, inputs, direction)
    ):
        assert torch.allclose(ours, theirs, atol=1e-11)


@pytest.mark.parametrize(("dtype", "limits"), [(torch.float32, (1e-6, 1e-5)), (torch.bfloat16, (0.02, 0.05))], ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_long_sequences_with_sinks_and_soft_caps(softcap, dtype, limits):
    """Longer than a block of queries, and in half precision, against float64."""
    generator = torch.Generator().manual_seed(1)
    lengths = [300, 1, 515]
    exact = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    exact.append(torch.randn(4, dtype=torch.float64, generator=generator))
    rounded = [each.to(dtype).requires_grad_() for each in exact]
    exact = [each.detach().double().requires_grad_() for each in rounded]
    found = packed_attention(*rounded[:3], lengths, softcap=softcap, sinks=rounded[3])
    expected = oracle(*exact[:3], lengths, None, None, True, softcap, exact[3])
    assert (found - expected).abs().max() < limits[0] * expected.abs().max()
    direction = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    ours = torch.autograd.grad(found, rounded, direction.to(dtype))
    for one, other in zip(ours, torch.autograd.grad(expected, exact, direction)):
        assert (one - other).abs().max() < limits[1] * other.abs().max()


def test_under_autocast_what_norms_have_left_in_float32_is_cast():
    """As torch's own attention does: Qwen3's norms give float32 queries and keys beside values in bfloat16."""
    query, key, value = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    expected = packed_attention(*(each.bfloat16() for each in (query, key, value)), [4, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed_attention(query, key, value.bfloat16(), [4, 5]), expected)
        exact = [each.double() for each in (query, key, value)]
        assert packed_attention(*exact, [4, 5]).dtype == torch.float64


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_a_model_is_given_with_dropout_and_without_lengths(dropout):
    """Rows of a batch behind a mask, as in an evaluation; with dropout a weight is zero or twice what it is."""
    query, key, value, sinks = (torch.randn(shape) for shape in ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (4,)))
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    scores = Scores(causal=False, softcap=1.5)
    value = torch.eye(9, 8).expand(2, 2, 9, 8)  # outputs are the weights of the first eight keys
    found = attend(query, key, value, scores, mask=mask, dropout=dropout, sinks=sinks)
    for row in range(2):
        expected = oracle(
            *(each[row].transpose(0, 1) for each in (query, key, value)), [9], None, None, True, 1.5, sinks
        )
        ours = found[row].transpose(0, 1)
        kept = ours != 0
        assert dropout == 0 or 0.2 < kept[expected != 0].float().mean() < 0.8
        assert torch.allclose(ours[kept], expected[kept] / (1 - dropout), atol=1e-6)


@pytest.mark.parametrize("name", ["llama4_text", "gpt_oss", "gemma2"])
def test_a_plain_call_of_a_packed_model_is_its_own(name):
    model = tiny_model(name, "causal")
    ids = torch.randint(3, 30, (2, 21))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    keywords = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        expected = model(**keywords).logits
        with pack_model(model):
            assert torch.allclose(model(**keywords).logits[mask.bool()], expected[mask.bool()], atol=1e-5)
            assert not torch.allclose(model(ids, use_cache=False).logits[0], expected[1])


@pytest.mark.matrix
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 64, 128, 129, 400])
def test_the_blocks_that_see_each_other_are_those_that_torch_finds_pair_by_pair(window, causal):
    """Torch's ``create_block_mask`` asks ours of every pair of tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    for lengths in ([700], [1, 127, 128, 300, 0, 84], [5], [256, 256], [130] * 6, [1] * 300):
        cu_seqlens, total = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
        ours = _block_mask(cu_seqlens, total, window, causal)
        theirs = create_block_mask(ours.mask_mod, None, None, total, total, device="cpu")
        assert ours.shape == theirs.shape
        for kind in ("kv", "full_kv", "q", "full_q"):
            counts = getattr(ours, f"{kind}_num_blocks")
            assert torch.equal(counts, getattr(theirs, f"{kind}_num_blocks"))
            used = torch.arange(getattr(ours, f"{kind}_indices").shape[-1]) < counts[..., None]
            found, expected = (getattr(mask, f"{kind}_indices") for mask in (ours, theirs))
            assert torch.equal(found[used], expected[used])


@pytest.mark.matrix
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 300])
def test_flex_attention_sees_the_same(window, causal):
    lengths = [30, 1, 0, 64, 200]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    query, key, value = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    from torch.nn.attention import flex_attention as flex

    with torch.no_grad():
        block_mask = _block_mask(cu_seqlens, sum(lengths), window, causal)
        rows = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        found = flex.flex_attention(*rows, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)
    expected = oracle(query, key, value, lengths, window, None, causal)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_the_varlen_kernel_accepts_the_call(window, causal):
    """Shapes and arguments only, on meta tensors: the kernel itself runs on CUDA alone."""
    query, key, value = (
        torch.randn(20, heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    cu_seqlens = torch.zeros(4, dtype=torch.int32, device="meta")
    mixed = varlen_attention(query, key, value, cu_seqlens, 9, window=window, scale=0.3, causal=causal)
    mixed.sum().backward()
    assert mixed.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape


@pytest.mark.slow
def test_flex_attention_compiles_without_gradients():
    lengths = [30, 1, 64]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    query, key, value = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        found = [flex_attention(query, key, value, cu_seqlens, softcap=softcap) for softcap in (None, 1.5)]
        in_chunks = flex_attention(query, key, value, chunked(cu_seqlens, 20))
    assert torch.allclose(found[0], oracle(query, key, value, lengths, None, None), atol=1e-5)
    assert torch.allclose(found[1], oracle(query, key, value, lengths, None, None, softcap=1.5), atol=1e-5)
    assert torch.allclose(in_chunks, oracle(query, key, value, [20, 10, 1, 20, 20, 20, 4], None, None), atol=1e-5)


class CountCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


def test_many_short_sequences_and_long_windows_take_few_calls():
    lengths = np.random.default_rng(0).integers(1, 40, 400).tolist()
    tensors = [torch.randn(sum(lengths), 2, 8) for _ in range(3)]
    with CountCalls() as count, torch.no_grad():
        packed_attention(*tensors, lengths)
    assert 0 < count.calls <= 39
    in_order = arrange((7, 7, 7), None, torch.device("cpu"))
    assert in_order.places is None
    assert in_order.buckets == ((3, 7),)
    # A long window does not compute the square.
    tensors = [torch.randn(4096, 1, 8) for _ in range(3)]
    arrangement = arrange((4096,), 64, torch.device("cpu"))
    assert len(arrangement.blocks) == 64
    with CountCalls() as count, torch.no_grad():
        packed_attention(*tensors, [4096], window=64)
    assert count.calls == 2  # the first block, and all that look back on one


@pytest.mark.parametrize(("dim", "value_dim", "dtype", "served"), [
    (16, 16, torch.float32, True), (24, 16, torch.bfloat16, True), (8, 8, torch.float32, False),
    (16, 8, torch.float32, False), (16, 16, torch.float64, False),
])  # fmt: skip
def test_flex_attention_is_not_asked_for_what_its_kernel_refuses(dim, value_dim, dtype, served):
    """Its products need 16 columns: a llama of head dimension 8 raised on CUDA in float32."""
    cuda = torch.device("cuda")
    assert (flex_problem(cuda, dtype, (dim, value_dim)) is None) is served
    assert flex_problem(cuda, dtype, (dim, value_dim), 0.1) == "attention dropout"
    assert flex_problem(torch.device("cpu"), torch.float32, (16, 16)) is not None


def test_lengths_follow_a_buffer_that_is_written_anew():
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    assert host_lengths(cu_seqlens) == [3, 2]
    cu_seqlens.copy_(torch.tensor([0, 1, 5]))
    assert host_lengths(cu_seqlens) == [1, 4]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert"])
def test_a_layer_is_one_graph_for_rows_of_every_shape(name):
    kind = "masked" if name == "bert" else "causal"
    eager, model = (tiny_model(name, kind) for _ in range(2))
    pack_model(eager), pack_model(model)
    torch._dynamo.reset()
    graphs = CompileCounter()
    for layer in model.bert.encoder.layer if name == "bert" else model.model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    counts = []
    for lengths in np.random.default_rng(2).integers(1, 40, (12, 4)):
        samples = samples_of(lengths[: int(lengths[0]) % 4 + 1])
        row = RaggedBatch.from_samples(samples).to_flattened()
        row = {**row, "input_ids": row["input_ids"] % 30}
        row.pop("labels")
        assert torch.allclose(model(**row).logits, eager(**row).logits, atol=1e-6)
        counts.append(graphs.frame_count)
    assert counts[3] == counts[-1] > 0, "compiled anew for another shape"
