"""Multiple choice: the choices of a question stay together, packed and padded, and are compared with each other."""

import copy
import json
import sys

import numpy as np
import pytest
import torch
import transformers as hf

from tests.support import packed_models, packing_script
from tests.support.launch import torchrun
from ullage import InputError, pack_model
from ullage.training import PackedSequenceCollator, RaggedCollator, Trainer, TrainingArguments
from ullage.training.batches.choices import flattened

SIZES = {**packed_models.QUIET, **packed_models.SIZES}
KINDS = {
    "bert": lambda: hf.BertForMultipleChoice(hf.BertConfig(**SIZES)),
    "albert": lambda: hf.AlbertForMultipleChoice(
        hf.AlbertConfig(embedding_size=16, classifier_dropout_prob=0.0, **SIZES)
    ),
    "roberta": lambda: hf.RobertaForMultipleChoice(hf.RobertaConfig(**SIZES)),
    "electra": lambda: hf.ElectraForMultipleChoice(hf.ElectraConfig(embedding_size=16, **SIZES)),
    "distilbert": lambda: hf.DistilBertForMultipleChoice(
        hf.DistilBertConfig(
            vocab_size=packed_models.VOCAB,
            dim=32,
            hidden_dim=48,
            n_layers=2,
            n_heads=4,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        )
    ),
    "modernbert": lambda: hf.ModernBertForMultipleChoice(
        hf.ModernBertConfig(**packed_models.SIZES, cls_token_id=1, sep_token_id=2)
    ),
    "xlnet": lambda: hf.XLNetForMultipleChoice(
        hf.XLNetConfig(
            vocab_size=packed_models.VOCAB,
            d_model=32,
            n_layer=2,
            n_head=4,
            d_inner=48,
            dropout=0.0,
            summary_last_dropout=0.0,
        )
    ),
}
#: Choices of each question, by their lengths.
LENGTHS = [(5, 24, 1), (9, 9, 9), (3, 30, 2), (1, 1, 1), (17, 4, 12), (8, 30, 7), (2, 3, 2), (20, 6, 13)]


