"""Where a model lives, and what is sent of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name, not detached; one that has several names (tied embeddings) by its
    first."""
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def move_model(model: nn.Module, device: torch.device) -> None:
    """Moves a model whose parameters are all on one device, where they are not there already.

    The question costs microseconds. `Module.to` walks over all modules even when nothing has to move, which on CPU
    slots cost more than the device lease around it.
    """
    if next(model.parameters()).device != device:
        model.to(device)
