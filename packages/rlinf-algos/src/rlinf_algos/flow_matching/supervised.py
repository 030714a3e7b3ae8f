"""Conditional flow matching (arXiv:2210.02747, 4.1, example II, without its least deviation), the supervised training
of pi0 (arXiv:2410.24164, section IV).

pi0 draws the times from a beta distribution that prefers noise, where the actions are still undecided.
"""

from torch import Tensor

from rlinf_algos.checks import as_mask, at_least_float32, check_finite, check_range, check_shape, masked
from rlinf_algos.errors import AlgosError


def training_times(uniform: Tensor, *, concentration: float = 1.5, least: float = 0.001) -> Tensor:
    """`least + (1 - least) Beta(concentration, 1)`, by the inverse of its distribution.

    Args:
        uniform: any shape, numbers in [0, 1].
        concentration: above 0; 1 is uniform, more prefers noise. pi0: 1.5.
        least: the time nearest to the actions, in [0, 1); pi0's code has 0.001.
    """
    if not 0.0 < concentration < float("inf"):
        raise AlgosError(f"concentration={concentration} must be above 0")
    check_range("least", least, low=0.0, high=1.0 - 1e-6, why="it is the earliest time")
    return least + (1.0 - least) * uniform.pow(1.0 / concentration)


def flow_interpolation(actions: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """What the network sees, and what it should answer.

    Args:
        actions: [B, ...], of the data. noise: the same shape, standard normal. times: [B], in [0, 1].

    Returns:
        states `t noise + (1 - t) actions` and velocities `noise - actions`, [B, ...], at least float32.

    Raises:
        ShapeError, NonFiniteError. AlgosError: a time outside [0, 1].
    """
    check_shape("noise", noise, actions.shape, "actions")
    check_shape("times", times, actions.shape[:1], "the samples of actions")
    for name, tensor in (("actions", actions), ("noise", noise), ("times", times)):
        check_finite(name, tensor)
    if len(times):
        for time in (float(times.min()), float(times.max())):
            check_range("times", time, low=0.0, high=1.0, why="1 is noise, 0 the actions")
    actions, noise = at_least_float32(actions), at_least_float32(noise)
    t = times.to(actions).view(-1, *[1] * (actions.ndim - 1))
    return t * noise + (1.0 - t) * actions, noise - actions


def flow_matching_loss(velocities: Tensor, target_velocities: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared errors of the velocities, unreduced; `token_mean` aggregates them.

    Args:
        velocities: [B, ...], predicted at the interpolated states, with gradient.
        target_velocities: the same shape, of `flow_interpolation`; a constant.
        mask: the same shape, bool or 0/1: 0 on padded dimensions and on actions beyond the episode's end. None: all.

    Returns:
        the same shape, at least float32, 0 outside the mask.

    Raises: ShapeError, NonFiniteError: inside the mask.
    """
    check_shape("target_velocities", target_velocities, velocities.shape, "velocities")
    inside = as_mask("mask", mask, "velocities", velocities)
    errors = masked("velocities", velocities, inside) - masked("target_velocities", target_velocities.detach(), inside)
    return errors.square()
