"""Evaluation gives what transformers gives: arrays padded with -100, whatever form the batches had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tests.support.small_runs import quiet
from ullage.datasets import byte_tokenizer
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import (
    PackedSequenceCollator,
    RaggedCollator,
    Seq2SeqCollator,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

VOCABULARY = 320
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LENGTHS = (3, 9, 1, 5, 12, 2, 7)
TARGETS = (4, 2, 2, 1, 3, 3, 4)


def bert(kind):
    return kind(hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, num_labels=2, **SIZES))


def llama():
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **SIZES, **ids))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


MODELS = {
    "tagger": lambda: bert(hf.BertForTokenClassification),
    "words": lambda: bert(hf.BertForMaskedLM),
    "classes": lambda: bert(hf.BertForSequenceClassification),
    "answers": lambda: bert(hf.BertForQuestionAnswering),
    "llama": llama,
    "t5": t5,
    "recurrent": lambda: RecurrentForCausalLM(RecurrentConfig(vocab_size=VOCABULARY, hidden_size=16)),
}


def samples(name):
    generator = np.random.default_rng(0)
    made = []
    for length, target in zip(LENGTHS, TARGETS):
        ids = generator.integers(3, VOCABULARY, length)
        sample: dict[str, Any] = {"input_ids": ids.tolist()}
        if name == "classes":
            sample["labels"] = int(ids.sum() % 2)
        elif name != "answers":  # whose script evaluates without labels
            labels = {"tagger": ids % 2, "t5": generator.integers(3, VOCABULARY, target)}.get(name, ids)
            sample["labels"] = labels.tolist()
            if name in ("tagger", "words"):
                sample["labels"][0] = -100
        made.append(sample)
    return made


def collator(name, form):
    tokenizer = byte_tokenizer()
    if form == "packed sequence":
        return PackedSequenceCollator(labels_from="input_ids")
    if "ragged" in form:
        return Seq2SeqCollator() if name == "t5" else RaggedCollator()
    if name == "t5":
        return hf.DataCollatorForSeq2Seq(tokenizer)
    return (hf.DataCollatorWithPadding if name in ("classes", "answers") else hf.DataCollatorForTokenClassification)(
        tokenizer
    )


def accuracy(p):
    """As transformers' example scripts compute it: over the labels that are not -100."""
    predictions = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    guesses = predictions.argmax(-1) if predictions.ndim > p.label_ids.ndim else predictions
    return {"accuracy": float((guesses == p.label_ids)[p.label_ids != -100].mean())}


def translation(eval_preds):
    preds, labels = eval_preds
    if isinstance(preds, tuple):
        preds = preds[0]
    preds = np.where(preds != -100, preds, 0)
    labels = np.where(labels != -100, labels, 0)
    assert preds.dtype == labels.dtype == np.int64
    return {"length": float(np.mean([np.count_nonzero(pred != 0) for pred in preds])), "labels": float(labels.sum())}


def chosen(logits, labels):
    assert isinstance(labels, torch.Tensor)
    assert logits.shape[:2] == labels.shape
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


MEASURED = ("tagger", "words", "llama", "recurrent", "classes")


def make(kind, arguments, name, form, folder, metrics=None, chooses=("words", "llama", "recurrent"), **options):
    torch.manual_seed(0)
    options |= {"label_names": ["labels"]} if name == "recurrent" else {}  # transformers takes shift_labels for one
    trainer = kind(
        MODELS[name]().eval(),
        quiet(folder, arguments, per_device_eval_batch_size=3, **options),
        data_collator=collator(name, form),
        eval_dataset=samples(name),
        processing_class=byte_tokenizer(),
        compute_metrics=metrics or (accuracy if name in MEASURED else lambda p: {}),
        preprocess_logits_for_metrics=chosen if name in chooses else None,
    )
    if name == "recurrent" and kind is hf.Trainer:
        trainer.data_collator = hf.DataCollatorForTokenClassification(byte_tokenizer())
    return trainer


def run(kind, arguments, name, form, *rest, **options):
    return make(kind, arguments, name, form, *rest, **options).predict(samples(name))


