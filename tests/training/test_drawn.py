"""Batches of others' collators under packing: the same sequences, losses and gradients as RaggedCollator's."""

import copy

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    default_data_collator,
)

from tests.support import packing_script, trl_cases
from tests.support.small_runs import logged, quiet
from ullage import InputError, RaggedBatch
from ullage.datasets import pack_dataset
from ullage.training import PackedSequenceCollator, RaggedCollator, Seq2SeqCollator, Trainer
from ullage.training.batches.reading import as_ragged

#: One token, a sequence that fills a microbatch, and what lies between.
LENGTHS = [1, 128, 5, 1, 77, 128, 1, 2, 30, 64, 1, 3]


@pytest.fixture(scope="module")
def tokenizer():
    return trl_cases.tokenizer()


def trls(**options):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as Collator

    return Collator(pad_token_id=0, **options)


def on_the_left(tokenizer):
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    return DataCollatorForSeq2Seq(left)


BOUNDS, INDICES = {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}
COLLATORS = {
    "flattening": lambda _: DataCollatorWithFlattening(),
    "flattening, all": lambda _: DataCollatorWithFlattening(**BOUNDS, **INDICES),
    "flattening, bounds alone": lambda _: DataCollatorWithFlattening(return_position_ids=False, **BOUNDS),
    "flattening, indices alone": lambda _: DataCollatorWithFlattening(return_position_ids=False, **INDICES),
    "flattening, arrays": lambda _: DataCollatorWithFlattening(return_tensors="np"),
    "flattening, positions from 2": lambda _: DataCollatorWithFlattening(position_ids_start=2),
    "ours, flattened": lambda _: RaggedCollator(True, "input_ids"),
    "TRL's, padding free": lambda _: trls(padding_free=True),
    "TRL's, positions": lambda _: trls(return_position_ids=True, pad_to_multiple_of=16),
    "language modelling": lambda tokenizer: DataCollatorForLanguageModeling(tokenizer, mlm=False),
    "padded on the left": on_the_left,
}


def samples_of(lengths=LENGTHS):
    """Samples without a padding id among their tokens: that collator makes -100 of each."""
    rows = packing_script.make_samples(lengths)
    ids = [[1 + token % (packing_script.VOCAB - 1) for token in row["input_ids"]] for row in rows]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]


def run(folder, collator, name="llama", samples=None, **options):
    torch.manual_seed(0)
    trainer = packing_script.make_trainer(
        name, str(folder), samples=samples or samples_of(), collator=collator, max_steps=3, **options
    )
    trainer.model.double()
    trainer.eval_dataset = samples or samples_of()
    trainer.train()
    return np.array(logged(trainer)), trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(tmp_path_factory.mktemp("reference"), RaggedCollator())


@pytest.mark.parity
@pytest.mark.parametrize("name", ["flattening", "language modelling"])
def test_every_collator_trains_as_ours(tmp_path, tokenizer, reference, name):
    samples = samples_of()
    if name == "language modelling":  # it makes the labels
        samples = [{"input_ids": sample["input_ids"]} for sample in samples]
    losses, evaluated = run(tmp_path, COLLATORS[name](tokenizer), samples=samples)
    assert losses[:, 0].min() > 1
    np.testing.assert_allclose(losses, reference[0], rtol=1e-10)
    assert evaluated == pytest.approx(reference[1], rel=1e-10)


@pytest.mark.parity
@pytest.mark.parametrize("name", COLLATORS)
def test_every_collators_batch_holds_the_sequences(tokenizer, name):
    samples = samples_of(LENGTHS[:6])
    if name == "language modelling":
        samples = [{"input_ids": sample["input_ids"]} for sample in samples]
    batch = COLLATORS[name](tokenizer)(samples)
    assert not isinstance(batch, RaggedBatch)
    found, expected = as_ragged(batch), RaggedCollator()(samples_of(LENGTHS[:6]))
    assert found.layout.lengths.tolist() == LENGTHS[:6]
    assert set(found.names) == {"input_ids", "labels"}
    assert torch.equal(found["input_ids"], expected["input_ids"])
    # The first label of a sequence is the collator's separator, or that of the sample: no loss that shifts looks.
    later = torch.ones(sum(LENGTHS[:6]), dtype=torch.bool)
    later[expected.layout.starts.tolist()] = False
    assert torch.equal(found["labels"][later], expected["labels"][later])
    row = found.to_flattened()
    for field, value in expected.to_flattened().items():
        assert np.array_equal(row[field], value), field


