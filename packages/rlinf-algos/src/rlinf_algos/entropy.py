"""The entropy bonus of the policy loss (arXiv:1707.06347, eq. 9).

Entropies come from `logprobs_and_entropy` (tokens), `gaussian_entropy` (actions) or a flow's `transition_entropy`.
"""

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
    """The next weight of the bonus, which keeps the entropy above a target: `step` more if the entropy is at most the
    target, `step` less if it is above, between 0 and `most` (Skywork-OR1, arXiv:2505.22312, section 4; the defaults are
    those of TRL's `use_adaptive_entropy`).

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
