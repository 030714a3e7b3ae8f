"""Pictures of problems: in which forms a row has them, and how they are decoded.

A row has a picture as a path relative to its file, as bytes, as `{"bytes": ..., "path": ...}` (the format of Hugging
Face data sets), as a base64 data URL, or as a part of a chat that holds one of these. When the rows are read, a
picture's file is read once: for its digest, its size and the checks of its format. It is decoded whenever a prompt with
it is made, so pictures are in memory as files alone, or stay on disk.

Pictures are turned upright (EXIF) before anything else; the model's image processor makes them RGB, with white behind
what is transparent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from rlinf.errors import UserError

MARKER = "<image>"
"""Where a picture goes in a problem's text."""
COLUMNS = ("images", "image", "pictures", "picture")
"""Usual names of the column of pictures."""
HOLDERS = ("bytes", "image_url", "image", "url", "path")
"""Keys of an object under which a picture is; the first that has a value counts."""
MOST_BYTES = 256 << 20
FETCH_TIMEOUT_S = 60.0
ORIENTATION = 0x0112
"""EXIF tag; from 5 on, rows and columns are exchanged."""


class PictureError(ValueError):
    """A picture that cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemPicture:
    """A picture of a problem as its file has it, decoded when a prompt is made."""

    path: Path | None = None
    """Its file; None: `content`."""
    content: bytes = field(default=b"", repr=False)
    digest: str
    """SHA-256 of its file."""
    width: int
    """In pixels, upright."""
    height: int
    place: str
    """Of its row, for messages."""

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return len(self.content)

    def decode(self) -> Any:
        """Returns a `PIL.Image.Image`, upright. Raises: UserError where the file is damaged, or is another one now."""
        try:
            content = self.content if self.path is None else self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.place}: the picture {self.path}: {error.strerror or error}") from error
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise UserError(
                f"{self.place}: the picture {self.path} is not the one that was there when the run started",
                hint="leave the files of pictures unchanged while a run reads them",
            )
        try:
            return _decoded(content)
        except PictureError as error:
            raise UserError(f"{self.place}: the picture {self.path or ''}: {error}", hint="replace the file") from error


def read_picture(value: Any, folder: Path, place: str, *, fetches: bool = False) -> ProblemPicture:
    """Reads the picture of a value in a row.

    Args:
        value: in one of the forms above.
        folder: what paths are relative to.
        place: of the row.
        fetches: whether http(s) URLs are fetched, now and once.
    Raises: PictureError.
    """
    path, content = _stored(value, folder, fetches=fetches)
    if len(content) > MOST_BYTES:
        raise PictureError(f"has {len(content):,} bytes; at most {MOST_BYTES:,} are read")
    width, height = _size(content)
    digest = hashlib.sha256(content).hexdigest()
    in_memory = content if path is None else b""
    return ProblemPicture(path=path, content=in_memory, digest=digest, width=width, height=height, place=place)


def without_pictures(value: Any) -> Any:
    """Returns a value of a row without the bytes of pictures, for rewards and people, which read it as text."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and value.startswith("data:image/"):
        return f"{value[:32]}... <{len(value)} characters>"
    if isinstance(value, Mapping):
        text = {"bytes": f"<{len(value['bytes'])} characters>"} if isinstance(value.get("bytes"), str) else {}
        return {name: without_pictures(one) for name, one in value.items()} | text
    if isinstance(value, list | tuple):
        return [without_pictures(one) for one in value]
    return value


def _stored(value: Any, folder: Path, *, fetches: bool) -> tuple[Path | None, bytes]:
    """The file of a picture, if it is one, and its bytes."""
    if isinstance(value, bytes):
        return None, value
    if isinstance(value, Mapping):
        holder = next((name for name in HOLDERS if value.get(name) is not None), None)
        if holder is None:
            raise PictureError(f"an object with a picture has one of {', '.join(HOLDERS)}; this has {sorted(value)}")
        if holder == "bytes" and isinstance(value[holder], str):
            return None, _from_base64(value[holder])
        return _stored(value[holder], folder, fetches=fetches)
    if not isinstance(value, str) or not value.strip():
        what = "is empty" if isinstance(value, str) else f"is a {type(value).__name__}"
        raise PictureError(f"must be a path, bytes, an object with one of them, or a data URL; {what}")
    scheme = urlsplit(value[:200]).scheme.lower() if ":" in value[:10] else ""
    if scheme == "data":
        head, comma, text = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise PictureError(f"a data URL of a picture begins like data:image/png;base64, this one {value[:40]!r}")
        return None, _from_base64(text)
    if scheme in ("http", "https"):
        if not fetches:
            raise PictureError(
                f"{value[:120]!r} is on the network; download it, or fetch all with --task.fetch_pictures true"
            )
        return None, _fetched(value)
    path = Path(unquote(value.removeprefix("file://"))) if scheme == "file" else Path(value)
    path = folder / path
    try:
        return path, path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PictureError(f"{path}: {why}; paths are relative to the folder of the row's file") from error


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"is not base64: {error}") from error


def _fetched(url: str) -> bytes:
    try:
        with urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            return answer.read(MOST_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise PictureError(f"{url[:120]!r} cannot be fetched: {error}") from error


def _opened(content: bytes) -> Any:
    """Raises: PictureError."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("pictures need the package pillow", hint="pip install 'rlinf[vision]'") from error
    if not content:
        raise PictureError("is empty")
    try:
        return Image.open(io.BytesIO(content))
    except Exception as error:  # formats raise various errors for damaged files
        raise PictureError(f"is no picture that Pillow reads: {_first_line(error)}") from error


def _size(content: bytes) -> tuple[int, int]:
    """Width and height of the upright picture. Raises: PictureError."""
    try:
        _opened(content).verify()
    except PictureError:
        raise
    except Exception as error:  # as when it is opened
        raise PictureError(f"is damaged: {_first_line(error)}") from error
    image = _opened(content)
    if getattr(image, "is_animated", False) and image.format != "MPO":  # which has previews as further frames
        raise PictureError(f"has {image.n_frames} frames: videos need torchvision in transformers, and are not read")
    width, height = image.size
    if not width or not height:
        raise PictureError(f"has {width} x {height} pixels")
    if image.mode == "F":
        raise PictureError("has floating-point pixels; save it with 8 bits a channel")
    turned = image.getexif().get(ORIENTATION, 1) >= 5
    return (height, width) if turned else (width, height)


def _decoded(content: bytes) -> Any:
    """Raises: PictureError."""
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
