"""Pictures of problems: in which forms a row has them, and how they are decoded.

A row has a picture as a path relative to its file, as bytes, as `{"bytes": ..., "path": ...}` (the format of Hugging
Face data sets), as a base64 data URL, or as a part of a chat that holds one of these. When the rows are read, a
picture's file is read once: for its digest, its size and the checks of its format. It is decoded whenever a prompt with
it is made, so pictures are in memory as files alone, or stay on disk.

Pictures are turned upright (EXIF) before anything else; the model's image processor makes them RGB, with white behind
what is transparent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlinf.errors import UserError
from rlinf_workers.models import (
    PictureError,
    decoded_picture,
    fetched_picture,
    picture_from_base64,
    picture_from_data_url,
    picture_size,
)

MARKER = "<image>"
"""Where a picture goes in a problem's text."""
COLUMNS = ("images", "image", "pictures", "picture")
"""Usual names of the column of pictures."""
HOLDERS = ("bytes", "image_url", "image", "url", "path")
"""Keys of an object under which a picture is; the first that has a value counts."""


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

    def read(self) -> bytes:
        """Returns its file. Raises: UserError where it is another one now."""
        try:
            content = self.content if self.path is None else self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.place}: the picture {self.path}: {error.strerror or error}") from error
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise UserError(
                f"{self.place}: the picture {self.path} is not the one that was there when the run started",
                hint="leave the files of pictures unchanged while a run reads them",
            )
        return content

    def decode(self) -> Any:
        """Returns a `PIL.Image.Image`, upright. Raises: UserError where the file is damaged, or is another one now."""
        content = self.read()
        try:
            return decoded_picture(content)
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
    try:
        width, height = picture_size(content)
    except ImportError as error:
        raise UserError("pictures need the package pillow", hint="pip install 'rlinf[vision]'") from error
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
            return None, picture_from_base64(value[holder])
        return _stored(value[holder], folder, fetches=fetches)
    if not isinstance(value, str) or not value.strip():
        what = "is empty" if isinstance(value, str) else f"is a {type(value).__name__}"
        raise PictureError(f"must be a path, bytes, an object with one of them, or a data URL; {what}")
    scheme = urlsplit(value[:200]).scheme.lower() if ":" in value[:10] else ""
    if scheme == "data":
        return None, picture_from_data_url(value)
    if scheme in ("http", "https"):
        if not fetches:
            raise PictureError(
                f"{value[:120]!r} is on the network; download it, or fetch all with --task.fetch_pictures true"
            )
        return None, fetched_picture(value)
    path = Path(unquote(value.removeprefix("file://"))) if scheme == "file" else Path(value)
    path = folder / path
    try:
        return path, path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PictureError(f"{path}: {why}; paths are relative to the folder of the row's file") from error
