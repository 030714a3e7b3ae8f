"""Files of pictures: what is in their header, and their pixels.

Pictures are turned upright (EXIF) before anything else. Needs Pillow, which the functions import. Imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass, field
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

NEEDS_PILLOW = "pictures need the package pillow; install it with `pip install 'rlinf-workers[vision]'`"
MOST_BYTES = 256 << 20
FETCH_TIMEOUT_S = 60.0
ORIENTATION = 0x0112
"""EXIF tag; from 5 on, rows and columns are exchanged."""


class PictureError(ValueError):
    """A picture that cannot be used."""


@dataclass(frozen=True)
class PictureFile:
    """A picture in memory, as its file has it (`picture_processor.StoredPicture`)."""

    content: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def decode(self) -> Any:
        """Returns a `PIL.Image.Image`, upright. Raises: PictureError."""
        picture_size(self.content)
        return decoded_picture(self.content)


def picture_from_base64(text: str) -> bytes:
    """Raises: PictureError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"is not base64: {error}") from error


def picture_from_data_url(url: str) -> bytes:
    """The file in a data URL. Raises: PictureError."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError(f"a data URL of a picture begins like data:image/png;base64, this one {url[:40]!r}")
    return picture_from_base64(text)


def fetched_picture(url: str) -> bytes:
    """The file at an http(s) URL. Raises: PictureError."""
    try:
        with urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            return answer.read(MOST_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise PictureError(f"{url[:120]!r} cannot be fetched: {error}") from error


def picture_size(content: bytes) -> tuple[int, int]:
    """Width and height of the upright picture in a file. Raises: PictureError; ImportError without Pillow."""
    if len(content) > MOST_BYTES:
        raise PictureError(f"has {len(content):,} bytes; at most {MOST_BYTES:,} are read")
    try:
        _opened(content).verify()
    except PictureError:
        raise
    except Exception as error:  # as when it is opened
        raise PictureError(f"is damaged: {_first_line(error)}") from error
    image = _opened(content)
    if getattr(image, "is_animated", False) and image.format != "MPO":  # which has previews as further frames
        raise PictureError(f"has {image.n_frames} frames; a column of videos takes it")
    width, height = image.size
    if not width or not height:
        raise PictureError(f"has {width} x {height} pixels")
    if image.mode == "F":
        raise PictureError("has floating-point pixels; save it with 8 bits a channel")
    turned = image.getexif().get(ORIENTATION, 1) >= 5
    return (height, width) if turned else (width, height)


def decoded_picture(content: bytes) -> Any:
    """Returns a `PIL.Image.Image`, upright. Raises: PictureError; ImportError without Pillow."""
    image = _opened(content)
    import numpy as np
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as error:
        raise PictureError(f"is damaged: {_first_line(error)}") from error
    if image.mode.startswith("I"):  # 16 bits; Pillow's conversion would make all above 255 white
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image


def _opened(content: bytes) -> Any:
    """Raises: PictureError; ImportError without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(NEEDS_PILLOW) from error
    if not content:
        raise PictureError("is empty")
    try:
        return Image.open(io.BytesIO(content))
    except Exception as error:  # formats raise various errors for damaged files
        raise PictureError(f"is no picture that Pillow reads{_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Empty for a file of no known format, since Pillow's message then has an object in memory for its name."""
    return "" if type(error).__name__ == "UnidentifiedImageError" else f": {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
