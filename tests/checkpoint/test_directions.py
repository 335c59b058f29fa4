"""Every format to every other and back: the same tensors, states, steps, settings and names, bit for bit.

The origin is shards that real DeepSpeed code wrote. Each pair is three conversions: origin to A, A to B, B to A again.
"""

import hashlib
import itertools

import numpy as np
import pytest

from tests.support import real_zero
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats.optimizer_groups import optimizer_groups
from ullage.checkpoint.formats.table import FORMATS
from ullage.checkpoint.reading import Sources, Tally, stream

pytestmark = pytest.mark.parity

MODEL = [
    {
        "embed.weight": (10, 3),
        "layers.0.weight": (7, 3),
        "layers.0.bias": (7,),
        "layers.1.weight": (7, 3),
        "head": (11,),
    },
    {"norm.weight": (7,), "norm.bias": (7,), "scale": (1,)},
]
EXTRAS = {
    "frozen": {"adapter.base": (6, 5)},
    "buffers": {"norm.running_mean": (5,)},
    "tied": {"lm_head.weight": "embed.weight"},
}
#: Formats, with a number of ranks for those that have one; 40 ranks are more than a group has elements.
KINDS = {
    "zero1": {"ranks": 3}, "zero2": {"ranks": 40}, "zero3": {"ranks": 5},
    "universal": {}, "safetensors": {"optimizer": True}, "dcp": {}, "trainer": {},
}  # fmt: skip
PAIRS = list(itertools.product(KINDS, KINDS))
QUICK = [("zero1", "trainer"), ("dcp", "zero3"), ("safetensors", "universal")]


def content(inventory):
    """All that a checkpoint holds and every format can: tensors by their bytes, steps, settings, order, ties."""
    assert inventory.problems() == []
    assert inventory.optimizer_problems == ()
    sources, tensors = Sources(inventory), {}
    for tensor in inventory.tensors:
        data, buffer = hashlib.sha256(), np.empty(1 << 16, np.uint8)
        for chunk in stream(sources, tensor, 0, tensor.numel, buffer, Tally()):
            data.update(chunk.tobytes())
        tensors[tensor.name, tensor.key] = tensor.dtype, tensor.shape, tensor.kind, data.hexdigest()
    sources.close()
    groups = [(g.names, g.settings, g.step, g.step_dtype, g.kept) for g in optimizer_groups(inventory)]
    assert not any(isinstance(value, TensorRef) for group in groups for value in group[1].values())
    return {"tensors": tensors, "groups": groups, "aliases": inventory.aliases}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin")
    recipe = Recipe(stage=2, dp=3, dtype="bf16", groups=MODEL, weight_decay=[0.1, 0.0], **EXTRAS)
    return checkpoint.read(real_zero.write(folder, recipe).folder)


def test_every_format_is_in_the_matrix():
    assert set(KINDS) == set(FORMATS)


@pytest.mark.parametrize(("a", "b"), [p if p in QUICK else pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS])
def test_there_and_back_is_the_same(a, b, origin, tmp_path):
    checkpoint.convert(origin, tmp_path / "a", format=a, **KINDS[a])
    checkpoint.convert(tmp_path / "a", tmp_path / "b", format=b, **KINDS[b])
    checkpoint.convert(tmp_path / "b", tmp_path / "again", format=a, **KINDS[a])
    first, other, again = (checkpoint.read(tmp_path / name) for name in ("a", "b", "again"))
    expected = content(origin)
    assert len(expected["tensors"]) == 26
    assert content(first) == expected
    assert content(other) == expected
    assert content(again) == expected
    assert checkpoint.verify(tmp_path / "a", tmp_path / "b") == []
    assert checkpoint.verify(tmp_path / "b", tmp_path / "again") == []
