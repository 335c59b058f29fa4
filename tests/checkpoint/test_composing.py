"""However the work is cut into units, the target has the same bytes and the report the same counts."""

import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ullage import checkpoint
from ullage.checkpoint.conversion import copying

pytestmark = pytest.mark.property


def _source(folder, sizes):
    draw = np.random.default_rng(len(sizes))
    tensors = {f"w{i}": draw.standard_normal(size, np.float32) for i, size in enumerate(sizes)}
    for i in range(0, len(sizes), 3):
        tensors[f"w{i}"][: i % 5] = np.nan
    tensors["half"] = draw.standard_normal((7, 3)).astype(np.float16)
    tensors["none"] = np.zeros((0, 4), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def _files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "ullage.json"}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=24),
    small=st.sampled_from([4, 64, 1000, 4000]),
    unit=st.sampled_from([64, 4000, 40_000]),
    together=st.integers(1, 9),
    format=st.sampled_from(["dcp", "safetensors"]),
    dtype=st.sampled_from([None, "bfloat16"]),
)
def test_no_cut_changes_a_byte(tmp_path_factory, sizes, small, unit, together, format, dtype):
    folder = tmp_path_factory.mktemp("cuts")
    _source(folder / "source", sizes)
    whole = checkpoint.convert(folder / "source", folder / "whole", format=format, dtype=dtype, workers=1)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"SMALL_BYTES": small, "UNIT_BYTES": unit, "_TOGETHER": together}.items():
            patched.setattr(copying, name, value)
        cut = checkpoint.convert(folder / "source", folder / "cut", format=format, dtype=dtype, workers=2)
    assert _files(folder / "cut") == _files(folder / "whole")
    assert cut.not_finite == whole.not_finite
    assert len(whole.not_finite) == sum(i % 5 > 0 and size > 0 for i, size in enumerate(sizes) if i % 3 == 0)


@pytest.mark.slow
def test_many_tensors_of_every_size_are_what_torch_loads(tmp_path):
    """More than one stretch, with tensors between them that are too large for one."""
    sizes = [*range(300), 300_000, *[7] * 2100, 270_000, 1]
    tensors = _source(tmp_path / "source", sizes)
    checkpoint.convert(tmp_path / "source", tmp_path / "dcp", format="dcp")
    assert checkpoint.verify(tmp_path / "source", tmp_path / "dcp") == []
    loaded = {
        "model": {
            name: torch.empty(value.shape, dtype=torch.from_numpy(value).dtype) for name, value in tensors.items()
        }
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert all(loaded["model"][name].numpy().tobytes() == value.tobytes() for name, value in tensors.items())
    assert json.loads((tmp_path / "dcp" / "ullage.json").read_text())["not_finite"]
