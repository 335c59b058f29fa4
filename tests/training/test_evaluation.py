"""eval_loss is the token mean computed by hand, at every batch size and on every number of processes."""

import json

import pytest
import torch

from tests.support import evaluate_script
from tests.support.launch import torchrun

pytestmark = pytest.mark.distributed


def by_hand(name):
    """Sum of the losses of single samples in float64, divided by how many labels counted; and each sample's logits."""
    model = evaluate_script.make_model(name).double()
    total, count, logits = 0.0, 0, []
    for sample in evaluate_script.samples_for(name):
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])
        if name == "tagger":
            out = model(input_ids=ids, input_lengths=[ids.shape[1]]).logits[0]
            predicted, target = out, labels
        else:
            out = model(input_ids=ids).logits[0]
            predicted, target = out[:-1], labels[1:]
        loss = torch.nn.functional.cross_entropy(predicted, target, reduction="sum", ignore_index=-100)
        total += loss.item()
        count += int((target != -100).sum())
        logits.append(out.detach().float())
    return total / count, logits


def assert_as_by_hand(results):
    for name in ("recurrent", "llama", "tagger"):
        loss, logits = by_hand(name)
        for key in [f"{name} {size}" for size in evaluate_script.BATCH_SIZES] + [f"{name} stream"]:
            assert results[key]["eval_loss"] == pytest.approx(loss, abs=1e-6), key
            for mine, hand in zip(results[key]["predictions"], logits, strict=True):
                torch.testing.assert_close(torch.tensor(mine), hand, rtol=1e-4, atol=1e-5)


def test_on_one_process(tmp_path):
    assert_as_by_hand(evaluate_script.everything(str(tmp_path)))


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_on_several_processes(tmp_path, processes):
    torchrun(processes, evaluate_script.__file__, tmp_path)
    assert_as_by_hand(json.loads((tmp_path / "results.json").read_text()))
