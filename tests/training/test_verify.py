"""The proof before the first step of a packed run: what it takes, what it refuses, and that it changes nothing."""

import logging

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from tests.support import own_models, verify_script
from tests.support.small_runs import losses, on_ranks, quiet
from ullage.mixers import SequencesMeet
from ullage.training import RaggedCollator, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

LENGTHS = [5, 23, 1, 17, 9, 40, 12, 3, 30, 2, 9, 21, 8, 8, 19, 1]
OPTIONS = {
    "packing_capacity": 64, "max_steps": 2, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
    "learning_rate": 1e-2, "train_sampling_strategy": "sequential",
}  # fmt: skip


def samples(labels=None):
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, own_models.SIZES["vocab_size"], (length,), generator=draw) for length in LENGTHS]
    return [{"input_ids": each, "labels": each if labels is None else labels(each)} for each in ids]


def llama(**options):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(own_models.llama_config(attention_dropout=0.1, **options))


def make(folder, model, data=None, *, trainer=Trainer, arguments=TrainingArguments, **options):
    data = data or samples()
    return trainer(model, quiet(folder, arguments, **{**OPTIONS, **options}), train_dataset=data, eval_dataset=data)


def weights(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def meeting():
    model = llama()
    verify_script.put_meeting(model)
    return model


def lora():
    return get_peft_model(llama(), LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


KINDS = {
    "plain": (llama, {}),
    "bfloat16": (llama, {"bf16": True}),
    "noise on embeddings": (llama, {"neftune_noise_alpha": 5}),
    "adapters": (lora, {}),
    "checkpointing": (llama, {"activation_checkpointing": True}),
    "reentrant checkpointing": (
        llama,
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "another loss per sequence": (llama, {"packing_loss_weighting": "sequence"}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_the_proof_is_the_run_without_it_to_the_last_bit(kind, tmp_path, caplog):
    make_model, options = KINDS[kind]
    found = []
    for verify in (True, False):
        trainer = make(tmp_path, make_model(), packing_verify=verify, **options)
        with caplog.at_level(logging.INFO, "ullage"):
            trainer.train()
        found.append((losses(trainer), weights(trainer.model), trainer._packer.proof.last))
    (mine, trained, proof), (expected, other, none) = found
    assert mine == expected
    assert torch.equal(trained, other)
    assert proof.passed
    assert not proof.weak
    assert len(set(proof.lengths)) >= 3
    assert none is None
    assert caplog.text.count("packing proved on 4 sequences of") == 1
    assert "native" in caplog.text


@pytest.mark.slow
def test_a_compiled_model_is_proved_without_compiling_it(tmp_path):
    trainer = make(tmp_path, llama(), torch_compile=True, torch_compile_backend="eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trainer._packer.proof.before_step(trainer.model, trainer._packer.pack([RaggedCollator()(samples()[:8])]))
    assert trainer._packer.proof.last.passed
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


PAIRS = {"trainer": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments, "packing_capacity": 96}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
HEADS = {
    "classes of tokens": (hf.BertForTokenClassification, lambda ids: ids % 3, {}),
    "a class of each sequence": (hf.BertForSequenceClassification, lambda ids: int(ids[0]) % 3, {}),
    "pairs": (hf.T5ForConditionalGeneration, lambda ids: ids[: 1 + len(ids) // 2], PAIRS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("head", HEADS)
def test_heads_are_proved(head, tmp_path):
    kind, labels, options = HEADS[head]
    config = hf.T5Config(vocab_size=99, **T5) if head == "pairs" else hf.BertConfig(**own_models.SIZES, num_labels=3)
    trainer = make(tmp_path, kind(config), samples(labels), **options)
    trainer.train()
    found = trainer._packer.proof.last.differences
    assert {each.kind for each in found} == {"outputs", "gradients", "loss"}
    assert head != "pairs" or {"logits", "encoder_last_hidden_state", "the loss"} <= {each.name for each in found}


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("name", own_models.LEAKING)
def test_a_model_of_ones_own_trains_packed_as_it_does_alone(name, tmp_path):
    """Each trained with sequences that saw each other, and nobody said so."""
    labels = {"lstm before a tagging head": lambda ids: ids % 4}.get(name)
    runs = []
    for capacity in (64, None):
        torch.manual_seed(0)
        model = own_models.LEAKING[name][0]()
        batch = {"packing_capacity": 64} if capacity else {"packing_capacity": None, "per_device_train_batch_size": 1}
        batch["gradient_accumulation_steps"] = 1 if capacity else 8
        trainer = make(tmp_path, model.double(), samples(labels), **batch)
        if capacity is None:
            trainer.data_collator = RaggedCollator()
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


@pytest.mark.regression
def test_a_model_that_no_way_keeps_apart_is_refused_with_the_module(tmp_path):
    trainer = make(tmp_path, meeting())
    before = weights(trainer.model).clone()
    with pytest.raises(SequencesMeet, match=r"first in model\.layers\.1\.mlp \(Meeting\).*packing_verify=False"):
        trainer.train()
    assert torch.equal(weights(trainer.model), before)
    make(tmp_path, meeting(), packing_verify=False).train()


def test_evaluation_alone_is_proved_forward(tmp_path):
    trainer = make(tmp_path, llama())
    trainer.evaluate()
    found = trainer._packer.proof.last
    assert {each.kind for each in found.differences} == {"outputs", "loss"}
    with pytest.raises(SequencesMeet, match=r"model\.layers\.1\.mlp \(Meeting\)"):
        make(tmp_path, meeting()).evaluate()


@pytest.mark.slow  # TRL alone takes seconds to load
def test_rows_of_preference_losses_are_proved_by_their_logits(tmp_path):
    from tests.support import trl_cases

    trainer = trl_cases.make_sft("llama", str(tmp_path), packing_capacity=64, max_steps=1)
    trainer.train()
    assert trainer._packer.proof.last.passed


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp"])
def test_an_engine_trains_with_the_proof_as_without_it_to_the_last_bit(engine, tmp_path):
    cases = [[engine, "llama", True], [engine, "llama", False], [engine, "meeting", True]]
    ranks = on_ranks(2, verify_script, tmp_path, cases, timeout=500)
    for proved, plain, refused in ranks:
        assert (proved["proved"], plain["proved"]) == (True, False)
        assert len(proved["losses"]) == verify_script.STEPS
        assert proved["losses"] == plain["losses"]
        assert proved["weights"] == plain["weights"]
        if engine in ("zero3", "fsdp"):  # of the ways that are left none makes equally many calls
            assert "where its parameters are sharded" in refused["error"]
        else:
            assert "first in model.layers.1.mlp (Meeting)" in refused["error"]
            assert "packing_verify=False" in refused["error"]
    assert any("packing proved on 4 sequences" in each for each in ranks[0][0]["said"])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.regression
def test_ranks_take_the_same_coarser_way(tmp_path):
    name = "convolution before lm_head"
    for (rank,) in on_ranks(2, verify_script, tmp_path, [["ddp", name, True]], timeout=300):
        assert rank["way"] == "whole by lengths"
