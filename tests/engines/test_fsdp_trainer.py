"""A model that parallelize made, under our Trainer from Python: what it refuses, and what ranks have to agree on."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ullage import InputError
from ullage.core.errors import DistributedError
from ullage.engines import fsdp
from ullage.training import RaggedCollator, Trainer, TrainingArguments
from ullage.training.step.drawing import StepCounts

SAMPLES = [{"input_ids": list(range(3, 3 + length))} for length in (5, 17, 2, 30, 9, 11)]


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def arguments(folder, **more):
    fixed = {"per_device_train_batch_size": 3, "max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    fixed |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2}
    return TrainingArguments(output_dir=str(folder), **{"packing_capacity": 64, **fixed, **more})


def trainer(folder, made=None, **more):
    made = fsdp.parallelize(model()) if made is None else made
    return Trainer(made, arguments(folder, **more), RaggedCollator(labels_from="input_ids"), train_dataset=SAMPLES)


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_step_of_one_process_is_that_of_a_plain_model(tmp_path):
    sharded, plain = trainer(tmp_path / "sharded"), trainer(tmp_path / "plain", model())
    for each in (sharded, plain):
        each.train()
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-6)
    assert losses(sharded)[-1] < losses(sharded)[0]
    made = trainer(tmp_path / "unclipped", max_grad_norm=0.0)
    made.train()
    assert all(row["grad_norm"] > 0 for row in made.state.log_history if "loss" in row)


@pytest.mark.parametrize(("options", "message"), [
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is not supported over ullage.engines.fsdp"),
    ({"async_save": True}, "async_save is not supported over"),
    ({"packing_loss_weighting": "sequence"}, "packing_loss_weighting is not supported over"),
    ({"packing_capacity": "auto"}, "a capacity is not found by itself over"),
    ({"packing_capacity": None}, "is trained on packed steps .*packing_capacity.: expected a number of tokens"),
    ({"bf16": True}, r"bf16 .* expected parallelize\(model, dtype=torch.bfloat16\)"),
])  # fmt: skip
def test_arguments_that_would_not_be_honoured_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        trainer(tmp_path, **options)


def test_a_state_with_other_keys_than_names_is_refused_before_anything_is_written(tmp_path):
    made = fsdp.parallelize(model())
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-2)
    schedules = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3]), torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(InputError, match=r"a state is more than plain numbers, by names \(scheduler\)"):
        fsdp.save(tmp_path / "made", made, optimizer, scheduler=schedules[0])
    assert list(tmp_path.iterdir()) == []
    fsdp.save(tmp_path / "made", made, optimizer, scheduler=schedules[1])
    schedules[1].step_size = 7
    fsdp.load(tmp_path / "made", made, optimizer, scheduler=schedules[1])
    assert schedules[1].step_size == 3


def test_what_cannot_be_spread_is_refused():
    with torch.device("meta"):
        bare = model()
    for made, options, message in (
        (model(), {"dp_replicate": 2}, r"dp_replicate does not divide .* expected a divisor of dp 1, found 2"),
        (bare, {}, r"has no weights yet: expected weights=FOLDER"),
        (model(), {"weights": "anywhere"}, "this model has its weights already"),
        (fsdp.parallelize(model()), {}, "this model is parallel already"),
    ):
        with pytest.raises(InputError, match=message):
            fsdp.parallelize(made, **options)


def test_ranks_that_share_their_batches_have_drawn_the_same():
    def row(labels, batches, stop=0):
        return StepCounts.row(labels, True, None, batches, stop, 0.0)

    told = torch.tensor([row(5, 1), row(5, 1), row(7, 0), row(7, 0, stop=15)])
    met = StepCounts.of(told, [[0, 1], [2, 3]])
    assert (met.labels.tolist(), met.batches.tolist(), met.stop) == ([5, 7], [1, 0], 15)
    with pytest.raises(DistributedError, match=r"have drawn different ones: .* found .*\[\[5, 1\], \[7, 0\]\]"):
        StepCounts.of(told, [[0, 2], [1, 3]])
