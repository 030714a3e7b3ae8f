"""The losses of soft actor-critic (SAC, arXiv:1812.05905) and of RLPD (arXiv:2302.02948), which is SAC with an ensemble
of critics and demonstrations in every batch.

An update of the critics, on transitions from a replay buffer:

    soft_targets(...)      r + gamma (1 - terminated) (min over a subset of target critics - alpha log pi)
    critic_loss(...)       the critics' squared errors
    follow_(...)           the target critics move towards the critics

and one of the policy:

    soft_policy_loss(...)  alpha log pi - Q, for actions that the policy draws with `squashed_sample`
    temperature_loss(...)  moves alpha so that the policy's entropy approaches its target

All losses are unreduced, one term for each transition. Departures from arXiv:1812.05905: the temperature is the
exponential of the trained parameter, and its loss is linear in that parameter, as in the authors' code (rail-berkeley,
softlearning) and in stable-baselines3; critics take the minimum over a random subset of an ensemble, as in REDQ
(arXiv:2101.05982). A subset of all critics is SAC itself.

Legend: n transitions, E critics, A numbers of an action.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_algos.checks import at_least_float32, check_finite, check_range, check_shape
from rlinf_algos.errors import AlgosError, ShapeError

_LOG_2_PI = math.log(2.0 * math.pi)
POLICY_VALUES = ("min", "mean")
"""How the critics of an ensemble become the value that the policy maximizes."""


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draws actions from a normal distribution squashed by tanh, differentiably in both parameters.

    Args:
        mean, log_std: [..., A], of the distribution before tanh.
        noise: [..., A], standard normal.

    Returns:
        Actions [..., A] in (-1, 1), and their log-probabilities [...] in nats, at least float32. The density is that of
        the squashed action (arXiv:1812.05905, eq. 26); log(1 - tanh(u)^2) is computed as
        2 (log 2 - u - softplus(-2 u)), which stays finite where tanh(u) rounds to 1.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity in mean or log_std.
    """
    check_shape("log_std", log_std, mean.shape, "mean")
    check_shape("noise", noise, mean.shape, "mean")
    check_finite("mean", mean)
    check_finite("log_std", log_std)
    mean, log_std = at_least_float32(mean), at_least_float32(log_std)
    unsquashed = mean + log_std.exp() * noise
    normal = -0.5 * noise.square() - log_std - 0.5 * _LOG_2_PI
    log_slope = 2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))
    return unsquashed.tanh(), (normal - log_slope).sum(-1)


def soft_targets(
    rewards: Tensor,
    terminated: Tensor,
    next_values: Tensor,
    next_logprobs: Tensor,
    *,
    temperature: float | Tensor,
    gamma: float,
    backup_entropy: bool = True,
) -> Tensor:
    """The values that critics are trained towards: the reward plus the discounted soft value of the next state.

    Args:
        rewards: [n].
        terminated: [n] bool: the task ended with the transition, so nothing follows. A transition that a time limit
            cut is False here: its next state has a value.
        next_values: [n, E], of the target critics of the chosen subset, for actions that the policy draws in the next
            state.
        next_logprobs: [n], of these actions.
        temperature: alpha, the weight of the entropy.
        gamma: discount factor in [0, 1].
        backup_entropy: False leaves the entropy out of the targets, so that critics predict rewards alone (RLPD for
            sparse rewards).

    Returns:
        [n], a constant.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity in an input. AlgosError: gamma out of range.
    """
    check_range("gamma", gamma, low=0.0, high=1.0, why="it is a discount")
    _check_ensemble("next_values", next_values, rewards)
    check_shape("terminated", terminated, rewards.shape, "rewards")
    check_shape("next_logprobs", next_logprobs, rewards.shape, "rewards")
    for name, tensor in (("rewards", rewards), ("next_values", next_values), ("next_logprobs", next_logprobs)):
        check_finite(name, tensor)
    following = at_least_float32(next_values.detach()).amin(dim=1)
    if backup_entropy:
        following = following - temperature * next_logprobs
    return (rewards + gamma * following.masked_fill(terminated, 0.0)).detach()


def critic_loss(values: Tensor, targets: Tensor) -> Tensor:
    """The squared errors of all critics, unreduced.

    Args:
        values: [n, E], with gradient.
        targets: [n], a constant: every critic has the same.

    Returns:
        [n]: half the squared error, summed over critics.

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity in an input.
    """
    _check_ensemble("values", values, targets)
    check_finite("values", values)
    check_finite("targets", targets)
    return 0.5 * (at_least_float32(values) - targets.detach()[:, None]).square().sum(dim=1)


