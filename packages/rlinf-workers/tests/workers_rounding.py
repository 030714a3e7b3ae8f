"""How far rounding alone may move a number: test bounds that follow from the arithmetic, not from one processor.

A kernel chooses the order of its additions and how many numbers it adds at once; both differ between processors,
releases and batch shapes. For n rounded additions with independent errors, Higham and Mary (*A New Approach to
Probabilistic
Rounding Error Analysis*, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4) bound the error by `confidence * sqrt(n) * u`
times the sum of the magnitudes, except with probability 2 n exp(-confidence^2 / 2); u is half of a dtype's eps.
"""

from __future__ import annotations

import math

import torch

CONFIDENCE = 7.0
"""Failure probability of about 1e-7 for a thousand additions."""


def rounding_bound(num_additions: int, *, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference between two results of the same additions in different orders.

    Args:
        num_additions: on the path to one number; consecutive sums count together.
        size: sum of the magnitudes of the addends, in the unit of the result.
    """
    return 2 * CONFIDENCE * math.sqrt(num_additions) * torch.finfo(dtype).eps / 2 * size


def additions_of_transformer(*, num_layers: int, width: int, inner_width: int, num_tokens: int) -> int:
    """Additions on the path from a token to a number of the head, for `rounding_bound`: per layer two norms, the
    projections into and out of attention, its scores and its average, and both products of the MLP; then a norm and the
    head."""
    return num_layers * (6 * width + inner_width + num_tokens) + 2 * width
