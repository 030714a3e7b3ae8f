"""The times of a denoising chain, and which of its steps is the noisy one of a sample."""

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


def draw_denoising_indices(
    num_samples: int,
    num_steps: int,
    *,
    skip_last: bool = False,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Draws for each sample the one step that is noisy and has a log-probability; the others follow the ODE.

    One evaluation of the network then serves a sample's update, instead of K (pi_RL, arXiv:2510.25889, and
    Flow-GRPO-Fast). Drawn for each sample, where RLinf draws one for the whole batch: every batch has all steps.

    Args:
        skip_last: leaves out the last step, whose deviation is the smallest (RLinf: `ignore_last`).

    Returns:
        [num_samples] int64, uniform over 0 ... num_steps - 1.
    """
    num_choices = num_steps - 1 if skip_last else num_steps
    if num_choices < 1:
        raise AlgosError(f"num_steps={num_steps} leaves no step to choose" + " but the last" * skip_last)
    return torch.randint(num_choices, (num_samples,), generator=generator, device=device)
