"""Pictures of models that read them in tiles (SmolVLM), in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_workers.models.picture_processor import image_processor
from rlinf_workers.models.picture_texts import TILED

LAST = 1.0 - 1e-6
"""Largest place of a patch along a side of 1."""


def know_largest_picture() -> None:
    """Computes the features of the largest picture from its size, in each process of vLLM that reserves memory for
    them. vLLM 0.32.0 makes such a picture and processes it, for which it needs torchvision and num2words."""
    from vllm.multimodal.processing import BaseProcessingInfo  # pyright: ignore[reportMissingImports]

    BaseProcessingInfo.get_mm_max_tokens_per_item = largest_picture


def largest_picture(processing: Any, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int] | None:
    """The method of vLLM's `BaseProcessingInfo`; other models than those of tiles have their own, or None."""
    model = processing.ctx.model_config
    config = model.hf_config
    if config.model_type not in TILED:
        return None
    tiles, vision = image_processor(model.tokenizer), config.vision_config
    edge = tiles.size["longest_edge"]
    num_tiles, _, _ = tiles.get_number_of_image_patches(edge, edge, {})
    return {"image": num_tiles * (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2}


def see_as_trained(model: nn.Module) -> None:
    """Lets the tower of tiles see as that of transformers. vLLM 0.32.0 also attends to patches beside the picture, and
    its rounding gives some patches the position of a neighbor: of 27 in a row, as in SmolVLM2-2.2B, the eleventh."""
    tower: Any = getattr(getattr(model, "model", None), "vision_model", None)
    if tower is not None:
        tower.apply_encoder_attention_mask = True
        tower.embeddings.get_position_ids = partial(patch_positions, side=tower.embeddings.num_patches_per_side)


def patch_positions(is_patch: Tensor, *_: Any, side: int) -> Tensor:
    """[N, R C] int64, the rows of the position embedding for the patches of tiles.

    Args:
        is_patch: [N, R, C] bool, False beside the picture.
        side: patches along a side of the embedding; a picture that has fewer is stretched to it.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side, device=is_patch.device)
    rows, columns = (
        torch.bucketize(_places(first).clamp(max=LAST), borders, right=True)
        for first in (is_patch[:, :, 0], is_patch[:, 0, :])
    )
    return (rows[:, :, None] * side + columns[:, None, :]).flatten(1) * is_patch.flatten(1)


def _places(is_patch: Tensor) -> Tensor:
    """[N, L] float32, where the patches along a side begin. Multiplied, not divided, as transformers rounds it."""
    step = 1.0 / is_patch.sum(1, keepdim=True)
    return torch.arange(is_patch.shape[1], dtype=torch.float32, device=is_patch.device) * step
