"""The engine's Trainer from Python: transformers' own arguments, a collator, callbacks, and what it refuses."""

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ullage import InputError
from ullage.engines import fsdp
from ullage.training import RaggedCollator

SAMPLES = [{"input_ids": list(range(3, 3 + length))} for length in (5, 17, 2, 30, 9, 11)]


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def arguments(folder, **more):
    fixed = {"per_device_train_batch_size": 3, "max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    fixed |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2}
    return transformers.TrainingArguments(output_dir=str(folder), **{**fixed, **more})


class Seen(transformers.TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_it_trains_by_transformers_arguments_and_calls_callbacks(tmp_path):
    seen, sizes = Seen(), []

    class Counted(fsdp.Trainer):
        def training_step(self, step):
            sizes.append(sum(len(batch) for batch in step.microbatches))
            return super().training_step(step)

    trainer = Counted(model(), arguments(tmp_path), train_dataset=SAMPLES, callbacks=[seen])
    trainer.train()
    assert seen.steps == [1, 2, 3, 4]
    assert sizes == [3, 3, 3, 3]
    assert losses(trainer)[-1] < losses(trainer)[0]
    padded = [
        {"input_ids": [*one["input_ids"], 0], "attention_mask": [1] * len(one["input_ids"]) + [0]} for one in SAMPLES
    ]
    collated = fsdp.Trainer(model(), arguments(tmp_path), RaggedCollator(), train_dataset=padded)
    collated.train()
    assert losses(collated) == pytest.approx(losses(trainer), rel=1e-6)


def test_what_it_cannot_do_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is nothing to train on"):
        fsdp.Trainer(model(), arguments(tmp_path), train_dataset=[])
    with pytest.raises(InputError, match="label_smoothing_factor is not supported over"):
        fsdp.Trainer(model(), arguments(tmp_path, label_smoothing_factor=0.1), train_dataset=SAMPLES)
    with pytest.raises(InputError, match=r"dp_replicate does not divide .* expected a divisor of dp 1, found 2"):
        fsdp.Trainer(model(), arguments(tmp_path), train_dataset=SAMPLES, dp_replicate=2)
    with torch.device("meta"):
        bare = model()
    with pytest.raises(InputError, match=r"has no weights yet: expected one of weights=FOLDER and seed=NUMBER"):
        fsdp.parallelize(bare)
    with pytest.raises(InputError, match="this model has its weights already"):
        fsdp.parallelize(model(), seed=3)


def test_accumulated_batches_are_one_step(tmp_path):
    runs = []
    for batch, accumulated in ((4, 1), (2, 2)):
        more = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        runs.append(fsdp.Trainer(model(), arguments(tmp_path, **more), train_dataset=SAMPLES))
        runs[-1].train()
    assert losses(runs[0]) == losses(runs[1])


def test_masks_say_what_is_learnt(tmp_path):
    masked = [{**one, "completion_mask": [0, *[1] * (len(one["input_ids"]) - 1)], "text": "cut"} for one in SAMPLES]
    labelled = [{**one, "labels": [-100, *one["input_ids"][1:]]} for one in SAMPLES]
    runs = [fsdp.Trainer(model(), arguments(tmp_path), train_dataset=samples) for samples in (masked, labelled)]
    for run in runs:
        run.train()
    assert losses(runs[0]) == losses(runs[1])
    with pytest.raises(InputError, match=r"a mask has another length than its sample"):
        fsdp.Trainer(model(), arguments(tmp_path), train_dataset=[{**SAMPLES[0], "completion_mask": [1]}]).train()