def make_model(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().double()
    with torch.no_grad():  # scores far enough apart that the choice counts
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def make_samples(questions=LENGTHS, **more):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for k, lengths in enumerate(questions):
        ids = [torch.randint(3, packed_models.VOCAB, (length,), generator=generator).tolist() for length in lengths]
        mask = [[1] * len(row) for row in ids]
        samples.append({"input_ids": ids, "attention_mask": mask, "label": k % len(lengths), **more})
    return samples


def padding_collator(samples, side="right"):
    """As ``DataCollatorForMultipleChoice`` does."""
    rows = [torch.tensor(row) for sample in samples for row in sample["input_ids"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    shape = (len(samples), len(samples[0]["input_ids"]), -1)
    fields = {"input_ids": ids.view(shape), "attention_mask": (ids != 0).long().view(shape)}
    return {**fields, "labels": torch.tensor([sample["label"] for sample in samples])}


def make_trainer(folder, model, collator, samples=None, trainer=Trainer, **options):
    options = {"per_device_train_batch_size": 4, "packing_capacity": 48, "per_device_eval_batch_size": 3, **options}
    if trainer is hf.Trainer:
        del options["packing_capacity"]
    kind = hf.TrainingArguments if trainer is hf.Trainer else TrainingArguments
    arguments = kind(
        str(folder), max_steps=2, learning_rate=1e-1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", train_sampling_strategy="sequential", optim="sgd", remove_unused_columns=False, **options,
    )  # fmt: skip
    samples = make_samples() if samples is None else samples
    return trainer(model, arguments, data_collator=collator, train_dataset=samples, eval_dataset=samples)


def trained(folder, model, collator, **options):
    made = make_trainer(folder, model, collator, **options)
    made.train()
    return [(each["loss"], each["grad_norm"]) for each in made.state.log_history if "loss" in each]


WAYS = {
    "padded batches": (padding_collator, {}),
    "padded on the left": (lambda samples: padding_collator(samples, "left"), {}),
    "ours": (RaggedCollator(), {}),
    "none": (None, {}),
    "one microbatch": (RaggedCollator(), {"packing_capacity": 4096}),
    "not packed": (RaggedCollator(), {"packing_capacity": None}),
    "not packed, no collator": (None, {"packing_capacity": None}),
}


@pytest.mark.regression
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way not in ("padded batches", "not packed"))) for way in WAYS]
)
def test_choices_train_and_evaluate_as_on_padded_batches(tmp_path, way):
    collator, options = WAYS[way]
    model = make_model("bert")
    other = make_trainer(tmp_path, copy.deepcopy(model), padding_collator, trainer=hf.Trainer)
    mine = make_trainer(tmp_path, model, collator, **options)
    for trainer in (other, mine):
        trainer.train()
    (found, expected) = (
        [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
        for trainer in (mine, other)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, two in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    found, expected = mine.predict(mine.eval_dataset), other.predict(other.eval_dataset)
    np.testing.assert_allclose(np.stack(list(found.predictions)), expected.predictions, rtol=1e-6)
    assert np.stack(list(found.label_ids)).tolist() == expected.label_ids.tolist()


@pytest.mark.regression
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("bert", "xlnet"))) for kind in KINDS]
)
def test_a_packed_call_compares_the_choices_of_each_question(kind):
    model = make_model(kind).eval()
    samples = make_samples()
    batch = RaggedCollator()(samples)
    alone = [
        model(**padding_collator([{"input_ids": [row], "label": 0}])).logits
        for sample in samples
        for row in sample["input_ids"]
    ]
    logits = torch.cat(alone).view(len(samples), -1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"])
    with pack_model(model):
        found = model(**flattened(batch))
        as_tuple = model(**flattened(batch), return_dict=False)
    assert float((found.logits - logits).abs().max()) < 1e-9
    assert float((found.loss - expected).abs()) < 1e-9
    assert float((as_tuple[0] - expected).abs()) < 1e-9
    assert as_tuple[1].shape == logits.shape


def test_questions_with_unequal_numbers_of_choices_are_packed(tmp_path):
    samples = make_samples([(5, 24), (9,), (3, 7, 2, 4), (1, 1, 1)])
    model = make_model("bert")
    alone = copy.deepcopy(model)
    torch.stack([alone(**padding_collator([sample])).loss for sample in samples]).mean().backward()
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]
    )
    found = trained(tmp_path, model, RaggedCollator(), samples=samples)
    assert found[0][1] == pytest.approx(float(norm), rel=1e-6)
    with pytest.raises(InputError, match=r"as many choices each.*found \[1, 2, 3, 4\]. Pack them"):
        trained(tmp_path, make_model("bert"), RaggedCollator(), samples=samples, packing_capacity=None)


REFUSED = {
    "truncated": (lambda: make_model("bert"), RaggedCollator(), {"packing_oversize": "truncate"}, "would cut choices"),
    "over the capacity": (lambda: make_model("bert"), RaggedCollator(), {"packing_capacity": 34}, r"packing_capacity=34 tokens, found 35. .* cut samples before .*='drop'$"),
    "another head": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)), padding_collator, {},
        "questions with several choices are packed for the heads of multiple choice",
    ),
    "flattened": (lambda: make_model("bert"), RaggedCollator(flattened=True), {}, "has one sequence per sample"),
    "packed sequences": (lambda: make_model("bert"), PackedSequenceCollator(), {}, "has one sequence per sample"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_packed_is_told_in_a_sentence(tmp_path, case):
    model, collator, options, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        trained(tmp_path, model(), collator, **options)


def test_bounds_that_are_not_those_of_the_row_are_refused():
    model, row = make_model("bert"), flattened(RaggedCollator()(make_samples()))
    with pack_model(model), pytest.raises(InputError, match="cu_choices does not bound the choices"):
        model(**{**row, "cu_choices": row["cu_choices"][:-1]})


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_choices_as_one(tmp_path):
    torchrun(2, __file__, tmp_path)
    expected = trained(tmp_path, make_model("bert"), padding_collator, trainer=hf.Trainer)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"results{rank}.json").read_text())
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)


if __name__ == "__main__":
    model = make_model("bert")
    packing_script.leave(sys.argv[1], [trained(sys.argv[1], model, RaggedCollator(), per_device_train_batch_size=2)])
