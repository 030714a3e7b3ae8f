"""Reads and writes the files that fine-tuning adds to a merged checkpoint, such as `action_head--150000_checkpoint.pt`.

They are state dicts of torch. If a module was trained under DistributedDataParallel, its names begin with `module.`.
The vision backbone with FiLM is saved from within a LoRA model, so that its linear layers are saved as `base_layer`
with `lora_A` and `lora_B`; they are merged here with the scale of fine-tuning (`lora_alpha = min(rank, 16)`). peft
resolves "all-linear" to suffixes of names, one of which is `proj`, so that the convolution `patch_embed.proj` of both
towers has an update, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.policies.added_weights import lora_change
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.checkpoint import ModelSpec
from rlinf_workers.policies.openvla.model import unused_tensors
from rlinf_workers.policies.published import replaced

LARGEST_ALPHA = 16


def part_file(folder: str, part: str) -> Path | None:
    """The file of a module; None if there is none.

    Raises: PolicyError if there are several.
    """
    paths = sorted(Path(folder).glob(f"{part}--*checkpoint.pt"))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise PolicyError(f"{folder} has several files of {part}: {names}; keep only the one to load")
    return paths[0] if paths else None


def read_part(path: Path, *, shapes_alone: bool = False) -> dict[str, Tensor]:
    """Name in the module -> tensor; with `shapes_alone` the tensors have no data.

    Raises: PolicyError if the file is not a state dict.
    """
    where: Any = "meta" if shapes_alone else "cpu"
    try:
        tensors = torch.load(path, map_location=where, weights_only=True, mmap=True)
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    except Exception as error:
        raise PolicyError(f"{path} is not a state dict that torch.save wrote: {error}") from error


def write_part(path: Path, output: Path, trained: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Writes a file like `path` with trained tensors. LoRA weights are merged into their base, and their update is 0.

    Args:
        trained: name, as read from the file -> tensor.
        dtype: dtype of all floating-point tensors; None: as in the file.
    """
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    written = {
        name: torch.zeros_like(tensor)
        if ".lora_B." in name
        else replaced(tensor, trained.get(_merged_name(name.removeprefix("module."))), dtype)
        for name, tensor in tensors.items()
    }
    torch.save(written, output)


def _merged_name(name: str) -> str:
    """The name of a tensor of the vision backbone after LoRA weights are merged."""
    return re.sub(r"(\.blocks\.\d+)\.block\.", r"\1.", name.replace(".base_layer.", "."))


def read_vision_backbone(path: Path, spec: ModelSpec, *, shapes_alone: bool = False) -> dict[str, Tensor]:
    """The tensors of both towers with FiLM, by the model's names, with the LoRA weights merged."""
    tensors = read_part(path, shapes_alone=shapes_alone)
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            down, up = (tensors[f"{layer}.lora_{half}.default.weight"] for half in "AB")
            tensor = tensor + min(len(down), LARGEST_ALPHA) / len(down) * lora_change(down, up)
        merged[_merged_name(name)] = tensor
    unused = unused_tensors(spec)
    return {name: tensor for name, tensor in merged.items() if not unused.match(name)}


def check_part(path: Path, tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises: PolicyError if names or shapes differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"no {name}" for name in expected if name not in shapes]
    wrong += [f"{name}, which there is not" for name in shapes if name not in expected]
    wrong += [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise PolicyError(f"{path} does not fit: it has {'; '.join(wrong[:4])}{more}")
