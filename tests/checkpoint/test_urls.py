"""Checkpoints by URL, over file systems of fsspec that live in this process: what a folder gives, a store gives."""

import json
import random

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ullage import checkpoint
from ullage.checkpoint.core import paths
from ullage.checkpoint.core.reading import Unreadable
from ullage.cli import convert, inspect, verify
from ullage.core.errors import CheckpointError, InputError, UsageError

#: one beyond the size of small files (1 MiB), one of no elements, one of one, and names with the signs of wildcards
TENSORS = {"w": (300, 1100), "empty": (0, 4), "one": (1,), "part[0].*": (7, 3), "flag?": (5,)}


class Shaky(MemoryFileSystem):
    """A memory file system that counts the bytes asked for, and lets requests fail."""

    protocol = "shaky"
    store, pseudo_dirs = {}, [""]
    fetched = 0
    draw = random.Random(0)
    share = 0.0
    forbidden = False

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("shaky://", "memory://"))

    def cat_ranges(self, paths, starts, ends, max_gap=None, on_error="return", **more):
        if self.forbidden:
            return [PermissionError("no") for _ in paths]
        found = [self._store_of(p)[s:e] for p, s, e in zip(paths, starts, ends)]
        type(self).fetched += sum(map(len, found))
        fate = [self.draw.random() < self.share for _ in found]
        broken = [self.draw.choice([data[:-1], OSError("reset")]) for data in found]
        return [b if f else data for f, b, data in zip(fate, broken, found)]

    def _store_of(self, path):
        return self.store[self._strip_protocol(path)].getvalue()


fsspec.register_implementation("shaky", Shaky, clobber=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(paths, "_PAUSE", 0.0)
    MemoryFileSystem.store.clear()
    Shaky.store.clear()
    Shaky.fetched, Shaky.share, Shaky.forbidden = 0, 0.0, False
    Shaky.draw = random.Random(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    draw = np.random.default_rng(3)
    save_file({n: draw.standard_normal(s).astype(np.float32) for n, s in TENSORS.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


def upload(folder, url):
    system = fsspec.filesystem(url.partition(":")[0])
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe_file(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def content(folder):
    """Bytes by name of everything in a folder, but for what names the source."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found.pop("ullage.json")
    return found


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_url_gives_the_bytes_that_a_folder_does(folder, tmp_path, format):
    upload(folder, "memory://bucket/source")
    plain = checkpoint.convert(folder, tmp_path / "plain", format=format)
    for source, target in [
        ("memory://bucket/source", tmp_path / "from"),
        (f"file://{folder}", f"file://{tmp_path}/file"),
    ]:
        report = checkpoint.convert(source, target, format=format)
        assert content(tmp_path / "file" if "file:" in str(target) else target) == content(tmp_path / "plain")
        assert (report.num_bytes, report.records_checked, report.notes) == (plain.num_bytes, plain.records_checked, [])
        assert checkpoint.verify(source, target) == []


def test_verify_sees_a_changed_byte_in_a_store(folder, tmp_path):
    checkpoint.convert(folder, tmp_path / "out", format="dcp")
    upload(tmp_path / "out", "memory://bucket/out")
    held = MemoryFileSystem.store["/bucket/out/__0_0.distcp"]
    at = held.getbuffer().nbytes // 2
    held.getbuffer()[at] ^= 1
    (problem,) = checkpoint.verify(folder, "memory://bucket/out")
    assert problem.parameter == "w"
    assert "differs in 1 of 330000 elements" in problem.what


def test_a_description_is_read_without_its_file(folder, tmp_path):
    checkpoint.convert(folder, tmp_path / "dcp", format="dcp")
    upload(tmp_path / "dcp", "shaky://bucket/dcp")
    upload(folder, "shaky://bucket/source")
    size = sum(v.getbuffer().nbytes for v in Shaky.store.values())
    for name in ("dcp", "source"):
        assert checkpoint.read(f"shaky://bucket/{name}").problems() == []
    assert 1000 < Shaky.fetched < size / 10


def test_requests_that_fail_for_now_are_repeated_and_a_store_that_says_no_is_asked_once(folder, tmp_path):
    upload(folder, "shaky://bucket/source")
    inventory = checkpoint.read("shaky://bucket/source")
    Shaky.share = 0.2
    checkpoint.convert("shaky://bucket/source", tmp_path / "out", format="dcp")
    assert checkpoint.verify("shaky://bucket/source", tmp_path / "out") == []
    Shaky.share = 1.0
    (problem,) = checkpoint.read("shaky://bucket/source").problems()
    assert problem.what.startswith("cannot read")
    Shaky.forbidden = True
    (problem,) = checkpoint.read("shaky://bucket/source").problems()
    assert (problem.what, problem.file) == ("cannot read: no", "model.safetensors")
    with pytest.raises(Unreadable, match="run the same command again"):
        checkpoint.convert(inventory, tmp_path / "no", format="dcp")


def test_what_cannot_be_is_refused_in_one_line(folder):
    with pytest.raises(InputError, match="Protocol not known: nothing"):
        checkpoint.read("nothing://bucket")
    with pytest.raises(CheckpointError, match=r"no such folder \(memory://bucket/none\)"):
        checkpoint.read("memory://bucket/none")
    with pytest.raises(
        InputError, match=r"writes to a folder, not to a URL \(memory://bucket/out\). Convert to a folder"
    ):
        checkpoint.convert(folder, "memory://bucket/out", format="dcp")
    assert list(MemoryFileSystem.store) == []


def test_the_command_line_takes_urls(folder, tmp_path):
    upload(folder, "memory://bucket/source")
    run, target = CliRunner(), str(tmp_path / "out")
    told = run.invoke(convert.app, ["memory://bucket/source", target, "--to", "dcp", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["source"] == "memory://bucket/source"
    assert run.invoke(verify.app, ["memory://bucket/source", target]).exit_code == 0
    told = run.invoke(inspect.app, ["memory://bucket/source", "--json", "--storage-option", "skip_instance_cache=true"])
    assert json.loads(told.output)["problems"] == []


def test_storage_options_are_values_or_text():
    given = ["anon=true", "key=abc=", "client_kwargs.region_name=eu", "client_kwargs.verify=false"]
    said = {"anon": True, "key": "abc=", "client_kwargs": {"region_name": "eu", "verify": False}}
    assert convert.storage_options(given) == said
    with pytest.raises(UsageError, match="key=value"):
        convert.storage_options(["anon"])
