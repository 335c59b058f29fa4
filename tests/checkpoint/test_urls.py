"""Checkpoints by URL, over file systems of fsspec that live in this process: what a folder gives, a store gives."""

import json
import random
import shutil
import tempfile

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save_file
from typer.testing import CliRunner

from tests.support.checkpoints import flip
from ullage import checkpoint
from ullage.checkpoint.conversion import destination
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
    writes_left: int | None = None
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

    def pipe_file(self, path, value, **more):
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise KeyboardInterrupt  # as final as a kill, for what has been written so far
            type(self).writes_left -= 1
        if self.draw.random() < self.share:
            raise OSError("connection reset")
        super().pipe_file(path, value)


fsspec.register_implementation("shaky", Shaky, clobber=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(paths, "_PAUSE", 0.0)
    MemoryFileSystem.store.clear()
    Shaky.store.clear()
    Shaky.fetched, Shaky.writes_left, Shaky.share, Shaky.forbidden = 0, None, 0.0, False
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


def content(where):
    """Bytes by name of everything in a folder or URL, but for what names the source."""
    if "://" not in str(where):
        found = {p.relative_to(where).as_posix(): p.read_bytes() for p in where.rglob("*") if p.is_file()}
    else:
        system, root = fsspec.core.url_to_fs(where)
        found = {p[len(root) + 1 :]: system.store[p].getvalue() for p in system.find(root)}
    assert found.pop("ullage.json")
    return found


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_url_gives_and_gets_the_bytes_that_a_folder_does(folder, tmp_path, format):
    upload(folder, "memory://bucket/source")
    plain = checkpoint.convert(folder, tmp_path / "plain", format=format)
    wanted = content(tmp_path / "plain")
    for source, target in [
        ("memory://bucket/source", tmp_path / "from"),
        (folder, "memory://bucket/to"),
        ("memory://bucket/source", "memory://bucket/both"),
        (f"file://{folder}", f"file://{tmp_path}/file"),
    ]:
        report = checkpoint.convert(source, target, format=format)
        assert content(tmp_path / "file" if "file:" in str(target) else target) == wanted
        assert (report.num_bytes, report.records_checked, report.notes) == (plain.num_bytes, plain.records_checked, [])
        assert checkpoint.verify(source, target) == []
    # And back, from what was written there.
    checkpoint.convert("memory://bucket/both", "memory://bucket/back", format="safetensors")
    back = content("memory://bucket/back")
    assert back["model.safetensors"][-64:] == (folder / "model.safetensors").read_bytes()[-64:]
    assert checkpoint.verify("memory://bucket/both", "memory://bucket/back") == []
    assert not [p for p in MemoryFileSystem.store if ".journal" in p]


def test_verify_sees_a_changed_byte_in_a_store(folder):
    checkpoint.convert(folder, "memory://bucket/out", format="dcp")
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


def test_requests_that_fail_for_now_are_repeated(folder):
    upload(folder, "shaky://bucket/source")
    Shaky.share = 0.2
    checkpoint.convert("shaky://bucket/source", "shaky://bucket/out", format="dcp")
    assert checkpoint.verify("shaky://bucket/source", "shaky://bucket/out") == []
    Shaky.share = 1.0
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.read("shaky://bucket/out")


def test_a_store_that_says_no_is_asked_once(folder):
    upload(folder, "shaky://bucket/source")
    inventory = checkpoint.read("shaky://bucket/source")
    Shaky.forbidden = True
    (problem,) = checkpoint.read("shaky://bucket/source").problems()
    assert (problem.what, problem.file) == ("cannot read: no", "model.safetensors")
    with pytest.raises(Unreadable, match="run the same command again"):
        checkpoint.convert(inventory, "memory://bucket/out", format="dcp")


@pytest.mark.parametrize("spool_is_there", [True, False])
@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4])
def test_an_interrupted_upload_is_gone_on_with(folder, monkeypatch, tmp_path, writes, spool_is_there):
    monkeypatch.setattr(destination, "PARALLEL", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = "shaky://bucket/out"
    Shaky.writes_left = writes
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(folder, target, format="safetensors")
    if writes:
        with pytest.raises(CheckpointError, match="not finished"):
            checkpoint.read(target)
    if not spool_is_there:  # another machine
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
    # Written are the mark, then three files, then ``ullage.json``.
    Shaky.writes_left = 5 - max(1, writes) + (writes == 0)
    report = checkpoint.convert(folder, target, format="safetensors")
    assert Shaky.writes_left == 0
    assert (report.bytes_resumed == report.num_bytes) == (spool_is_there and writes > 0)
    assert checkpoint.verify(folder, target) == []
    assert not [p for p in Shaky.store if ".journal" in p]
    assert not list(tmp_path.iterdir())


def test_an_unfinished_conversion_with_other_options_is_not_written_over(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = "shaky://bucket/out"
    Shaky.writes_left = 2
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(folder, target, format="safetensors")
    Shaky.writes_left, before = None, {name: data.getvalue() for name, data in Shaky.store.items()}
    with pytest.raises(InputError, match="the target exists"):
        checkpoint.convert(folder, target, format="dcp")
    assert {name: data.getvalue() for name, data in Shaky.store.items()} == before
    Shaky.store.clear()
    checkpoint.convert(folder, target, format="dcp")  # what the spool holds is of other options, and goes
    assert sorted(content(target)) == [".metadata", "__0_0.distcp"]


def test_a_target_that_is_there_is_not_touched(folder):
    Shaky.store.clear()
    fsspec.filesystem("shaky").pipe_file("shaky://bucket/out/mine.txt", b"mine")
    with pytest.raises(InputError, match="the target exists"):
        checkpoint.convert(folder, "shaky://bucket/out", format="dcp")
    assert list(Shaky.store) == ["/bucket/out/mine.txt"]


def test_a_damaged_source_leaves_nothing(folder, tmp_path):
    checkpoint.convert(folder, tmp_path / "dcp", format="dcp")
    flip(tmp_path / "dcp" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="fails its checksum"):
        checkpoint.convert(tmp_path / "dcp", "memory://bucket/out", format="safetensors")
    assert list(MemoryFileSystem.store) == []


def test_what_cannot_be_is_refused_in_one_line(folder):
    with pytest.raises(InputError, match="Protocol not known: nothing"):
        checkpoint.read("nothing://bucket")
    with pytest.raises(CheckpointError, match=r"no such folder \(memory://bucket/none\)"):
        checkpoint.read("memory://bucket/none")
    upload(folder, "memory://bucket/source")
    with pytest.raises(InputError, match="inside the source"):
        checkpoint.convert("memory://bucket/source", "memory://bucket/source/out", format="dcp")


def test_the_command_line_takes_urls(folder):
    upload(folder, "memory://bucket/source")
    run = CliRunner()
    told = run.invoke(convert.app, ["memory://bucket/source", "memory://bucket/out", "--to", "dcp", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["target"] == "memory://bucket/out"
    assert run.invoke(verify.app, ["memory://bucket/source", "memory://bucket/out"]).exit_code == 0
    told = run.invoke(inspect.app, ["memory://bucket/out", "--json", "--storage-option", "skip_instance_cache=true"])
    assert json.loads(told.output)["problems"] == []
    told = run.invoke(convert.app, ["memory://bucket/out", "memory://bucket/x", "--to", "dcp", "--dry-run"])
    assert "would write dcp to memory://bucket/x" in told.output


def test_storage_options_are_values_or_text():
    given = ["anon=true", "key=abc=", "client_kwargs.region_name=eu", "client_kwargs.verify=false"]
    said = {"anon": True, "key": "abc=", "client_kwargs": {"region_name": "eu", "verify": False}}
    assert convert.storage_options(given) == said
    with pytest.raises(UsageError, match="key=value"):
        convert.storage_options(["anon"])
