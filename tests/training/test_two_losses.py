"""Labels by sequence beside labels by token: a sum of two means cannot be packed, and is refused by the label's name."""

import pytest
import torch
import transformers as hf

from tests.support import packed_models
from tests.support.small_runs import losses, quiet
from ullage import InputError, RaggedBatch, pack_model
from ullage.training import RaggedCollator, Trainer

SIZES = {**packed_models.QUIET, **packed_models.SIZES}


def make_samples(second):
    ids = [torch.arange(3, 3 + length).tolist() for length in (5, 24, 1, 9)]
    return [{"input_ids": row, "labels": row, second: k % 2} for k, row in enumerate(ids)]


def train(folder, model, samples):
    arguments = quiet(folder, max_steps=2, per_device_train_batch_size=4, packing_capacity=40)
    trainer = Trainer(model, arguments, data_collator=RaggedCollator(), train_dataset=samples)
    trainer.train()
    return losses(trainer)


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
        train(tmp_path, model, make_samples("topic_labels"))
    # Fields by sequence that the model does not take are in nobody's way.
    plain = hf.BertForTokenClassification(model.config)
    assert len(train(tmp_path, plain, make_samples("topic_labels"))) == 2


def test_the_two_losses_of_pretraining_are_refused_in_a_run_and_in_a_packed_call(tmp_path):
    model = hf.BertForPreTraining(hf.BertConfig(**SIZES))
    samples = make_samples("next_sentence_label")
    with pytest.raises(InputError, match=r"next_sentence_label by sequence\. Leave next_sentence_label or packing out"):
        train(tmp_path, model, samples)
    batch = RaggedBatch.from_samples(samples)
    row = {**batch.to_flattened(), "labels": batch["labels"][None], "next_sentence_label": batch["next_sentence_label"]}
    with pack_model(model), pytest.raises(InputError, match="next_sentence_label by sequence"):
        model(**row)
