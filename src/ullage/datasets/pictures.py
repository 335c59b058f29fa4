"""Images of samples: from a file of a folder, its bytes, or what ``datasets`` holds, to a decoded picture.

Pillow decodes; nothing else is needed. What a file says of its size is looked at before it is decoded, so that a small
file cannot fill the memory; names that lead out of the folder are refused, and nothing is fetched from an address.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ullage.core.errors import InputError, first_line, root_cause
from ullage.core.extras import needed_by

#: Formats of pixels that Pillow reads by itself: no page descriptions, which it hands to other programs.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
#: The tag of EXIF that says which way up a picture is.
_ORIENTATION = 0x0112
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


@dataclass(frozen=True)
class PictureReader:
    """Reader of the images that samples name or hold.

    Attributes:
        folder: that the names of files are looked up in; without one samples have to hold their images.
    """

    folder: str | os.PathLike[str] | None = None

    def read(self, image: Any, where: str) -> Any:
        """The picture in RGB, upright, as ``PIL.Image``.

        Args:
            image: the name of a file in the folder; bytes of a file; ``{"bytes": ..., "path": ...}`` as ``datasets``
                stores it; a picture of Pillow's; or an array [H, W, 3] of bytes.
            where: the sample, for messages.

        Raises ``InputError`` for an address, a name outside the folder, more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``
        (before anything is decoded), and a file that is missing, damaged, cut off, or no image.
        """
        with needed_by("reading images"):
            from PIL import Image, ImageOps

        Image.init()
        formats = [name for name in FORMATS if name in Image.OPEN]  # of some a build of Pillow may know nothing
        found, name = self._source(image, where)
        where = f"{where}, image {name}"
        opened = contextlib.ExitStack()
        try:
            if isinstance(found, Image.Image):
                picture = found
            else:
                file = opened.enter_context(found if isinstance(found, io.BytesIO) else found.open("rb"))
                with warnings.catch_warnings():
                    # A large image is an error of ours below; the size is known as soon as the header is read.
                    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                    picture = Image.open(file, formats=formats)
            _require_size(picture.size, Image.MAX_IMAGE_PIXELS, where)
            # Decoded once, and copied only where it has to be turned, or has other colours.
            picture.load()
            if picture.getexif().get(_ORIENTATION, 1) != 1:
                picture = ImageOps.exif_transpose(picture)
            return picture if picture.mode == "RGB" else picture.convert("RGB")
        except InputError:
            raise
        except Image.UnidentifiedImageError:
            raise InputError(
                "a file is no image", where=where, expected=f"one of {', '.join(formats)}", found="another"
            ) from None
        except Image.DecompressionBombError as error:
            raise _too_large(where, Image.MAX_IMAGE_PIXELS, first_line(error)) from None
        except Exception as error:  # decoders raise whatever they like
            raise InputError(
                "an image cannot be decoded", where=where, found=f"{type(error).__name__}: {first_line(error)}"
            ) from error
        finally:
            opened.close()

    def _source(self, image: Any, where: str) -> tuple[Any, str]:
        """What Pillow opens, or a picture of its own; and how it is called in messages."""
        from PIL import Image

        if isinstance(image, Mapping):
            held = image.get("bytes")
            image = held if held is not None else image.get("path")
        if isinstance(image, Image.Image):
            return image, "in the row"
        if isinstance(image, bytes):
            return io.BytesIO(image), f"of {len(image):,} bytes"
        if isinstance(image, (str, os.PathLike)):
            path = self._path(os.fspath(image), where)
            return path, str(path)
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
            return Image.fromarray(image), "in the row"
        raise InputError(
            "a sample holds something that is no image",
            where=where,
            expected="the name of a file, bytes, a picture of Pillow's, or an array [H, W, 3] of uint8",
            found=f"{type(image).__name__} {str(image)[:40]!r}",
        )

    def _path(self, name: str, where: str) -> Path:
        """The file of that name in the folder."""
        if _ADDRESS.match(name):
            raise InputError(
                "an image is an address, and nothing is fetched",
                where=where,
                expected="the name of a file",
                found=repr(name[:60]),
                hint="fetch it first, and name the file",
            )
        if self.folder is None:
            raise InputError(
                "an image is named, and no folder to find it in",
                where=where,
                found=repr(name[:60]),
                hint="give image_folder",
            )
        folder = os.path.abspath(self.folder)
        # By the names alone: a link that lies in the folder is its owner's, and the hub's cache is made of links.
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.commonpath([folder, path]) != folder:
            raise InputError(
                "the name of an image leads out of its folder",
                where=where,
                expected=f"a file in {folder}",
                found=repr(name[:60]),
            )
        if not os.path.isfile(path):
            found = "a folder" if os.path.isdir(path) else "nothing there"
            raise InputError("the file of an image cannot be read", where=f"{where}, image {path}", found=found)
        return Path(path)


def _require_size(size: tuple[int, int], most: int | None, where: str) -> None:
    if most is not None and size[0] * size[1] > most:
        raise _too_large(where, most, f"{size[0]:,} x {size[1]:,}")
    if min(size) < 1:
        raise InputError("an image is empty", where=where, found=f"{size[0]} x {size[1]} pixels")


def _too_large(where: str, most: int | None, found: str) -> InputError:
    return InputError(
        "an image is too large",
        where=where,
        expected=f"at most {most:,} pixels" if most is not None else None,
        found=found,
        hint="shrink it, or raise PIL.Image.MAX_IMAGE_PIXELS",
    )


# Processors


def load_processor(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The processor that a folder holds, as ``AutoProcessor`` loads it; without torchvision, all of it but the clips.

    The part of a processor that reads clips needs torchvision, and transformers then loads none of the processor.
    ``options``: of ``from_pretrained``. Raises ``InputError`` where there is none.
    """
    with needed_by("ullage.datasets.load_processor"):
        import PIL  # noqa: F401  (without it transformers fails at a name of its own)
        import transformers
        from transformers.utils.import_utils import is_torchvision_available

    options = {"local_files_only": True, **options}
    try:
        said, _ = transformers.ProcessorMixin.get_processor_dict(os.fspath(folder), **options)
        kind = getattr(transformers, str(said.get("processor_class")), None)
        takes_clips = kind is not None and "video_processor" in kind.get_attributes()
        has_clips = "video_processor" in said or (Path(folder) / "video_preprocessor_config.json").is_file()
        if takes_clips and not (has_clips and is_torchvision_available()):
            return without_clips(kind).from_pretrained(folder, **options)
        found = transformers.AutoProcessor.from_pretrained(folder, **options)
    except Exception as error:  # each of the parts raises its own
        raise InputError(
            "the processor cannot be loaded", where=os.fspath(folder), found=first_line(root_cause(error))
        ) from error
    if getattr(found, "image_processor", None) is None:
        raise InputError("this is no processor of images", where=os.fspath(folder), found=type(found).__name__)
    return found


def without_clips(kind: Any) -> Any:
    """A class of processors without its part for clips, which takes a tokenizer and an image processor."""
    own = [name for name in kind.get_attributes() if "video" not in name]
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "get_attributes": classmethod(lambda cls: own)})
