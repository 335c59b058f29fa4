"""The mixin before TRL's trainers: what they do by themselves stays theirs, to the digit; what packing serves, it says."""

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForSequenceClassification

from tests.support.trl_cases import model, numbers, outcome, text, tokenizer
from ullage.training import RaggedTrainerMixin, TrainingArguments

pytestmark = pytest.mark.slow  # TRL alone takes seconds to load

NUMBER = 10


def rows(make):
    return Dataset.from_list([make(i) for i in range(NUMBER)])


def preferences(i):
    return {"prompt": text(i, 2 + i % 3), "chosen": " " + text(i + 1, 1 + i % 5), "rejected": " " + text(i + 2, 2)}


def case(name):
    """A trainer of TRL's, its configuration, its data, and what it needs beside them."""
    import trl

    options = {}
    if name == "DPO":
        data, more = rows(preferences), {"model": model(), "ref_model": model()}
    elif name == "Reward":
        data = rows(lambda i: {"chosen": text(i + 1, 3 + i % 5), "rejected": text(i + 2, 2 + i % 4)})
        more = {"model": model(LlamaForSequenceClassification, num_labels=1)}
    elif name == "KTO":
        data = rows(lambda i: {"prompt": text(i, 2), "completion": " " + text(i + 1, 1 + i % 5), "label": i % 2 == 0})
        more = {"model": model(), "ref_model": model()}
    elif name == "GRPO":
        data, options = (
            rows(lambda i: {"prompt": text(i, 2 + i % 3)}),
            {"num_generations": 2, "max_completion_length": 4},
        )
        more = {"model": model(), "reward_funcs": lambda completions, **_: [float(len(c) % 3) for c in completions]}
    else:
        data, more = rows(lambda i: {"text": text(i, 3 + i % 6)}), {"model": model()}
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), data, more, options


def mixed(trainer):
    return type(f"Ragged{trainer.__name__}", (RaggedTrainerMixin, trainer), {})


def build(kind, config, data, more, options, folder):
    torch.manual_seed(0)
    options = {
        "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2,
        "bf16": False, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    arguments = config(str(folder), **options)
    return kind(args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), **more)


@pytest.mark.parametrize("name", ["DPO", "Reward", "KTO", "GRPO"])
def test_training_and_evaluation_are_the_trainers_own_to_the_digit(name, tmp_path):
    results = []
    for wrap in (lambda kind: kind, mixed):
        kind, *rest = case(name)
        results.append(outcome(build(wrap(kind), *rest, tmp_path)))
    assert len(results[0][0]) == 3
    assert "eval_loss" in results[0][1]
    assert results[1] == results[0]


def test_a_trainers_own_columns_are_kept_beside_adapters(tmp_path):
    """Rows that were packed beforehand say so in ``seq_lengths``; without it their sequences see each other."""
    kind, config, _, _, _ = case("SFT")
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
        trainer = build(wrap(kind), config, data, more, options, tmp_path)
        bounds.append(next(iter(trainer.get_train_dataloader()))["cu_seq_lens_q"].tolist())
    assert bounds[0] == bounds[1] == [0, 2, 6, 8, 12]


def test_sft_is_packed_as_it_trains_unpacked(tmp_path):
    import trl

    @dataclass
    class Arguments(trl.SFTConfig, TrainingArguments):
        pass

    losses, evaluations = [], []
    for capacity in (None, 16):
        kind, _, data, more, _ = case("SFT")
        options = {"per_device_train_batch_size": 5, "packing_capacity": capacity}
        trainer = build(mixed(kind), Arguments, data, more, options, tmp_path)
        logged, evaluated = outcome(trainer)
        losses.append([entry["loss"] for entry in logged])
        evaluations.append(evaluated["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


def test_metrics_of_a_trainer_without_labels_are_computed(tmp_path):
    kind, config, data, more, options = case("Reward")
    more = {**more, "compute_metrics": lambda found: {"rows": len(found.predictions), "labels": len(found.label_ids)}}
    metrics = [
        build(wrap(kind), config, data, more, options, tmp_path).evaluate() for wrap in (lambda each: each, mixed)
    ]
    assert metrics[0]["eval_rows"] > NUMBER
    assert [numbers(each) for each in metrics[:1]] == [numbers(each) for each in metrics[1:]]
