"""Losses and whole steps of a Trainer on a pretended CUDA device."""

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState

from tests.gpu.comparing import TOLERANCE, assert_close
from tests.pretended.cases import LENGTHS, made
from tests.pretended.device import CUDA, on_device, pretending
from tests.pretended.kernels import stand_ins
from tests.support.small_runs import STEADY, losses, quiet
from ullage import RaggedBatch, pack_model
from ullage.core.movement import to_cuda_at_once
from ullage.core.rows import on_host
from ullage.training import RaggedCollator, Trainer, TrainingArguments, sequence_logps
from ullage.training.loss.chunked_loss import _chunks, chunked_cross_entropy


class OnDevice(TrainingArguments):
    """Arguments of a run that is on one GPU."""

    n_gpu = property(lambda self: 1)

    @property
    def device(self):
        assert self._setup_devices.type == "cpu"
        PartialState._shared_state["device"] = CUDA  # accelerate's
        return CUDA


class Waits(transformers.TrainerCallback):
    """The waits of each step, and its copies to the device."""

    def __init__(self, tally):
        self.tally, self.steps = tally, []

    def on_step_end(self, *_, **__):
        self.steps.append((self.tally.waits.copy(), self.tally.copies.copy()))
        self.tally.clear()


def trained(folder, kind, dtype=torch.float32, **options):
    """A Trainer of a tiny model over three steps, which are of three microbatches each."""
    AcceleratorState._reset_state(True)
    samples = [
        {"input_ids": [3 + (i + k) % 50 for k in range(n)]} for i, n in enumerate([30, 7, 29, 40, 12, 9, 33, 20] * 3)
    ]
    options = {**STEADY, "packing_capacity": 64, "per_device_train_batch_size": 8, "max_steps": 3, **options}
    arguments = quiet(folder, kind, logging_steps=3, **options)
    collator = RaggedCollator(labels_from="input_ids")
    trainer = Trainer(made("llama", "causal", 1).to(dtype), arguments, data_collator=collator, train_dataset=samples)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


#: Lines that wait in a step of three microbatches, and how often: what is not a number, and whether to stop for it.
STEP = {"transformers/trainer.py": 2, "ullage/training/mixin.py": 1}


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "flex float32"),
        ({"bf16": True}, "varlen bfloat16"),
        ({"bf16": True, "dtype": torch.bfloat16}, "varlen bfloat16"),
        ({"packing_chunked_loss": False}, "flex float32"),
    ],
    ids=["float32", "autocast", "weights", "whole head"],
)
def test_a_packed_step_is_the_cpus_and_waits_three_times(tmp_path, options, kernel):
    expected = trained(tmp_path / "cpu", TrainingArguments, **options)
    expected.train()
    with pretending() as tally, stand_ins(tally) as kernels:
        found = trained(tmp_path / "device", OnDevice, **options)
        watch = Waits(tally)
        found.add_callback(watch)
        found.train()
    AcceleratorState._reset_state(True)
    half = "bf16" in options
    assert losses(found) == pytest.approx(losses(expected), rel=2e-2 if half else 1e-5)
    for mine, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert on_device(mine)
        if not half:
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)
    assert set(kernels) == {kernel}
    waits, copies = watch.steps[-1]
    assert {line.split()[-1].rsplit(":")[0]: number for line, number in waits.items()} == STEP
    # One copy of a microbatch, and the number of labels.
    assert sorted(copies.values()) == [1, 3]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_loss_in_chunks_is_the_cpus_and_waits_for_no_known_labels(masked, known):
    random = torch.Generator().manual_seed(0)
    head, hidden = torch.nn.Linear(16, 97, bias=False), torch.randn(30, 16, generator=random, requires_grad=True)
    labels = torch.randint(0, 97, (30,), generator=random)
    if masked:
        labels[::3] = -100
    expected = chunked_cross_entropy(hidden, head, labels, chunk=8)
    wanted = torch.autograd.grad(expected, (hidden, head.weight))
    counted = int((labels != -100).sum())
    with pretending() as tally:
        with tally.muted():
            there = [each.detach().to(CUDA) for each in (hidden, labels)]
            there[0].requires_grad_()
            head.to(CUDA)
        loss = chunked_cross_entropy(there[0], head, there[1], chunk=8, counted=counted if known else None)
        loss.backward()
        assert tally.waits.total() == (0 if known else 1 + masked)
        assert loss.is_cuda
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip((there[0].grad, head.weight.grad), wanted, strict=True):
        assert_close(mine, other, TOLERANCE[torch.float32])


