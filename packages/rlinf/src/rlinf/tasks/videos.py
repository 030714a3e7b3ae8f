"""Videos of problems: files, which ffmpeg decodes, and lists of frames.

A row has a video in the forms of a picture (pictures.py), or as a list of its frames, each in one of these forms. When
the rows are read, the file is read once, for its digest, its size and its number of frames; which of them the model
sees follows from the settings. They are decoded whenever a prompt with the video is made.

ffmpeg comes with the package imageio-ffmpeg. It may open nothing but the file. The time of a frame is its number,
divided by the average rate of the file.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf.errors import UserError
from rlinf.tasks.pictures import (
    VIDEO_MARKER,
    PictureReading,
    ProblemPicture,
    named,
    read_picture,
    stored_file,
    stored_value,
)
from rlinf_workers.models import FrameSampling, PictureError, sampled_frames

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 1 << 30
"""Of a file, which is read whole for its digest."""
ONLY_THE_FILE = ["-protocol_whitelist", "file"]
"""A file may be a playlist; then ffmpeg would open what it names."""
EVERY_FRAME = ["-fps_mode", "passthrough"]
MISSING_FRAMES = 2
"""Stored frames at the end that may not be decoded, as of a file that was cut; then the last one is repeated."""
DECODING_ERRORS = (OSError, RuntimeError, StopIteration, KeyError, ValueError)
"""What imageio-ffmpeg raises for files that ffmpeg does not read, or whose header lacks something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemVideo:
    """A video of a problem, whose sampled frames are decoded when a prompt is made."""

    marker: ClassVar[str] = VIDEO_MARKER
    path: Path | None = None
    """Its file; None: `content`, or `frames`."""
    content: bytes = field(default=b"", repr=False)
    frames: tuple[ProblemPicture, ...] = ()
    """The sampled frames of a list."""
    file_digest: str = ""
    """SHA-256 of its file."""
    sampling: FrameSampling
    width: int
    """Of a frame in pixels, upright."""
    height: int
    place: str
    """Of its row, for messages."""

    @property
    def digest(self) -> str:
        """Of all that the model sees of it."""
        parts = (self.file_digest, [frame.digest for frame in self.frames], self.sampling)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return len(self.content) + sum(frame.num_bytes for frame in self.frames)

    @property
    def files(self) -> tuple[bytes, ...]:
        """The sampled frames as files, for rewards. Raises: UserError, as `decode_frames`."""
        if self.frames:
            return tuple(frame.read() for frame in self.frames)
        return tuple(map(_png, self.decode_frames()))

    def decode_frames(self) -> Sequence[Any]:
        """Returns the sampled frames as `PIL.Image.Image`. Raises: UserError where they cannot be decoded, or are of
        another file now."""
        if self.frames:
            return [frame.decode() for frame in self.frames]
        what = f"{self.place}: the video {self.path or ''}"
        content = stored_file(self.path, self.content, self.file_digest, what)
        try:
            with _file_of(self.path, content) as file:
                return list(_decoded(file, self.sampling))
        except PictureError as error:
            raise UserError(f"{what}: {error}", hint="replace the file") from error


PictureOrVideo = ProblemPicture | ProblemVideo


def read_video(value: Any, folder: Path, place: str, reading: PictureReading) -> ProblemVideo:
    """Reads the video of a value in a row. The arguments are those of `read_picture`.

    Raises: PictureError.
    """
    if isinstance(value, list | tuple):
        return _of_frames(value, folder, place, reading)
    if isinstance(value, dict) and isinstance(value.get("video"), list | tuple):  # a part of a chat
        return _of_frames(value["video"], folder, place, reading)
    path, content = stored_value(value, folder, reading)
    if len(content) > MOST_BYTES:
        raise PictureError(f"has {len(content):,} bytes; at most {MOST_BYTES:,} are read")
    with named(path), _file_of(path, content) as file:
        num_frames, fps, (width, height) = _described(file)
    return ProblemVideo(
        path=path,
        content=content if path is None else b"",
        file_digest=hashlib.sha256(content).hexdigest(),
        sampling=sampled_frames(num_frames, fps, target_fps=reading.video_fps, max_frames=reading.max_frames),
        width=width,
        height=height,
        place=place,
    )


