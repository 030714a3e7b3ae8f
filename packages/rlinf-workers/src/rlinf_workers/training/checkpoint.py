"""An optimizer's state as a safetensors file, by the names of the parameters."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def save_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: str) -> None:
    """The state of every parameter as `<parameter>:<state>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    save_file(
        {
            f"{names[p]}:{key}": value.cpu().contiguous()
            for p, state in optimizer.state.items()
            for key, value in state.items()
        },
        path,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: str) -> None:
    """The inverse of `save_optimizer`; the parameters must have the same names."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in load_file(path).items():
        name, _, field = key.rpartition(":")
        if name not in parameters:
            raise ValueError(f"{path}: holds state for {name!r}, which the model does not have")
        on = value if field == "step" else value.to(parameters[name].device)
        optimizer.state[parameters[name]][field] = on