def test_more_labels_than_were_counted_are_refused():
    hidden, labels = torch.randn(4, 8), torch.arange(4)
    with pytest.raises(RuntimeError, match="more labels count"):
        chunked_cross_entropy(hidden, torch.nn.Linear(8, 9), labels, counted=3)
    labels[1] = -100  # fewer are weighed with zero
    head = torch.nn.Linear(8, 9)
    expected = chunked_cross_entropy(hidden, head, labels)
    torch.testing.assert_close(chunked_cross_entropy(hidden, head, labels, counted=4), expected)


def test_logps_of_a_batch_are_the_cpus_and_wait_once_for_its_labels():
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (length,), generator=random) for length in LENGTHS]
    batch = RaggedBatch.from_samples([{"input_ids": row, "labels": row} for row in rows])
    model = made("llama", "causal", 1)
    pack_model(model, verify=False)
    expected = sequence_logps(model, batch)
    with pretending() as tally, stand_ins(tally):
        with tally.muted():
            model.to(CUDA)
            batch = batch.to(CUDA)
        found = sequence_logps(model, batch)
        assert tally.waits.total() == 1, tally.waits
        tally.clear()
        found.sums.sum().backward()
        assert tally.waits.total() == 0
        assert found.sums.is_cuda
    for name in ("per_token", "sums", "means", "counts"):
        assert_close(getattr(found, name), getattr(expected, name), TOLERANCE[torch.float32], name)


def test_fields_that_are_moved_at_once_do_not_touch_each_other():
    fields = {"ids": torch.arange(5)[None], "real": torch.ones(3, dtype=torch.bool), "pixels": torch.randn(2, 3)}
    fields |= {"bounds": torch.tensor([0, 5], dtype=torch.int32), "name": "a", "one": torch.tensor(7)}
    with pretending() as tally:
        moved = to_cuda_at_once({**fields, "again": fields["bounds"]}, CUDA)
        assert (tally.waits.total(), tally.copies.total()) == (0, 1)
        assert moved["again"] is moved["bounds"]
        assert all(moved[name].is_cuda for name in ("ids", "real", "pixels", "bounds", "one"))
        version = moved["ids"]._version
        moved["real"].fill_(False)
        assert moved["ids"]._version == version
        assert on_host(moved["ids"]).tolist() == [[0, 1, 2, 3, 4]]
        assert tally.waits.total() == 0
        moved["ids"][0, 0] = 9
        assert on_host(moved["ids"]).tolist() == [[9, 1, 2, 3, 4]]  # which was written to: read again
        assert any(line.startswith("read ullage/core/rows.py") for line in tally.waits)
        assert not on_host(moved["real"]).any()
    for name in ("pixels", "bounds", "one"):
        torch.testing.assert_close(moved[name], fields[name])
    assert to_cuda_at_once(fields, torch.device("cpu"))["ids"] is fields["ids"]


def test_chunks_are_as_large_as_the_device_likes_them():
    """An H200 took 110 ms for this head in chunks that suit a CPU, and 36 ms in these."""
    head = torch.nn.Linear(1, 128256, bias=False, device="meta")
    assert len(_chunks(8192, head, None, "cuda")) == 8
    assert len(_chunks(8192, head, None, "cpu")) == 64
