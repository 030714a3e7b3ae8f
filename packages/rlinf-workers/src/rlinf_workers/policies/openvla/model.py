"""The parts of an OpenVLA model (arXiv:2406.09246, after Prismatic, arXiv:2402.07865) and their weights.

Two vision towers whose features are concatenated, three layers that project them, and Llama. The tensors have the names
of the published checkpoints, so that no renaming is needed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.added_weights import is_head_of_rl
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.checkpoint import TOWERS, ModelSpec
from rlinf_workers.policies.openvla.vision import VisionTower


class VisionBackbone(nn.Module):
    """Pictures for both towers -> their concatenated features, [n, patches, sum of both widths]."""

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
    """The modules of a model; the keys are the prefixes of its tensor names."""

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
    """Name -> shape of the model's tensors."""
    with torch.device("meta"):
        parts = make_parts(spec)
    state = nn.ModuleDict({name: part for name, part in parts.items() if isinstance(part, nn.Module)}).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_files(spec: ModelSpec, files: WeightFiles) -> None:
    """Checks that a checkpoint has all tensors of the model and no others that affect its output.

    Raises:
        PolicyError: there are tensors of another model.
        WeightFilesError: tensors are missing or have another shape.
    """
    towers = [replace(tower, language_width=0) for tower in spec.towers]
    shapes = shapes_of(replace(spec, towers=(towers[0], towers[1])))
    files.check(shapes)
    unused = unused_tensors(spec)
    others = [name for name in files.specs if name not in shapes and not is_head_of_rl(name)]
    if unknown := [name for name in others if not unused.match(name)]:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise PolicyError(f"{files.folder} has tensors that OpenVLA does not have: {', '.join(unknown[:4])}{more}")


def unused_tensors(spec: ModelSpec) -> re.Pattern[str]:
    """Names of tensors in checkpoints that do not affect the output."""
    unused = [
        re.escape(prefix) + rf"(blocks\.{tower.num_blocks}|norm|attn_pool)\."
        for prefix, tower in zip(TOWERS, spec.towers, strict=True)
    ]
    return re.compile("|".join([*unused, r"language_model\..*rotary_emb\.inv_freq$"]))


@torch.no_grad()
def load_parts(parts: nn.Module, files: WeightFiles) -> None:
    """Loads the parts, or a module that contains them, from a checkpoint that `check_files` accepts."""
    state = parts.state_dict()
    for name in files.specs:
        if name in state and not is_head_of_rl(name):
            state[name].copy_(files.read(name))
