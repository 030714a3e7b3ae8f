"""Vision transformers in the layout of the published checkpoints, with timm's tensor names.

Both towers are the same module with different options (arXiv:2010.11929): DINOv2 has a class token, register tokens
(arXiv:2309.16588) without position embeddings, and layer scale; SigLIP (arXiv:2303.15343) has only patches. Features
are the output of the second-to-last block without the final norm, so the last block is not created.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-6
"""As in timm's vision transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """The sizes of a tower."""

    width: int
    num_blocks: int
    """Number of blocks that are used: one less than in the checkpoint."""
    num_heads: int
    mlp_width: int
    patch_size: int
    num_patches: int
    """Number of patches per side."""
    num_registers: int = 0
    has_class_token: bool = False
    has_layer_scale: bool = False
    language_width: int = 0
    """Width of the embedding that modulates features (FiLM); 0: no modulation."""


class _PatchEmbed(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, shape.patch_size, stride=shape.patch_size)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.proj(pictures).flatten(2).mT


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self._num_heads = shape.num_heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.mlp_width)
        self.fc2 = nn.Linear(shape.mlp_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _LayerScale(nn.Module):
    """arXiv:2103.17239. The checkpoints call its parameter `scale_factor`, not `gamma` as timm does."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(shape.width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.attn = _Attention(shape)
        self.ls1 = _LayerScale(shape) if shape.has_layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.mlp = _Mlp(shape)
        self.ls2 = _LayerScale(shape) if shape.has_layer_scale else nn.Identity()
        if shape.language_width:
            self.scale = nn.Linear(shape.language_width, shape.width)
            self.shift = nn.Linear(shape.language_width, shape.width)

    def forward(self, x: Tensor, language: Tensor | None = None) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        if language is not None:
            x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTower(nn.Module):
    """Pictures [n, 3, H, W], normalised -> features of their patches [n, patches, width], row by row."""

    _no_split_modules: ClassVar[list[str]] = ["_Block"]
    """The layers that `fsdp2` shards one by one, as declared by transformers' models."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(shape)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, shape.num_patches**2, shape.width))
        if shape.has_class_token:
            self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, shape.width))
        if shape.num_registers:
            self.reg_token = nn.Parameter(0.02 * torch.randn(1, shape.num_registers, shape.width))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_blocks))
        self._shape = shape

    def forward(self, pictures: Tensor, language: Tensor | None = None) -> Tensor:
        """
        Args:
            language: [n, language_width]; modulates the features between attention and MLP of each block, with the same
                numbers for all patches (FiLM, arXiv:1709.07871, as in arXiv:2502.19645).
        """
        x = self.patch_embed(pictures) + self.pos_embed
        prefix = [self.cls_token] if self._shape.has_class_token else []
        prefix += [self.reg_token] if self._shape.num_registers else []
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in prefix), x], dim=1)
        for block in self.blocks:
            x = block(x, language)
        return x[:, -self.pos_embed.shape[1] :]
