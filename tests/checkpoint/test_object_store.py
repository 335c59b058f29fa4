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


def test_a_conversion_is_exact_while_requests_fail_and_what_is_not_permitted_or_missing_is_one_line(tmp_path):
    with object_store.serve(seed=7) as store:
        written = real_zero.write(tmp_path / "written", Recipe(stage=1, dp=3, groups=GROUPS))
        system, source, options = store.system(), "s3://bucket/source", {"storage_options": store.options}
        for path in sorted(written.folder.rglob("*")):
            if path.is_file():
                system.pipe_file(f"bucket/source/{path.relative_to(written.folder).as_posix()}", path.read_bytes())

        before = store.counts(0.05)
        report = checkpoint.convert(source, tmp_path / "local", workers=4, **options)
        assert report.records_checked > 0
        assert checkpoint.verify(source, tmp_path / "local", **options) == []
        faults = {k: n - before[k] for k, n in store.counts(0.0).items()}
        assert sum(faults.values()) > 0, faults
        assert_is_the_truth(tmp_path / "local", written)

        inventory = checkpoint.read(source, **options)
        store.counts(object_store.DENY)
        with pytest.raises(CheckpointError, match=r"cannot read: (Access Denied|Forbidden) \(s3://bucket/source"):
            checkpoint.read(source, **options)
        with pytest.raises(CheckpointError, match="cannot read"):
            checkpoint.convert(inventory, tmp_path / "out")
        store.counts(0.0)

        for url in ("s3://bucket/none", "s3://no-bucket/x"):
            with pytest.raises(CheckpointError, match=rf"no such folder \({url}\)"):
                checkpoint.read(url, **options)
        system.rm_file(f"bucket/source/global_step7/{inventory.files[0].name}")
        assert [p.what for p in inventory.problems()] == ["a file changed"]


def test_without_credentials_the_store_is_named_and_not_the_file(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/none",
        "AWS_SHARED_CREDENTIALS_FILE": "/none",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=r"^cannot read: Unable to locate credentials \(s3://bucket/none\)$"):
        checkpoint.read("s3://bucket/none")
