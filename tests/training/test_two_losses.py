"""Heads with a loss per sequence beside one per token: each is divided by its own number, or the batch is refused."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf

from tests.support import packed_models
from ullage import InputError, RaggedBatch, pack_model
from ullage.training import RaggedCollator, Trainer, TrainingArguments

LENGTHS = (5, 24, 1, 9, 17, 3, 30, 2)
SIZES = {**packed_models.QUIET, **packed_models.SIZES}
SMALL = {"embedding_size": 16, **SIZES}
KINDS = {
    "bert": lambda: hf.BertForPreTraining(hf.BertConfig(**SIZES)),
    "albert": lambda: hf.AlbertForPreTraining(hf.AlbertConfig(classifier_dropout_prob=0.0, **SMALL)),
    "mobilebert": lambda: hf.MobileBertForPreTraining(hf.MobileBertConfig(**SMALL, intra_bottleneck_size=16)),
    "megatron_bert": lambda: hf.MegatronBertForPreTraining(hf.MegatronBertConfig(**SIZES)),
    "ernie": lambda: hf.ErnieForPreTraining(hf.ErnieConfig(**SIZES)),
}


def make_model(kind):
    torch.manual_seed(0)
    return KINDS[kind]().double()


def make_samples(second, lengths=LENGTHS):
    """Of which some have many masked words and some none."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for k, length in enumerate(lengths):
        ids = torch.randint(3, packed_models.VOCAB, (length,), generator=generator)
        hidden = torch.rand(length, generator=generator) > (0.2 if k % 3 else 1.0)
        labels = ids.masked_fill(~hidden, -100).tolist()
        samples.append({"input_ids": ids.tolist(), "labels": labels, second: k % 2})
    return samples


def trained(folder, model, samples, collator, trainer=Trainer, **options):
    options = {"per_device_train_batch_size": 4, "packing_capacity": 40, **options}
    if trainer is hf.Trainer:
        del options["packing_capacity"]
    kind = hf.TrainingArguments if trainer is hf.Trainer else TrainingArguments
    arguments = kind(
        str(folder), max_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", train_sampling_strategy="sequential", optim="sgd", **options,
    )  # fmt: skip
    made = trainer(model, arguments, data_collator=collator, train_dataset=samples)
    made.train()
    return [(each["loss"], each["grad_norm"]) for each in made.state.log_history if "loss" in each]


def padding_collator(samples):
    return RaggedCollator()(samples).to_padded()


@pytest.mark.regression
@pytest.mark.parametrize("kind", ["bert", "albert"])
@pytest.mark.parametrize("capacity", [30, 4096])
def test_two_losses_train_as_on_padded_batches(tmp_path, kind, capacity):
    model = make_model(kind)
    samples = make_samples("sentence_order_label" if kind == "albert" else "next_sentence_label")
    theirs = copy.deepcopy(model)
    expected = trained(tmp_path, theirs, samples, padding_collator, hf.Trainer)
    found = trained(tmp_path, model, samples, RaggedCollator(), packing_capacity=capacity)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.regression
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("bert", "albert"))) for kind in KINDS]
)
@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_packed_call_weighs_each_loss_by_its_own_number(kind, as_tuple):
    model, second = make_model(kind).eval(), "sentence_order_label" if kind == "albert" else "next_sentence_label"
    batch = RaggedBatch.from_samples(make_samples(second))
    expected = model(**batch.to_padded())
    with pack_model(model):
        row = batch.to_flattened() | {"labels": batch["labels"][None], second: batch[second]}
        found = model(**row, return_dict=not as_tuple)
    assert float((found[0] - expected.loss).abs()) < 1e-9
    assert found[1].shape == (1, sum(LENGTHS), packed_models.VOCAB)
    assert torch.allclose(found[2], expected[2])


class TwoHeads(hf.BertForTokenClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None, topic_labels=None, **more):
        outputs = super().forward(input_ids, attention_mask, labels=labels, **more)
        outputs.loss = outputs.loss + outputs.logits.square().mean() * topic_labels.double().mean()
        return outputs


@pytest.mark.regression
def test_labels_by_sequence_beside_those_by_token_of_an_unknown_head_are_refused(tmp_path):
    torch.manual_seed(0)
    model = TwoHeads(hf.BertConfig(num_labels=packed_models.VOCAB, **SIZES))
    with pytest.raises(InputError, match=r"a loss per sequence beside one per token.*topic_labels by sequence. Leave"):
        trained(tmp_path, model, make_samples("topic_labels"), RaggedCollator())
    # Fields by sequence that the model does not take are in nobody's way.
    plain = hf.BertForTokenClassification(model.config)
    assert len(trained(tmp_path, plain, make_samples("topic_labels"), RaggedCollator())) == 2


@pytest.mark.regression
def test_a_sequence_without_a_class_beside_masked_words_is_named(tmp_path):
    samples = make_samples("next_sentence_label")
    samples[2]["next_sentence_label"] = -100
    with pytest.raises(
        InputError, match=r"train_dataset\[2\], next_sentence_label.*Give every sample a next_sentence_label"
    ):
        trained(tmp_path, make_model("bert"), samples, RaggedCollator())
