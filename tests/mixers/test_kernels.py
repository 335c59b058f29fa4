"""Mixers by kernels that take lengths: told where sequences lie in one call of a row, or run by lengths.

The kernels are stand-ins with the packages' signatures (``tests.support.kernel_standins``).
"""

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch

from maintenance.tiny import tiny_config, tiny_model
from tests.support.kernel_standins import CALLS, PACKAGES, file_of
from ullage import Layout, RaggedBatch, pack_model
from ullage.mixers.forwards import FoundForward

pytestmark = pytest.mark.parity

#: Type -> its file, and the functions that one of its mixers calls in training. Each takes lengths.
TYPES = {
    "qwen3_next": ("qwen3_next", ["causal_conv1d_fn", "chunk_gated_delta_rule"]),
    "mamba2": ("mamba2", ["mamba_split_conv1d_scan_combined"]),
    "lfm2": ("lfm2", ["causal_conv1d_fn"]),
    "kimi_linear": ("kimi_linear", ["causal_conv1d_fn", "chunk_kda"]),
    "qwen3_5_text": ("qwen3_5", ["causal_conv1d_fn", "chunk_gated_delta_rule"]),
    "qwen3_5_moe_text": ("qwen3_5_moe", ["causal_conv1d_fn", "chunk_gated_delta_rule"]),
    "olmo_hybrid": ("olmo_hybrid", ["causal_conv1d_fn", "chunk_gated_delta_rule"]),
    "bailing_hybrid": ("bailing_hybrid", ["causal_conv1d_fn", "chunk_kda"]),
    "bamba": ("bamba", ["mamba_split_conv1d_scan_combined"]),
    "granitemoehybrid": ("granitemoehybrid", ["mamba_split_conv1d_scan_combined"]),
    "falcon_h1": ("falcon_h1", ["mamba_split_conv1d_scan_combined"]),
    "nemotron_h": ("nemotron_h", ["mamba_split_conv1d_scan_combined"]),
    "zamba2": ("zamba2", ["mamba_split_conv1d_scan_combined"]),
    "lfm2_moe": ("lfm2_moe", ["causal_conv1d_fn"]),
    "inkling_text": ("inkling", ["causal_conv1d_fn"]),
}
IN_EVALUATION = {"mamba_split_conv1d_scan_combined": ["causal_conv1d_fn", "mamba_chunk_scan_combined"]}
QUICK = ("qwen3_next", "mamba2", "lfm2")
#: In slots of multiples of four: padding, sequences of one token, an empty one, one as long as its slot.
LENGTHS = (7, 1, 0, 4, 12, 1)


def each(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def model_of(module, model_type):
    """The tiny model of a type, with the classes of another execution of its file."""
    made = tiny_model(model_type, "causal")
    model = getattr(module, type(made).__name__)(tiny_config(model_type))
    model.load_state_dict(made.state_dict())
    return model


def rows_of(seed=0, lengths=LENGTHS):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=random) for length in lengths]


def packed_row(rows, multiple=4):
    samples = [{"input_ids": row, "labels": row} for row in rows if len(row)]
    batch = RaggedBatch.from_samples(samples, pad_to_multiple_of=multiple)
    layout = Layout([len(row) for row in rows], pad_to_multiple_of=multiple)
    return RaggedBatch({name: batch[name] for name in batch.names}, layout).to_flattened()


def split(row, values):
    """The values of each sequence, without the padding of its slot."""
    starts = row["cu_seq_lens_q"].tolist()
    return torch.cat([values[start : start + length] for start, length in zip(starts, LENGTHS)])


def outcome(model, call):
    """Logits, and the gradients of their weighed sum."""
    logits = call()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    return logits.detach(), torch.cat([each.flatten() for each in found if each is not None])


def told_parts(model):
    """The parts of a packed model that are told the lengths of a row."""
    parts = (vars(module).get("forward") for module in model.modules())
    return [each for each in parts if isinstance(each, FoundForward) and each.length_keywords]


def alone(model, device=None):
    rows = [row.to(device) for row in rows_of() if len(row)]
    return torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def assert_near(found, expected, limit):
    assert float((found - expected).abs().max() / expected.abs().max()) < limit


