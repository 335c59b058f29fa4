"""The manifest of a folder: every file, every block of it, and whatever has changed since."""

import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.checkpoint.core import manifest as manifests
from ullage.checkpoint.core.manifest import (
    files_in,
    joined_sums,
    misplaced,
    problems_of,
    read_manifests,
    sum_share,
    write_manifest,
)

BLOCK_BYTES = 16 << 20
KINDS = {what: kind for kind, what in manifests._SAID.items()}


def list_folder(folder: Path) -> None:
    write_manifest(folder, joined_sums([sum_share(folder, files_in(folder))]).values())


def said(folder: Path, *, content: bool = True) -> list[tuple[str, str]]:
    manifest = read_manifests(folder)
    assert manifest is not None
    if not content:
        return [(d.name, d.kind) for d in misplaced(folder, manifest.files)]
    return [(problem.file or "", KINDS[problem.what]) for problem in problems_of(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two blocks and five bytes; a file of no bytes; one in a folder."""
    (tmp_path / "inner").mkdir()
    with open(tmp_path / "large.bin", "wb") as stream:
        stream.truncate(2 * BLOCK_BYTES)  # a hole, which costs no disk
        stream.seek(0, os.SEEK_END)
        stream.write(b"12345")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "inner" / "small.json").write_text("{}")
    list_folder(tmp_path)
    return tmp_path


def test_the_file_is_as_the_formats_page_says(folder):
    content = json.loads((folder / "manifest.json").read_text())
    files = content["files"]
    assert (content["format"], content["version"]) == ("ullage-manifest", 2)
    assert list(files) == ["empty.txt", "inner/small.json", "large.bin"]
    assert files["empty.txt"] == {"bytes": 0, "crc32": "00000000"}
    assert files["inner/small.json"] == {"bytes": 2, "crc32": f"{zlib.crc32(b'{}'):08x}"}
    whole = zlib.crc32((folder / "large.bin").read_bytes())
    assert files["large.bin"] == {"bytes": 2 * BLOCK_BYTES + 5, "crc32": f"{whole:08x}"}
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    assert content["files_crc32"] == f"{zlib.crc32(text.encode()):08x}"


def test_a_byte_of_any_block_is_found_by_any_number_of_members(folder):
    with open(folder / "large.bin", "r+b") as stream:
        stream.seek(BLOCK_BYTES + 7)
        stream.write(b"x")
    [problem] = problems_of(folder)
    assert (problem.file, problem.what) == ("large.bin", "a file is not what the manifest lists")
    listed = read_manifests(folder).files
    for parts in (1, 2, 3, 5):
        sums = joined_sums([sum_share(folder, listed, part, parts) for part in range(parts)])
        assert [each.name for each in listed if sums[each.name][2] != each.crc] == ["large.bin"]


def test_what_changed_since_is_found(folder):
    assert said(folder) == []
    (folder / "added-later.pt").write_text("by somebody")
    assert said(folder) == []
    (folder / "inner" / "small.json").write_text("[]")  # after it had been found right, by this process
    assert said(folder) == [("inner/small.json", "changed")]
    assert said(folder, content=False) == []
    os.truncate(folder / "large.bin", BLOCK_BYTES)
    (folder / "empty.txt").unlink()
    everything = [("empty.txt", "missing"), ("inner/small.json", "changed"), ("large.bin", "size")]
    assert said(folder) == everything
    assert said(folder, content=False) == [everything[0], everything[2]]


def test_a_damaged_manifest_is_damage_wherever_the_byte_lies(tmp_path):
    (tmp_path / "a").write_text("a")
    list_folder(tmp_path)
    whole = (tmp_path / "manifest.json").read_bytes()
    for place in range(len(whole)):
        torn = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        (tmp_path / "manifest.json").write_bytes(torn)
        try:
            same = json.loads(torn) == json.loads(whole)  # a space became another one
        except ValueError:
            same = False
        assert same or said(tmp_path), (place, torn)
    (tmp_path / "manifest.json").write_bytes(b"")
    assert said(tmp_path) == [("manifest.json", "changed")]


def test_a_folder_inside_that_has_a_manifest_speaks_for_itself(tmp_path):
    inner = tmp_path / "weights"
    inner.mkdir()
    (inner / "part.distcp").write_text("numbers")
    list_folder(inner)
    (tmp_path / "state.json").write_text("{}")
    list_folder(tmp_path)
    listed = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert list(listed) == ["state.json", "weights/manifest.json"]
    assert said(tmp_path) == []
    (inner / "part.distcp").write_text("numbets")
    assert said(tmp_path) == [("weights/part.distcp", "changed")]
    (inner / "manifest.json").unlink()
    assert said(tmp_path) == [("weights/manifest.json", "missing")]


def test_a_folder_without_one_a_file_of_that_name_by_others_and_names_that_leave_the_folder(tmp_path):
    assert read_manifests(tmp_path) is None
    assert read_manifests(tmp_path / "nowhere") is None
    (tmp_path / "manifest.json").write_text('{"name": "a web page", "icons": []}')
    assert read_manifests(tmp_path) is None
    assert [(each.name, each.num_bytes) for each in files_in(tmp_path)] == [("manifest.json", 35)]
    (tmp_path / "inside").mkdir()
    for name in ("../manifest.json", str(tmp_path / "manifest.json")):
        write_manifest(tmp_path / "inside", [(name, 1, 0, "")])
        assert said(tmp_path / "inside") == [("manifest.json", "changed")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from([0, 1, 50, 63, 64, 65, 640]), max_size=9), st.sampled_from([1, 2, 3, 7, 64]))
def test_members_share_every_byte_once_and_their_sums_are_those_of_the_files(tmp_path_factory, sizes, parts):
    folder = tmp_path_factory.mktemp("shares")
    for number, size in enumerate(sizes):
        (folder / f"{number}").write_bytes(os.urandom(size))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifests, "_BLOCK_BYTES", 64)
        patched.setattr(manifests, "_FILE_COST", 4)
        shares = [sum_share(folder, files_in(folder), part, parts) for part in range(parts)]
    found = joined_sums(shares)
    assert [(each[0], each[1]) for each in found.values()] == [(f"{n}", size) for n, size in enumerate(sizes)]
    assert all(each[2] == zlib.crc32((folder / each[0]).read_bytes()) for each in found.values())
    if sizes:
        assert max(sum(each[1] for each in share) for share in shares) <= sum(sizes) / parts + 2 * 64