def soft_policy_loss(
    logprobs: Tensor, values: Tensor, *, temperature: float | Tensor, policy_value: str = "min"
) -> Tensor:
    """The policy's loss, unreduced: alpha log pi - Q.

    Args:
        logprobs: [n], of actions that the policy has drawn with `squashed_sample`, with gradient.
        values: [n, E], of the critics for these actions, with gradient in the actions; the critics' parameters must
            not be stepped with it.
        temperature: alpha, a constant here.
        policy_value: min: the policy maximizes the smallest value (SAC); mean: the ensemble's mean (REDQ, RLPD).

    Returns:
        [n].

    Raises:
        ShapeError: shapes differ. NonFiniteError: NaN or infinity in an input. AlgosError: an unknown policy_value.
    """
    _check_ensemble("values", values, logprobs)
    check_finite("logprobs", logprobs)
    weight = temperature.detach() if isinstance(temperature, Tensor) else temperature
    return weight * logprobs - policy_values(values, policy_value)


def policy_values(values: Tensor, policy_value: str = "min") -> Tensor:
    """[n, E] -> [n], the values that the policy maximizes, with gradient. Raises: as `soft_policy_loss`."""
    if policy_value not in POLICY_VALUES:
        raise AlgosError(f"policy_value={policy_value!r} is not known; use {' or '.join(POLICY_VALUES)}")
    check_finite("values", values)
    return at_least_float32(values).amin(dim=1) if policy_value == "min" else at_least_float32(values).mean(dim=1)


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, *, target_entropy: float) -> Tensor:
    """The temperature's loss, unreduced: -log alpha (log pi + target). Its gradient raises alpha while the entropy is
    below the target.

    Args:
        log_temperature: scalar, with gradient.
        logprobs: [n], of actions that the policy has drawn; a constant.
        target_entropy: nats of a whole action; SAC: -A.

    Returns:
        [n].

    Raises:
        ShapeError: log_temperature is no scalar. NonFiniteError: NaN or infinity in an input.
    """
    if log_temperature.ndim:
        raise ShapeError(f"log_temperature has shape {list(log_temperature.shape)}; it is a scalar")
    check_finite("log_temperature", log_temperature)
    check_finite("logprobs", logprobs)
    return -log_temperature * (at_least_float32(logprobs.detach()) + target_entropy)


@torch.no_grad()
def follow_(targets: Sequence[Tensor], sources: Sequence[Tensor], *, rate: float) -> None:
    """Moves target parameters towards the trained ones in place: target + rate (source - target).

    Args:
        rate: in (0, 1]; 1 copies. Papers call it tau.

    Raises: AlgosError: rate out of range.
    """
    if not 0.0 < rate <= 1.0:
        raise AlgosError(f"rate={rate} must be above 0 and at most 1: it is the share by which targets move")
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, rate)


def random_shift(pictures: Tensor, offsets: Tensor, *, pad: int = 4) -> Tensor:
    """Shifts pictures by whole pixels and repeats their border (DrQ, arXiv:2004.13649): pads by `pad` on all sides,
    then cuts a window of the old size.

    Args:
        pictures: [n, H, W, C], any dtype.
        offsets: [n, 2] int64 in 0..2 pad, the window's upper left corner; pad, pad: no shift.

    Returns:
        [n, H, W, C].

    Raises:
        ShapeError: pictures that are not [n, H, W, C], or another number of offsets. AlgosError: an offset out of
        range.
    """
    if pictures.ndim != 4:
        raise ShapeError(f"pictures have shape {list(pictures.shape)}; expected [n, H, W, C]")
    check_shape("offsets", offsets, (len(pictures), 2), "[n, 2] for pictures")
    if offsets.numel() and not (int(offsets.min()) >= 0 and int(offsets.max()) <= 2 * pad):
        raise AlgosError(f"offsets are {int(offsets.min())}..{int(offsets.max())}; with pad={pad} use 0..{2 * pad}")
    count, height, width, channels = pictures.shape
    padded = pictures.new_empty(count, height + 2 * pad, width + 2 * pad, channels)
    middle = padded[:, pad : pad + height]
    middle[:, :, pad : pad + width] = pictures
    middle[:, :, :pad], middle[:, :, pad + width :] = pictures[:, :, :1], pictures[:, :, -1:]
    padded[:, :pad], padded[:, pad + height :] = middle[:, :1], middle[:, -1:]
    corners = enumerate(offsets.tolist())
    windows = [padded[row, top : top + height, left : left + width] for row, (top, left) in corners]
    return torch.stack(windows) if windows else pictures


def _check_ensemble(name: str, values: Tensor, like: Tensor) -> None:
    """Raises: ShapeError unless `values` is [n, E] for n rows, E at least 1."""
    if like.ndim != 1 or values.ndim != 2 or len(values) != len(like) or not values.shape[1]:
        raise ShapeError(f"{name} has shape {list(values.shape)} for transitions {list(like.shape)}; expected [n, E]")
