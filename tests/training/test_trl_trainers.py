"""The mixin before TRL's trainers: what they do by themselves stays theirs, to the digit; what packing serves, it says."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.support.small_runs import quiet
from tests.support.trl_cases import model, numbers, outcome, tokenizer
from tests.support.trl_preferences import case
from ullage.training import RaggedTrainerMixin

pytestmark = pytest.mark.slow  # TRL alone takes seconds to load

NUMBER = 10


def mixed(trainer):
    return type(f"Ragged{trainer.__name__}", (RaggedTrainerMixin, trainer), {})


def build(kind, config, data, more, folder, **options):
    torch.manual_seed(0)
    options = {
        "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
        "bf16": False, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    arguments = quiet(folder, config, **options)
    return kind(args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), **more)


@pytest.mark.parametrize("name", ["DPO", "Reward", "KTO", "GRPO"])
def test_training_and_evaluation_are_the_trainers_own_to_the_digit(name, tmp_path):
    results = []
    for wrap in (lambda kind: kind, mixed):
        kind, *rest = case(name, NUMBER)
        options = {"num_generations": 2, "max_completion_length": 4} if name == "GRPO" else {}
        results.append(outcome(build(wrap(kind), *rest, tmp_path, **options)))
    assert len(results[0][0]) == 3
    assert "eval_loss" in results[0][1]
    assert results[1] == results[0]


def test_a_trainers_own_columns_are_kept_beside_adapters(tmp_path):
    """Rows that were packed beforehand say so in ``seq_lengths``; without it their sequences see each other."""
    import trl

    data = Dataset.from_list(
        [{"input_ids": [5, 6, 7, 8, 9, 10], "labels": [5, 6, 7, 8, 9, 10], "seq_lengths": [2, 4]}] * 4
    )
    options = {
        "padding_free": True,
        "packing": False,
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    bounds = []
    for wrap in (lambda kind: kind, mixed):
        flash = model()
        flash.config._attn_implementation = "flash_attention_2"  # TRL asks for its name, and runs nothing here
        more = {"model": flash, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
        trainer = build(wrap(trl.SFTTrainer), trl.SFTConfig, data, more, tmp_path, **options)
        bounds.append(next(iter(trainer.get_train_dataloader()))["cu_seq_lens_q"].tolist())
    assert bounds[0] == bounds[1] == [0, 2, 6, 8, 12]


def test_metrics_of_a_trainer_without_labels_are_computed(tmp_path):
    kind, config, data, more = case("Reward", NUMBER)
    more = {**more, "compute_metrics": lambda found: {"rows": len(found.predictions), "labels": len(found.label_ids)}}
    metrics = [build(wrap(kind), config, data, more, tmp_path).evaluate() for wrap in (lambda each: each, mixed)]
    assert metrics[0]["eval_rows"] > NUMBER
    assert [numbers(each) for each in metrics[:1]] == [numbers(each) for each in metrics[1:]]
