"""Sequences with images in one row: each gets what it gets alone, whatever the others have, in every kind of model."""

import copy

import pytest
import torch

from maintenance.pictures import picture_samples, takes_clips
from maintenance.tiny import tiny_model
from tests.support import picture_ranks
from tests.support.processes import run, values
from ullage import RaggedBatch, pack_model
from ullage.attention import packing_problem
from ullage.core.errors import InputError
from ullage.mixers import run_towers_always
from ullage.mixers.items import alone_form

pytestmark = pytest.mark.parity

#: The way of each type, and how its images are kept apart.
TYPES = {
    "qwen2_vl": ("native", "row"), "qwen2_5_vl": ("native", "row"), "qwen3_vl": ("native", "row"),
    "qwen3_5": ("mixers", "row"), "gemma3": ("native", "row"), "llava": ("native", "row"),
    "llava_onevision": ("native", "row"), "internvl": ("native", "row"), "smolvlm": ("native", "row"),
    "mistral3": ("native", "row"), "paligemma": ("native", "row"), "mllama": ("native", "row"),
    # By sequence: as a whole in a row with images, or always.
    "deepseek_vl": ("native", "sequences"), "idefics": ("whole", "sequences"),
}  # fmt: skip
#: Those of the quick tests: segments and three axes, rows of a batch, masks with parts both ways.
QUICK = ("qwen2_5_vl", "llava", "gemma3")
BY_KIND = [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in list(TYPES)[:-1]]


def made(model_type, images=(1, 0, 3, 0, 2), dtype=torch.float64, clips=True):
    """A model and sequences of it, with a clip in every other one where it takes clips."""
    model = tiny_model(model_type, "image").to(dtype)
    clips = [place % 2 for place in range(len(images))] if clips and takes_clips(model) else None
    samples = picture_samples(model, images=images, videos=clips)
    return model, [cast(sample, dtype) for sample in samples]


def cast(sample, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in sample.items()}


def row_of(samples, **options):
    return RaggedBatch.from_samples(samples, **options).to_flattened()


def alone(model, samples):
    """Logits [T, V] of all sequences, and the mean of their losses over labels."""
    outputs = [model(**alone_form(model, sample)) for sample in samples]
    counts = [int((sample["labels"][1:] != -100).sum()) for sample in samples]
    loss = sum(output.loss * count for output, count in zip(outputs, counts)) / sum(counts)
    return torch.cat([output.logits[0] for output in outputs]), loss


def gradients(model, loss):
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: each for name, each in zip(parameters, found) if each is not None}


def require_near(found, expected, limit=1e-5):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= limit * max(float(expected.abs().max()), 1e-6)


def require_gradients_near(found, expected, limit=1e-5):
    assert found.keys() == expected.keys()
    most = max(float(each.abs().max()) for each in expected.values())
    for name, wanted in expected.items():
        scale = max(float(wanted.abs().max()), 1e-3 * most)
        assert float((found[name] - wanted).abs().max()) <= limit * scale, name


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", BY_KIND)
def test_each_sequence_gets_what_it_gets_alone(model_type):
    model, samples = made(model_type)
    logits, loss = alone(model, samples)
    expected = gradients(model, loss)
    assert any("vision" in name or "visual" in name for name in expected)
    with pack_model(model) as packed:
        assert (packed.way.kind, packed.way.items) == TYPES[model_type]
        assert packing_problem(model) is None or packed.way.kind in ("whole", "mixers")
        outputs = model(**row_of(samples))
        require_near(outputs.logits[0], logits, 1e-10)
        require_near(outputs.loss, loss, 1e-6)  # which transformers computes in float32
        require_gradients_near(gradients(model, outputs.loss), expected, 1e-6)
    assert not any(
        {"forward", "get_image_features", "get_video_features"} & set(vars(each)) for each in model.modules()
    )
    require_near(alone(model, samples)[0], logits, 0)


