"""Invariants of the checkpoint's parts: sums combine, archives hold what was put in, holes and overlaps are found."""

import math
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper import on_paper
from tests.support.drawing import lengths as drawn
from ullage.checkpoint import File, Fragments, Inventory, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.inventory import Band, Merge
from ullage.checkpoint.core.numbers import cast, count_not_finite
from ullage.checkpoint.core.sums import combine
from ullage.checkpoint.files.archive import archive
from ullage.checkpoint.files.pickling import Constant
from ullage.checkpoint.files.torchfile import TensorRef, read_torch_file

pytestmark = pytest.mark.property


@given(st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=6), max_size=5))
def test_sums_of_parts_combine_to_the_sum_of_the_whole(owners):
    parts = [(i, data) for i, pieces in enumerate(owners) for data in pieces]
    found = combine(
        np.array([zlib.crc32(d) for _, d in parts], np.int64),
        np.array([len(d) for _, d in parts], np.int64),
        np.array([i for i, _ in parts], np.int64),
    )
    assert found.tolist() == [zlib.crc32(b"".join(pieces)) for pieces in owners]


def test_sums_combine_beyond_32_bits_of_length():
    """crc(A zeros) for a tail of 5 GiB, computed by zlib in pieces that are combined two by two."""
    block = zlib.crc32(bytes(1 << 20))
    crcs, size = np.array([block, block]), 1 << 20
    while size < 5 << 30:
        crcs = np.repeat(combine(crcs, np.array([size, size]), np.zeros(2, np.int64)), 2)
        size *= 2
    many = 8192  # 8 GiB of zeros as 8192 parts at once
    whole = combine(np.full(many, block, np.int64), np.full(many, 1 << 20), np.zeros(many, np.int64))
    assert size == 8 << 30
    assert whole[0] == crcs[0]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=25)
@given(plain, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=4))
def test_torch_loads_what_we_write_and_we_read_it_back(tmp_path_factory, value, shapes):
    arrays = [np.arange(math.prod(s), dtype=np.float32).reshape(s) - 3 for s in shapes]
    constants = [Constant("float32", tuple(a.shape), a.tobytes()) for a in arrays]
    target = archive("x.pt", OrderedDict(value=value, tensors=constants))
    data = bytearray(target.num_bytes)
    for offset, text in target.texts:
        data[offset : offset + len(text)] = text
    path = tmp_path_factory.mktemp("archive") / "x.pt"
    path.write_bytes(data)
    loaded = torch.load(path, weights_only=False)
    assert loaded["value"] == value
    assert all(torch.equal(t, torch.from_numpy(a)) for t, a in zip(loaded["tensors"], arrays))
    found = read_torch_file(path)
    assert found.root["value"] == value
    assert found.has_crcs
    for ref, array in zip(found.root["tensors"], arrays):
        assert isinstance(ref, TensorRef)
        assert ref.shape == array.shape
        assert not array.size or found.place(ref) % 64 == 0


def test_an_archive_beyond_4_gib_is_zip64(tmp_path):
    """Sparse files: two tensors of more than 4 GiB, and one that begins beyond them."""
    from ullage.checkpoint.files.pickling import TensorCopy

    def tensor(numel):
        part = Slice(0, (numel,), Fragments.one(0, 0, numel))
        return TensorCopy(Tensor("t", "fp32", (numel,), "float32", "parameter", (part,)), "float32")

    target = archive("x.pt", {"a": tensor(1_200_000_000), "b": tensor(1_100_000_000), "c": tensor(5)})
    path = tmp_path / "x.pt"
    with open(path, "wb") as stream:
        stream.truncate(target.num_bytes)
        for offset, text in target.texts:
            stream.seek(offset)
            stream.write(text)
        stream.seek(target.payloads[2].offset)
        stream.write(np.arange(5, dtype=np.float32).tobytes())
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert [tuple(loaded[k].shape) for k in "abc"] == [(1_200_000_000,), (1_100_000_000,), (5,)]
    assert loaded["c"].tolist() == [0, 1, 2, 3, 4]
    found = read_torch_file(path)
    assert [found.place(found.root[k]) for k in "abc"] == [p.offset for p in target.payloads]


