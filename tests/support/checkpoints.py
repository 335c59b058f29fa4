"""What the tests of checkpoints do to files and folders, and what a converted folder must hold."""

import hashlib
import sys
import zipfile

import numpy as np
import pytest
import torch

from tests.support import forked
from tests.support.real_zero import SENTINEL
from ullage import checkpoint
from ullage.checkpoint.core.reading import Sources, Tally, stream
from ullage.core.errors import CheckpointError, InputError


def shard(run, rank):
    return run / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_states(run):
    return run / "mp_rank_00_model_states.pt"


def edit(path, change):
    """Load a file of ``torch.save``, let ``change`` work on its content, save it again."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def flip(path, at=None):
    """Flip a bit of the byte at ``at``, or of the one in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def describe(path, program):
    """Put another description into a file of ``torch.save``, with right sums."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in records.items():
            new.writestr(name, program if name.endswith("data.pkl") else content)


def contents(folder):
    """The digest of every file."""
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(source, target, match, **options):
    """``convert`` refuses with one short line; what lies beside the target is as before. Returns the error."""
    beside = next(folder for folder in target.parents if folder.exists())
    before = contents(beside)
    with pytest.raises((CheckpointError, InputError), match=match) as caught:
        checkpoint.convert(source, target, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert contents(beside) == before
    assert not target.exists()
    return caught.value


def convert(source, target, **options):
    """``checkpoint.convert``, and ``verify`` finds the target equal to the source. Returns the report."""
    report = checkpoint.convert(source, target, **options)
    assert checkpoint.verify(source, target) == []
    return report


def value_of(inventory, tensor):
    """The tensor's elements, through the reader, in pieces of a few rows."""
    sources, buffer = Sources(inventory), np.empty(512, np.uint8)
    data = b"".join(bytes(part) for part in stream(sources, tensor, 0, tensor.numel, buffer, Tally()))
    sources.close()
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)


def convert_with_deepspeed(source, target, *more):
    """DeepSpeed's own converter, in a process of its own. Returns (status, output)."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source)]
    command += ["--output_folder", str(target), "--num_extract_workers", "1", "--num_merge_workers", "1", *more]
    done = forked.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def universal(folder, name, key="fp32"):
    """A tensor of a universal folder."""
    return torch.load(folder / "zero" / name / f"{key}.pt", weights_only=True)["param"]


def assert_is_the_truth(folder, truth):
    """Every state of every trained parameter of a universal folder is the truth in shape and in every bit; no other."""
    held = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    assert held == {*truth.shapes(), *truth.recipe.frozen, *truth.recipe.buffers}
    for name, shape in truth.shapes().items():
        for key in truth.keys:
            found = universal(folder, name, key)
            assert tuple(found.shape) == shape
            assert torch.equal(found, torch.from_numpy(np.asarray(truth.tensor(name, key)))), (name, key)
            assert not (found == SENTINEL).any()
