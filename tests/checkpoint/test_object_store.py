"""Conversions from and to an S3 server of its own process, of which some of the requests fail, and of killed clients."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support import real_zero
from tests.support.checkpoints import assert_is_the_truth
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.conversion import destination
from ullage.core.errors import CheckpointError, InputError

pytest.importorskip("moto.server", reason="needs moto[server]")
pytest.importorskip("s3fs", reason="needs s3fs")
from tests.support import object_store

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

#: two beyond the size of small files (1 MiB), one of the size of a part, and many small ones
GROUPS = [{"a.weight": (300, 1100), "b.weight": (301, 1100), "c": (1,)}, {f"n{i}": (50 + i,) for i in range(30)}]


@pytest.fixture(scope="module")
def store():
    with object_store.serve(seed=7) as store:
        yield store


@pytest.fixture(scope="module")
def written(tmp_path_factory, store):
    truth = real_zero.write(tmp_path_factory.mktemp("written"), Recipe(stage=1, dp=3, groups=GROUPS))
    system = store.system()
    for path in sorted(truth.folder.rglob("*")):
        if path.is_file():
            system.pipe_file(f"bucket/source/{path.relative_to(truth.folder).as_posix()}", path.read_bytes())
    return truth


@pytest.fixture(autouse=True)
def faults(store):
    yield
    store.counts(0.0)


def fetch(store, key, folder):
    """Every object under a key, as a folder."""
    system = store.system()
    system.invalidate_cache()
    for name in system.find(key):
        path = folder / name[len(key) + 1 :]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(system.cat_file(name))
    return folder


def test_both_ways_are_exact_while_one_request_in_twenty_fails(store, written, tmp_path):
    before = store.counts(0.05)
    options = store.options
    report = checkpoint.convert(
        store.url("bucket/source"), store.url("bucket/out/universal"), storage_options=options, workers=4
    )
    assert report.records_checked > 0
    checkpoint.convert(store.url("bucket/source"), tmp_path / "local", storage_options=options)
    assert checkpoint.verify(written.folder, store.url("bucket/out/universal"), storage_options=options) == []
    faults = {k: n - before[k] for k, n in store.counts(0.0).items()}
    assert all(n > 0 for n in faults.values()), faults
    assert_is_the_truth(fetch(store, "bucket/out/universal", tmp_path / "universal"), written)
    assert_is_the_truth(tmp_path / "local", written)
    assert store.system().cat_file("bucket/out/latest_universal") == b"universal"


def test_large_files_go_in_parts_and_come_back(store, written, tmp_path, monkeypatch):
    # Every file by the driver; and parts of 5 MiB, the least that S3 takes, of which these files have several.
    monkeypatch.setattr(destination, "_SMALL_BYTES", 0)
    options = store.options | {"default_block_size": 5 << 20}
    target = store.url("bucket/parts")
    checkpoint.convert(
        store.url("bucket/source"), target, format="safetensors", optimizer=True, storage_options=options
    )
    checkpoint.convert(written.folder, tmp_path / "local", format="safetensors", optimizer=True)
    found = fetch(store, "bucket/parts", tmp_path / "found")
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file() and path.name != "ullage.json":
            assert (found / path.relative_to(tmp_path / "local")).read_bytes() == path.read_bytes(), path
    assert checkpoint.verify(written.folder, target, storage_options=options) == []


#: A client that kills itself at its n-th write; with n < 0 when it removes its journal, with n = 0 it ends.
_CLIENT = """
import json, os, sys
from ullage import checkpoint
from ullage.checkpoint.core.paths import Store
source, target, options, limit = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
write, remove, count = Store.write, Store.remove, [0]
def written(self, key, data):
    count[0] += 1
    if count[0] == limit:
        os.kill(os.getpid(), 9)
    write(self, key, data)
def removed(self, keys):
    if limit < 0:
        os.kill(os.getpid(), 9)
    remove(self, keys)
Store.write, Store.remove = written, removed
print(checkpoint.convert(source, target, storage_options=options).bytes_resumed)
"""


def client(store, target, limit, spools):
    source = store.url("bucket/source")
    command = [sys.executable, "-c", _CLIENT, source, target, json.dumps(store.options), str(limit)]
    environment = {**os.environ, "TMPDIR": str(spools)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("limit", [60, -1])
def test_a_killed_client_is_gone_on_with(store, written, tmp_path, limit):
    target = store.url(f"bucket/killed/{limit}")
    assert client(store, target, limit, tmp_path).returncode == -signal.SIGKILL
    # At the last moment ``ullage.json`` is there and the journal is being removed.
    if limit > 0:
        with pytest.raises(CheckpointError, match="not finished"):
            checkpoint.read(target, storage_options=store.options)
    told = client(store, target, 0, tmp_path)
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) > 0  # of the spool, which then is gone
    assert not list(tmp_path.iterdir())
    assert_is_the_truth(fetch(store, f"bucket/killed/{limit}", tmp_path), written)
    assert checkpoint.verify(written.folder, target, storage_options=store.options) == []


def test_what_is_not_permitted_is_one_line(store, written, tmp_path):
    inventory = checkpoint.read(store.url("bucket/source"), storage_options=store.options)
    store.counts(object_store.DENY)
    with pytest.raises(CheckpointError, match=r"cannot read: (Access Denied|Forbidden) \(s3://bucket/source"):
        checkpoint.read(store.url("bucket/source"), storage_options=store.options)
    with pytest.raises(InputError, match=r"writing is not permitted \(s3://bucket/denied"):
        checkpoint.convert(written.folder, store.url("bucket/denied"), storage_options=store.options)
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.convert(inventory, tmp_path / "out")


def test_what_is_missing_is_one_line(store, written):
    options = store.options
    with pytest.raises(CheckpointError, match=r"no such folder \(s3://bucket/none\)"):
        checkpoint.read(store.url("bucket/none"), storage_options=options)
    with pytest.raises(CheckpointError, match=r"no such folder \(s3://no-bucket/x\)"):
        checkpoint.read(store.url("no-bucket/x"), storage_options=options)
    with pytest.raises(InputError, match=r"the bucket is not there \(s3://no-bucket/x"):
        checkpoint.convert(written.folder, store.url("no-bucket/x"), storage_options=options)
    with pytest.raises(InputError, match="a whole bucket"):
        checkpoint.convert(written.folder, store.url("bucket"), storage_options=options)
    inventory = checkpoint.read(store.url("bucket/source"), storage_options=options)
    name = inventory.files[0].name
    system = store.system()
    held = system.cat_file(f"bucket/source/global_step7/{name}")
    system.rm_file(f"bucket/source/global_step7/{name}")
    try:
        assert [p.what for p in inventory.problems()] == ["a file changed"]
    finally:
        system.pipe_file(f"bucket/source/global_step7/{name}", held)
