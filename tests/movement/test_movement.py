"""to_device moves what it knows, keeps every type, and never calls a constructor it does not know.

The target is the meta device, so that a tensor left behind is seen.
"""

import collections
import dataclasses
import types
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import ullage
from ullage import RaggedBatch, to_device

ONE = torch.ones(2)


class Point(NamedTuple):
    x: Any
    y: Any


class TaggedTuple(tuple):
    def __new__(cls, items, tag):
        new = super().__new__(cls, items)
        new.tag = tag
        return new


class DemandingDict(dict):
    def __init__(self, required, *items):
        super().__init__(*items)
        self.required = required


class OwnMapping(MutableMapping):
    def __init__(self, data, required):
        self._data = data
        self.required = required

    def __getitem__(self, key):
        return self._data[key]

    def __setitem__(self, key, value):
        self._data[key] = value

    def __delitem__(self, key):
        del self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class SlottedMapping(Mapping):
    __slots__ = ("_data",)

    def __init__(self, *, data):
        self._data = data

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class OwnSequence(Sequence):
    def __init__(self, items, required):
        self._items = items

    def __getitem__(self, index):
        return self._items[index]

    def __len__(self):
        return len(self._items)


@dataclasses.dataclass(frozen=True)
class Frozen:
    tokens: torch.Tensor
    name: str = "frozen"


@dataclasses.dataclass(slots=True)
class Slotted:
    tokens: torch.Tensor
    inner: Any = None


class HasAnotherTo:
    def __init__(self):
        self.tensor = ONE

    def to(self, language):
        raise AssertionError("this `to` translates")


def first_of_point(p):
    return p.x


CASES = {
    "tensor": (ONE, lambda v: v),
    "list": ([1, ONE], lambda v: v[1]),
    "tuple in dict": ({"a": (ONE, "text")}, lambda v: v["a"][0]),
    "namedtuple": (Point(ONE, 3), first_of_point),
    "tuple subclass": (TaggedTuple([ONE], tag="t"), lambda v: v[0]),
    "dict subclass": (DemandingDict("r", {"a": ONE}), lambda v: v["a"]),
    "defaultdict": (collections.defaultdict(list, {"a": ONE}), lambda v: v["a"]),
    "OrderedDict": (collections.OrderedDict(a=ONE), lambda v: v["a"]),
    "UserDict": (collections.UserDict({"a": ONE}), lambda v: v["a"]),
    "UserList": (collections.UserList([ONE]), lambda v: v[0]),
    "deque": (collections.deque([ONE], maxlen=3), lambda v: v[0]),
    "own mapping": (OwnMapping({"a": ONE}, "r"), lambda v: v["a"]),
    "slotted mapping": (SlottedMapping(data={"a": ONE}), lambda v: v["a"]),
    "mapping proxy": (types.MappingProxyType({"a": ONE}), lambda v: v["a"]),
    "own sequence": (OwnSequence([ONE], "r"), lambda v: v[0]),
    "BatchEncoding": (BatchEncoding({"input_ids": ONE}), lambda v: v["input_ids"]),
    "ModelOutput": (BaseModelOutput(last_hidden_state=ONE), lambda v: v.last_hidden_state),
    "frozen dataclass": (Frozen(ONE), lambda v: v.tokens),
    "slotted dataclass": (Slotted(1, inner=[ONE]), lambda v: v.inner[0]),
    "PackedSequence": (pack_sequence([ONE, ONE], enforce_sorted=False), lambda v: v.data),
    "RaggedBatch": (RaggedBatch.from_samples([{"x": ONE}]), lambda v: v["x"]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_container_is_moved_and_keeps_its_type(name):
    value, tensor_in = CASES[name]
    moved = to_device(value, "meta")
    assert type(moved) is type(value)
    assert tensor_in(moved).device.type == "meta"
    assert tensor_in(value).device.type == "cpu", "the argument was changed"
    for attribute in ("tag", "required", "name", "default_factory", "maxlen"):
        assert getattr(moved, attribute, None) == getattr(value, attribute, None)


def test_a_packed_sequence_keeps_batch_sizes_on_the_host_and_its_order():
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    moved = to_device([packed], "meta")[0]
    assert isinstance(moved, PackedSequence)
    assert moved.batch_sizes.device.type == "cpu"
    assert {moved.data.device.type, moved.sorted_indices.device.type, moved.unsorted_indices.device.type} == {"meta"}


def test_a_jagged_nested_tensor_is_moved():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    moved = to_device({"x": nested}, "cpu", float_dtype=torch.float64)["x"]
    assert moved.is_nested
    assert moved.dtype == torch.float64


def test_a_block_mask_is_moved():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    assert to_device([mask], "meta")[0].kv_num_blocks.device.type == "meta"


@pytest.mark.parametrize("value", ["text", b"bytes", 3, None, range(3), {1, 2}, HasAnotherTo(), torch.nn.Linear(1, 1)])
def test_what_is_unknown_passes_untouched(value):
    assert to_device({"x": value}, "meta")["x"] is value


def test_nothing_is_copied_when_nothing_moves():
    batch = {"x": [ONE, (ONE, "text")], "y": Frozen(ONE)}
    assert to_device(batch, "cpu") is batch


def test_float_dtype_casts_floating_tensors_only():
    moved = to_device({"x": ONE, "ids": torch.tensor([1])}, "cpu", float_dtype=torch.bfloat16)
    assert (moved["x"].dtype, moved["ids"].dtype) == (torch.bfloat16, torch.int64)


def test_a_type_of_ones_own_can_be_registered():
    class Mine:
        def __init__(self, tokens):
            self.tokens = tokens

    @ullage.to_device.register(Mine)
    def _(value, device, *, non_blocking, float_dtype):
        return Mine(to_device(value.tokens, device, non_blocking=non_blocking, float_dtype=float_dtype))

    assert to_device([Mine(ONE)], "meta")[0].tokens.device.type == "meta"
