"""Images of a Trainer's samples arrive in the packed microbatches, beside the tokens of their sequence."""

import numpy as np
import pytest
import torch

from tests.support.item_cases import pictures
from tests.support.small_runs import losses, packed_steps, quiet
from ullage import InputError
from ullage.training import RaggedCollator, Trainer


class Looking(torch.nn.Module):
    """A model that notes which rows each sequence came with, and trains on its tokens."""

    def __init__(self):
        super().__init__()
        self.scores, self.seen = torch.nn.Embedding(40_000, 8), {}

    def forward(self, input_ids, cu_seq_lens_q, labels=None, cu_seq_items=None, **items):
        for i, start in enumerate(cu_seq_lens_q[:-1].tolist()):
            rows = {name: items[name][bounds[i] : bounds[i + 1]] for name, bounds in (cu_seq_items or {}).items()}
            self.seen.setdefault(int(input_ids[0, start]), []).append(rows)
        targets = torch.where(labels[0, 1:] < 0, labels[0, 1:], labels[0, 1:] % 8)
        loss = torch.nn.functional.cross_entropy(self.scores(input_ids[0, :-1]), targets)
        return {"loss": loss, "logits": self.scores(input_ids)}


class Believed(Trainer):
    """Its loss is declared, so that nothing runs before the first step."""

    packing_loss = "token_mean"


def test_a_trainer_s_samples_reach_the_packed_model_with_their_images(tmp_path):
    data = [{name: value for name, value in s.items() if name != "id"} for s in pictures(24, seed=3)]
    model = Looking()
    arguments = quiet(
        tmp_path, packing_capacity=64, per_device_train_batch_size=8, num_train_epochs=1, remove_unused_columns=False,
        packing_verify=False,
    )  # fmt: skip
    trainer = Believed(model, arguments, train_dataset=data, data_collator=RaggedCollator())
    steps = packed_steps(trainer)
    trainer.train()
    assert np.isfinite(losses(trainer)).all()
    assert len(steps) == 3
    assert sum(bool(batch.items) for step in steps for batch in step.microbatches) > 3
    for sample in data:
        (seen,) = model.seen[int(sample["input_ids"][0])]
        for name in set(sample) - {"input_ids", "labels"}:
            inside = (slice(None), *(slice(length) for length in sample[name].shape[1:]))
            assert torch.equal(seen[name][inside], sample[name]), name
        assert not any(len(rows) for name, rows in seen.items() if name not in sample)
    whole = steps[0]
    assert len(whole["pixel_values"]) == sum(
        len(s.get("pixel_values", ())) for b in whole.microbatches for s in b.samples()
    )


def test_a_model_that_cannot_tell_images_apart_is_refused_a_row_with_them(tmp_path):
    class Unaware(Looking):
        def forward(self, input_ids, cu_seq_lens_q, labels=None, **others):
            raise AssertionError("it was called")

    data = pictures(8, seed=3)
    arguments = quiet(tmp_path, per_device_train_batch_size=8, max_steps=1, remove_unused_columns=False)
    trainer = Trainer(Unaware(), arguments, train_dataset=data, data_collator=RaggedCollator())
    with pytest.raises(InputError, match=r"cannot tell the images of a row's sequences apart \(Unaware\)"):
        trainer.train()