def test_classes_and_values_by_sequence_come_along():
    samples = [{**sample, "labels": i, "scores": [0.5, i, 2.0]} for i, sample in enumerate(samples_of([3, 1, 4]))]
    width = 4
    padded = {
        name: torch.tensor([sample[name] + [0] * (width - len(sample[name])) for sample in samples])
        for name in ("input_ids", "attention_mask")
    }
    padded |= {name: torch.tensor([sample[name] for sample in samples]) for name in ("labels", "scores")}
    found = as_ragged(padded)
    assert found.layout.lengths.tolist() == [3, 1, 4]
    assert set(found.per_sequence) == {"labels", "scores"}
    assert found["scores"].tolist() == [[0.5, i, 2.0] for i in range(3)]


def test_pairs_of_a_padded_batch_are_sources_and_targets(tmp_path, tokenizer):
    """DataCollatorForSeq2Seq as Seq2SeqCollator, also where sources and targets are equally wide."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = BartConfig(vocab_size=packing_script.VOCAB, dropout=0.0, **sizes, **heads, **packing_script.SPECIAL)
    model = BartForConditionalGeneration(config).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    texts = samples_of([3, 9, 1, 7])
    pairs = [{**text, "labels": texts[i - 1]["input_ids"][::-1]} for i, text in enumerate(texts)]
    found = []
    for collator in (Seq2SeqCollator(), DataCollatorForSeq2Seq(tokenizer, model=model)):
        model.load_state_dict(before)
        arguments = quiet(tmp_path, packing_capacity=24, max_steps=1, per_device_train_batch_size=4)
        trainer = Trainer(model, arguments, collator, pairs, pairs)
        trainer.train()
        found.append([*logged(trainer)[0], trainer.evaluate()["eval_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-10)


@pytest.mark.regression
def test_a_flattened_row_with_padded_slots_trains_packed_as_unpacked(tmp_path, reference):
    """It trained unpacked and was refused under packing: where the slots' padding lies was read by one of two readers."""
    collator = RaggedCollator(flattened=True, labels_from="input_ids", pad_to_multiple_of=4)
    packed, evaluated = run(tmp_path, collator)
    unpacked, alone = run(tmp_path, collator, packing_capacity=None)
    np.testing.assert_allclose(packed, reference[0], rtol=1e-10)
    # transformers' loss is float32, and the rows are others.
    np.testing.assert_allclose(unpacked, reference[0], rtol=1e-6)
    assert [evaluated, alone] == pytest.approx([reference[1]] * 2, rel=1e-6)


def test_padded_slots_and_empty_ones_are_those_of_the_bounds():
    row = {"input_ids": torch.tensor([[5, 6, 7, 0, 8, 0]]), "cu_seq_lens_q": torch.tensor([0, 4, 4, 6])}
    found = as_ragged({**row, "position_ids": torch.tensor([[0, 1, 2, 0, 0, 0]])})
    assert found.layout.lengths.tolist() == [3, 0, 1]
    assert found.layout.slots.tolist() == [4, 0, 2]
    assert [sample["input_ids"].tolist() for sample in found.samples()] == [[5, 6, 7], [], [8]]
    assert as_ragged(row).layout.lengths.tolist() == [4, 0, 2]  # without positions nothing tells the padding


def test_the_rows_of_a_packed_file_are_taken(tmp_path):
    """Rows with positions, one per batch, as ``ullage pack`` writes them and default_data_collator leaves them."""
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "position_ids": [0, 1, 2, 0], "seq_lengths": [3, 1]}
    found = as_ragged(default_data_collator([row]))
    assert found.layout.lengths.tolist() == [3, 1]
    assert found.names == ("input_ids", "labels")


