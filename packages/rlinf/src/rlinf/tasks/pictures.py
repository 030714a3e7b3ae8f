"""Pictures of problems: in which forms a row has them, and how they are decoded. Videos are in videos.py.

A row has a picture as a path relative to its file, as bytes, as `{"bytes": ..., "path": ...}` (the format of Hugging
Face data sets), as a base64 data URL, or as a part of a chat that holds one of these. When the rows are read, a
picture's file is read once: for its digest, its size and the checks of its format. It is decoded whenever a prompt with
it is made, so pictures are in memory as files alone, or stay on disk.

Pictures are turned upright (EXIF) before anything else; the model's image processor makes them RGB, with white behind
what is transparent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from rlinf.errors import UserError
from rlinf_workers.models import (
    MARKER,
    PictureError,
    decoded_picture,
    fetched_picture,
    picture_from_base64,
    picture_from_data_url,
    picture_size,
)

if TYPE_CHECKING:
    from rlinf.config.evaluation import EvalConfig
    from rlinf.config.tasks import PictureConfig

VIDEO_MARKER = "<video>"
"""Where a video goes in a problem's text, as a picture at `MARKER`."""
COLUMNS = ("images", "image", "pictures", "picture")
"""Usual names of the column of pictures."""
VIDEO_COLUMNS = ("videos", "video")
"""Those of the column of videos."""
HOLDERS = ("bytes", "image_url", "video_url", "image", "video", "url", "path")
"""Keys of an object under which a picture or a video is; the first that has a value counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureReading:
    """How the pictures and videos of rows are read."""

    fetches: bool = False
    """Whether http(s) URLs are fetched, now and once."""
    video_fps: float = 2.0
    """Frames of a second of video that a model sees; of a list of frames, how many are of a second."""
    max_frames: int = 64
    """Of a video."""

    @classmethod
    def as_set(cls, settings: PictureConfig | EvalConfig) -> PictureReading:
        """As the settings of a run or of an evaluation say."""
        return cls(fetches=settings.fetch_pictures, video_fps=settings.video_fps, max_frames=settings.max_frames)


DEFAULT_READING = PictureReading()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemPicture:
    """A picture of a problem as its file has it, decoded when a prompt is made."""

    marker: ClassVar[str] = MARKER
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

    @property
    def files(self) -> tuple[bytes, ...]:
        """Its file, for rewards. Raises: UserError, as `read`."""
        return (self.read(),)

    def read(self) -> bytes:
        """Returns its file. Raises: UserError where it is another one now."""
        return stored_file(self.path, self.content, self.digest, f"{self.place}: the picture {self.path}")

    def decode(self) -> Any:
        """Returns a `PIL.Image.Image`, upright. Raises: UserError where the file is damaged, or is another one now."""
        content = self.read()
        try:
            return decoded_picture(content)
        except PictureError as error:
            raise UserError(f"{self.place}: the picture {self.path or ''}: {error}", hint="replace the file") from error


def stored_file(path: Path | None, content: bytes, digest: str, what: str) -> bytes:
    """Returns the content of a file, or what is in memory of it.

    Args:
        digest: its SHA-256 when the rows were read.
        what: for messages.
    Raises: UserError where it is another one now.
    """
    try:
        content = content if path is None else path.read_bytes()
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(
            f"{what} is not the one that was there when the run started",
            hint="leave the files of pictures and videos unchanged while a run reads them",
        )
    return content


def read_picture(value: Any, folder: Path, place: str, reading: PictureReading) -> ProblemPicture:
    """Reads the picture of a value in a row.

    Args:
        value: in one of the forms above.
        folder: what paths are relative to.
        place: of the row.
    Raises: PictureError.
    """
    path, content = stored_value(value, folder, reading)
    try:
        with named(path):
            width, height = picture_size(content)
    except ImportError as error:
        raise UserError("pictures need the package pillow", hint="pip install 'rlinf[vision]'") from error
    digest = hashlib.sha256(content).hexdigest()
    in_memory = content if path is None else b""
    return ProblemPicture(path=path, content=in_memory, digest=digest, width=width, height=height, place=place)


@contextmanager
def named(path: Path | None) -> Iterator[None]:
    """A context whose errors about the content of a file, if it is one, begin with its path. Raises: PictureError."""
    try:
        yield
    except PictureError as error:
        raise PictureError(f"{path} {error}" if path else str(error)) from error


def without_pictures(value: Any) -> Any:
    """Returns a value of a row without the bytes of pictures, for rewards and people, which read it as text."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and value.startswith(("data:image/", "data:video/")):
        return f"{value[:32]}... <{len(value)} characters>"
    if isinstance(value, Mapping):
        text = {"bytes": f"<{len(value['bytes'])} characters>"} if isinstance(value.get("bytes"), str) else {}
        return {name: without_pictures(one) for name, one in value.items()} | text
    if isinstance(value, list | tuple):
        return [without_pictures(one) for one in value]
    return value


def stored_value(value: Any, folder: Path, reading: PictureReading) -> tuple[Path | None, bytes]:
    """The file of a picture or a video, if it is one, and its bytes. Raises: PictureError."""
    if isinstance(value, bytes):
        return None, value
    if isinstance(value, Mapping):
        holder = next((name for name in HOLDERS if value.get(name) is not None), None)
        if holder is None:
            raise PictureError(f"an object must have one of {', '.join(HOLDERS)}; this has {sorted(value)}")
        if holder == "bytes" and isinstance(value[holder], str):
            return None, picture_from_base64(value[holder])
        return stored_value(value[holder], folder, reading)
    if not isinstance(value, str) or not value.strip():
        what = "is empty" if isinstance(value, str) else f"is a {type(value).__name__}"
        raise PictureError(f"must be a path, bytes, an object with one of them, or a data URL; {what}")
    scheme = urlsplit(value[:200]).scheme.lower() if ":" in value[:10] else ""
    if scheme == "data":
        return None, picture_from_data_url(value)
    if scheme in ("http", "https"):
        if not reading.fetches:
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
