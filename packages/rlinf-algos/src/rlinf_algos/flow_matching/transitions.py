"""One denoising step as a normal distribution over the next state.

The ODE `d state = v dt` has no density, and so no policy gradient. Two ways to give it one:

**Flow-SDE** (Flow-GRPO, arXiv:2505.05470, "ODE to SDE"): a stochastic process with the same marginals at every time,

    d state = (v + sigma^2 / (2 t) (state + (1 - t) v)) dt + sigma dw,   sigma = noise_level sqrt(t / (1 - t))

in Euler-Maruyama steps. `state + (1 - t) v` predicts the noise, and -1 / t times it is the score. At t = 1, where sigma
is infinite, 1 - t is taken of the next time, as in the authors' code: the first step then has the deviation
`noise_level` however short it is, and the marginals are those of the ODE as the steps get shorter, not before.

**Flow-noise** (pi_RL, arXiv:2510.25889; ReinFlow, arXiv:2505.22094): the step of the ODE, with a deviation that a head
of the network learns.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos.checks import at_least_float32, check_finite, check_range, check_shape
from rlinf_algos.errors import AlgosError, ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowTransition:
    """The next state, given this one: independent normals."""

    mean: Tensor
    """[B, ...]"""
    std: Tensor
    """[B, ...], above 0; 0 for a step of the ODE."""


def flow_ode_transition(states: Tensor, velocities: Tensor, times: Tensor, next_times: Tensor) -> FlowTransition:
    """The step without noise, for evaluation: `states + (next_times - times) velocities`, deviation 0.

    Args:
        states: [B, ...], at `times`. velocities: the same shape, the network's prediction there, with gradient.
        times, next_times: [B], 1 >= times > next_times >= 0; each sample may be at another step.

    Raises:
        ShapeError, NonFiniteError. AlgosError: times out of order.
    """
    states, velocities, t, next_t = _checked(states, velocities, times, next_times)
    return FlowTransition(mean=states + (next_t - t) * velocities, std=torch.zeros_like(states))


def flow_sde_transition(
    states: Tensor, velocities: Tensor, times: Tensor, next_times: Tensor, *, noise_level: float
) -> FlowTransition:
    """The step of the stochastic process with the ODE's marginals.

    Args:
        states, velocities, times, next_times: as for `flow_ode_transition`.
        noise_level: above 0; Flow-GRPO's `a` (0.7), pi_RL: 0.5.

    Raises: as `flow_ode_transition`. AlgosError: noise_level not above 0.
    """
    check_noise_level(noise_level)
    states, velocities, t, next_t = _checked(states, velocities, times, next_times)
    sigma_squared = noise_level**2 * t / (1.0 - torch.where(t == 1.0, next_t, t))
    predicted_noise = states + (1.0 - t) * velocities
    drift = velocities + sigma_squared / (2.0 * t) * predicted_noise
    std = (sigma_squared * (t - next_t)).sqrt()
    return FlowTransition(mean=states + (next_t - t) * drift, std=std.expand(states.shape))


def flow_noise_transition(
    states: Tensor, velocities: Tensor, stds: Tensor, times: Tensor, next_times: Tensor
) -> FlowTransition:
    """The step of the ODE with a learned deviation.

    Args:
        states, velocities, times, next_times: as for `flow_ode_transition`.
        stds: the shape of states, above 0, with gradient: `bounded_std` of the noise head's output.

    Raises: as `flow_ode_transition`. AlgosError: a deviation that is not above 0.
    """
    check_shape("stds", stds, states.shape, "states")
    check_finite("stds", stds)
    if bool((stds <= 0.0).any()):
        index = tuple((stds <= 0.0).nonzero()[0].tolist())
        raise AlgosError(f"stds{list(index)}={stds[index].item()} must be above 0; bounded_std keeps it in a range")
    ode = flow_ode_transition(states, velocities, times, next_times)
    return FlowTransition(mean=ode.mean, std=at_least_float32(stds))


def bounded_std(raw: Tensor, *, low: float, high: float) -> Tensor:
    """A noise head's unbounded output as a deviation between `low` and `high`: `tanh`, linear in the log-variance.

    Args:
        raw: any shape, with gradient; 0 gives the geometric mean of the bounds.
        low, high: 0 < low < high; RLinf: 0.08 and 0.16.

    Returns:
        the same shape, at least float32.
    """
    if not 0.0 < low < high < float("inf"):
        raise AlgosError(f"low={low}, high={high}: deviations must be 0 < low < high")
    check_finite("raw", raw)
    share = 0.5 * (torch.tanh(at_least_float32(raw)) + 1.0)
    return torch.exp(math.log(low) + (math.log(high) - math.log(low)) * share)


def transition_logprobs(next_states: Tensor, transition: FlowTransition) -> Tensor:
    """Log-densities of the next states, element by element.

    Args:
        next_states: [B, ...], what was sampled; a constant.

    Returns:
        [B, ...], nats, with the gradient of mean and deviation. Densities: they may be positive.

    Raises:
        ShapeError, NonFiniteError. AlgosError: a deviation of 0: a step of the ODE has no density.
    """
    check_shape("next_states", next_states, transition.mean.shape, "transition.mean")
    check_finite("next_states", next_states)
    if bool((transition.std == 0.0).any()):
        raise AlgosError("a step without noise has no log-probability; only the steps drawn by the indices have one")
    return _logprobs(at_least_float32(next_states.detach()), transition)


def transition_entropy(transition: FlowTransition) -> Tensor:
    """Differential entropies, `log std + (1 + log 2 pi) / 2`, [B, ...]: for a bonus where the deviation is learned."""
    return transition.std.log() + 0.5 * (1.0 + math.log(2.0 * math.pi))


def check_noise_level(noise_level: float) -> None:
    if not 0.0 < noise_level < float("inf"):
        raise AlgosError(f"noise_level={noise_level} must be above 0; without noise a chain has no log-probabilities")


def _logprobs(next_states: Tensor, transition: FlowTransition) -> Tensor:
    z = (next_states - transition.mean) / transition.std
    return -0.5 * z.square() - transition.std.log() - 0.5 * math.log(2.0 * math.pi)


def _checked(
    states: Tensor, velocities: Tensor, times: Tensor, next_times: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All at least float32; times as [B, 1, ...]."""
    check_shape("velocities", velocities, states.shape, "states")
    if states.ndim == 0:
        raise ShapeError("states has no dimensions; expected [B, ...]")
    for name, tensor in (("times", times), ("next_times", next_times)):
        check_shape(name, tensor, states.shape[:1], "the samples of states")
        check_finite(name, tensor)
    check_finite("states", states)
    check_finite("velocities", velocities)
    if len(times):
        check_range("the largest of times", float(times.max()), low=0.0, high=1.0, why="1 is noise, 0 the actions")
        check_range(
            "the least of next_times", float(next_times.min()), low=0.0, high=1.0, why="1 is noise, 0 the actions"
        )
        if not bool((next_times < times).all()):
            index = int((next_times >= times).nonzero()[0])
            raise AlgosError(
                f"next_times[{index}]={next_times[index].item()} is not below times[{index}]={times[index].item()}; "
                "denoising goes from 1 to 0"
            )
    states = at_least_float32(states)
    shape = (-1, *[1] * (states.ndim - 1))
    return states, at_least_float32(velocities), times.to(states).view(shape), next_times.to(states).view(shape)
