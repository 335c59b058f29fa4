"""Conversions from an S3 server of its own process, of which some of the requests fail."""

import pytest

from tests.support import real_zero
from tests.support.checkpoints import assert_is_the_truth
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytest.importorskip("moto.server", reason="needs moto[server]")
pytest.importorskip("s3fs", reason="needs s3fs")
from tests.support import object_store

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

#: two beyond the size of small files (1 MiB), and many small ones
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


def test_a_conversion_is_exact_while_one_request_in_twenty_fails(store, written, tmp_path):
    before = store.counts(0.05)
    options = store.options
    report = checkpoint.convert(store.url("bucket/source"), tmp_path / "local", storage_options=options, workers=4)
    assert report.records_checked > 0
    assert checkpoint.verify(store.url("bucket/source"), tmp_path / "local", storage_options=options) == []
    faults = {k: n - before[k] for k, n in store.counts(0.0).items()}
    assert sum(faults.values()) > 0, faults
    assert_is_the_truth(tmp_path / "local", written)


def test_what_is_not_permitted_is_one_line(store, written, tmp_path):
    inventory = checkpoint.read(store.url("bucket/source"), storage_options=store.options)
    store.counts(object_store.DENY)
    with pytest.raises(CheckpointError, match=r"cannot read: (Access Denied|Forbidden) \(s3://bucket/source"):
        checkpoint.read(store.url("bucket/source"), storage_options=store.options)
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.convert(inventory, tmp_path / "out")


def test_what_is_missing_is_one_line(store, written):
    options = store.options
    with pytest.raises(CheckpointError, match=r"no such folder \(s3://bucket/none\)"):
        checkpoint.read(store.url("bucket/none"), storage_options=options)
    with pytest.raises(CheckpointError, match=r"no such folder \(s3://no-bucket/x\)"):
        checkpoint.read(store.url("no-bucket/x"), storage_options=options)
    inventory = checkpoint.read(store.url("bucket/source"), storage_options=options)
    name = inventory.files[0].name
    system = store.system()
    held = system.cat_file(f"bucket/source/global_step7/{name}")
    system.rm_file(f"bucket/source/global_step7/{name}")
    try:
        assert [p.what for p in inventory.problems()] == ["a file changed"]
    finally:
        system.pipe_file(f"bucket/source/global_step7/{name}", held)
