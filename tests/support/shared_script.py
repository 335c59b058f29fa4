"""Runs of one global batch, or of a stream, on any number of ranks; ``shared_script.py FOLDER '[[place, options], ...]'``.

Each case trains in a place of its own below the folder, where it goes on from what is there. Options are those of the
arguments, and ``kind`` of the model, ``stage`` of ZeRO, ``stream``: one of :func:`streams`, of ``count`` samples, and
``until``: a step that is saved and ends the run.
"""

import os

import datasets
from transformers import TrainerCallback

from tests.support import own_losses, story
from tests.support.packing_script import make_model, make_samples, zero
from tests.support.small_runs import STEADY, quiet, said_by_ullage, serve
from ullage.core.errors import UllageError
from ullage.training import RaggedCollator

#: Of two epochs of three steps at a global batch of 13 or 12: the last step of an epoch has 4 samples, or 6.
LENGTHS = [5 + 7 * i % 23 for i in range(30)]


def numbered(i):
    """A sample whose first three tokens say its number."""
    return {"input_ids": [1 + i // 60**k % 60 for k in range(3)] + [1] * (i % 5)}


def streams(count):
    def read(spans):
        for first, last in spans:
            yield from map(numbered, range(first, last))

    spans = [(0, count // 4), (count // 4, count // 2), (count // 2, count)]
    whole = datasets.IterableDataset.from_generator(read, gen_kwargs={"spans": spans})
    return {
        "torch": story.Stream([numbered(i) for i in range(count)]),
        "datasets": whole,
        "table": datasets.Dataset.from_list([numbered(i) for i in range(count)]).to_iterable_dataset(3),
        "shuffled": whole.shuffle(seed=3, buffer_size=7),
    }


class Stop(TrainerCallback):
    """Saves after a step, and ends the run."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def run(
    folder, place, kind="llama", stage=0, until=None, trainer="Trainer", evaluates=True, stream=None, count=0, **options
):
    options = {
        **STEADY, "packing_global_batch_size": 13, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3,
        "num_train_epochs": 2, "lr_scheduler_type": "cosine", "train_sampling_strategy": "random",
        "deepspeed": zero(stage) if stage else None, **options,
    }  # fmt: skip
    data = [numbered(i) for i in range(count)] if stream else make_samples(LENGTHS)
    index = {tuple(sample["input_ids"]): i for i, sample in enumerate(data)}
    made = own_losses.ALL[trainer](
        make_model(kind),
        quiet(os.path.join(folder, place), **options),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=streams(count)[stream] if stream else data,
        eval_dataset=make_samples(LENGTHS[:7]),
    )
    trained, step = {}, made.training_step

    def noting(model, inputs, number=None):
        parts = inputs.microbatches if hasattr(inputs, "microbatches") else inputs.batches
        ids = [tuple(sample["input_ids"].tolist()) for part in parts for sample in part.samples()]
        trained[str(made.state.global_step + 1)] = [index[each] for each in ids]
        return step(model, inputs, number)

    made.training_step = noting
    made.add_callback(Stop(until))
    with said_by_ullage() as said:
        made.train(resume_from_checkpoint="auto")
    rows = [row for row in made.state.log_history if "loss" in row]
    names = ("loss", "grad_norm", "learning_rate", "epoch")
    return {
        "rows": {str(row["step"]): [row.get(name) for name in names] for row in rows},
        "samples": trained,
        "eval_loss": made.evaluate()["eval_loss"] if evaluates else None,
        "max_steps": made.state.max_steps,
        "said": said,
    }


if __name__ == "__main__":
    serve(run, UllageError)
