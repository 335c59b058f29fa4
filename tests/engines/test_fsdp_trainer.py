"""A model that parallelize made, under our Trainer from Python: what it refuses, and what ranks have to agree on."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ullage import InputError, checkpoint
from ullage.core.errors import CheckpointError, DistributedError
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


def stepped(made, optimizer, without=()):
    """The optimizer after a step in which some parameters had no gradient."""
    made(input_ids=torch.arange(3, 12)[None], labels=torch.arange(3, 12)[None]).loss.backward()
    for name, parameter in made.named_parameters():
        if name in without:
            parameter.grad = None
    optimizer.step()
    return optimizer


def states_of(made, optimizer):
    """What is held of each parameter, by name and key."""
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    held = {names[id(p)]: state for p, state in optimizer.state.items()}
    return {(name, key): value for name, state in held.items() for key, value in state.items() if value is not None}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_gets_state_and_settings_by_name_and_keeps_how_it_computes(tmp_path, kind):
    def optimizer_of(made, **settings):
        return (torch.optim.AdamW if kind == "adamw" else torch.optim.SGD)(made.parameters(), **settings)

    made = fsdp.parallelize(model())
    optimizer = stepped(made, optimizer_of(made, lr=1e-3, foreach=True), without=("lm_head.weight",))
    fsdp.save(tmp_path / "made", made, optimizer)
    other = fsdp.parallelize(model())
    loaded = stepped(other, optimizer_of(other, lr=7.0, foreach=False))
    fsdp.load(tmp_path / "made", other, loaded, hyperparameters=False)
    assert loaded.param_groups[0]["lr"] == 7.0
    assert_equal(states_of(other, loaded), states_of(made, optimizer))
    fsdp.load(tmp_path / "made", other, loaded)
    assert (loaded.param_groups[0]["lr"], loaded.param_groups[0]["foreach"]) == (1e-3, False)
    assert_equal(dict(other.state_dict()), dict(made.state_dict()))


def test_a_tied_weight_gets_the_state_that_was_saved_under_its_other_name(tmp_path):
    def tied():
        return LlamaForCausalLM(LlamaConfig(**{**model().config.to_dict(), "tie_word_embeddings": True}))

    made = fsdp.parallelize(tied())
    optimizer = stepped(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    fsdp.save(tmp_path / "first", made, optimizer)
    first, other = "model.embed_tokens.weight", "lm_head.weight"
    inventory = checkpoint.read(tmp_path / "first")
    renamed = [replace(each, name=other) if each.name == first else each for each in inventory.tensors]
    names = [[other if name == first else name for name in listed] for listed in inventory.details.names]
    details = replace(inventory.details, names=names)
    turned = replace(inventory, tensors=tuple(renamed), aliases={first: other}, details=details)
    checkpoint.convert(turned, tmp_path / "other", format="dcp")  # weights under both names, state under one
    checkpoint.convert(replace(turned, aliases={}), tmp_path / "alone", format="dcp")  # all of it under the other
    for folder in (tmp_path / "first", tmp_path / "other", tmp_path / "alone"):
        again = fsdp.parallelize(tied())
        loaded = torch.optim.AdamW(again.parameters(), lr=7.0)
        fsdp.load(folder, again, loaded)
        assert_equal(states_of(again, loaded), states_of(made, optimizer))
        assert_equal(dict(again.state_dict()), dict(made.state_dict()))
        assert loaded.param_groups[0]["lr"] == 1e-3


class Unlisted(LlamaForCausalLM):
    """A class that transformers does not have, whose optimizer is of two groups."""


def test_a_trainers_folder_of_a_class_that_transformers_lacks_is_read_in_the_order_of_the_model(tmp_path):
    torch.manual_seed(1)
    plain = trainer(tmp_path / "run", Unlisted(model().config), max_steps=2, save_strategy="steps", save_steps=2)
    plain.train()
    made = fsdp.parallelize(Unlisted(model().config))
    names = transformers.Trainer.get_decay_parameter_names(None, made)
    named = list(made.named_parameters())
    groups = [{"params": [p for n, p in named if (n in names) is decays]} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=7.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    fsdp.load(tmp_path / "run" / "checkpoint-2", made, optimizer, scheduler=schedule)
    assert_equal(states_of(made, optimizer), states_of(plain.model, plain.optimizer.optimizer))
    assert schedule.last_epoch == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2"]


def test_weights_of_a_larger_model_or_of_other_sizes_are_refused_and_a_new_optimizer_stays_new(tmp_path):
    def config(**sizes):
        return LlamaConfig(**{**model().config.to_dict(), **sizes})

    made = fsdp.parallelize(model())
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-2, momentum=0.9)
    for name, sizes, message in (
        ("larger", {"num_hidden_layers": 2}, "the checkpoint is of a larger model .*layers.1.*"),
        ("wider", {"intermediate_size": 48}, r"has another size .*expected \[32, 16\], found \[48, 16\]"),
    ):
        LlamaForCausalLM(config(**sizes)).save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").unlink()  # which would tell
        with pytest.raises(CheckpointError, match=message):
            fsdp.load(tmp_path / name, made)
        with torch.device("meta"):
            empty = model()
        with pytest.raises(CheckpointError, match=message):
            fsdp.parallelize(empty, weights=tmp_path / name)
    fsdp.save(tmp_path / "adamw", made, stepped(made, torch.optim.AdamW(made.parameters())))
    with pytest.raises(CheckpointError, match="lacks what the optimizer needs"):
        fsdp.load(tmp_path / "adamw", made, optimizer)
    assert not optimizer.state
    fsdp.save(tmp_path / "alone", made)
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        fsdp.load(tmp_path / "alone", made, optimizer)


def test_a_state_with_other_keys_than_names_is_refused_before_anything_is_written(tmp_path):
    made = fsdp.parallelize(model())
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-2)
    schedules = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3]), torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(
        InputError, match=r"a state is more than plain numbers by names \(scheduler\): expected numbers"
    ):
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
