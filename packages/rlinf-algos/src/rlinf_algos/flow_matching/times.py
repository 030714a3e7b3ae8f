"""The times of a denoising chain."""

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError


def denoising_times(
    num_steps: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[num_steps + 1]: evenly from 1 (noise) to 0 (actions)."""
    if num_steps < 1:
        raise AlgosError(f"num_steps={num_steps} must be at least 1")
    return torch.linspace(1.0, 0.0, num_steps + 1, device=device, dtype=dtype)
