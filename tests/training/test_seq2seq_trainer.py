"""Seq2SeqTrainer: sources and targets of unequal length, trained on and judged by what is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, GenerationConfig

import ullage
from tests.support.small_runs import quiet
from ullage.core.errors import InputError
from ullage.models import RecurrentConfig, RecurrentEncoderDecoder, RecurrentEncoderDecoderConfig, RecurrentForCausalLM
from ullage.training import Seq2SeqCollator, Seq2SeqTrainer, Seq2SeqTrainingArguments
from ullage.training.batches.targets import join_targets

VOCABULARY = 24
LENGTHS = ((3, 5), (9, 2), (1, 1), (6, 7), (4, 4), (12, 3), (2, 9))


def _samples() -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(0)
    return [
        {
            "input_ids": generator.integers(3, VOCABULARY, source).tolist(),
            "labels": [*generator.integers(3, VOCABULARY, target - 1).tolist(), 2],
        }
        for source, target in LENGTHS
    ]


def _model(**changes: Any) -> RecurrentEncoderDecoder:
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return RecurrentEncoderDecoder(
        RecurrentEncoderDecoderConfig(vocab_size=VOCABULARY, hidden_size=16, **ids, **changes)
    )


class _Padding:
    """A padded batch as transformers' own collator makes it, without a tokenizer."""

    pad_token_id, padding_side = 0, "right"

    def pad(self, features: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        rows = [{"input_ids": feature["input_ids"]} for feature in features]
        return ullage.RaggedBatch.from_samples(rows).to_padded()


def _trainer(tmp_path: Path, model: Any = None, collator: Any = None, **arguments: Any) -> Seq2SeqTrainer:
    options = {"per_device_train_batch_size": 4, **arguments}
    others = {name: options.pop(name) for name in ("compute_metrics",) if name in options}
    return Seq2SeqTrainer(
        model=_model() if model is None else model,
        args=quiet(tmp_path, Seq2SeqTrainingArguments, **options),
        data_collator=Seq2SeqCollator() if collator is None else collator,
        train_dataset=_samples(),
        eval_dataset=_samples(),
        **others,
    )


def _real(row: Any) -> list[int]:
    """The tokens of a padded row: no sample has the id of padding."""
    return [token for token in row.tolist() if token not in (0, -100)]


def _token_mean(model: Any) -> float:
    """The mean loss over all labels, pair by pair."""
    total = 0.0
    with torch.no_grad():
        for sample in _samples():
            source, labels = torch.tensor([sample["input_ids"]]), torch.tensor([sample["labels"]])
            total += float(model(input_ids=source, labels=labels).loss) * labels.numel()
    return total / sum(target for _, target in LENGTHS)


@pytest.mark.parametrize(("generates", "batch_size"), [(False, 1), (False, 7), (True, 3)])
def test_eval_loss_is_the_token_mean_at_every_batch_size(generates: bool, batch_size: int, tmp_path: Path) -> None:
    model: Any = _model()
    padded = DataCollatorForSeq2Seq(_Padding(), model)  # pyright: ignore[reportArgumentType]
    options = {"predict_with_generate": generates, "per_device_eval_batch_size": batch_size}
    for collator in (Seq2SeqCollator(), padded):
        trainer = _trainer(tmp_path, model, collator, **options)
        assert trainer.evaluate(max_new_tokens=3)["eval_loss"] == pytest.approx(_token_mean(model), abs=1e-6)


@pytest.mark.parametrize("generates", [False, True])
def test_predictions_are_those_of_each_sample_alone(generates: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"pairs": len(prediction.predictions)}

    trainer = _trainer(tmp_path, predict_with_generate=generates, per_device_eval_batch_size=3, compute_metrics=metrics)
    output = trainer.predict(_samples(), max_new_tokens=6, num_beams=2, suppress_tokens=[0])  # pyright: ignore[reportArgumentType]
    assert output.metrics is not None
    assert output.metrics["test_pairs"] == len(LENGTHS)
    (prediction,) = seen
    model: Any = trainer.model
    for sample, found, labels in zip(_samples(), prediction.predictions, prediction.label_ids, strict=True):
        assert _real(labels) == sample["labels"]
        source = torch.tensor([sample["input_ids"]])
        if generates:
            row = model.generate(source, max_new_tokens=6, num_beams=2, suppress_tokens=[0])[0].tolist()
            assert _real(found) == (row[: row.index(2) + 1] if 2 in row else row)
            assert len(row) > 1
        else:
            alone = model(input_ids=source, labels=torch.tensor([sample["labels"]])).logits[0]
            assert np.allclose(found[: len(alone)], alone.detach().numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_step_on_ragged_batches_equals_one_on_padded_ones(tmp_path: Path) -> None:
    weights = []
    for collator in (Seq2SeqCollator(), Seq2SeqCollator(flattened=True), None):
        model = _model()
        if collator is None:
            collator = DataCollatorForSeq2Seq(_Padding(), model)  # pyright: ignore[reportArgumentType]
        trainer = _trainer(tmp_path, model, collator, max_steps=3, gradient_accumulation_steps=2, learning_rate=1e-2)
        trainer.train()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert any(not torch.equal(weights[0][name], value) for name, value in _model().state_dict().items())
    for others in weights[1:]:
        assert all(torch.allclose(others[name], value, rtol=0, atol=2e-5) for name, value in weights[0].items())


def test_the_settings_of_generation_are_those_given(tmp_path: Path) -> None:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    settings = GenerationConfig(max_new_tokens=2, min_new_tokens=2, suppress_tokens=[0], **ids)
    trainer = _trainer(tmp_path, predict_with_generate=True, generation_config=settings, max_steps=1)
    lengths = {len(_real(row)) for row in trainer.predict(_samples()).predictions}  # pyright: ignore[reportArgumentType]
    assert lengths == {3}
    longer = trainer.predict(_samples(), max_new_tokens=5, min_new_tokens=5)  # pyright: ignore[reportArgumentType]
    assert {len(_real(row)) for row in longer.predictions} == {6}
    trainer.data_collator = ullage.training.RaggedCollator()  # of sources alone
    output = trainer.predict([{"input_ids": sample["input_ids"]} for sample in _samples()], max_new_tokens=4)  # pyright: ignore[reportArgumentType]
    assert len(output.predictions) == len(LENGTHS)
    assert output.label_ids is None


def test_a_decoder_alone_goes_on_at_the_end_of_each_prompt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = RecurrentForCausalLM(
        RecurrentConfig(vocab_size=VOCABULARY, hidden_size=8, pad_token_id=0, eos_token_id=2)
    ).eval()
    prompts: Any = [{"input_ids": sample["input_ids"], "labels": sample["input_ids"]} for sample in _samples()]
    trainer = _trainer(
        tmp_path, model, ullage.training.RaggedCollator(), predict_with_generate=True, per_device_eval_batch_size=3
    )
    output = trainer.predict(prompts, max_new_tokens=4, suppress_tokens=[0])
    for sample, row in zip(prompts, output.predictions, strict=True):
        alone = model.generate([sample["input_ids"]], max_new_tokens=4, suppress_tokens=[0])[0].tolist()
        new = alone[len(sample["input_ids"]) :]
        assert _real(row) == sample["input_ids"] + (new[: new.index(2) + 1] if 2 in new else new)


def test_sources_and_targets_keep_their_own_lengths() -> None:
    batch: Any = Seq2SeqCollator()([{**sample, "weight": float(i)} for i, sample in enumerate(_samples())])
    assert batch.layout.lengths.tolist() == [source for source, _ in LENGTHS]
    assert [row.tolist() for row in batch["labels"].unbind()] == [sample["labels"] for sample in _samples()]
    assert batch["weight"].tolist() == list(range(len(LENGTHS)))
    moved = batch.to("cpu")
    assert [row.tolist() for row in moved["labels"].unbind()] == [sample["labels"] for sample in _samples()]
    assert [sample["labels"].tolist() for sample in batch.samples()] == [sample["labels"] for sample in _samples()]
    flat: Any = Seq2SeqCollator(flattened=True)(_samples())
    assert flat["decoder_cu_seq_lens_q"].tolist() == np.cumsum([0, *(target for _, target in LENGTHS)]).tolist()
    assert flat["labels"].tolist() == [[token for sample in _samples() for token in sample["labels"]]]


def test_masks_are_used_up_on_both_sides() -> None:
    sample = {
        "input_ids": [0, 0, 5, 6],
        "attention_mask": [0, 0, 1, 1],
        "labels": [7, 8, 2, -100],
        "decoder_attention_mask": [1, 1, 1, 0],
    }
    batch: Any = Seq2SeqCollator()([sample])
    assert batch.names == ("input_ids", "labels")
    assert batch["input_ids"].tolist() == [5, 6]
    assert batch["labels"].unbind()[0].tolist() == [7, 8, 2]


def test_samples_that_are_no_pairs() -> None:
    with pytest.raises(
        InputError, match=r"a sample has no target \(sample 1\): expected labels, found \['input_ids'\]"
    ):
        Seq2SeqCollator()([_samples()[0], {"input_ids": [3]}])
    with pytest.raises(InputError, match=r"a sequence is empty \(sample 0\)"):
        Seq2SeqCollator()([{"input_ids": [3], "labels": []}])


def test_a_pair_over_the_capacity_is_named_and_targets_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected at most packing_capacity=14 tokens, found 15"):
        _trainer(tmp_path, packing_capacity=14).train()
    with pytest.raises(InputError, match="packing_oversize='truncate' would cut targets"):
        _trainer(tmp_path, packing_capacity=14, packing_oversize="truncate")


def test_other_fields_with_lengths_of_their_own_cannot_be_joined() -> None:
    batch = ullage.training.RaggedCollator()([{"input_ids": [3, 4]}, {"input_ids": [5]}])
    rows = batch.to_nested("input_ids")
    strange = ullage.RaggedBatch({"input_ids": batch["input_ids"], "pixels": rows}, batch.layout, ["pixels"])
    with pytest.raises(InputError, match=r"only targets have lengths of their own .* \(field 'pixels'\)"):
        join_targets(strange)
