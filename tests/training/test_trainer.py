"""The Trainer: what it refuses and how it says so, and what it counts."""

import subprocess
import sys
import textwrap

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging as hf_logging

from tests.support import story
from tests.support.launch import ROOT, environment
from tests.support.small_runs import logged, quiet
from ullage import InputError, TrainingError
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import PackedSequenceCollator, RaggedCollator, RaggedTrainerMixin, Trainer

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def language_model(**options):
    torch.manual_seed(0)
    return RecurrentForCausalLM(RecurrentConfig(vocab_size=story.VOCAB, hidden_size=8, **SPECIAL, **options))


def arguments(folder, **options):
    return quiet(folder, TrainingArguments, **{"max_steps": 2, **options})


def trainer(folder, model, samples, evaluation=None, collator=None, **options):
    return Trainer(
        model,
        arguments(folder, **options),
        data_collator=collator or RaggedCollator(labels_from="input_ids"),
        train_dataset=samples,
        eval_dataset=evaluation if evaluation is not None else samples,
    )


class Tiny(nn.Module):
    """A model of a user's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.config = None

    def outputs(self, x, y):
        return {"loss": nn.functional.mse_loss(self.layer(x), y), "out": self.layer(x)}


class TargetNamed(Tiny):
    def forward(self, x, target=None):
        return self.outputs(x, target)


class SwallowsAll(Tiny):
    def forward(self, x, **kw):
        return self.outputs(x, kw["y"])


class AuxLabels(Tiny):
    def forward(self, x, labels=None, aux_labels=None):
        return self.outputs(x, labels)


@pytest.mark.parametrize(
    ("model", "field", "message"),
    [
        (TargetNamed(), "target", r"no parameter of forward is recognised as labels \(forward\(x, target\)\).*label_names=\['target'\]"),
        (SwallowsAll(), "y", r"no parameter of forward is recognised as labels \(forward\(x, kw\)\).*label_names=\['y'\]"),
        (AuxLabels(), "labels", r"taken for labels and is not in the batch \(aux_labels\).*Set label_names=\['labels'\]"),
    ],
)  # fmt: skip
def test_evaluate_names_the_parameter_at_fault(tmp_path, model, field, message):
    samples = [{"x": np.float32([[i]])[0], field: np.float32([[i]])[0]} for i in range(4)]
    mine = trainer(tmp_path, model, samples, collator=stack, remove_unused_columns=False)
    with pytest.raises(InputError, match=message):
        mine.evaluate()
    mended = trainer(tmp_path, model, samples, collator=stack, remove_unused_columns=False, label_names=[field])
    assert mended.evaluate()["eval_loss"] >= 0


def stack(samples):
    return {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}


def test_a_compiled_model_evaluates_without_being_told(tmp_path):
    class Labelled(Tiny):
        def forward(self, x, labels=None):
            return self.outputs(x, labels)

    samples = [{"x": np.float32([i]), "labels": np.float32([i])} for i in range(4)]
    compiled = torch.compile(Labelled(), backend="eager")
    assert trainer(tmp_path, compiled, samples, collator=stack).evaluate()["eval_loss"] >= 0


def test_empty_datasets_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"the training dataset is empty \(train_dataset\)"):
        trainer(tmp_path, language_model(), [], evaluation=[{"input_ids": [3]}]).train()
    with pytest.raises(InputError, match=r"the dataset is empty \(evaluation\): expected at least one sample"):
        trainer(tmp_path, language_model(), [{"input_ids": [3, 4]}], evaluation=[]).evaluate()


@pytest.mark.parametrize("collator", [RaggedCollator(labels_from="input_ids"), PackedSequenceCollator("input_ids")])
def test_an_id_outside_the_vocabulary_is_named(tmp_path, collator):
    """In training by its index in the data set, which is shuffled; of a stream by its place in the batch."""
    good = [{"input_ids": [3, i % 20]} for i in range(23)]
    samples = [*good[:17], {"input_ids": [3, 4, 23, 5]}, *good[17:]]
    message = r"a token id is outside the vocabulary \({}, input_ids at position 2\): expected 0 to 22, found 23"
    mine = trainer(tmp_path, language_model(), samples, collator=collator, max_steps=-1, num_train_epochs=1)
    with pytest.raises(InputError, match=message.format(r"train_dataset\[17\]")):
        mine.train()
    with pytest.raises(InputError, match=message.format("sample 1 of the batch")):
        mine.evaluate()
    stream = trainer(tmp_path, language_model(), story.Stream(samples), samples, collator=collator, max_steps=9)
    with pytest.raises(InputError, match=message.format("sample 1 of the batch")):
        stream.train()


def test_a_loss_that_is_no_number_stops_training_before_the_step(tmp_path):
    class Explodes(story.LengthsTagger):
        def forward(self, input_ids=None, input_lengths=None, labels=None):
            output = super().forward(input_ids, input_lengths, labels)
            return ModelOutput(loss=output.loss * float("nan"), logits=output.logits)

    model = Explodes(story.StoryConfig())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mine = trainer(tmp_path, model, story.make_samples(8), collator=RaggedCollator())
    with pytest.raises(TrainingError, match=r"the loss or its gradient is not a number \(step 1\): .* found nan"):
        mine.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


#: Of three steps of two samples, no label of the second one counts.
SOME_MASKED = [
    {"input_ids": [3, 4, 5, 6 + i], "labels": [-100, 4, 5, 6 + i] if i // 2 != 1 else [-100] * 4} for i in range(6)
]
IN_ORDER = {"train_sampling_strategy": "sequential", "logging_steps": 1, "max_steps": 3}


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=story.VOCAB, **sizes, **SPECIAL))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_in_which_no_label_counts_is_one_of_zero_loss_as_in_transformers(tmp_path, caplog, smoothing):
    """Gradients are zero, not missing: the optimizer's momentum goes on, weights decay, the schedule steps."""
    options = {**IN_ORDER, "per_device_train_batch_size": 2, "weight_decay": 0.1, "learning_rate": 0.01}
    options |= {"label_smoothing_factor": smoothing}
    theirs = transformers.Trainer(
        tiny_llama(), arguments(tmp_path, **options), default_data_collator, train_dataset=SOME_MASKED
    )
    theirs.train()
    mine = trainer(tmp_path, tiny_llama(), SOME_MASKED, collator=RaggedCollator(), **options)
    metrics = mine.train().metrics
    expected, found = (logged(each, "loss", "grad_norm", "learning_rate") for each in (theirs, mine))
    assert found[1][:2] == (0.0, 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(mine.model.parameters(), theirs.model.parameters()):
        torch.testing.assert_close(one, other)
    said = [record.message for record in caplog.records if "no label counts" in record.message]
    assert len(said) == 1
    assert "step 2, field 'labels'" in said[0]
    assert metrics["total_empty_steps"] == 1
    assert mine.state.log_history[-1]["total_empty_steps"] == 1


def test_a_loss_that_divides_by_nothing_has_no_say_in_a_step_without_labels(tmp_path, caplog):
    class MaskedMean(story.LengthsTagger):
        """A user's own loss: 0/0 where nothing counts, in the forward and in the backward."""

        def forward(self, input_ids=None, input_lengths=None, labels=None):
            logits = super().forward(input_ids, input_lengths).logits
            each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return ModelOutput(loss=each.sum() / (labels != -100).sum(), logits=logits)

    torch.manual_seed(0)
    mine = trainer(
        tmp_path, MaskedMean(story.StoryConfig()), SOME_MASKED[2:4] * 4, collator=RaggedCollator(), **IN_ORDER
    )
    before = {name: tensor.clone() for name, tensor in mine.model.state_dict().items()}
    metrics = mine.train().metrics
    assert story.losses(mine) == [0.0] * 3
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.model.state_dict().items())
    assert metrics["total_empty_steps"] == 3
    assert sum("no label counts" in record.message for record in caplog.records) == 1


