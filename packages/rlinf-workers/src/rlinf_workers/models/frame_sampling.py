"""Which frames of a video a model sees. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROUNDING = 1e-6
"""Of a product that is a whole number but for its last bits."""
MIN_FRAMES = 4
"""A video with as many has at least these sampled, as Qwen's processors do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSampling:
    """Which frames of a video a model sees."""

    indices: tuple[int, ...]
    """Of the frames, among all of the video."""
    num_frames: int
    """Of the whole video."""
    fps: float
    """Frames per second of the whole video."""

    def metadata(self) -> Any:
        """Returns transformers' record of the same."""
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(total_num_frames=self.num_frames, fps=self.fps, frames_indices=list(self.indices))


def sampled_frames(num_frames: int, fps: float, *, target_fps: float, max_frames: int) -> FrameSampling:
    """Returns frames that are spread evenly from the first to the last.

    Args:
        num_frames, fps: of the whole video.
        target_fps: of the sampled frames, as far as `MIN_FRAMES` and `max_frames` allow.
    """
    count = min(max(int(num_frames * (target_fps / fps) + ROUNDING), MIN_FRAMES), max_frames, num_frames)
    gaps = max(count - 1, 1)
    indices = tuple(round(place * (num_frames - 1) / gaps) for place in range(count))
    return FrameSampling(indices=indices, num_frames=num_frames, fps=fps)
