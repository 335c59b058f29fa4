"""``compute_metrics`` gets each sequence once and in order, on every number of processes, and eval_loss is by token."""

import functools
import json
import math

import numpy as np
import pytest
import torch

from tests.support import metrics_script
from tests.support.small_runs import on_ranks

pytestmark = pytest.mark.distributed

#: Which model, and which of its samples, a case of the script asks.
ASKED = {
    "padded": "bert tagger",
    "inputs and loss": "llama tagger",
    "accumulated": "bert tagger",
    "tuple": "packed llama",
}
BATCH_SIZE = 3


@functools.cache
def one_by_one(name):
    """What a model says of each sample alone, without padding, packing or a batch: outputs and mean losses."""
    model = metrics_script.MODELS[name]()
    if name == "packed llama":
        model.set_attn_implementation("eager")
    outputs, losses = [], []
    for sample in metrics_script.samples_for(name):
        with torch.no_grad():
            whole = model(**{key: torch.tensor(value)[None] for key, value in sample.items()})
        token_aligned = name != "bert classifier"
        if name == "bert answers":
            outputs.append((whole.start_logits[0].numpy(), whole.end_logits[0].numpy()))
        else:
            outputs.append((whole.logits[0] if token_aligned else whole.logits.squeeze(0)).numpy())
        losses.append(float(whole.loss))
    return outputs, losses


def mean_loss(name):
    """The mean over all labels that count, which is that of no batch's means."""
    before = int(name in ("packed llama", "recurrent"))  # the first label of a sequence has nothing before it
    labels = [np.atleast_1d(sample["labels"])[before:] for sample in metrics_script.samples_for(name)]
    counts = [int((each != -100).sum()) for each in labels]
    sums = [loss * n for loss, n in zip(one_by_one(name)[1], counts) if n]
    return sum(sums) / sum(counts)


def assert_close(mine, theirs):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs):
        np.testing.assert_allclose(np.asarray(one)[: len(other)], other, rtol=1e-4, atol=1e-5)


def real(rows, samples, filled=False):
    """Padded rows without their padding, which is -100 where ``filled``; what has one value a sequence as it is."""
    found = []
    for row, sample in zip(rows, samples, strict=True):
        number = len(sample["input_ids"])
        assert not filled or not isinstance(row, list) or set(row[number:]) <= {-100}
        found.append(row[:number] if isinstance(row, list) else row)
    return found


def joined(calls, key):
    return [entry for call in calls for entry in call[key]]


def check_whole(results):
    for case in (*metrics_script.MODELS, *ASKED):
        name = ASKED.get(case, case)
        samples, (outputs, _) = metrics_script.samples_for(name), one_by_one(name)
        (call,) = results[case]["calls"]
        if name == "bert answers":
            assert call["label_ids"] == [[s["start_positions"] for s in samples], [s["end_positions"] for s in samples]]
            for k in range(2):
                assert_close(call["predictions"][k], [output[k] for output in outputs])
            continue
        assert real(call["label_ids"], samples, filled=True) == [s["labels"] for s in samples], case
        assert results[case]["metrics"]["eval_number"] == len(samples)
        assert results[case]["metrics"]["eval_loss"] == pytest.approx(mean_loss(name), abs=1e-5), case
        if case == "accumulated":
            assert real(call["predictions"], samples) == [output.argmax(-1).tolist() for output in outputs]
        elif case == "tuple":
            assert real(call["predictions"][0], samples) == [output.argmax(-1).tolist() for output in outputs]
            assert real(call["predictions"][1], samples, filled=True) == [s["labels"] for s in samples]
        else:
            assert_close(call["predictions"], outputs)


def check_inputs_and_losses(results):
    (call,) = results["inputs and loss"]["calls"]
    samples = metrics_script.samples_for("llama tagger")
    assert real(call["inputs"], samples) == [s["input_ids"] for s in samples]
    counts = [sum(label != -100 for label in s["labels"]) for s in samples]
    sums = [loss * n for loss, n in zip(one_by_one("llama tagger")[1], counts)]
    batches = [slice(k, k + BATCH_SIZE) for k in range(0, len(samples), BATCH_SIZE)]
    means = [sum(sums[b]) / sum(counts[b]) for b in batches]
    np.testing.assert_allclose(call["losses"], np.repeat(means, BATCH_SIZE)[: len(samples)], rtol=1e-5)


def check_batch_by_batch(results, world):
    for name in ("bert tagger", "bert classifier"):
        for kind in ("list", "stream"):
            result, samples = results[f"{name} batchwise {kind}"], metrics_script.samples_for(name)
            calls = result["calls"]
            assert len(calls) == math.ceil(len(samples) / BATCH_SIZE / world)
            assert [call["compute_result"] for call in calls] == [False] * (len(calls) - 1) + [True]
            assert real(joined(calls, "label_ids"), samples, filled=True) == [s["labels"] for s in samples]
            assert len(joined(calls, "losses")) == len(samples)
            assert_close(joined(calls, "predictions"), one_by_one(name)[0])
            assert result["metrics"]["eval_number"] == len(samples)
            whole = results[name]["metrics"]["eval_loss"]
            assert result["metrics"]["eval_loss"] == pytest.approx(whole, abs=1e-6)


def check(results, world):
    check_whole(results)
    check_inputs_and_losses(results)
    check_batch_by_batch(results, world)


def test_on_one_process(tmp_path):
    check(json.loads(json.dumps(metrics_script.everything(tmp_path))), 1)
    assert metrics_script.faults(tmp_path) == {
        "data": "ValueError: sample 4 is broken",
        "metric": "ValueError: no metric",
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_on_several_processes(tmp_path, processes):
    ranks = on_ranks(processes, metrics_script, tmp_path, None)
    check(ranks[0], processes)
    for rank in ranks[1:]:
        assert rank["recurrent"]["calls"] == ranks[0]["recurrent"]["calls"]

    def elsewhere(rank, error):
        told = f"DistributedError: another rank failed while evaluating its batches (rank {rank}): found {error}. "
        return f"{told}The log of rank {rank} has the whole error"

    said = [rank["faults"] for rank in ranks]
    broken, last = "ValueError: sample 4 is broken", processes - 1
    assert [each["data"] for each in said] == [broken if r == 1 else elsewhere(1, broken) for r in range(processes)]
    assert [each["metric"] for each in said] == [
        *[elsewhere(last, "ValueError: no metric")] * last,
        "ValueError: no metric",
    ]
