"""A LoRA that ``model.add_adapter`` has put on: it goes on from its checkpoint, or is refused before it trains."""

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM

from tests.support.own_models import llama_config, sequences
from tests.support.small_runs import losses, quiet
from ullage.core.errors import CheckpointError, InputError
from ullage.training import RaggedCollator, Trainer


@pytest.fixture(autouse=True)
def the_peft_that_there_is(monkeypatch):
    """transformers 5.24 asks for a peft 0.22, which nobody can install yet; it does with what is installed."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.17")


ROWS = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in sequences((7, 3, 12, 5, 9, 3, 8, 4))]


def model(kind="one", **options):
    torch.manual_seed(0)
    made = LlamaForCausalLM(llama_config(num_hidden_layers=1))
    settings = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    made.add_adapter(LoraConfig(**settings), "first")
    if kind != "one":
        made.add_adapter(LoraConfig(**settings), "second")
    if kind == "both":
        made.set_adapter(["first", "second"])
    return made


def run(folder, steps, made, resume=None, **options):
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        **options,
    }
    arguments = quiet(folder, max_steps=steps, per_device_train_batch_size=4, **options)
    trainer = Trainer(made, arguments, RaggedCollator(), ROWS, ROWS[:3])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize(("kind", "adapter", "options"), [
    ("one", {}, {}),
    ("two", {}, {"packing_capacity": 64}),
    ("one", {"modules_to_save": ["lm_head"]}, {"async_save": True}),
])  # fmt: skip
def test_it_goes_on_as_if_it_had_not_stopped(tmp_path, kind, adapter, options):
    whole = losses(run(tmp_path / "whole", 4, model(kind, **adapter), **options))
    run(tmp_path / "parts", 2, model(kind, **adapter), **options)
    parts = run(tmp_path / "parts", 4, model(kind, **adapter), "auto", **options)
    assert losses(parts) == whole
    assert len(set(whole)) == 4


@pytest.mark.regression
def test_the_best_adapter_is_loaded_at_the_end(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1.0}
    trainer = run(tmp_path, 4, model(), **options)
    measured = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(measured), abs=1e-6)
    assert measured[0] != pytest.approx(measured[1], abs=1e-3)


@pytest.mark.regression
def test_what_a_checkpoint_would_not_hold_is_refused_before_training(tmp_path):
    loose = model()
    loose.lm_head.weight.requires_grad_(True)
    for made, found in ((loose, "lm_head.weight"), (model("both"), r"model.layers.0.*second.weight")):
        with pytest.raises(InputError, match=rf"hold one adapter, and more is trained .* found {found}"):
            run(tmp_path / "refused", 2, made)
        assert not list(tmp_path.glob("refused/checkpoint-*"))
        assert len(losses(run(tmp_path / "unsaved", 2, made, save_strategy="no"))) == 2


@pytest.mark.regression
def test_another_adapter_is_not_taken_for_it(tmp_path):
    run(tmp_path, 2, model())
    with pytest.raises(CheckpointError, match=r"another adapter than the model's .*adapter_model.safetensors.*v_proj"):
        run(tmp_path, 4, model(target_modules=["q_proj", "v_proj"]), f"{tmp_path}/checkpoint-2")
