"""Writes mp4 files with imageio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_envs.errors import EnvError


def require_video() -> None:
    """Raises: EnvError that names the packages to install if videos cannot be written."""
    try:
        import imageio.v2  # noqa: F401
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise EnvError(f"videos need imageio and its ffmpeg ({error}); pip install 'rlinf-envs[video]'") from error


def mp4_writer(path: Path, fps: float) -> Any:
    """Returns imageio's writer of an H.264 file, for images [H, W, 3] uint8 with even sides."""
    import imageio.v2

    # macro_block_size=1: otherwise imageio rescales images to multiples of 16; H.264 only needs even sides.
    return imageio.v2.get_writer(path, format="FFMPEG", mode="I", fps=fps, codec="libx264", macro_block_size=1)  # type: ignore[arg-type]
