"""Tensors of every dtype and layout in memory, from a file of ``torch.save`` to every format, bit for bit."""

import os
import shutil
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import edit, flip
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.core import reading
from ullage.checkpoint.core.inventory import File, Inventory, WrittenBy
from ullage.checkpoint.files.torchfile import read_torch_file
from ullage.checkpoint.zero.modules import whole_tensor
from ullage.core.errors import CheckpointError


def savable_dtypes():
    """Every dtype that this torch can save."""
    found = []
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}":
            try:
                torch.save(torch.empty(1, dtype=dtype), os.devnull)
            except Exception:  # of quantized and sub-byte dtypes there are no plain tensors
                continue
            found.append(name)
    return found


DTYPES = savable_dtypes()
RECIPE = Recipe(stage=2, dp=2, groups=[{"w": (7, 5)}], frozen={"base": (6, 5)}, buffers={"mean": (5,)})
#: dtypes that safetensors has no name for, or that its loader does not know
NOT_IN_SAFETENSORS = {"complex32", "bcomplex32", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2"}


def bits(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def with_buffers(written, folder, buffers, frozen=()):
    """A copy of the checkpoint that holds ``buffers`` too."""
    run = shutil.copytree(written.tag_folder, folder)
    edit(
        run / "mp_rank_00_model_states.pt",
        lambda c: (c["module"].update(buffers), c["buffer_names"].extend(set(buffers) - set(frozen))),
    )
    return run


def test_buffers_of_every_dtype_are_converted(written, tmp_path):
    """Float8 ended in a KeyError, in universal and dcp."""
    random = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8, generator=random)
    buffers = {f"b_{name}": raw.clone().view(getattr(torch, name)) for name in DTYPES}
    assert {"float8_e4m3fn", "uint64", "complex32", "bfloat16", "bool"} <= set(DTYPES)
    run = with_buffers(written, tmp_path / "run", buffers)
    checkpoint.convert(run, tmp_path / "universal")
    checkpoint.convert(run, tmp_path / "dcp", format="dcp")
    assert checkpoint.verify(run, tmp_path / "universal") == []
    assert checkpoint.verify(run, tmp_path / "dcp") == []
    slim = torch.load(tmp_path / "universal" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    for name, tensor in buffers.items():
        for found in (
            torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=True)["param"],
            slim["module"][name],
        ):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(bits(found), bits(tensor))


def test_safetensors_takes_the_dtypes_that_it_has_names_for_and_refuses_the_others(written, tmp_path):
    from safetensors.torch import load_file

    some = {f"b_{n}": torch.ones(6).to(getattr(torch, n)) for n in DTYPES if "bits" not in n and "float4" not in n}
    known = {name: t for name, t in some.items() if name[2:] not in NOT_IN_SAFETENSORS}
    run = with_buffers(written, tmp_path / "run", known)
    checkpoint.convert(run, tmp_path / "st", format="safetensors")
    assert checkpoint.verify(run, tmp_path / "st") == []
    held = load_file(tmp_path / "st" / "model.safetensors")
    for name, tensor in known.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(bits(held[name]), bits(tensor))
    odd = with_buffers(written, tmp_path / "odd", {"b": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"safetensors has no name for this dtype \(b\): found complex128"):
        checkpoint.convert(odd, tmp_path / "out", format="safetensors")


def test_tensors_that_are_not_contiguous_are_converted(written, tmp_path):
    """One such buffer refused the whole checkpoint."""
    tensors = {
        "transposed": torch.arange(12).view(3, 4).t(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "every second": torch.arange(20.0)[3:15:2],
        "channels_last": torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "base": torch.arange(30.0).view(5, 6).t(),  # the frozen parameter
    }
    run = with_buffers(written, tmp_path / "run", tensors, frozen={"base"})
    edit(run / "mp_rank_00_model_states.pt", lambda content: content.update(mine=tensors["transposed"]))
    assert not torch.load(run / "mp_rank_00_model_states.pt", weights_only=False)["module"]["base"].is_contiguous()
    for format in ("universal", "safetensors", "dcp"):
        report = checkpoint.convert(run, tmp_path / format, format=format)
        assert report.records_checked >= len(tensors)
        assert checkpoint.verify(run, tmp_path / format) == []
    for name, tensor in tensors.items():
        found = torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=True)["param"]
        assert found.is_contiguous()
        assert torch.equal(found, tensor)
    slim = torch.load(tmp_path / "universal" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert torch.equal(slim["mine"], tensors["transposed"])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.sampled_from(["int64", "float32", "bool"]),
    st.sampled_from([64, 1 << 20]),
)
def test_any_strides_are_read_as_torch_reads_them(tmp_path_factory, dims, start, dtype, block):
    shape, strides = zip(*dims)
    span = start + 1 + sum((d - 1) * s for d, s in dims)
    whole = (torch.arange(span + 3) % 251).to(getattr(torch, dtype))
    tensor = whole.as_strided(shape, strides, start)
    folder = tmp_path_factory.mktemp("strides")
    torch.save(tensor, folder / "x.pt")
    source = read_torch_file(folder / "x.pt")
    files = (File("x.pt", source.num_bytes, "model"),)
    made = whole_tensor("x", "buffer", source.root, 0, source)
    sources = reading.Sources(Inventory(folder, "zero", WrittenBy(), files, (made,)))
    before, reading.CHUNK_BYTES = reading.CHUNK_BYTES, block
    try:
        parts = [
            bytes(chunk)
            for chunk in reading.stream(sources, made, 0, made.numel, np.empty(64, np.uint8), reading.Tally())
        ]
    finally:
        reading.CHUNK_BYTES = before
        sources.close()
    assert b"".join(parts) == bits(tensor).numpy().tobytes()


def test_what_lies_behind_a_strided_tensor_is_compared_with_its_checksum_too(written, tmp_path):
    """Elements that no index of the tensor reaches belong to its record all the same."""
    whole = torch.arange(40.0)
    run = with_buffers(written, tmp_path / "run", {"some": whole[::4]})
    path = run / "mp_rank_00_model_states.pt"
    held = read_torch_file(path)
    flip(path, held.place(held.root["module"]["some"]) + 4 * 4)
    with pytest.raises(CheckpointError, match=r"fails its checksum .*parameter some \(buffer\)"):
        checkpoint.convert(run, tmp_path / "out", format="safetensors")


def test_a_file_without_checksums_is_told_from_one_whose_mark_is_damaged(tmp_path):
    """Without sums all are zero. One flipped bit in a small record turned all comparisons off before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(torch.ones(3), tmp_path / "without.pt")
        finally:
            torch.serialization.set_crc32_options(True)
    assert not read_torch_file(tmp_path / "without.pt").has_crcs
    torch.save(torch.ones(3), tmp_path / "with.pt")
    held = read_torch_file(tmp_path / "with.pt")
    flip(tmp_path / "with.pt", held.others["version"].offset)
    with pytest.raises(CheckpointError, match=r"corrupted: the record 'version' fails its checksum"):
        read_torch_file(tmp_path / "with.pt")
