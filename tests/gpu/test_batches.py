"""Batches on a device: every form of a RaggedBatch, and everything that to_device moves, as on the CPU."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ullage import RaggedBatch, to_device

LENGTHS = (5, 1, 8, 4, 4, 13)


def make(pad_to_multiple_of=1):
    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "input_ids": torch.randint(1, 50, (n,), generator=generator),
            "labels": torch.randint(1, 50, (n,), generator=generator),
            "x": torch.randn(n, 3, generator=generator),
            "reward": torch.tensor(float(i)),
        }
        for i, n in enumerate(LENGTHS)
    ]
    return RaggedBatch.from_samples(samples, pad_to_multiple_of=pad_to_multiple_of)


def assert_tree(found: Any, expected: Any, device: torch.device) -> None:
    """The same values; tensors on the device."""
    if isinstance(expected, torch.Tensor):
        assert found.device == device
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_tree(found[name], expected[name], device)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_tree(one, other, device)
    else:
        assert found == expected


FORMS = {
    "samples": lambda batch: batch.samples(),
    "padded": lambda batch: batch.to_padded(),
    "padded left": lambda batch: batch.to_padded(side="left"),
    "flattened": lambda batch: batch.to_flattened(),
    "shifted": lambda batch: batch.with_shift_labels()["shift_labels"],
    "placeholder": lambda batch: batch.placeholder().to_flattened(),
    "lengths": lambda batch: [batch.cu_seqlens, batch.position_ids],
    "nested": lambda batch: list(batch.to_nested("x").unbind()),
}


@pytest.mark.parametrize("pad_to_multiple_of", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_is_the_cpus(device, form, pad_to_multiple_of):
    batch = make(pad_to_multiple_of)
    assert_tree(FORMS[form](batch.to(device)), FORMS[form](batch), device)


def test_a_packed_sequence_and_padded_rows_come_back(device):
    batch = make().to(device)
    packed = batch.to_packed_sequence("x")
    theirs = pack_sequence([sample["x"] for sample in make().samples()], enforce_sorted=False)
    assert packed.batch_sizes.device.type == "cpu"
    assert_tree([packed.data, packed.sorted_indices], [theirs.data, theirs.sorted_indices], device)
    assert_tree(RaggedBatch.from_packed_sequence(packed, "x")["x"], make()["x"], device)
    padded = batch.to_padded()
    back = RaggedBatch.from_padded(padded, padded.pop("attention_mask"))
    assert_tree({name: back[name] for name in back.names}, {name: make()[name] for name in back.names}, device)


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: Any
    name: str


def test_to_device_moves_what_it_knows_and_keeps_its_type(device):
    rows = [torch.randn(3, 2), torch.randn(1, 2)]
    things = {
        "pair": Pair(torch.ones(2), [torch.zeros(1), "text"]),
        "frozen": Frozen({"x": torch.ones(3)}, "kept"),
        "packed": pack_sequence(rows, enforce_sorted=False),
        "batch": make(4),
        "nested": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }
    moved = to_device(things, device, non_blocking=True, float_dtype=torch.bfloat16)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].other[1] == "text"
    assert moved["frozen"].name == "kept"
    assert moved["frozen"].values["x"].dtype == torch.bfloat16
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].batch_sizes.device.type == "cpu"
    tensors = [moved["pair"].one, moved["frozen"].values["x"], moved["packed"].data, moved["nested"].values()]
    assert {tensor.device for tensor in (*tensors, moved["batch"]["x"])} == {device}
    assert moved["batch"]["input_ids"].dtype == torch.int64
    for row, back in zip(rows, moved["nested"].unbind()):
        assert torch.equal(back.cpu(), row.bfloat16())


def test_pinned_memory_moves_without_waiting(device):
    if device.type != "cuda":
        pytest.skip("memory is pinned for a GPU")
    batch = make(4)
    pinned = batch.pin_memory()
    assert all(pinned[name].is_pinned() for name in pinned.names)
    assert not batch["x"].is_pinned()
    torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
    try:
        moved = pinned.to(device, non_blocking=True)
        again = to_device({"batch": pinned}, device, non_blocking=True)["batch"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_tree({name: moved[name] for name in moved.names}, {name: batch[name] for name in batch.names}, device)
    assert torch.equal(again["x"], moved["x"])