@pytest.mark.matrix
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("model_type", each(TYPES))
def test_a_row_is_one_call_of_each_kernel_and_each_sequence_gets_what_it_gets_alone(model_type, training):
    name, kernels = TYPES[model_type]
    with file_of(name) as module:
        model = model_of(module, model_type).train(training)
        expected, gradients = outcome(model, lambda: alone(model))
        # The stand-ins compute what torch's own functions do.
        assert_near(alone(tiny_model(model_type, "causal")).detach(), expected, 1e-5)
        row = packed_row(rows_of())
        with pack_model(model):
            CALLS.clear()
            found, found_gradients = outcome(model, lambda: split(row, model(**row).logits[0]))
            told = {type(part.module) for part in told_parts(model)}
        # Those within an attention that runs by lengths, as Inkling's, are called once too.
        mixers = [module for module in model.modules() if type(module) in told]
        assert mixers
        assert sorted(CALLS) == sorted((kernels if training else IN_EVALUATION.get(kernels[0], kernels)) * len(mixers))
        assert_near(found, expected, 1e-5)
        assert_near(found_gradients, gradients, 1e-4)


@pytest.mark.parametrize("model_type", each(TYPES))
def test_a_neighbour_of_other_tokens_or_nan_changes_nothing(model_type):
    with file_of(TYPES[model_type][0]) as module:
        model = model_of(module, model_type).train()
        rows = rows_of()
        with pack_model(model), torch.no_grad():
            embed = model.get_input_embeddings()
            row = packed_row(rows)
            found = []
            for change in (None, "other", "nan"):
                embedded = embed(row["input_ids"]).clone()
                if change is not None:  # the fourth sequence, between others
                    embedded[0, 12:16] = torch.nan if change == "nan" else embedded[0, :4].flip(0)
                keywords = {key: value for key, value in row.items() if key not in ("input_ids", "labels")}
                logits = model(inputs_embeds=embedded, **keywords).logits[0]
                found.append(torch.cat([logits[:12], logits[16:]]))
                assert bool(logits[12:16].isnan().all()) == (change == "nan")
        if "mamba_split_conv1d_scan_combined" in TYPES[model_type][1]:  # shares chunks, and rounds together
            assert_near(found[1], found[0], 1e-5)
            return
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("model_type", "packages"), [
    ("qwen3_next", ("fla",)), ("qwen3_next", ("causal_conv1d",)), ("qwen3_next", ()),
    pytest.param("mamba2", ("causal_conv1d",), marks=pytest.mark.slow),
    pytest.param("mamba", ("causal_conv1d", "mamba_ssm"), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_mixer_of_which_a_function_takes_no_lengths_runs_by_lengths(model_type, packages):
    with file_of(model_type, packages) as module:
        model = model_of(module, model_type).eval()
        expected = alone(model)
        row = packed_row(rows_of())
        with pack_model(model):
            assert not told_parts(model)
            assert_near(split(row, model(**row).logits[0]), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_is_told_the_same_lengths_again(reentrant):
    with file_of("qwen3_next") as module:
        model = model_of(module, "qwen3_next").train()
        other = copy.deepcopy(model)
        other.activation_checkpointing_enable({"use_reentrant": reentrant})
        row, after = packed_row(rows_of()), packed_row(rows_of(1, (30, 2)))
        with pack_model(model), pack_model(other):
            expected = outcome(model, lambda: model(**row).logits)
            logits = other(**row).logits
            other(**after)  # another row before the backward of the first
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
            (logits * weights).sum().backward()
        found = [each.grad.flatten() for each in other.parameters() if each.grad is not None]
        assert_near(torch.cat(found), expected[1], 1e-5)


def test_the_stand_ins_have_the_signatures_of_the_packages():
    watched = json.loads((Path(__file__).parents[2] / "maintenance" / "watched.json").read_text())
    for package, functions in PACKAGES.items():
        theirs = {name: text for names in watched[package]["files"].values() for name, text in names.items()}
        for function in functions:
            ours = str(inspect.signature(function))[1:-1]
            assert ours.replace(" ", "") == theirs[function.__name__].replace("float('inf')", "inf").replace(" ", "")