@pytest.mark.parametrize("model_type", BY_KIND)
def test_an_image_of_nan_reaches_its_own_sequence_alone(model_type):
    model, samples = made(model_type, dtype=torch.float32)
    with pack_model(model), torch.no_grad():
        before = model(**row_of(samples)).logits[0]
        ill = copy.deepcopy(samples)
        ill[2]["pixel_values"].fill_(float("nan"))
        after = model(**row_of(ill)).logits[0]
    for place, (good, bad) in enumerate(
        zip(*(each.split([len(sample["input_ids"]) for sample in samples]) for each in (before, after)))
    ):
        if place == 2:
            assert bad.isnan().any()
        else:
            require_near(bad, good)


@pytest.mark.parametrize("model_type", BY_KIND)
def test_a_sequence_with_too_few_image_tokens_is_named(model_type):
    model, samples = made(model_type, images=(1, 2, 1))
    token = next(
        value for name in ("image_token_id", "image_token_index") if (value := getattr(model.config, name, None))
    )
    # One of the second sequence's tokens went over to the third: all in all their number is right.
    ids = [samples[place]["input_ids"] for place in (1, 2)]
    ids[0][(ids[0] == token).nonzero()[-1]] = 5
    ids[1][-1] = token
    with pack_model(model) as packed:
        if packed.way.items == "sequences":
            pytest.skip("the model itself sees each sequence alone")
        with pytest.raises(InputError, match="sequence 1 of the packed row has not as many image tokens"):
            model(**row_of(samples))


def test_pixels_without_their_rows_by_sequence_are_refused():
    model, samples = made("qwen2_5_vl")
    row = row_of(samples)
    wrong = {**row["cu_seq_items"], "image_grid_thw": row["cu_seq_items"]["image_grid_thw"][:-1]}
    unbounded = {name: value for name, value in row.items() if not name.startswith(("cu_seq_lens", "max_length"))}
    with pack_model(model):
        with pytest.raises(InputError, match=r"needs cu_seq_items.*RaggedBatch.to_flattened"):
            model(**{name: value for name, value in row.items() if name != "cu_seq_items"})
        with pytest.raises(InputError, match="cu_seq_items does not cover image_grid_thw"):
            model(**row | {"cu_seq_items": wrong})
        with pytest.raises(InputError, match="cu_seq_items came without cu_seq_lens_q"):
            model(**unbounded)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", pytest.param("paligemma", marks=pytest.mark.slow)])
def test_padding_behind_a_sequence_is_seen_by_none(model_type):
    model, samples = made(model_type, images=(1, 0, 2))
    logits, _ = alone(model, samples)
    batch = RaggedBatch.from_samples(samples, pad_to_multiple_of=8)
    with pack_model(model):
        found = model(**batch.to_flattened()).logits[0]
    require_near(found[torch.from_numpy(~batch.layout.padding_mask())], logits, 1e-10)


STOOD_IN = [each if each == "qwen3_vl" else pytest.param(each, marks=pytest.mark.slow) for each in TYPES]


