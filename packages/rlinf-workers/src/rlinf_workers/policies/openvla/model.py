"""The parts of an OpenVLA model (arXiv:2406.09246, after Prismatic, arXiv:2402.07865) and their weights.

The features of two vision towers side by side, three layers that project them, Llama. The tensors of the parts have the
names of the published checkpoints, so that no table stands between the two.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.checkpoint import TOWERS, ModelSpec
from rlinf_workers.policies.openvla.vision import VisionTower


class VisionBackbone(nn.Module):
    """Pictures for both towers -> their features side by side, [n, patches, both widths]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = map(VisionTower, spec.towers)

    def forward(self, dino: Tensor, siglip: Tensor, language: Tensor | None = None) -> Tensor:
        return torch.cat([self.featurizer(dino, language), self.fused_featurizer(siglip, language)], dim=-1)


class Projector(nn.Module):
    """Features of patches -> embeddings of the language model."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        gelu = nn.functional.gelu
        return self.fc3(gelu(self.fc2(gelu(self.fc1(features)))))


class Parts(TypedDict):
    """What a model is put together from; the keys begin the names of its tensors."""

    vision_backbone: VisionBackbone
    projector: Projector
    language_model: LlamaForCausalLM


def make_parts(spec: ModelSpec) -> Parts:
    """The parts, with random weights of torch's default dtype and device."""
    config = LlamaConfig(**spec.text_config)
    return Parts(
        vision_backbone=VisionBackbone(spec),
        projector=Projector(sum(tower.width for tower in spec.towers), config.hidden_size),
        language_model=LlamaForCausalLM(config),
    )


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Those of the model's tensors, by their names."""
    with torch.device("meta"):
        parts = make_parts(spec)
    state = nn.ModuleDict({name: part for name, part in parts.items() if isinstance(part, nn.Module)}).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_files(spec: ModelSpec, folder: str) -> None:
    """Whether a folder has the tensors of the model, and nothing that the model would have to use.

    Raises:
        PolicyError: it has others, which are another model's.
        WeightFilesError: tensors are missing or of another shape.
    """
    towers = [replace(tower, language_width=0) for tower in spec.towers]
    shapes = shapes_of(replace(spec, towers=(towers[0], towers[1])))
    files = WeightFiles(folder)
    files.check(shapes)
    unused = unused_tensors(spec)
    if unknown := [name for name in files.specs if name not in shapes and not unused.match(name)]:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise PolicyError(f"{folder} has tensors that OpenVLA has not: {', '.join(unknown[:4])}{more}")


def unused_tensors(spec: ModelSpec) -> re.Pattern[str]:
    """Names of tensors that checkpoints have and no answer depends on."""
    unused = [
        re.escape(prefix) + rf"(blocks\.{tower.num_blocks}|norm|attn_pool)\."
        for prefix, tower in zip(TOWERS, spec.towers, strict=True)
    ]
    return re.compile("|".join([*unused, r"language_model\..*rotary_emb\.inv_freq$"]))


@torch.no_grad()
def load_parts(parts: nn.Module, folder: str) -> None:
    """Fills the parts, or a module that has them beside others, from a folder that `check_files` accepts."""
    files = WeightFiles(folder)
    state = parts.state_dict()
    for name in files.specs:
        if name in state:
            state[name].copy_(files.read(name))
