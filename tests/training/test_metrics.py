"""Metrics on sequences of true length: what they are given at the edges, and what the Trainer does with them."""

import json
import math

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_outputs import ModelOutput

from tests.support import metrics_script, story
from tests.support.small_runs import losses, quiet
from ullage import InputError
from ullage.training import RaggedCollator, Trainer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def predict(model, samples, folder, *, batch_size=3, **options):
    arguments = quiet(folder, per_device_eval_batch_size=batch_size, **options)
    return Trainer(model.eval(), arguments, data_collator=RaggedCollator()).predict(samples)


def bert(kind, **options):
    torch.manual_seed(0)
    return kind(hf.BertConfig(vocab_size=story.VOCAB, max_position_embeddings=16, num_labels=3, **{**SIZES, **options}))


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_classifier_gives_rows_even_where_they_look_like_tokens(tmp_path, length):
    """As many classes as tokens, as many sequences as tokens; without labels that would tell."""
    samples = [{"input_ids": [5 + i] * length} for i in range(5)]
    output = predict(bert(hf.BertForSequenceClassification), samples, tmp_path)
    assert output.predictions.shape == (5, 3)
    assert output.label_ids is None


def test_what_is_nested_comes_back_nested(tmp_path):
    """Logits, and hidden states of each layer."""
    lengths = [1, 4, 2, 3, 1]
    samples = [{"input_ids": [3 + i] * n, "labels": [-100] + [1] * (n - 1)} for i, n in enumerate(lengths)]
    model = bert(hf.BertForTokenClassification, output_hidden_states=True)
    logits, hidden = predict(model, samples, tmp_path).predictions
    assert logits.shape == (5, 4, 3)
    assert [layer.shape for layer in hidden] == [(5, 4, 16)] * 3
    for row, number, sample in zip(hidden[-1], lengths, samples, strict=True):
        alone = model(torch.tensor([sample["input_ids"]]), output_hidden_states=True).hidden_states[-1][0]
        assert np.allclose(row[:number], alone.detach(), atol=1e-5)


class Packed(nn.Module):
    """A user's own, of packed rows alone: it knows no mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(story.VOCAB, 4)

    def forward(self, input_ids=None, cu_seq_lens_q=None, labels=None, **_):
        logits = self.embedding(input_ids).bfloat16()
        loss = None if labels is None else logits.float().mean()
        return ModelOutput(loss=loss, logits=logits, firsts=logits[0, cu_seq_lens_q[:-1].long(), 0])


@pytest.mark.parametrize("number", [1, 4])
def test_a_model_of_packed_rows_alone_gives_padded_ones(tmp_path, number):
    samples = [{"input_ids": list(range(1, n + 1)), "labels": [0] * n} for n in (2, 1, 3, 5)[:number]]
    model = Packed()
    logits, firsts = predict(model, samples, tmp_path, batch_size=2).predictions
    assert (logits.shape, logits.dtype) == ((number, 5 if number > 1 else 2, 4), np.float32)
    for row, first, sample in zip(logits, firsts, samples, strict=True):
        there = model.embedding(torch.tensor(sample["input_ids"])).bfloat16().float().detach().numpy()
        assert np.array_equal(row[: len(there)], there)
        assert (row[len(there) :] == -100).all()
        assert first == there[0, 0]


def test_batches_may_stay_apart(tmp_path):
    samples = [{"input_ids": [3] * n, "labels": [4] * n} for n in (2, 1, 3, 5)]
    output = predict(Packed(), samples, tmp_path, eval_do_concat_batches=False)
    assert [batch.tolist() for batch in output.label_ids] == [[[4, 4, -100], [4, -100, -100], [4, 4, 4]], [[4] * 5]]


@pytest.mark.parametrize("batchwise", [False, True])
def test_a_stream_without_samples_is_refused(tmp_path, batchwise):
    options = {"compute_metrics": lambda given, compute_result=None: {}, "batch_eval_metrics": batchwise}
    trainer = metrics_script.make_trainer("bert tagger", tmp_path, samples=story.Stream([]), **options)
    with pytest.raises(InputError, match=r"the dataset is empty \(evaluation\)"):
        trainer.evaluate()


def test_several_datasets_have_metrics_of_their_own(tmp_path):
    samples = metrics_script.samples_for("bert tagger")
    trainer = metrics_script.make_trainer(
        "bert tagger", tmp_path, compute_metrics=lambda given: {"number": np.float32(len(given.label_ids))}
    )
    metrics = trainer.evaluate({"one": samples[:1], "all": samples})
    assert (metrics["eval_one_number"], metrics["eval_all_number"]) == (1.0, 13.0)
    json.dumps(metrics)


def test_each_fresh_model_is_packed_as_the_first(tmp_path):
    """A model that ``model_init`` makes anew keeps packed sequences apart, too."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    samples = [{"input_ids": [1, 2, 3, 4, 5, 6, 7][i % 3 :][: 2 + i % 5]} for i in range(12)]

    def make():
        torch.manual_seed(0)
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=8, **sizes))

    found = []
    for options in ({}, {"packing_capacity": 64}):
        arguments = quiet(tmp_path, max_steps=2, per_device_train_batch_size=4, learning_rate=0.1, **options)
        trainer = Trainer(None, arguments, RaggedCollator(labels_from="input_ids"), samples, model_init=make)
        trainer.train()
        found.append(losses(trainer))
    assert trainer.model.config._attn_implementation == "ullage"
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert all(map(math.isfinite, found[0]))