@pytest.mark.parametrize("model_type", STOOD_IN[:-2])
def test_a_row_of_text_runs_the_tower_where_that_is_asked_for_and_nothing_changes(model_type):
    model, samples = made(model_type, images=(0, 0), dtype=torch.float32, clips=False)
    with pack_model(model):
        without = model(**row_of(samples))
        trained = gradients(model, without.loss)
        kinds = ("image", "video") if takes_clips(model) else ("image",)
        assert run_towers_always(model, kinds)
        outputs = model(**row_of(samples))
        found = gradients(model, outputs.loss)
        assert run_towers_always(model, ())
        assert gradients(model, model(**row_of(samples)).loss).keys() == trained.keys()
    assert torch.equal(outputs.logits, without.logits)
    assert any("vision" in name or "visual" in name for name in found.keys() - trained.keys())
    assert all(not found[name].any() for name in found.keys() - trained.keys())


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("mllama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_get_the_images_of_their_row_again(model_type, reentrant):
    model, samples = made(model_type)
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    alone(model, samples)[1].backward()
    # The older kind gives a tower no gradients, whose input asks for none.
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    with pack_model(model):
        first, second = model(**row_of(samples)), model(**row_of(samples[:2]))  # another row before the backward
        assert float(second.loss.detach()) != float(first.loss.detach())
        first.loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    require_gradients_near(found, expected, 1e-6)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_a_frozen_tower_keeps_nothing_for_a_backward(model_type):
    model, samples = made(model_type, dtype=torch.float32)
    text = {id(each) for each in model.get_decoder().parameters()} | {id(model.lm_head.weight)}
    for parameter in model.parameters():
        parameter.requires_grad = id(parameter) in text
    # As adapters with checkpoints ask: what is embedded requires a gradient, in the tower too.
    model.enable_input_require_grads()
    with pack_model(model):
        seen = []
        part = next(each for each in model.modules() if type(each).__name__.endswith(("VisionBlock", "EncoderLayer")))
        part.register_forward_hook(lambda module, given, output: seen.append(output))
        model(**row_of(samples)).loss.backward()
    assert seen
    assert not any(
        each.requires_grad for output in seen for each in [output[0] if isinstance(output, tuple) else output]
    )


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_generation_is_what_it_was(model_type):
    model, samples = made(model_type, images=(1, 0, 2), dtype=torch.float32)
    questions = [
        {name: value for name, value in alone_form(model, sample).items() if name != "labels"} for sample in samples
    ]
    options = {"max_new_tokens": 4, "do_sample": False}
    before = [model.generate(**question, **options) for question in questions]
    with pack_model(model):
        after = []
        for question in questions:
            model(**row_of(samples))
            after.append(model.generate(**question, **options))
    assert all(torch.equal(one, other) for one, other in zip(before, after))


def test_a_copy_is_packed_and_a_proof_takes_images():
    model, samples = made("qwen2_5_vl", images=(0, 1, 2), dtype=torch.float32)
    logits, _ = alone(model, samples)
    with pack_model(model, verify=samples) as packed:
        assert str(packed.way) == "native"
        copied = copy.deepcopy(model)
    require_near(copied(**row_of(samples)).logits[0], logits)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_with_text_alone_waits_for_no_other():
    types = ["qwen2_5_vl", "qwen3_5", "gemma3", "smolvlm", "mistral3", "mllama"]
    for found in values(run(picture_ranks.steps, 2, types, timeout=200, loads=("torch", "training"))):
        assert found.keys() == {*types}
        for model_type, (expected, *others) in found.items():
            for other in others:
                assert other == pytest.approx(expected, rel=1e-5), model_type


def features(self, *args, **kwargs):
    return super(type(self), self).get_image_features(*args, **kwargs)


def with_default(self, pixel_values, *args, scale=1.0, **kwargs):
    return features(self, pixel_values * scale, *args, **kwargs)


@pytest.mark.regression
@pytest.mark.parametrize(("model_type", "own"), [
    # The first calls it by place, the second by name and image by image.
    ("qwen2_5_vl", features),
    ("qwen2_5_vl", with_default),
    ("qwen2_5_vl", lambda self, pixels, grid=None, /, **kwargs: features(self, pixels, grid, **kwargs)),
    ("mistral3", with_default),
    ("mistral3", lambda self, **kwargs: features(self, **kwargs)),
])  # fmt: skip
def test_features_of_ones_own_get_what_the_model_gives_them(model_type, own):
    model, samples = made(model_type, images=(1, 0, 2), clips=False)
    model.model.__class__ = type("Own", (type(model.model),), {"get_image_features": own})
    logits, _ = alone(model, samples)
    with pack_model(model), torch.no_grad():
        require_near(model(**row_of(samples)).logits[0], logits, 1e-10)