IDS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])


def ids(**fields):
    return {"input_ids": IDS, **fields}


def bounded(**fields):
    return {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 4]), **fields}


REFUSED = [
    (r"know their sequences: .* found dict of input_ids, labels. Leave data_collator out, or use", ids(labels=IDS)),
    (r"know their sequences: .* found Tensor", IDS),
    (r"attention_mask has holes \(row 1\)", ids(attention_mask=torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]))),
    (r"a row of attention_mask is all padding \(row 1\)", ids(attention_mask=IDS > 4)),
    (
        r"position_ids do not count on within a row of attention_mask",
        ids(attention_mask=torch.ones(2, 4), position_ids=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])),
    ),
    (
        r"cu_seq_lens_q does not cover the row: expected rising from 0 to 4, found 1 sequences, 3 tokens",
        bounded(cu_seq_lens_q=torch.tensor([0, 3])),
    ),
    (
        r"position_ids and cu_seq_lens_q disagree .* expected \[0, 3\], found \[0, 2\]",
        bounded(position_ids=torch.tensor([[0, 1, 0, 1]])),
    ),
    (r"a row with cu_seq_lens_q has padding too", bounded(attention_mask=torch.tensor([[1, 1, 1, 0]]))),
    (r"values and lengths disagree \(field 'scores'\)", bounded(scores=torch.ones(3))),
]


@pytest.mark.parametrize(("message", "batch"), REFUSED)
def test_what_does_not_tell_its_sequences_is_refused(message, batch):
    with pytest.raises(InputError, match=message):
        as_ragged(batch)


def test_a_collator_without_lengths_is_named_where_the_trainer_draws(tmp_path):
    trainer = packing_script.make_trainer("recurrent", str(tmp_path), max_steps=1)
    for collator in (PackedSequenceCollator("input_ids"), lambda samples: {"input_ids": torch.ones(2, 3).long()}):
        trainer.data_collator = collator
        with pytest.raises(InputError, match="packing needs batches that know their sequences: expected a collator"):
            trainer.train()


def rows_of(samples):
    fields = {name: [sample[name] for sample in samples] for name in ("input_ids", "labels")}
    return pack_dataset(datasets.Dataset.from_dict(fields), 128)


def test_packed_rows_train_and_are_evaluated_as_their_sequences(tmp_path):
    """Under our packing, with our collator and TRL's: seq_lengths is kept for it, and rows are taken apart."""
    samples = samples_of()
    rows = rows_of(samples)
    assert max(map(len, rows["seq_lengths"])) > 1
    found, evaluated = [], []
    for collator, data, options in (
        (RaggedCollator(), samples, {}),
        (RaggedCollator(), rows, {}),
        (None, rows.remove_columns("labels"), {}),
        (trls(padding_free=True), rows, {"remove_unused_columns": False}),
    ):
        options["per_device_train_batch_size"] = len(data)
        trainer = packing_script.make_trainer("llama", str(tmp_path), samples=data, max_steps=1, **options)
        if collator is None:  # as of a Trainer that is given none
            trainer = Trainer(trainer.model, trainer.args, train_dataset=data)
        else:
            trainer.data_collator = collator
        trainer.model.double()
        if isinstance(collator, RaggedCollator):
            evaluated.append(trainer.evaluate(data)["eval_loss"])
        trainer.train()
        found += logged(trainer)
    # Llama's loss is float32 in any model, and the rows are others.
    np.testing.assert_allclose(found[1:], [found[0]] * 3, rtol=1e-6)
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-7)


def test_a_row_that_does_not_hold_its_sequences_is_named():
    with pytest.raises(InputError, match=r"\(sample 1, field 'labels'\): expected 3 tokens, .* found 2"):
        RaggedCollator()([
            {"input_ids": [1], "labels": [1], "seq_lengths": [1]},
            {"input_ids": [1, 2, 3], "labels": [1, 2], "seq_lengths": [2, 1]},
        ])  # fmt: skip