def _beside(boxes, size):
    """A tensor of ``size`` columns that two model ranks hold parts of."""
    slices = tuple(Slice(rank, (9,), Fragments.one(rank, 0, 9)) for rank in range(2))
    merge = Merge("columns", 1, size, 1, tuple(Band(*box) for box in boxes))
    files = tuple(File(f"f{rank}", 400, "optimizer", 0, rank) for rank in range(2))
    tensor = Tensor("w", "fp32", (size,), "float32", "parameter", slices, merge)
    return Inventory(Path("nowhere"), "zero", WrittenBy(), files, (tensor,))


@given(drawn(low=0, high=9, min_size=1, max_size=6).filter(any), st.data())
def test_slices_of_model_ranks_that_do_not_lie_side_by_side_are_found(widths, data):
    """A hole, an overlap, a missing end: the branch that refuses. Empty slices are none of these."""
    boxes = [[i % 2, 0, at, width] for i, (width, at) in enumerate(zip(widths, np.cumsum([0, *widths]).tolist()))]
    assert _beside(boxes, sum(widths)).tiling_problems() == []
    which = data.draw(st.sampled_from([i for i, width in enumerate(widths) if width]))
    change = data.draw(st.sampled_from(["drop", "move", "widen", "narrow"]))
    if change == "drop":
        del boxes[which]
    else:
        boxes[which][2 if change == "move" else 3] += -1 if change == "narrow" else 1
    (problem,) = _beside(boxes, sum(widths)).tiling_problems()
    assert (problem.what, problem.parameter) == ("the slices of the model ranks do not make the whole", "w")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_any_hole_or_overlap_is_found(lengths, data):
    starts = np.cumsum([0, *lengths[:-1]])
    numel = sum(lengths)
    whole = _inventory(starts, lengths, numel)
    assert whole.tiling_problems() == []
    which = data.draw(st.integers(0, len(lengths) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "shift", "shorten", "lengthen"]))
    starts, lengths = starts.tolist(), list(lengths)
    if change == "drop":
        del starts[which], lengths[which]
    elif change == "double":
        starts.append(starts[which])
        lengths.append(lengths[which])
    elif change == "shift":
        starts[which] += 1
    else:
        lengths[which] += 1 if change == "lengthen" else -1
    (problem, *_) = _inventory(starts, lengths, numel).tiling_problems()
    assert problem.parameter == "w"
    assert "no file holds" in problem.what or "two fragments claim" in problem.what


def _inventory(starts, lengths, numel):
    fragments = Fragments.of([(0, 4 * start, start, length) for start, length in zip(starts, lengths)])
    tensor = Tensor("w", "fp32", (numel,), "float32", "parameter", (Slice(0, (numel,), fragments),))
    files = (File("f", 4 * numel + 400, "optimizer", 0, 0),)
    return Inventory(Path("nowhere"), "zero", WrittenBy(), files, (tensor,))


@given(
    drawn(64, 128, 256, low=1, high=400, min_size=1, max_size=9),
    st.sampled_from([1, 2, 3, 7, 64, 768]),
    st.sampled_from([1, 3]),
)
def test_on_paper_every_tensor_is_whole_and_padding_is_the_rest(numels, dp, stage):
    inventory = on_paper([{f"p{i}": (n,) for i, n in enumerate(numels)}], stage=stage, dp=dp)
    assert inventory.problems() == []
    (group,) = inventory.groups
    assert group.padding == group.size - sum(numels) == group.padding_of().sum() >= 0
    assert (group.padding_of() >= 0).all()


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_casts_are_torchs_casts(dtype, wanted):
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=random, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 65504.0, 65520.0, 3.4e38])
    given = torch.cat([special, bits.view(torch.float32), torch.randn(20_000, generator=random)]).to(
        getattr(torch, dtype)
    )
    chunk = given.view(torch.uint8).numpy()
    found = torch.from_numpy(cast(chunk, dtype, wanted).copy()).view(getattr(torch, wanted))
    expected = given.to(getattr(torch, wanted))
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])
    assert count_not_finite(chunk, dtype) == int((~torch.isfinite(given)).sum())


def test_a_finite_chunk_whose_sum_overflows_is_finite():
    assert count_not_finite(np.full(100, 3e38, np.float32).view(np.uint8), "float32") == 0
