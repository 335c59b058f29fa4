"""Models of every kind under the Trainer: packed, they train as on padded batches, whatever their heads take."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from maintenance.tiny import tiny_model
from tests.support import packed_models, packing_script
from tests.support.small_runs import on_ranks
from ullage import InputError
from ullage.mixers import pack_model
from ullage.training.batches import forms
from ullage.training.step.packing import Packer

#: Those that the quick tests train.
QUICK = ("qwen3_next", "bert", "t5", "llama_last", "bert_several", "llama_answers")
#: Heads that see padding as an answer: padded rows differ from single sequences by themselves.
SEES_PADDING = ("bert_answers", "llama_answers")


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Losses and norms of five steps on padded batches on one process, by family."""
    folder = str(tmp_path_factory.mktemp("padded"))
    found = {}

    def of(family):
        if family not in found:
            alone = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
            options = {**alone, "gradient_accumulation_steps": 4} if family in SEES_PADDING else {}
            found[family] = packed_models.run(family, folder, packed=False, **options)
        return found[family]

    return of


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (family not in QUICK))
        for family in (*packed_models.FAMILIES, *packed_models.HEADS)
    ],
)
def test_packed_training_is_training_on_padded_batches(padded, tmp_path, family):
    """Sequences of one token and of the whole capacity; a step in which no label of a shifted loss counts."""
    found, expected = packed_models.run(family, str(tmp_path)), padded(family)
    assert found["padding"] == [0.0] * 5
    if family not in SEES_PADDING:
        assert max(expected["padding"]) > 0.4
    assert min(norm for k, norm in enumerate(expected["norms"]) if k != 1) > 1e-3
    assert packed_models.largest_difference(found, expected) < 1e-5


#: By stage of ZeRO; how an engine reduces gradients does not depend on the model. Of stage 3 a layer called once more on
#: one rank, whose rows have other lengths, would hang.
STAGES = {
    0: [*packed_models.FAMILIES, *packed_models.HEADS],
    2: [*packed_models.FAMILIES, *packed_models.HEADS][::2],
    3: ["qwen3_next", "nemotron_h", "mamba2", "modernbert", "t5"],
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_train_as_one_on_padded_batches(padded, tmp_path, stage):
    """Also padded; and packed with a rank that has no sequence in a microbatch, or in a whole step."""
    cases = [[family, stage, True] for family in STAGES[stage]]
    cases += [[family, stage, False] for family in ("qwen3_next", "t5") if stage < 3]
    ranks = on_ranks(2, packed_models, tmp_path, cases, timeout=560)
    far = {}
    for (family, _, packed), *found in zip(cases, *ranks, strict=True):
        difference = max(packed_models.largest_difference(each, padded(family)) for each in found)
        if difference >= 1e-5:
            far[family, packed] = difference
        if packed:
            assert 0 in [sum(step) for each in found for step in each["real"]], "no rank was empty"
            assert any(0 in step and sum(step) for each in found for step in each["real"]), "no microbatch was empty"
    assert far == {}


def test_an_evaluated_encoder_decoder_generates_the_same_packed(tmp_path):
    """Predictions and labels come back pair by pair, also where an evaluation batch is cut into microbatches."""
    outputs = []
    for packed in (False, True):
        trainer = packed_models.make_trainer("t5", str(tmp_path), packed=packed, per_device_eval_batch_size=8)
        samples = packed_models.make_samples("t5", packed_models.STEPS[:2])
        outputs.append([trainer.predict(samples), trainer.evaluate(samples)["eval_loss"]])
        for labels, sample in zip(outputs[-1][0].label_ids, samples, strict=True):
            assert labels[labels > 0].tolist() == sample["labels"].tolist()
    (mine, loss), (theirs, other) = outputs
    assert loss == pytest.approx(other, rel=1e-6)
    assert [row.tolist() for row in mine.predictions] == [row.tolist() for row in theirs.predictions]


def test_a_model_that_asks_in_vain_for_packing_is_padded_and_says_so_once(padded, tmp_path, caplog):
    family = "mamba2"
    model = packed_models.make_model(family)
    model.set_attn_implementation("ullage")
    forms.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING", logger=forms.logger.name):
        forms.logger.addHandler(caplog.handler)
        try:
            found = packed_models.run(family, str(tmp_path), packed=False, model=model)
        finally:
            forms.logger.removeHandler(caplog.handler)
    said = {record.getMessage() for record in caplog.records if "batches are padded" in record.getMessage()}
    (line,) = said
    assert line.startswith("batches are padded although attn_implementation='ullage': ")
    assert "ullage.pack_model(model), or packing_capacity=..." in line
    assert max(found["padding"]) > 0.4
    assert packed_models.largest_difference(found, padded(family)) < 1e-5


def test_a_causal_model_without_a_mask_is_padded_behind_its_sequences(tmp_path):
    found = []
    for packed in (False, True):
        model = tiny_model("xlstm", "causal")
        assert forms.form_of(model) == "rows"
        options = {"learning_rate": 1e-3, "steps": ((5, 24, 1, 9), (2, 16, 8, 23))}
        found.append(packed_models.run("xlstm", str(tmp_path), packed=packed, model=model, **options))
    assert (min(found[0]["padding"]) > 0.3, max(found[1]["padding"])) == (True, 0.0)
    assert packed_models.largest_difference(*found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_model_that_was_packed_by_hand_takes_rows_without_packing_capacity(padded, tmp_path, family):
    model = packed_models.make_model(family)
    pack_model(model)
    found = packed_models.run(family, str(tmp_path), packed=False, model=model)
    assert found["padding"] == [0.0] * 5
    assert packed_models.largest_difference(found, padded(family)) < 1e-5


def test_a_packed_model_is_seen_through_what_wraps_it():
    model = packed_models.make_model("bert")
    pack_model(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["query"]))
    for wrapped in (adapted, torch.compile(adapted), torch.nn.DataParallel(adapted)):
        assert forms.form_of(wrapped) == "flattened"


@pytest.mark.slow
def test_a_leak_between_sequences_would_be_seen(padded, tmp_path, monkeypatch):
    """The same steps with rows that are taken for one sequence each."""
    monkeypatch.setattr(packed_models.Trainer, "_prepare_inputs", _as_one_sequence)
    found = packed_models.run("qwen3_next", str(tmp_path))
    assert packed_models.largest_difference(found, padded("qwen3_next")) > 1e-4


def _as_one_sequence(trainer, inputs):
    keywords = trainer._reader.prepare(inputs)
    return {name: keywords[name] for name in ("input_ids", "labels")}


def test_layers_that_run_once_per_length_are_refused_where_parameters_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(Packer, "meets_every_microbatch", True)
    with pytest.raises(InputError, match=r"ranks would gather them unequally often \(BertForSeq.*whole by lengths"):
        packed_models.make_trainer("bert", str(tmp_path), packed=True)
    by_hand = packed_models.make_model("bert")
    pack_model(by_hand)
    with pytest.raises(InputError, match="Leave packing_capacity and pack_model out"):
        packed_models.make_trainer("bert", str(tmp_path), packed=False, model=by_hand)
    native = packing_script.make_trainer("llama", str(tmp_path)).model
    assert native.config._attn_implementation == "ullage"