def _of_frames(values: Sequence[Any], folder: Path, place: str, reading: PictureReading) -> ProblemVideo:
    """Raises: PictureError."""
    if not values:
        raise PictureError("has no frames")
    fps = reading.video_fps
    sampling = sampled_frames(len(values), fps, target_fps=fps, max_frames=reading.max_frames)
    frames = []
    for index in sampling.indices:
        try:
            frames.append(read_picture(values[index], folder, place, reading))
        except PictureError as error:
            raise PictureError(f"frame {index + 1}: {error}") from error
    sizes = sorted({(frame.width, frame.height) for frame in frames})
    if len(sizes) > 1:
        named = " and ".join(f"{width} x {height}" for width, height in sizes[:2])
        raise PictureError(f"has frames of {named} pixels; all must have one size")
    ((width, height),) = sizes
    return ProblemVideo(frames=tuple(frames), sampling=sampling, width=width, height=height, place=place)


@contextmanager
def _file_of(path: Path | None, content: bytes) -> Iterator[Path]:
    """The file, or one that exists within the context."""
    if path is not None:
        yield path.absolute()
        return
    with tempfile.NamedTemporaryFile(prefix="rlinf-video-") as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def _described(file: Path) -> tuple[int, float, tuple[int, int]]:
    """Number of frames, frames per second, width and height; nothing but the first frame is decoded.

    Raises: PictureError; UserError without ffmpeg.
    """
    try:
        with closing(_read(file)) as frames:
            header = next(frames)
            next(frames)
        num_frames, fps, (width, height) = _num_frames(file), float(header["fps"]), header["size"]
    except DECODING_ERRORS as error:
        raise PictureError(
            f"is no video that ffmpeg reads: {_last_line(error)}; give the frames of a video as a list in the list"
        ) from error
    if num_frames < 2 or fps <= 0:  # a picture is a video of one frame to ffmpeg
        raise PictureError(
            f"has {num_frames} frame, {fps:g} a second; a video as a list of frames is a list in the list of videos"
        )
    return num_frames, fps, (width, height)


def _num_frames(file: Path) -> int:
    """Counts them as they are stored. Raises: RuntimeError."""
    command = [_ffmpeg().get_ffmpeg_exe(), "-nostdin", "-v", "error", "-nostats", *ONLY_THE_FILE, "-i", str(file)]
    command += ["-map", "0:v:0", "-c", "copy", "-f", "null", "-progress", "-", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    counts = [line for line in done.stdout.splitlines() if line.startswith("frame=")]
    if done.returncode or not counts:
        raise RuntimeError(done.stderr)
    return int(counts[-1].removeprefix("frame="))


def _decoded(file: Path, sampling: FrameSampling) -> Iterator[Any]:
    """The sampled frames. Raises: PictureError; UserError without ffmpeg."""
    from PIL import Image

    try:
        with closing(_read(file)) as frames:
            size, place = next(frames)["size"], -1
            last: bytes | None = None
            for index in sampling.indices:
                while place < index and (content := next(frames, None)) is not None:
                    place, last = place + 1, content
                if last is None or index - place > MISSING_FRAMES:
                    raise PictureError(f"has {place + 1} frames that can be decoded, of {sampling.num_frames}")
                yield Image.frombytes("RGB", size, last)
    except PictureError:
        raise
    except DECODING_ERRORS as error:
        raise PictureError(f"is damaged: {_last_line(error)}") from error


def _read(file: Path) -> Any:
    """imageio-ffmpeg's generator: a header, then frames as bytes."""
    return _ffmpeg().read_frames(str(file), input_params=ONLY_THE_FILE, output_params=EVERY_FRAME)


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise UserError("videos need the package imageio-ffmpeg", hint="pip install 'rlinf[video]'") from error
    return imageio_ffmpeg


def _last_line(error: Exception) -> str:
    """imageio-ffmpeg's errors repeat all that ffmpeg printed."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