def test_what_a_loss_has_beside_its_labels_counts_in_a_step_without_them(tmp_path):
    """A penalty of a user's own, which transformers trains on there too."""

    class Penalised(Trainer):
        def compute_loss(self, model, *args, **kwargs):
            return super().compute_loss(model, *args, **kwargs) + model.lm_head.weight.square().sum()

    model = tiny_llama()
    before = float(model.lm_head.weight.detach().square().sum())
    options = {**IN_ORDER, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    mine = Penalised(model, arguments(tmp_path, **options), RaggedCollator(), train_dataset=SOME_MASKED[2:4])
    mine.train()
    assert story.losses(mine) == pytest.approx([before], rel=1e-5)
    assert float(model.lm_head.weight.detach().square().sum()) == pytest.approx(before * 0.8**2, rel=1e-5)


def test_a_step_without_labels_ends_the_run_if_asked_to(tmp_path):
    def told(empty_step):
        asked = quiet(tmp_path, empty_step=empty_step, per_device_train_batch_size=2, **IN_ORDER)
        Trainer(language_model(), asked, RaggedCollator(), train_dataset=SOME_MASKED).train()

    message = r"no label counts in this step \(step 2, field 'labels'\).*empty_step='warn'"
    with pytest.raises(TrainingError, match=message):
        told("error")
    with pytest.raises(InputError, match=r"no such empty_step: expected 'warn' or 'error', found 'ignore'"):
        told("ignore")


def test_dispatching_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"dispatch_batches would cut packed batches apart .* found True"):
        trainer(tmp_path, language_model(), [], accelerator_config={"dispatch_batches": True})


