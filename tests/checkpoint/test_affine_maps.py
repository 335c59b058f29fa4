"""``affine_map``: what DeepSpeed cuts by a map, ours joins; what contradicts the patterns or the slices is refused."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.checkpoint.core.inventory import File, Fragments, Inventory, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.reading import Sources, Tally, stream
from ullage.checkpoint.zero.parallel import Patterns, join
from ullage.core.errors import CheckpointError


def strides(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def segments_map(shape, dim, segments, tp):
    """A map of segments along ``dim``: (size, widths by rank), or (size, None) where every rank holds all of it."""
    ranks = {}
    for rank in range(tp):
        own = [size if widths is None else widths[rank] for size, widths in segments]
        local = [sum(own) if i == dim else d for i, d in enumerate(shape)]
        pieces, source, dest = [], 0, 0
        for (size, widths), width in zip(segments, own):
            at = source + (0 if widths is None else sum(widths[:rank]))
            piece = {
                "shape": [width if i == dim else d for i, d in enumerate(shape)],
                "source": [at * strides(shape)[dim], strides(shape)],
                "dest": [dest * strides(local)[dim], strides(local)],
                "locations": list(range(tp)) if widths is None else [rank],
            }
            pieces.append(piece)
            source, dest = source + size, dest + width
        ranks[rank] = {"shard_shape": local, "pieces": pieces}
    return {"logical_shape": list(shape), "ranks": ranks}


def cut(whole, described, rank):
    """The slice of a rank, as ``torch.as_strided`` of the whole says it."""
    held = described["ranks"][rank]
    flat = np.empty(math.prod(held["shard_shape"]), np.float32)
    for piece in held["pieces"]:
        index = [np.zeros(piece["shape"], np.int64) + side[0] for side in (piece["source"], piece["dest"])]
        for k, side in enumerate((piece["source"], piece["dest"])):
            for axis, size in enumerate(piece["shape"]):
                along = [-1 if i == axis else 1 for i in range(len(piece["shape"]))]
                index[k] = index[k] + (np.arange(size) * side[1][axis]).reshape(along)
        flat[index[1].reshape(-1)] = whole.reshape(-1)[index[0].reshape(-1)]
    return flat


def joined(folder, described, whole, *, info=None, drift=None):
    """What ours reads of slices cut by the map; every choice of a rank that holds the same."""
    files, slices = [], []
    for rank, held in sorted(described["ranks"].items()):
        flat = cut(whole, described, rank)
        if drift is not None and rank == drift[0]:
            flat[drift[1]] += 1
        (folder / f"{rank}").write_bytes(flat.tobytes())
        files.append(File(f"{rank}", flat.nbytes, "optimizer"))
        slices.append(Slice(rank, tuple(held["shard_shape"]), Fragments.one(rank, 0, flat.size)))
    patterns = Patterns(
        {
            "universal_checkpoint_version": 0.5,
            "affine_map": {"version": 1, "params": {"^w$": described}},
            **(info or {}),
        }
    )
    made = join("w", slices, patterns, 4)
    found = []
    for parts, merge in ((made.slices, made.merge), *made.others):
        tensor = Tensor("w", "fp32", made.shape, "float32", "parameter", parts, merge)
        inventory = Inventory(folder, "zero", WrittenBy(), tuple(files), (tensor,))
        assert inventory.problems() == []
        sources = Sources(inventory)
        chunks = [c.copy() for c in stream(sources, tensor, 0, tensor.numel, np.empty(64, np.uint8), Tally())]
        sources.close()
        held = np.concatenate([np.zeros(0, np.uint8), *chunks]).view(np.float32)
        found.append(held.reshape(made.shape))
    return made, found


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    tp = draw(st.integers(1, 5))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        widths = draw(st.lists(st.integers(0, 3), min_size=tp, max_size=tp))
        shared = draw(st.booleans())
        size = draw(st.integers(1, 4)) if shared else sum(widths)
        segments.append((size, None if shared else widths))
    shape[dim] = sum(size for size, _ in segments)
    return tuple(shape), dim, segments, tp


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_slices_cut_by_a_map_are_the_whole_again(tmp_path_factory, layout):
    shape, dim, segments, tp = layout
    described = segments_map(shape, dim, segments, tp)
    whole = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    made, found = joined(tmp_path_factory.mktemp("map"), described, whole)
    assert made.shape == shape
    assert all(np.array_equal(got, whole) for got in found)
    # What several ranks hold is read from each of them, to be compared.
    shared = any(widths is None and size for size, widths in segments)
    assert len(found) == 1 or shared


SHAPE, SEGMENTS = (6, 10), [(6, [2, 1, 3]), (4, None)]  # a fused projection: queries are cut, keys and values are not


def test_copies_that_drifted_apart_are_seen(tmp_path):
    described = segments_map(SHAPE, 1, SEGMENTS, 3)
    whole = np.arange(60, dtype=np.float32).reshape(SHAPE)
    _, found = joined(tmp_path, described, whole, drift=(2, 4))
    assert [np.array_equal(got, whole) for got in found] == [True, True, False]


def _change(described, **change):
    described["ranks"][1]["pieces"][0].update(change)
    return described


@pytest.mark.parametrize(("described", "info", "said"), [
    (segments_map((4, 6), 0, [(4, [2, 2])], 2), {"parameter_with_row_parallelism_patterns": ["^w$"]}, "contradict"),
    (segments_map((4, 6), 0, [(4, [2, 2])], 2), {"tp_replicated_parameter_patterns": ["w"]}, "contradict"),
    (segments_map((4, 6), 0, [(4, None)], 2), {"parameter_with_row_parallelism_patterns": ["w"]}, "contradict"),
    (_change(segments_map((4, 6), 0, [(4, [2, 2])], 2), scale=0.5), {}, "scaled"),
    (_change(segments_map((4, 6), 0, [(4, [2, 2])], 2), source=[13, [6, 1]]), {}, "malformed"),
    (_change(segments_map((4, 6), 0, [(4, [2, 2])], 2), locations=[0]), {}, "malformed"),
    (_change(segments_map((4, 6), 0, [(4, [2, 2])], 2), locations=[0, 1]), {}, "malformed"),
    (_change(segments_map((4, 6), 0, [(4, [2, 2])], 2), source="x"), {}, "malformed"),
    (segments_map((4, 6), 0, [(4, [2, 2])], 2), {"affine_map": {"version": 2, "params": {}}}, "encoding"),
    (segments_map((4, 6), 0, [(4, [2, 2])], 2), {"universal_checkpoint_version": 0.6}, "unknown version"),
])  # fmt: skip
def test_a_map_that_cannot_be_followed_is_refused(tmp_path, described, info, said):
    whole = np.zeros(described["logical_shape"], np.float32)
    slices = segments_map((4, 6), 0, [(4, [2, 2])], 2) if said == "malformed" else described
    patterns = {"affine_map": {"version": 1, "params": {"^w$": described}}}
    with pytest.raises(CheckpointError, match=said):
        joined(tmp_path, slices, whole, info={**patterns, **info})


def test_slices_of_another_size_than_the_map_says_are_refused(tmp_path):
    described, other = (segments_map((4, 6), 0, [(4, sizes)], 2) for sizes in ([2, 2], [1, 3]))
    with pytest.raises(CheckpointError, match="other slices"):
        joined(tmp_path, other, np.zeros((4, 6), np.float32), info={"affine_map": {"params": {"w": described}}})


def test_patterns_that_say_the_same_give_the_entries_of_the_universal_file(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    rows = segments_map((4, 6), 1, [(6, [4, 2])], 2)
    made, found = joined(tmp_path, rows, whole, info={"parameter_with_row_parallelism_patterns": ["w"]})
    assert made.extra == {"cat_dim": 1}
    assert np.array_equal(found[0], whole)
    made, _ = joined(tmp_path, segments_map((4, 6), 0, [(4, [3, 1])], 2), whole)
    assert made.extra == {"cat_dim": 0}  # what is usual, so loaders that know no map load it
    made, _ = joined(tmp_path, rows, whole)
    assert made.extra == {}  # no list of patterns says it, and DeepSpeed's converter writes nothing either


@pytest.mark.slow
def test_deepspeeds_own_maps_are_followed(tmp_path):
    """Each of its constructors, cut by DeepSpeed and joined by ours."""
    import torch
    from deepspeed.checkpoint import affine

    maps = {
        "columns": affine.contiguous_split_map((7, 5), [3, 3, 1], 0),
        "rows": affine.contiguous_split_map((7, 5), [2, 0, 3], 1),
        "replicated": affine.replicated_map((3, 4), 3),
        "fused": affine.sub_param_map((12, 5), [6, 3, 3], [[2, 2, 2], [1, 1, 1], [3, 0, 0]], 0),
        "fused rows": affine.sub_param_map((5, 12), [6, 6], [[4, 2], [1, 5]], 1),
        "shared part": affine.segmented_map((10, 4), [(6, False), (4, True)], 0, 2, [[4, 2]]),
        "blocks": affine.block_gather_map((12, 3), {0: [0, 2, 3], 1: [1, 4, 5]}, 2, 0),
        "blocks of columns": affine.block_gather_map((3, 12), {0: [0, 5, 3], 1: [1, 4, 2]}, 2, 1),
    }
    for name, made in maps.items():
        whole = torch.randn(made.logical_shape)
        described = made.to_dict()
        for rank in described["ranks"]:
            shard = made.extract(whole, rank).reshape(-1).numpy()
            assert np.array_equal(shard, cut(whole.numpy(), described, rank)), name
        folder: Path = tmp_path / name
        folder.mkdir()
        _, found = joined(folder, described, whole.numpy())
        assert all(np.array_equal(got, whole.numpy()) for got in found), name
        assert np.array_equal(found[0], made.rebuild({r: made.extract(whole, r) for r in described["ranks"]}).numpy())
