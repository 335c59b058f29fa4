"""Log-probabilities by sequence of a packed row: those of padded rows, in values and gradients."""

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

import ullage
from tests.support.small_runs import logged, quiet
from ullage import InputError, RaggedBatch
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer, sequence_logps
from ullage.training.loss import sequence_logps as logps

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LENGTHS = [5, 1, 9, 2, 7]


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=44, **SIZES)).double().eval()


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=44, **sizes)).double().eval()


def mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=44, hidden_size=16, num_hidden_layers=2, state_size=4)).double()


def recurrent():
    torch.manual_seed(0)
    return RecurrentForCausalLM(RecurrentConfig(cell="gru", vocab_size=44, hidden_size=16)).double()


def batch(labelled=lambda i, k: k >= 2):
    torch.manual_seed(1)
    samples = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(3, 44, (length,))
        labels = torch.tensor([int(ids[k]) if labelled(i, k) else -100 for k in range(length)])
        samples.append({"input_ids": ids, "labels": labels})
    return RaggedBatch.from_samples(samples)


def alone(model, samples, temperature=1.0):
    """Each sequence by itself: log-probabilities of its tokens, 0 where none counts."""
    found = []
    for sample in samples:
        ids, labels = sample["input_ids"][None], sample["labels"]
        logits = model(input_ids=ids).logits[0] / temperature
        taken = log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(torch.cat([taken.new_zeros(1), torch.where(labels[1:] != -100, taken, 0.0)]))
    return found


def gradients(model, scalar):
    model.zero_grad()
    scalar.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("make", [llama, gpt2, mamba, recurrent])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_those_of_each_sequence_alone(make, temperature, monkeypatch):
    monkeypatch.setattr(logps, "_CHUNK", 4)  # several chunks, the last one short
    model, given = make(), batch()
    expected = alone(model, given.samples(), temperature)
    weights = torch.randn(len(LENGTHS), dtype=torch.float64)
    wanted = gradients(model, sum(w * each.sum() for w, each in zip(weights, expected, strict=True)))
    ullage.pack_model(model)
    found = sequence_logps(model, given, temperature=temperature)
    close = 1e-5 if make is mamba else 1e-12  # its logits are float32 whatever its weights are
    torch.testing.assert_close(found.per_token, torch.cat(expected), rtol=0, atol=close)
    torch.testing.assert_close(found.sums, torch.stack([each.sum() for each in expected]), rtol=0, atol=close)
    assert found.counts.tolist() == [3, 0, 7, 0, 5]
    torch.testing.assert_close(found.means, found.sums / found.counts.clamp(min=1))
    torch.testing.assert_close(gradients(model, (weights * found.sums).sum()), wanted, rtol=0, atol=max(close, 1e-10))


def test_labels_may_be_given_and_the_first_token_of_a_sequence_is_never_predicted():
    model, given = llama(), batch(lambda i, k: True)
    ullage.pack_model(model)
    own = sequence_logps(model, given)
    assert own.counts.tolist() == [length - 1 for length in LENGTHS]
    row = given.to_flattened()
    for labels in (given["input_ids"], row["input_ids"]):
        again = sequence_logps(model, {**row, "labels": torch.full_like(row["input_ids"], -100)}, labels)
        torch.testing.assert_close(again.sums, own.sums)
    without = {name: value for name, value in row.items() if name != "labels"}
    torch.testing.assert_close(sequence_logps(model, without).sums, own.sums)


def test_where_no_label_counts_there_is_still_something_to_go_backward_through():
    model, given = llama(), batch(lambda i, k: False)
    ullage.pack_model(model)
    found = sequence_logps(model, given)
    assert found.sums.tolist() == [0.0] * len(LENGTHS)
    assert found.counts.sum() == 0
    assert not gradients(model, found.means.sum()).any()


def test_logits_are_made_for_the_tokens_that_count_and_no_other():
    model, given = llama(), batch(lambda i, k: k == 4)
    ullage.pack_model(model)
    shapes = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    sequence_logps(model, given)
    assert shapes == [(1, 3, 44)]


def test_padded_rows_and_unpacked_models_are_refused():
    model, given = llama(), batch()
    with pytest.raises(InputError, match="does not keep the sequences of a row apart"):
        sequence_logps(model, given)
    ullage.pack_model(model)
    with pytest.raises(InputError, match="of a packed row"):
        sequence_logps(model, given.to_padded())
    with pytest.raises(InputError, match="not aligned"):
        sequence_logps(model, given, torch.zeros(3, dtype=torch.long))


class Margin(Trainer):
    """A loss of its own over pairs of sequences in one sample: the first half of each is preferred to the second."""

    packing_loss = "sequence_mean"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "cu_seq_lens_q" in inputs:
            sums = sequence_logps(model, inputs).sums
        else:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            taken = log_softmax(outputs.logits[:, :-1], -1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
            sums = torch.where(inputs["labels"][:, 1:] != -100, taken, 0.0).sum(1)
        return -torch.nn.functional.logsigmoid(inputs["weight"] * sums / 10).mean()


def test_a_loss_of_ones_own_is_that_of_padded_rows_under_packing(tmp_path):
    def collate(samples):
        ragged = RaggedCollator(labels_from="input_ids")(samples)
        return ragged if collate.packs else {**ragged.to_padded(), "weight": ragged["weight"]}

    data = [
        {"input_ids": [3 + (i * 5 + k) % 40 for k in range(length)], "weight": 0.5 + i % 3}
        for i, length in enumerate([3, 14, 5, 2, 9, 11, 1, 8])
    ]
    found = []
    for capacity in (None, 16):
        collate.packs = capacity is not None
        options = {"packing_capacity": capacity, "learning_rate": 1e-2, "remove_unused_columns": False}
        arguments = quiet(tmp_path, max_steps=2, per_device_train_batch_size=8, **options)
        trainer = Margin(llama().train(), arguments, data_collator=collate, train_dataset=data)
        trainer.train()
        found.append(np.array(logged(trainer)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
