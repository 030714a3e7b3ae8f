"""The norm of a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Scalar, at least float32, the norm of the parameters' norms: float32 loses three digits in a sum over a whole
    buffer of a large model. As `torch.nn.utils.get_total_norm`, which gives bfloat16 for gradients in bfloat16."""
    dtype = None if any(one.dtype == torch.float64 for one in gradients) else torch.float32
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*gradients], 2.0, dtype=dtype)))
