"""The patches for other projects: they apply to the sources that are at hand, and change what they say and no more."""

import importlib
import sys

import pytest
import torch

from maintenance.upstream import check
from tests.support import trl_preferences
from tests.support.trl_cases import numbers, tokenizer


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """TRL's GRPO trainer with the patch, made of copies of the installed files."""
    tree = check.patched("trl_7179", check.installed("trl"), tmp_path_factory.mktemp("trl"))
    utils = check.load("trl.trainer.patched_utils", tree / "trl/trainer/utils.py")
    real = importlib.import_module("trl.trainer.utils")
    real.trim_completions = utils.trim_completions  # which the patched trainer imports from there
    try:
        yield check.load("trl.trainer.patched_grpo", tree / "trl/trainer/grpo_trainer.py").GRPOTrainer, utils
    finally:
        del real.trim_completions
        for name in ("trl.trainer.patched_utils", "trl.trainer.patched_grpo"):
            sys.modules.pop(name, None)


def test_completions_are_cut_to_the_longest_of_the_minibatch(patched):
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    batch = {"prompt_ids": torch.ones(2, 3), "completion_mask": mask, "completion_ids": mask * 7, "tool_mask": None}
    batch |= {"token_type_ids": torch.ones(2, 8), "advantages": torch.ones(2), "num_items_in_batch": torch.tensor(3)}
    widths = {None: 2, 4: 4, 8: 5}
    for multiple, width in widths.items():
        cut = patched[1].trim_completions(batch, multiple)
        assert cut["completion_ids"].tolist() == (mask * 7)[:, :width].tolist()
        assert (cut["prompt_ids"].shape[1], cut["token_type_ids"].shape[1]) == (3, 3 + width)
        assert (cut["advantages"].shape, cut["num_items_in_batch"].ndim) == ((2,), 0)
    assert patched[1].trim_completions({"completion_mask": mask * 0})["completion_mask"].shape == (2, 1)


@pytest.mark.slow
def test_grpo_has_the_losses_that_it_has_without_the_patch(patched, tmp_path):
    import trl

    def run(kind):
        _, config, data, more = trl_preferences.case("GRPO", 24)
        torch.manual_seed(0)
        options = {"num_generations": 4, "max_completion_length": 64, "num_iterations": 2, "steps_per_generation": 3}
        arguments = config(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, bf16=False, use_cpu=True,
            report_to=[], disable_tqdm=True, logging_steps=1, activation_checkpointing=False, save_strategy="no",
            mask_truncated_completions=True, **options,
        )  # fmt: skip
        made = kind(args=arguments, train_dataset=data, processing_class=tokenizer(), **more)
        widths = []
        whole = made._compute_loss

        def compute_loss(model, inputs):
            widths.append(inputs["completion_ids"].shape[1])
            return whole(model, inputs)

        made._compute_loss = compute_loss
        made.train()
        return widths, [numbers(entry) for entry in made.state.log_history if "loss" in entry]

    (before, wanted), (after, found) = run(trl.GRPOTrainer), run(patched[0])
    assert len(wanted) == len(found) == 6
    assert sum(after) < sum(before)
    assert all(one <= other for one, other in zip(after, before))
    for ours, theirs in zip(found, wanted):
        for name in ("loss", "grad_norm", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert max(entry["grad_norm"] for entry in wanted) > 0.1