def test_a_model_that_cannot_tell_sequences_apart_is_refused(tmp_path):
    class Blind(story.StoryBase):
        def forward(self, input_ids=None, labels=None, **kwargs):
            raise AssertionError("never called")

    mine = trainer(tmp_path, Blind(story.StoryConfig()), story.make_samples(4), collator=RaggedCollator())
    with pytest.raises(InputError, match=r"cannot tell the sequences of a RaggedBatch apart \(Blind.forward\)"):
        mine.train()


def test_preparing_a_batch_leaves_the_callers_own_alone(tmp_path):
    """Whoever takes the step twice (a loss function takes labels out) finds the same batch both times."""
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4, 5]])}
    mine = trainer(tmp_path, language_model(), [{"input_ids": [3]}], label_smoothing_factor=0.1)
    prepared = mine._prepare_inputs(batch)
    assert prepared is not batch
    assert prepared.keys() == batch.keys()
    mine.current_gradient_accumulation_steps = 1  # as the loop sets it
    losses = [mine.training_step(mine.model, batch) for _ in range(2)]
    assert losses[0] == losses[1]
    assert batch.keys() == {"input_ids", "labels"}
    assert mine.prediction_step(mine.model, batch, True)[0] is not None


class Tokenizer:
    """As much of a tokenizer as is asked for."""

    pad_token_id = 0

    def save_pretrained(self, folder):
        pass


PADDED = [{"input_ids": [3, 4, 5, 0, 0], "labels": [3, 4, 5, 5, 5]}, {"input_ids": [6, 7, 8, 9, 0], "labels": [6] * 5}]


def counting(folder, processing_class, **options):
    def collate(samples):
        return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}

    args = arguments(folder, max_steps=1, **options)
    mine = Trainer(language_model(), args, collate, PADDED, processing_class=processing_class)
    mine.args.per_device_train_batch_size = 2
    return mine


@pytest.mark.parametrize(("processing_class", "number"), [(Tokenizer(), 7), (None, 10)])
def test_tokens_without_a_mask_are_what_is_not_the_tokenizers_padding(tmp_path, processing_class, number, caplog):
    hf_logging.warning_once.cache_clear()  # another test may have been warned of it
    mine = counting(tmp_path, processing_class, include_num_input_tokens_seen="non_padding")
    mine.train()
    assert mine.state.num_input_tokens_seen == number
    if processing_class:
        assert logged(mine, "padding_computed") == [(pytest.approx(1 - number / 10),)]
    else:  # nothing is said of what nobody can tell
        assert not any("padding_computed" in entry for entry in mine.state.log_history)
    told = [record.getMessage() for record in caplog.records if record.name == "ullage.training.batches.reading"]
    expected = [] if processing_class else ["padding cannot be told from tokens, so all count as tokens"]
    assert [message.partition(":")[0] for message in told] == expected


def test_true_counts_all_tokens_also_where_the_arguments_got_it_late(tmp_path):
    mine = counting(tmp_path, Tokenizer())
    mine.args.include_num_input_tokens_seen = True
    mine.train()
    assert mine.state.num_input_tokens_seen == 10


@pytest.mark.since("transformers", "5.10", "counts a causal model's labels with the first of each sequence")
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("n_gpu", [1, 2])
def test_a_step_is_divided_by_the_number_that_transformers_takes(tmp_path, n_gpu, average):
    """Also with several GPUs in one process, nn.DataParallel, whose replicas are multiplied or divided, never both."""
    args = arguments(tmp_path, average_tokens_across_devices=average)
    assert args.device.type == "cpu"
    args._n_gpu = n_gpu
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.int64), "labels": torch.ones(4, 6, dtype=torch.int64)}
    found = []
    for kind in (Trainer, transformers.Trainer):
        made = kind(language_model(), args, train_dataset=PADDED)
        found.append(made._get_num_items_in_batch([batch], args.device))
    assert torch.equal(torch.as_tensor(found[0]).float(), torch.as_tensor(found[1]).float()), found


