"""A stream that ranks train on together, some steps of it; run by torchrun. ``stream_script.py FOLDER '[options, ...]'``.

Each run goes on from the newest checkpoint of its folder. What it trained on is told as the samples' numbers, by step.
"""

import json
import os
import sys

import datasets
from transformers import TrainerCallback

from tests.support import story
from tests.support.packing_script import leave, make_model
from ullage.core.errors import UllageError
from ullage.training import RaggedCollator, Trainer, TrainingArguments
from ullage.training.step.packing import PackedBatch

#: Tokens of a sample that say its number, of a vocabulary of 61.
DIGITS = 3


def sample(i):
    digits = [1 + i // 60**k % 60 for k in range(DIGITS)]
    return {"input_ids": digits + [1] * (i % 5)}


def number_of(ids):
    return sum((digit - 1) * 60**k for k, digit in enumerate(ids[:DIGITS]))


def read(spans):
    for first, last in spans:
        yield from map(sample, range(first, last))


def streams(count):
    spans = [(0, count // 4), (count // 4, count // 2), (count // 2, count)]
    whole = datasets.IterableDataset.from_generator(read, gen_kwargs={"spans": spans})
    return {
        "torch": story.Stream([sample(i) for i in range(count)]),
        "datasets": whole,
        "table": datasets.Dataset.from_list([sample(i) for i in range(count)]).to_iterable_dataset(3),
        "shuffled": whole.shuffle(seed=3, buffer_size=7),
    }


class Stop(TrainerCallback):
    """Saves after step ``stop`` of the run, and ends it."""

    def __init__(self, stop):
        self.stop = stop

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def run(folder, data, count, stop, **options):
    """The numbers of this rank's samples by step, and the losses since the beginning."""
    trainer = Trainer(
        make_model("recurrent"),
        TrainingArguments(
            os.path.join(folder, data), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1,
            ddp_timeout=240, learning_rate=1e-2, lr_scheduler_type="constant", optim="adamw_torch", **options,
        ),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=streams(count)[data],
        callbacks=[Stop(stop)],
    )  # fmt: skip
    steps, draw = [], trainer._steps.draw_step

    def noting(*arguments):
        batches, items = draw(*arguments)
        for batch in batches:
            parts = batch.microbatches if isinstance(batch, PackedBatch) else batch.batches
            steps.append([number_of(s["input_ids"].tolist()) for part in parts for s in part.samples()])
        return batches, items

    trainer._steps.draw_step = noting
    trainer.train(resume_from_checkpoint="auto")
    return {"steps": steps, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def run_or_fail(folder, **options):
    try:
        return run(folder, **options)
    except UllageError as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    leave(sys.argv[1], [run_or_fail(sys.argv[1], **options) for options in json.loads(sys.argv[2])])
