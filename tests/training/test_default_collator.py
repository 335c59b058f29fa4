"""A Trainer that is given no collator: what it takes, and what it says of samples without labels."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tests.support.small_runs import quiet
from ullage import InputError
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, RaggedTrainerMixin, Seq2SeqCollator, Trainer
from ullage.training.mixin import given_argument

LENGTHS = (3, 9, 1, 5)
SMALL = {"vocab_size": 32, "hidden_size": 8, "pad_token_id": 0}
LLAMA = {**SMALL, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def samples(lengths=LENGTHS, labels=True):
    rows = [list(range(3, 3 + n)) for n in lengths]
    return [{"input_ids": row, "labels": row} if labels else {"input_ids": row} for row in rows]


def arguments(folder, **options):
    return quiet(folder, **{"max_steps": 1, "per_device_train_batch_size": 4, **options})


def recurrent():
    torch.manual_seed(0)
    return RecurrentForCausalLM(RecurrentConfig(cell="lstm", **SMALL))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def test_sequences_of_unequal_length_are_those_of_the_ragged_collator(tmp_path):
    losses = []
    for collator in (None, RaggedCollator()):
        trainer = Trainer(recurrent(), arguments(tmp_path), collator, samples(), samples())
        losses.append([trainer.train().training_loss, trainer.evaluate()["eval_loss"]])
    assert losses[0] == losses[1]


def test_labels_by_token_are_taken_beside_a_tokenizer_which_pads_none(tmp_path):
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=samples(), processing_class=tokenizer)
    assert trainer.train().training_loss > 0
    # What transformers can pad stays with it.
    config = LlamaConfig(num_labels=2, **LLAMA)
    classes = [{"input_ids": row["input_ids"], "label": i % 2} for i, row in enumerate(samples())]
    trainer = Trainer(
        LlamaForSequenceClassification(config), arguments(tmp_path), None, classes, processing_class=tokenizer
    )
    assert sorted(trainer.data_collator(classes)) == ["attention_mask", "input_ids", "labels"]


def test_rows_of_one_length_and_samples_that_are_no_sequences_stay_with_transformers(tmp_path):
    collate = Trainer(recurrent(), arguments(tmp_path)).data_collator
    assert collate(samples((4, 4)))["input_ids"].shape == (2, 4)
    choices = [{"input_ids": [[1, 2], [3, 4], [5, 6]], "label": 0}] * 2
    assert collate(choices)["input_ids"].shape == (2, 3, 2)
    assert sorted(collate([{"text": "one", "label": 1.5}, {"text": "three", "label": 2.0}])) == ["labels"]


@pytest.mark.parametrize(
    ("model", "collator", "lengths"),
    [(recurrent, None, LENGTHS), (llama, None, (4, 4, 4, 4)), (llama, RaggedCollator(), LENGTHS)],
    ids=["unequal", "equal", "ragged"],
)
def test_a_causal_model_without_labels_says_which_collator_to_pass(tmp_path, model, collator, lengths):
    trainer = Trainer(model(), arguments(tmp_path), collator, samples(lengths, labels=False))
    with pytest.raises(InputError, match=r"has no labels.*RaggedCollator\(labels_from='input_ids'\)"):
        trainer.train()
    assert len(trainer.predict(samples(labels=False)).predictions) == 4  # which needs none


def test_a_loss_function_needs_no_labels(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].square().mean()

    trainer = Trainer(llama(), arguments(tmp_path), None, samples(labels=False), compute_loss_func=loss)
    assert trainer.train().training_loss > 0


class Theirs(transformers.Trainer):
    """Takes its arguments in the order of TRL's DPO."""

    def __init__(self, model, reference, args, data_collator=None, train_dataset=None):
        super().__init__(model, args, data_collator, train_dataset)


class Passing(Theirs):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Ours(RaggedTrainerMixin, Theirs): ...


class OursPassing(RaggedTrainerMixin, Passing): ...


@pytest.mark.parametrize("cls", [Ours, OursPassing])
def test_a_collator_is_told_by_its_own_place_among_the_arguments(tmp_path, cls):
    packing = arguments(tmp_path, packing_capacity=16)
    for given in ((), (None, samples())):
        assert cls(llama(), None, packing, *given).data_collator == RaggedCollator(labels_from="input_ids")
    assert Trainer(llama(), packing, None, samples()).data_collator == RaggedCollator(labels_from="input_ids")
    mine = Seq2SeqCollator()
    assert cls(llama(), None, packing, mine).data_collator is mine
    assert cls(llama(), None, args=packing, data_collator=mine).data_collator is mine
    assert Trainer(llama(), packing, mine).data_collator is mine


def test_an_argument_of_a_constructor_that_does_not_take_it_is_not_given():
    class Narrow(transformers.Trainer):
        def __init__(self, model, rewards, args): ...

    class Mine(RaggedTrainerMixin, Narrow): ...

    assert given_argument("data_collator", Mine, RaggedTrainerMixin, (1, 2, 3), {}) is None
