"""Runs of one global batch on any number of ranks; run by torchrun. ``shared_script.py FOLDER '[[place, options], ...]'``.

Each case trains in a place of its own below the folder, where it goes on from what is there. Options are those of the
arguments, and ``kind`` of the model, ``stage`` of ZeRO, and ``until``: a step that is saved and ends the run.
"""

import json
import logging
import os
import sys

from transformers import TrainerCallback

from tests.support import own_losses
from tests.support.packing_script import leave, make_model, make_samples, zero
from ullage.training import RaggedCollator, TrainingArguments

#: Of two epochs of three steps at a global batch of 13 or 12: the last step of an epoch has 4 samples, or 6.
LENGTHS = [5 + 7 * i % 23 for i in range(30)]


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def samples_of(inputs):
    """The samples of a rank's part of a step, each by its tokens."""
    batches = inputs.microbatches if hasattr(inputs, "microbatches") else inputs.batches
    return [sample["input_ids"].tolist() for batch in batches for sample in batch.samples()]


def run(folder, place, kind="llama", stage=0, until=None, trainer="Trainer", resume="auto", evaluates=True, **options):
    options = {
        "packing_global_batch_size": 13, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3,
        "num_train_epochs": 2, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch",
        "ddp_timeout": 120, "deepspeed": zero(stage) if stage else None, **options,
    }  # fmt: skip
    data = make_samples(LENGTHS)
    index = {tuple(sample["input_ids"]): i for i, sample in enumerate(data)}
    made = own_losses.ALL[trainer](
        make_model(kind),
        TrainingArguments(os.path.join(folder, place), **options),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=data,
        eval_dataset=make_samples(LENGTHS[:7]),
    )
    trained, step = {}, made.training_step

    def noting(model, inputs, count=None):
        trained[str(made.state.global_step + 1)] = [index[tuple(tokens)] for tokens in samples_of(inputs)]
        return step(model, inputs, count)

    made.training_step = noting
    made.add_callback(Stop(until))
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ullage").addHandler(handler)
    try:
        made.train(resume_from_checkpoint=resume)
    finally:
        logging.getLogger("ullage").removeHandler(handler)
    rows = [row for row in made.state.log_history if "loss" in row]
    names = ("loss", "grad_norm", "learning_rate", "epoch")
    return {
        "rows": {str(row["step"]): [row[name] for name in names] for row in rows},
        "samples": trained,
        "eval_loss": made.evaluate()["eval_loss"] if evaluates else None,
        "max_steps": made.state.max_steps,
        "said": said,
    }


if __name__ == "__main__":
    leave(sys.argv[1], [run(sys.argv[1], place, **options) for place, options in json.loads(sys.argv[2])])
