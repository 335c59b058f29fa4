"""The manifest of a folder: every file, every block of it, and whatever has changed since."""

import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.checkpoint.core.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    blocks_of,
    damage_in,
    files_in,
    read_manifests,
    share_of_blocks,
    sums,
    write_manifest,
)


def list_folder(folder: Path) -> None:
    blocks = blocks_of(files_in(folder))
    write_manifest(folder / MANIFEST, blocks, sums(folder, blocks))


def said(folder: Path, **options) -> list[tuple[str, str]]:
    manifest = read_manifests(folder)
    assert manifest is not None
    return [(d.name, d.kind) for d in (*manifest.damage, *damage_in(folder, manifest.blocks, **options))]


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
    assert (content["format"], content["version"], content["block_bytes"]) == ("ullage-manifest", 1, 16 * 1024 * 1024)
    assert list(files) == ["empty.txt", "inner/small.json", "large.bin"]
    assert files["empty.txt"] == {"bytes": 0, "crc32": ["00000000"]}
    assert files["inner/small.json"] == {"bytes": 2, "crc32": [f"{zlib.crc32(b'{}'):08x}"]}
    hole = f"{zlib.crc32(bytes(BLOCK_BYTES)):08x}"
    assert files["large.bin"] == {"bytes": 2 * BLOCK_BYTES + 5, "crc32": [hole, hole, f"{zlib.crc32(b'12345'):08x}"]}
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    assert content["files_crc32"] == f"{zlib.crc32(text.encode()):08x}"


def test_a_block_is_checked_by_itself(folder):
    manifest = read_manifests(folder)
    assert manifest is not None
    first, second, _ = (block for block in manifest.blocks if block.name == "large.bin")
    with open(folder / "large.bin", "r+b") as stream:
        stream.seek(BLOCK_BYTES + 7)
        stream.write(b"x")
    assert damage_in(folder, [first]) == []
    [damage] = damage_in(folder, [second])
    assert damage.kind == "changed"
    assert damage.expected.endswith("in bytes 16,777,216 to 33,554,432")


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
    assert files_in(tmp_path) == [("manifest.json", 35)]
    (tmp_path / "inside").mkdir()
    for name in ("../manifest.json", str(tmp_path / "manifest.json")):
        write_manifest(tmp_path / "inside" / "manifest.json", blocks_of([(name, 1)]), [0])
        assert said(tmp_path / "inside") == [("manifest.json", "changed")]


@given(st.lists(st.sampled_from([0, 1, 5000, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES]), max_size=9), st.data())
def test_members_share_every_block_once_and_in_order(sizes, data):
    blocks = blocks_of([(str(number), size) for number, size in enumerate(sizes)])
    parts = data.draw(st.sampled_from([1, 2, 3, 7, 64]))
    assert [block for part in range(parts) for block in share_of_blocks(blocks, part, parts)] == blocks
    if sizes:
        heaviest = max(sum(block.num_bytes for block in share_of_blocks(blocks, part, parts)) for part in range(parts))
        assert heaviest <= sum(sizes) / parts + 2 * BLOCK_BYTES
