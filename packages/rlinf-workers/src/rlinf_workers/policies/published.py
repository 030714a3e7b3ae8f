"""Writes a trained policy into files like those of the published checkpoint that it started from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.models.weight_writer import write_tensors
from rlinf_workers.policies.base import PolicyError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
"""Suffixes of files with weights, which are written anew or left out; all other files are copied."""


def checkpoint_of(folder: str | None) -> Path:
    """The option `folder` of a policy. Raises: PolicyError if it is not set."""
    if folder is None:
        raise PolicyError("the policy started from random weights, not from a checkpoint, so it has no format of one")
    return Path(folder)


def write_weights(
    folder: Path,
    output: Path,
    policy: nn.Module,
    name_of: Callable[[str], str | None],
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Writes the safetensors files of a checkpoint with the weights of a policy, each tensor into the file and in the
    dtype that it has there, and copies the config, tokenizer and statistics.

    Args:
        folder: the checkpoint.
        output: an existing, empty folder.
        name_of: name in the checkpoint -> name in `policy.state_dict()`. The checkpoint's tensor is kept for None and
            for names that the policy does not have.
        dtype: dtype of all floating-point tensors; None: as in the checkpoint.

    Returns: the names of parameters that were not written.
    """
    files, trained, written = WeightFiles(folder), policy.state_dict(), set[str]()
    for file, names in files.names_by_file().items():
        tensors = dict[str, Tensor]()
        for name in names:
            mine = name_of(name)
            if mine is not None and mine in trained:
                written.add(mine)
            tensors[name] = replaced(files.read(name), trained.get(mine or ""), dtype)
        write_tensors(output / file, tensors)
    copy_others(folder, output)
    return [name for name, _ in policy.named_parameters() if name not in written]


def copy_others(folder: Path, output: Path) -> None:
    """Copies all files of a checkpoint that hold no weights."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and path.suffix not in WEIGHTS and not any(part.startswith(".") for part in relative.parts):
            (output / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, output / relative)


def replaced(tensor: Tensor, trained: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The trained tensor on the CPU, if there is one, in the dtype of the one in the checkpoint, or in `dtype`."""
    value = tensor if trained is None else trained.detach().cpu().reshape(tensor.shape)
    return value.to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