def test_packing_wants_a_process_per_gpu(tmp_path):
    args = quiet(tmp_path, packing_capacity=64)
    assert args.device.type == "cpu"
    args._n_gpu = 2
    with pytest.raises(InputError, match=r"found 2 in one process.*torchrun"):
        Trainer(language_model(), args, train_dataset=PADDED)


def test_a_mapped_stream_is_evaluated(tmp_path):
    """Its columns are not known before it is read."""
    listed = datasets.Dataset.from_list([{"ids": [3, 4, 5, 6][: 2 + i % 3]} for i in range(6)])
    stream = listed.to_iterable_dataset().map(lambda sample: {"input_ids": sample["ids"]})
    assert stream.column_names is None
    samples = [{"input_ids": sample["ids"]} for sample in listed]
    losses = [trainer(tmp_path, language_model(), samples, each).evaluate()["eval_loss"] for each in (samples, stream)]
    assert losses[0] == losses[1]


def test_columns_of_a_wrapped_model_are_the_models_own(tmp_path):
    """A compiled model's forward has no names. What a trainer under the mixin adds to the columns stays."""

    class Adds(transformers.Trainer):
        def _set_signature_columns_if_needed(self):
            if self._signature_columns is None:
                super()._set_signature_columns_if_needed()
                self._signature_columns += ["mine"]

    class Chooses(transformers.Trainer):
        def _set_signature_columns_if_needed(self):
            self._signature_columns = ["mine"]

    found = {}
    for base in (transformers.Trainer, Adds, Chooses):
        kind = type("Ragged", (RaggedTrainerMixin, base), {})
        mine = kind(torch.compile(language_model(), backend="eager"), arguments(tmp_path))
        mine._set_signature_columns_if_needed()
        found[base.__name__] = mine._signature_columns
    assert {"input_ids", "cu_seq_lens_q", "labels", "label_ids"} < set(found["Trainer"])
    assert sorted(found["Adds"]) == sorted([*found["Trainer"], "mine"])
    assert found["Chooses"] == ["mine"]


def test_a_causal_loss_not_named_so_is_not_scaled(tmp_path, monkeypatch):
    """transformers counts unshifted labels for a model that is not called ...ForCausalLM, and scales its loss by that."""

    class Ours(RecurrentForCausalLM):
        pass

    Ours.__module__ = "a_users_script"
    monkeypatch.setitem(sys.modules, Ours.__module__, sys.modules[__name__])  # older transformers look there
    samples = [{"input_ids": s["input_ids"] * 2} for s in story.make_samples(4)]
    losses = {}
    for kind in (RecurrentForCausalLM, Ours):
        torch.manual_seed(0)
        model = kind(RecurrentConfig(vocab_size=story.VOCAB, hidden_size=8, **SPECIAL))
        mine = trainer(tmp_path, model, samples, per_device_train_batch_size=4, max_steps=1, logging_steps=1)
        mine.train()
        losses[kind] = story.losses(mine)
    assert losses[Ours] == pytest.approx(losses[RecurrentForCausalLM], abs=1e-6)


def test_the_collator_uses_the_attention_mask_up():
    collate = RaggedCollator(labels_from="input_ids")
    batch = collate([
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0], "label": 1},
        {"input_ids": [0, 7, 8, 9], "attention_mask": [0, 1, 1, 1], "label": 0},
    ])  # fmt: skip
    assert batch["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert batch.layout.lengths.tolist() == [2, 3]
    assert batch["labels"].tolist() == [1, 0]
    assert "attention_mask" not in batch
    with pytest.raises(InputError, match=r"attention_mask has holes \(sample 0\)"):
        collate([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}])
    with pytest.raises(InputError, match=r"samples lack the field that labels are copied from: expected input_ids"):
        collate([{"x": [1]}])


@pytest.mark.slow
def test_the_trainer_needs_no_datasets(tmp_path):
    """On a machine without it (a bare GPU machine): trained and evaluated, in a process that cannot find it."""
    script = """
    import importlib.machinery as machinery, sys

    own = machinery.PathFinder.find_spec
    machinery.PathFinder.find_spec = classmethod(
        lambda cls, name, *rest: None if name.split(".")[0] == "datasets" else own(name, *rest)
    )
    from tests.support.packing_script import make_trainer

    trainer = make_trainer("llama", sys.argv[1], max_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0 and "datasets" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
