"""Files of a checkpoint: safetensors and JSON, never pickles. The folder's atomic rename is its owner's business."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def write_json(path: str, values: Mapping[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(values, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def load_model_weights(model: nn.Module, folder: str) -> None:
    """Weights of a Hugging Face folder into a model of the same architecture, through transformers' own loader.

    A frozen model takes the tensors themselves, uncopied. (The last bits of a product on the CPU depend on where its
    operands begin in memory, so a copy of the same weights answers with other bits.)
    """
    first = next(model.parameters())
    loaded: Any = type(model).from_pretrained(folder, dtype=first.dtype)  # type: ignore[attr-defined]
    model.load_state_dict(loaded.to(first.device).state_dict(), assign=not first.requires_grad)


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


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves the state of every parameter; step counts stay on the host, where AdamW wants them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                state[key] = value.to(device)


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
