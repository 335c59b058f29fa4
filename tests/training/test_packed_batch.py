"""A packed step where a user's ``training_step`` reads it: a mapping of the rank's flattened batch."""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from tests.support import packed_models
from tests.support.small_runs import losses
from ullage import InputError
from ullage.training import Seq2SeqTrainer, Trainer

STEPS = packed_models.STEPS[:2]


def run(family, folder, trainer):
    """Packed training with a trainer of a user's."""
    made = packed_models.make_trainer(family, str(folder), packed=True, steps=STEPS)
    made.__class__ = type(trainer.__name__, (trainer, Seq2SeqTrainer if family == "t5" else Trainer), {})
    made.train()
    return losses(made)


class Reading:
    """Reads all that a mapping offers, and hands the step on."""

    seen = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(inputs, Mapping)
        fields = {**inputs}
        assert list(inputs) == list(inputs.keys()) == list(fields)
        assert len(inputs) == len(fields)
        assert "input_ids" in inputs
        assert "weight" not in inputs
        assert inputs.get("weight") is None
        assert all(inputs[name] is value for name, value in inputs.items())
        type(self).seen = [*(self.seen or []), fields]
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_step_of_ones_own_reads_the_flattened_batch(tmp_path, family):
    kind = type("Reads", (Reading,), {"seen": None})
    expected = packed_models.run(family, str(tmp_path), steps=STEPS)["losses"]
    assert run(family, tmp_path, kind) == pytest.approx(expected, rel=1e-5)


def steps_of(family, folder):
    found = []

    class Kept(Reading):
        def training_step(self, model, inputs, num_items_in_batch=None):
            found.append(inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    run(family, folder, Kept)
    return found


@pytest.mark.regression
@pytest.mark.parametrize(("family", "shifts"), [("gpt_oss", True), ("bert_tokens", False)])
def test_the_row_holds_every_sequence_of_the_step(tmp_path, family, shifts):
    found = steps_of(family, tmp_path)
    samples = packed_models.make_samples(family, STEPS)
    for step, lengths in zip(found, STEPS, strict=True):
        assert step["input_ids"].shape == (1, sum(lengths)) == (1, step.numel())
        assert step["position_ids"].shape == step["labels"].shape == (1, sum(lengths))
        assert len(step.microbatches) > 1 or sum(lengths) <= packed_models.CAPACITY
        bounds = step["cu_seq_lens_q"].tolist()
        rows = [step["input_ids"][0, a:b].tolist() for a, b in itertools.pairwise(bounds)]
        mine, samples = samples[: len(lengths)], samples[len(lengths) :]
        assert sorted(rows) == sorted(sample["input_ids"].tolist() for sample in mine)
        counted = sum(int((sample["labels"] != -100).sum()) for sample in mine)
        assert int((step["labels"] != -100).sum()) == counted - shifts * len(lengths)


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("how", ["pop", "set", "delete", "whole"])
def test_what_would_go_wrong_is_told(tmp_path, how):
    class Changes:
        def training_step(self, model, inputs, num_items_in_batch=None):
            if how == "pop":
                inputs.pop("labels")
            elif how == "set":
                inputs["labels"] = inputs["input_ids"]
            elif how == "delete":
                del inputs["labels"]
            else:
                inputs = self._prepare_inputs(inputs)
            return torch.zeros(())

    message = "more than the model takes at once" if how == "whole" else "a packed step cannot be changed"
    with pytest.raises(InputError, match=message):
        run("gpt_oss", tmp_path, Changes)


def test_a_rank_without_sequences_has_an_empty_row(tmp_path):
    from ullage.training.batches.packed_batch import PackedBatch

    steps = steps_of("bert", tmp_path)
    whole = steps[0].microbatches[0]
    empty = type(whole).from_samples(whole.samples()[:1])
    nothing = type(whole)(
        {name: empty[name][:0] for name in empty.names}, type(empty.layout)(np.zeros(0, np.int64)), empty.per_sequence
    )
    step = PackedBatch((nothing,), steps[0].plan)
    assert step["input_ids"].shape == (1, 0)
    assert step["labels"].shape == (0,)
