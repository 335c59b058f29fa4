"""``packing_capacities``: packed steps of sequences with images hold every capacity, on every rank the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from maintenance.pictures import picture_samples
from maintenance.tiny import tiny_model
from ullage import InputError, MultimodalCost, RaggedBatch
from ullage.planning import Plan
from ullage.training import Trainer, TrainingArguments
from ullage.training.batches.amounts import amounts_of

_COUNTS = (0, 1, 3, 0, 1, 2, 0, 4)
_SIZES = ((4, 4), (8, 4), (6, 8), (4, 2))


def trainer(folder: Path, model: Any, samples: list[dict], **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=8, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", packing_verify=False, remove_unused_columns=False, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=samples)


def test_a_step_holds_tokens_and_patches_and_its_log_shows_both(tmp_path):
    model = tiny_model("qwen2_5_vl", "image")
    samples = picture_samples(model, images=_COUNTS, sizes=_SIZES)
    run = trainer(tmp_path, model, samples, packing_capacities="tokens=300,patches=128")
    run.train()
    plan = run.meter.plan
    assert isinstance(plan, Plan)
    assert (plan.problems(), plan.capacities) == ([], {"tokens": 300, "patches": 128})
    grids = [sample.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long)) for sample in samples]
    assert sorted(plan.amounts["patches"]) == sorted(int(grid.prod(1).sum()) for grid in grids)
    assert sorted(plan.amounts["images"]) == sorted(_COUNTS)
    (row,) = [row for row in run.state.log_history if "loss" in row]
    (use, _) = plan.statistics().resources
    assert row["patches_capacity_unused"] == pytest.approx(use.unused, abs=1e-4)
    assert row["images_per_second"] > 0
    assert row["flops_per_second"] > 0


@pytest.mark.parametrize("model_type", ["qwen2_vl", "llava", "mistral3"])
def test_patches_are_those_that_the_tower_sees(model_type):
    model = tiny_model(model_type, "image")
    samples = picture_samples(model, images=(0, 1, 2), sizes=((4, 4), (8, 4)))
    seen: list[int] = []
    tower = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower")))
    first = next(module for module in tower.modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)))
    first.register_forward_hook(lambda _, __, out: seen.append(out.numel() // out.shape[1]))
    found = amounts_of(RaggedBatch.from_samples(samples), model.config)
    assert found["images"].tolist() == [0, 1, 2]
    for sample, patches in zip(samples[1:2], found["patches"][1:2], strict=True):
        fields = {name: value for name, value in sample.items() if name not in ("labels", "mm_token_type_ids")}
        fields |= {"input_ids": sample["input_ids"][None]}
        model(
            **fields,
            **({"mm_token_type_ids": sample["mm_token_type_ids"][None]} if "mm_token_type_ids" in sample else {}),
        )
        assert sum(seen) == patches
    assert found["patches_squared"][2] <= found["patches"][2] ** 2 <= 2 * found["patches_squared"][2]
    assert amounts_of(RaggedBatch.from_samples(samples), transformers.LlamaConfig()) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packing_capacities": {"patches": 64}}, "must have the capacity of tokens, once"),
        ({"packing_capacities": "tokens=9,patches=64", "packing_capacity": 8}, "packing_capacity=8 and tokens=9"),
        ({"packing_capacities": "tokens=9,pixels=64"}, "resource of packing_capacities.*patches.*pixels"),
        ({"packing_capacities": "patches"}, "packing_capacities is unknown.*tokens=8192"),
        ({"packing_capacities": {"patches": 64}, "packing_capacity": "auto"}, "'auto' runs rows of text"),
    ],
)
def test_capacities_that_cannot_be_meant_are_refused(options, words, tmp_path):
    with pytest.raises(InputError, match=words):
        TrainingArguments(str(tmp_path), **options)


def test_a_sequence_of_too_many_patches_is_named_or_dropped(tmp_path):
    model = tiny_model("qwen2_vl", "image")
    samples = picture_samples(model, images=_COUNTS, sizes=_SIZES)
    limits = {"packing_capacities": {"tokens": 300, "patches": 100}}
    with pytest.raises(InputError, match=r"more patches than a microbatch.*train_dataset\[7\].*at most 100 patches"):
        trainer(tmp_path, model, samples, **limits).train()
    run = trainer(tmp_path, model, samples, packing_oversize="drop", **limits)
    run.train()
    assert run.meter.plan.statistics().num_dropped == 1
    text = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=99,
                                         num_hidden_layers=1, num_attention_heads=2))  # fmt: skip
    words = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 8
    with pytest.raises(InputError, match="takes no images, of which packing_capacities limits the patches"):
        trainer(tmp_path, text, words, **limits).train()


def test_a_frozen_tower_weighs_a_third():
    from ullage.training.step.metering import cost_of

    model = tiny_model("qwen2_vl", "image")
    trained = cost_of(model)
    assert isinstance(trained, MultimodalCost)
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    frozen = cost_of(model)
    assert isinstance(frozen, MultimodalCost)
    assert np.isclose(frozen.tower.linear * 3, trained.tower.linear)
    assert frozen.text == trained.text
