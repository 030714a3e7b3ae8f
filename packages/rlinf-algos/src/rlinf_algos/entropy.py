"""The entropy bonus of the policy loss (arXiv:1707.06347, eq. 9), and which tokens have high entropy.

Entropies come from `logprobs_and_entropy` (tokens), `gaussian_entropy` (actions) or a flow's `transition_entropy`.
"""

import math

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_range, masked


def entropy_bonus(entropies: Tensor, mask: Tensor | None = None, *, coef: float) -> Tensor:
    """`-coef * entropies`: terms to add to the loss_terms of a policy loss before the aggregation.

    Args:
        entropies: any shape, nats, with gradient.
        mask: the same shape, bool or 0/1; None: every element.
        coef: how much a nat is worth; at least 0.

    Returns:
        the same shape, at least float32, 0 outside the mask.

    Raises:
        ShapeError: shapes differ. NonFiniteError: inside the mask. AlgosError: a negative coef.
    """
    check_range("coef", coef, low=0.0, why="the bonus rewards entropy")
    return -coef * masked("entropies", entropies, as_mask("mask", mask, "entropies", entropies))


def adapted_entropy_coef(
    entropy_coef: float, measured_entropy: float, *, target: float, step: float = 0.005, most: float = 1.0
) -> float:
    """The next weight of the bonus, which holds the entropy above a target: `step` more where the entropy is at most
    the target, `step` less where it is above, between 0 and `most` (Skywork-OR1, arXiv:2505.22312, section 4; the
    defaults are those of TRL's `use_adaptive_entropy`).

    The bonus applies only where the entropy is at most the target. The coefficient and the last entropy are the only
    state: keep them in the checkpoint.

    Args:
        entropy_coef: the present one.
        measured_entropy: mean over the tokens of an optimizer step, nats.
        target: nats, above 0.

    Raises: AlgosError: a number out of range, NaN included.
    """
    check_range("measured_entropy", measured_entropy, low=-float("inf"), high=1e30, why="a controller needs a number")
    check_range("step", step, low=0.0, why="it is how far the weight moves")
    check_range("entropy_coef", entropy_coef, low=0.0, high=most, why="it is the weight of a bonus")
    change = step if measured_entropy <= target else -step
    return min(most, max(0.0, entropy_coef + change))


@torch.no_grad()
def high_entropy_mask(entropies: Tensor, mask: Tensor | None, *, top_fraction: float = 0.2) -> Tensor:
    """The mask's tokens of highest entropy, where a policy decides (arXiv:2506.01939 trains on the top 20 % alone).

    Args:
        entropies: any shape, nats; those of the whole batch, since the threshold is its quantile.
        mask: the same shape, bool or 0/1; None: every element.
        top_fraction: share of the elements inside the mask, in [0, 1]; elements that tie with the last one are in too.

    Returns:
        bool, the same shape: at least `ceil(top_fraction * num_inside)` elements.

    Raises:
        ShapeError, NonFiniteError, AlgosError: as `entropy_bonus`.
    """
    check_range("top_fraction", top_fraction, low=0.0, high=1.0, why="it is a share of the tokens")
    inside = as_mask("mask", mask, "entropies", entropies)
    filled = masked("entropies", entropies, inside)
    chosen = filled[inside]
    num_kept = math.ceil(top_fraction * len(chosen))
    if not num_kept:
        return torch.zeros_like(inside)
    threshold = chosen.kthvalue(len(chosen) - num_kept + 1).values
    return inside & (filled >= threshold)
