"""The story of PackedSequence under the Hugging Face Trainer.

Symptom: ``AssertionError`` from torch/nn/utils/rnn.py as soon as a collator gives a ``PackedSequence``, and, once that
is mended, further crashes in token counting and evaluation, and an ``eval_loss`` that depends on the batch size.
Cause: a ``PackedSequence`` is a namedtuple, and Trainer and accelerate take namedtuples, and batches, apart by rules
that do not hold for it.
Strategy: one ``to_device`` dispatched on types, one place that counts, evaluation that keeps samples; then the story's
own script runs after changing one import, on one process and on two, with the same numbers.
"""

import json

import pytest
import torch

from tests.support import story
from tests.support.launch import torchrun

pytestmark = pytest.mark.regression

CASES = list(story.COLLATORS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Every case on one process."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return {case: story.run_case(case, folder, {"include_num_input_tokens_seen": "all"}) for case in CASES}


def model_of(case):
    torch.manual_seed(0)
    return story.COLLATORS[case][1](story.StoryConfig())


def test_transformers_own_trainer_still_has_the_bug(tmp_path):
    """Should this fail one day, upstream mended it, and the page on pack_padded_sequence should say so."""
    import transformers

    trainer = story.make_trainer("all packed", str(tmp_path))
    theirs = transformers.Trainer(
        trainer.model, trainer.args, data_collator=story.collate_all_packed, train_dataset=trainer.train_dataset
    )
    with pytest.raises(AssertionError):
        theirs.train()


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_the_story_trains_evaluates_and_predicts(alone, case):
    result = alone[case]
    label = story.COLLATORS[case][2]
    samples = story.make_samples(13, 2, label)
    assert len(result["losses"]) == 4
    assert len(result["predictions"]) == len(samples)
    if label == "token" and case != "input_lengths":  # that collator sorts its samples
        assert [len(p) for p in result["predictions"]] == [len(s["input_ids"]) for s in samples]
        assert result["labels"] == [s["labels"] for s in samples]
    if label == "row":
        assert result["labels"] == [s["labels"] for s in samples]


def test_every_way_to_batch_gives_the_same_losses(alone):
    token_cases = [case for case in CASES if story.COLLATORS[case][2] == "token"]
    reference = alone["all packed"]
    for case in token_cases:
        assert alone[case]["losses"] == pytest.approx(reference["losses"], abs=2e-6)
        assert alone[case]["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-6)


def test_tokens_and_flops_count_real_tokens(alone):
    samples = story.make_samples(32, 1)
    seen = {case: alone[case]["tokens"] for case in CASES if case != "one label a row"}
    assert len(set(seen.values())) == 1
    tokens = next(iter(seen.values()))
    assert 16 < tokens < 16 * max(len(s["input_ids"]) for s in samples)
    parameters = model_of("all packed").num_parameters(exclude_embeddings=True)
    for case in seen:
        assert alone[case]["flos"] == 6 * tokens * parameters


@pytest.mark.slow
def test_two_processes_train_evaluate_and_predict_as_one(alone, tmp_path):
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "include_num_input_tokens_seen": "all",
    }
    torchrun(2, story.__file__, tmp_path, json.dumps([[case, options] for case in CASES]))
    results = json.loads((tmp_path / "results.json").read_text())
    for case, result in zip(CASES, results, strict=True):
        assert result["losses"] == pytest.approx(alone[case]["losses"], abs=2e-6), case
        assert result["eval_loss"] == pytest.approx(alone[case]["eval_loss"], abs=1e-6), case
        assert result["tokens"] == alone[case]["tokens"], case
        assert result["flos"] == alone[case]["flos"], case
        if case != "input_lengths":  # its collator sorts within its own batches
            for mine, theirs in zip(result["predictions"], alone[case]["predictions"], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_gradient_accumulation_is_exact(alone, tmp_path):
    """Means of unequal microbatches are weighed: two microbatches of two are one batch of four."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for case in ("all packed", "one label a row"):
        result = story.run_case(case, str(tmp_path), options)
        assert result["losses"] == pytest.approx(alone[case]["losses"], abs=2e-6)


@pytest.mark.slow
def test_iterable_datasets_and_workers(alone, tmp_path):
    """On one process an IterableDataset is accelerate's dispatch path, which would tear a PackedSequence apart.

    Ragged batches of streams: test_streams and test_metrics_distributed.
    """
    for options in ({"iterable": True}, {"dataloader_num_workers": 2}):
        result = story.run_case("all packed", str(tmp_path), options)
        assert result["eval_loss"] > 0
        assert len(result["predictions"]) == 13
        if "iterable" not in options:
            assert result["losses"] == pytest.approx(alone["all packed"]["losses"], abs=2e-6)