def assert_same(mine, theirs, *, exactly):
    if isinstance(theirs, tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs):
            assert_same(one, other, exactly=exactly)
        return
    assert (type(mine), mine.dtype, mine.shape) == (np.ndarray, theirs.dtype, theirs.shape)
    there = np.ones_like(mine, bool)
    if not exactly and mine.ndim > 1:  # what a packed row never computes, transformers' model makes up at padding
        lengths = TARGETS if mine.shape[1] == max(TARGETS) else LENGTHS if mine.shape[1] == max(LENGTHS) else None
        if lengths is not None:
            there.T[:] = (np.arange(mine.shape[1])[:, None] < np.array(lengths)).reshape(*mine.shape[1::-1])
    np.testing.assert_allclose(mine[there], theirs[there], rtol=1e-4, atol=1e-5)


CASES = [
    (name, form)
    for name in MODELS
    for form in ("padded", "ragged", "packed padded", "packed ragged", "packed sequence")
    if (form == "packed sequence") <= (name == "recurrent") and (form == "padded") <= (name != "recurrent")
]


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize(("name", "form"), CASES)
def test_arrays_are_those_of_transformers(name, form, tmp_path):
    theirs = run(hf.Trainer, hf.TrainingArguments, name, "padded", tmp_path)
    packed = {"packing_capacity": 14} if form.startswith("packed ") and form != "packed sequence" else {}
    mine = run(Trainer, TrainingArguments, name, form, tmp_path, **packed)
    assert_same(mine.predictions, theirs.predictions, exactly=form == "padded")
    first = theirs.predictions[0] if isinstance(theirs.predictions, tuple) else theirs.predictions
    assert len(first) == len(LENGTHS)
    if theirs.label_ids is None:
        assert mine.label_ids is None
    else:
        assert_same(mine.label_ids, theirs.label_ids, exactly=True)
    for key in theirs.metrics.keys() & {"test_accuracy", "test_length"}:
        assert mine.metrics[key] == pytest.approx(theirs.metrics[key])


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("form", ["padded", "ragged", "packed padded", "packed ragged"])
def test_generated_sequences_are_those_of_transformers(form, tmp_path):
    results = []
    for kind, arguments, how in (
        (hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments, "padded"),
        (Seq2SeqTrainer, Seq2SeqTrainingArguments, form),
    ):
        more = {"packing_capacity": 24} if how.startswith("packed ") else {}
        options = {"predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": 2, **more}
        results.append(run(kind, arguments, "t5", how, tmp_path, translation, **options))
    theirs, mine = results
    assert_same(mine.predictions, theirs.predictions, exactly=True)
    assert_same(mine.label_ids, theirs.label_ids, exactly=True)
    assert mine.metrics["test_length"] == theirs.metrics["test_length"]
    assert mine.metrics["test_labels"] == theirs.metrics["test_labels"]


@pytest.mark.regression
@pytest.mark.parametrize("form", ["padded", "packed ragged"])
def test_metrics_batch_by_batch_get_what_transformers_gives_them(form, tmp_path):
    seen = {}
    for kind, arguments, how in (
        (hf.Trainer, hf.TrainingArguments, "padded"),
        (Trainer, TrainingArguments, form),
    ):
        calls = seen[kind] = []

        def compute(given, compute_result, calls=calls):
            calls.append((given, compute_result))
            return {}

        options = {"batch_eval_metrics": True, "include_for_metrics": ["inputs"]}
        options |= {"packing_capacity": 14} if how.startswith("packed") else {}
        make(kind, arguments, "tagger", how, tmp_path, compute, chooses=("tagger",), **options).evaluate()
    assert [last for _, last in seen[Trainer]] == [False, False, True]
    for (mine, _), (theirs, _) in zip(seen[Trainer], seen[hf.Trainer], strict=True):
        assert isinstance(mine.predictions, torch.Tensor)
        assert (mine.predictions.dtype, mine.predictions.shape) == (theirs.predictions.dtype, theirs.predictions.shape)
        there = mine.label_ids != -100
        assert torch.equal(mine.label_ids, theirs.label_ids)
        assert torch.equal(mine.predictions[there], theirs.predictions[there])
        assert torch.equal(mine.inputs["input_ids"][there], theirs.inputs["input_ids"][there])
