"""Frames of videos as patches of several frames, without torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.models.frame_sampling import FrameSampling


class FramePairs:
    """Takes the place of the video processor in transformers' processor of a Qwen model: each frame goes through the
    image processor, and the patches of `temporal_patch_size` frames are joined. Where their number is no multiple of
    it, the last one is repeated, as in transformers. Unlike there, a frame has the limits in pixels of a picture.
    """

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor
        self.merge_size: int = image_processor.merge_size
        self.temporal_patch_size: int = image_processor.temporal_patch_size

    def __call__(
        self, videos: Sequence[Sequence[Any]], *, video_metadata: Sequence[Any], **_: Any
    ) -> dict[str, Tensor | Any]:
        """Args: videos: a single one, as its frames; video_metadata: its `VideoMetadata`."""
        (frames,) = videos
        outputs = self._image_processor(images=list(frames), do_convert_rgb=True, return_tensors="pt")
        rows, columns = outputs["image_grid_thw"][0, 1:].tolist()
        size = self.temporal_patch_size
        # every patch has its frame `size` times: [frames, patches, channels, size, pixels]
        channels = len(self._image_processor.image_mean)
        patches = outputs["pixel_values"].view(len(frames), rows * columns, channels, size, -1)[:, :, :, 0]
        patches = torch.cat([patches, patches[-1:].expand(-len(frames) % size, -1, -1, -1)])
        joined = patches.unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4)
        return {
            "pixel_values_videos": joined.reshape(joined.shape[0] * rows * columns, -1).contiguous(),
            "video_grid_thw": torch.tensor([[joined.shape[0], rows, columns]]),
            "video_metadata": list(video_metadata),
        }

    def grids(self, num_tokens: int, sampling: FrameSampling) -> Tensor:
        """[1, 3], a grid with the placeholders of a video whose frames have so many tokens each."""
        num_groups = -(-len(sampling.indices) // self.temporal_patch_size)
        return torch.tensor([[num_groups, num_tokens, self.merge_size**2]])
