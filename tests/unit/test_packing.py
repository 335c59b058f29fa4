"""What packing refuses before it trains, how it resumes, and how auxiliary losses are weighed."""

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GPTJConfig, GPTJForCausalLM

from tests import packing_script
from ullage import CheckpointError, InputError
from ullage.training import PackedSequenceCollator, RaggedCollator, Trainer, TrainingArguments


def test_gradient_accumulation_is_refused_with_the_reason(tmp_path):
    message = r"packing takes no gradient_accumulation_steps: each optimizer step is one global batch, .*: expected 1, found 2"
    with pytest.raises(InputError, match=message):
        packing_script.make_trainer("llama", str(tmp_path), gradient_accumulation_steps=2)


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_capacity_must_be_positive(tmp_path, capacity):
    with pytest.raises(
        InputError, match=f"packing_capacity must be positive: expected tokens a microbatch, .*, found {capacity}"
    ):
        packing_script.make_trainer("llama", str(tmp_path), packing_capacity=capacity)


def test_a_sequence_longer_than_the_capacity_is_named(tmp_path):
    with pytest.raises(InputError, match=r"(?s)100.*capacity.*64|capacity.*64.*100"):
        packing_script.make_trainer("llama", str(tmp_path), packing_capacity=64).train()


def test_a_model_whose_sequences_would_see_each_other_is_refused(tmp_path):
    config = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(InputError, match="would let packed sequences see each other"):
        Trainer(
            BertLMHeadModel(config), TrainingArguments(str(tmp_path), packing_capacity=8192, use_cpu=True, report_to=[])
        )


def test_a_model_without_an_attention_hook_is_refused(tmp_path):
    model = GPTJForCausalLM(GPTJConfig(vocab_size=61, n_embd=32, n_layer=1, n_head=2, rotary_dim=8))
    with pytest.raises(InputError, match="would let packed sequences see each other"):
        Trainer(model, TrainingArguments(str(tmp_path), packing_capacity=8192, use_cpu=True, report_to=[]))


def test_a_collator_that_does_not_know_its_sequences_is_refused(tmp_path):
    trainer = packing_script.make_trainer("llama", str(tmp_path))
    for collator in (PackedSequenceCollator("input_ids"), RaggedCollator(True, "input_ids")):
        trainer.data_collator = collator
        with pytest.raises(
            InputError,
            match="packing needs batches that know their sequences: expected a collator that gives a RaggedBatch",
        ):
            trainer.train()


def test_packed_training_resumes_exactly(tmp_path):
    whole = packing_script.make_trainer("recurrent", str(tmp_path / "a"), save_strategy="steps", save_steps=2)
    whole.train()
    again = packing_script.make_trainer("recurrent", str(tmp_path / "b"))
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    losses = [
        {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 2}
        for trainer in (whole, again)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    packing_script.make_trainer("recurrent", str(tmp_path / "a"), save_strategy="steps", save_steps=5).train()
    message = r"this checkpoint is of another model .*: expected model_type=llama, .* found model_type=ullage_recurrent"
    with pytest.raises(CheckpointError, match=message):
        packing_script.make_trainer("llama", str(tmp_path / "b")).train(str(tmp_path / "a" / "checkpoint-5"))
    with pytest.raises(CheckpointError, match=r"this is no checkpoint \(.*\): expected a folder, found nothing there"):
        packing_script.make_trainer("llama", str(tmp_path / "b")).train(resume_from_checkpoint=str(tmp_path / "none"))


def test_an_iterable_dataset_is_packed(tmp_path):
    from tests.story import Stream

    listed = packing_script.run("recurrent", str(tmp_path))
    streamed = packing_script.run("recurrent", str(tmp_path), samples=Stream(packing_script.make_samples()))
    assert streamed["losses"] == listed["losses"]


def test_an_auxiliary_loss_counts_by_real_tokens(tmp_path):
    trainer = packing_script.make_trainer("mixtral", str(tmp_path), max_steps=1)
    model = packing_script.make_model("mixtral")
    model.set_attn_implementation("ullage")
    kept, pack = [], trainer._pack
    trainer._pack = lambda batch: kept.append(pack(batch)) or kept[-1]
    trainer.train()
    (packed,) = kept
    assert len(packed.microbatches) > 1
    expected, labels = 0.0, sum(m.numel() - len(m) for m in packed.microbatches)
    with torch.no_grad():
        for microbatch in packed.microbatches:
            keywords = microbatch.to_flattened()
            out = model.train()(**keywords)
            count = microbatch.numel() - len(microbatch)
            own = out.loss - model.config.router_aux_loss_coef * out.aux_loss
            expected += float(own) * count / labels
            expected += model.config.router_aux_loss_coef * float(out.aux_loss) * microbatch.numel() / packed.num_tokens
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([expected], rel=1e-5)
