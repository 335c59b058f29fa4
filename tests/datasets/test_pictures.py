"""Images of samples: what is read, what is refused in one line, and which tokens a conversation is trained on."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from tests.support.picture_parts import PLACES, asked, picture, processor
from ullage.core.errors import InputError
from ullage.datasets.picture_chats import PictureEncoder
from ullage.datasets.pictures import PictureReader, load_processor


def _png(picture: Image.Image) -> bytes:
    held = io.BytesIO()
    picture.save(held, "PNG")
    return held.getvalue()


def _bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header promises many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "own"
    (own / "deep").mkdir(parents=True)
    picture().save(own / "a.png")
    picture("blue").save(own / "deep" / "b.jpg")
    (own / "cut.png").write_bytes((own / "a.png").read_bytes()[:60])
    (own / "text.png").write_text("no image")
    (own / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (own / "bomb.png").write_bytes(_bomb(20_000, 20_000))
    (own / "large.png").write_bytes(_bomb(10_000, 9_000))
    picture().save(tmp_path / "secret.png")
    return own


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ("../secret.png", "leads out of its folder"),
        ("{}/secret.png", "leads out of its folder"),
        ("data:image/png;base64,AAAA", "nothing is fetched"),
        ("none.png", "cannot be read .*none.png.*nothing there"),
        ("cut.png", "cannot be decoded .*cut.png"),
        ("text.png", "is no image .*text.png"),
        ("page.eps", "is no image"),
        ("bomb.png", "too large .*bomb.png.*89,478,485 pixels"),
        ("large.png", "too large .*10,000 x 9,000"),
        (17, "is no image .*int"),
    ],
)
def test_an_image_that_cannot_be_used_is_one_line_with_its_row(
    folder: Path, image: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told.startswith("too large"):  # which is known before it is decoded
        monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    if isinstance(image, str):
        image = image.format(folder.parent)
    with pytest.raises(InputError, match=told) as raised:
        PictureReader(folder).read(image, "chats.jsonl, line 7")
    assert "chats.jsonl, line 7" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_image_is_the_same_from_wherever_it_comes_and_upright(folder: Path) -> None:
    own = picture(size=(16, 8))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter
    own.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=turned)
    own.save(folder / "plain.png")
    stored = datasets.Dataset.from_dict({"image": [str(folder / "plain.png")]}).cast_column("image", datasets.Image())
    held = stored.cast_column("image", datasets.Image(decode=False))[0]["image"]
    read = PictureReader(folder).read
    found = [read(each, "row 0") for each in
             (own, "plain.png", _png(own), {"bytes": _png(own)}, held, stored[0]["image"], "turned.png")]  # fmt: skip
    assert [each.mode for each in found] == ["RGB"] * 7
    assert all(each.tobytes() == own.tobytes() and each.size == (16, 8) for each in found)


_ROWS = [
    {"images": ["a.png", "deep/b.jpg"], "conversations": asked("what?", "red, then blue", 2)},
    {"image": None, "conversations": asked("hi", "hello", 0)},
    {"image": "a.png", "conversations": [*asked("hi", "red", 0), *asked("again? ", "yes", 1)]},
    {"images": ["a.png", "a.png"], "conversations": [*asked("what?", "red", 1), *asked("again? ", "yes", 1)]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "red"},
        ],
        "images": ["a.png"],
    },
    {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}], "images": ["a.png"]},
    {
        "prompt": [*asked("what?", "red"), {"role": "user", "content": "sure?"}],
        "completion": [{"role": "assistant", "content": "yes"}],
        "image": "a.png",
    },
]
_SAID = ("red, then blue|", "hello|", "red|yes|", "red|yes|", "red|", "red|", "yes|")


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("marked", [False, True])
def test_labels_are_what_the_assistant_says_and_images_are_the_samples_own(
    folder: Path, kind: str, marked: bool
) -> None:
    own = processor(kind, marked=marked)
    encoder = PictureEncoder(own, PictureReader(folder))
    samples = [encoder.encode(row, f"row {i}") for i, row in enumerate(_ROWS)]
    for row, sample, said in zip(_ROWS, samples, _SAID, strict=True):
        ids, labels = sample["input_ids"], sample["labels"]
        counted = labels != -100
        assert own.tokenizer.decode(ids[counted]).replace("<|im_end|>\n", "|") == said
        assert torch.equal(labels[counted], ids[counted])
        named = row.get("images") or row.get("image") or []
        number = 1 if isinstance(named, str) else len(named)
        assert ("pixel_values" in sample) == (number > 0)
        if number:
            rows = 16 * number if kind == "qwen2_5_vl" else number
            assert sample["pixel_values"].shape[0] == rows
            alone = own(text=[PLACES[kind]], images=[[picture()]], return_tensors="pt")["pixel_values"]
            first = sample["pixel_values"][: rows // number]
            assert torch.equal(first, alone.reshape(first.shape))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"image": "a.png", "conversations": asked("what?", "red", 2)}, "expected 2 images.*found 1"),
        ({"text": "what?"}, "no conversation.*columns text"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "neither text nor an image"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
         "nothing is fetched"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "cannot make a sample"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_conversation_is_told(folder: Path, row: Any, told: str) -> None:
    with pytest.raises(InputError, match=told) as raised:
        PictureEncoder(processor("qwen2_5_vl"), PictureReader(folder)).encode(row, "row 3")
    assert "row 3" in str(raised.value)


def test_a_processor_without_its_part_for_clips_is_saved_and_loaded(tmp_path: Path) -> None:
    own = processor("qwen2_5_vl")
    own.save_pretrained(tmp_path)
    found = load_processor(tmp_path)
    one, other = (each(text=["<|image_pad|>?"], images=[[picture()]], return_tensors="pt") for each in (own, found))
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert torch.equal(one["pixel_values"], other["pixel_values"])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_processor(tmp_path / "none")
