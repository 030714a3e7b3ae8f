"""Denoising chains: sampling actions, and their log-probabilities.

With `indices` (one noisy step per sample, pi_RL's mixture of ODE and SDE) the log-probability is that of this step, and
one evaluation of the network recomputes it. Without, every step is noisy and their log-probabilities add up; the
density of the first state is the same for every policy and left out. RLinf instead averages over the steps, including
the first state.

Sampling and recomputation use the same operations on tensors of the same shape: with the same weights and batch they
agree bitwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlinf_algos.checks import at_least_float32, check_finite, check_shape
from rlinf_algos.errors import AlgosError, ShapeError
from rlinf_algos.flow_matching.transitions import (
    FlowTransition,
    check_noise_level,
    flow_noise_transition,
    flow_ode_transition,
    flow_sde_transition,
    transition_logprobs,
)


class FlowPrediction(NamedTuple):
    """What the network says about states at their times."""

    velocities: Tensor
    """[B, ...]"""
    stds: Tensor | None = None
    """[B, ...]: the learned deviations of flow-noise (`bounded_std`); None: flow-SDE."""


Predict = Callable[[Tensor, Tensor], FlowPrediction]
"""(states [B, ...], times [B]) -> prediction; observations are the callable's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowChain:
    """The outputs of sampling that the update needs."""

    states: Tensor
    """[K + 1, B, ...], from noise to actions."""
    logprobs: Tensor
    """[B, ...], nats, element by element, by the policy that sampled; 0 where a chain had no noisy step."""

    @property
    def actions(self) -> Tensor:
        """[B, ...]"""
        return self.states[-1]


@torch.no_grad()
def sample_flow_chain(
    predict: Predict,
    noise: Tensor,
    times: Tensor,
    *,
    noise_level: float | None,
    indices: Tensor | None = None,
    generator: torch.Generator | None = None,
    step_noise: Tensor | None = None,
) -> FlowChain:
    """Denoises.

    Args:
        predict: the network; called K times.
        noise: [B, ...], the first state, standard normal.
        times: [K + 1], from 1 to 0: `denoising_times`.
        noise_level: the noise level of flow-SDE. None: no noise where predictions are velocities alone (evaluation: the
            ODE), and the learned noise where they hold deviations.
        indices: [B] integers, the noisy step of each sample; None: every step.
        generator: a generator on the noise's device.
        step_noise: [K, B, ...], standard normal, the noise of each step; None: drawn.

    Raises:
        ShapeError, NonFiniteError: also in a prediction. AlgosError: times or indices out of range.
    """
    _check_times(times)
    if indices is not None:
        _check_indices(indices, noise, len(times) - 1)
    check_finite("noise", noise)
    if step_noise is not None:
        check_shape("step_noise", step_noise, (len(times) - 1, *noise.shape), "the steps of the chain")
    state = at_least_float32(noise)
    states, logprobs = [state], torch.zeros_like(state)
    for k in range(len(times) - 1):
        t, next_t = times[k].expand(len(noise)), times[k + 1].expand(len(noise))
        prediction = predict(state, t)
        ode = flow_ode_transition(state, prediction.velocities, t, next_t)
        is_noisy = torch.ones_like(state, dtype=torch.bool)
        if indices is not None:
            is_noisy &= _like(indices == k, state)
        if noise_level is None and prediction.stds is None:
            state = ode.mean
        else:
            transition = _transition(state, prediction, t, next_t, noise_level)
            if step_noise is None:
                drawn = torch.randn(state.shape, generator=generator, dtype=state.dtype, device=state.device)
            else:
                drawn = step_noise[k].to(state)
            state = torch.where(is_noisy, transition.mean + transition.std * drawn, ode.mean)
            logprobs = torch.where(is_noisy, logprobs + transition_logprobs(state, transition), logprobs)
        states.append(state)
    return FlowChain(states=torch.stack(states), logprobs=logprobs)


def flow_chain_logprobs(
    predict: Predict,
    states: Tensor,
    times: Tensor,
    *,
    noise_level: float | None,
    indices: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of a chain by the policy as it is now, element by element.

    Args:
        predict: called once with indices, K times without.
        states: [K + 1, B, ...], of `FlowChain`; a constant.
        times, noise_level, indices: as they were for sampling.

    Returns:
        [B, ...], nats, at least float32, with the gradient of the predictions.

    Raises:
        as `sample_flow_chain`. AlgosError: velocities alone and no noise_level.
    """
    _check_times(times)
    if states.ndim < 2 or len(states) != len(times):
        raise ShapeError(f"states has shape {list(states.shape)}; expected [{len(times)}, B, ...], one for each time")
    states = states.detach()
    if indices is not None:
        _check_indices(indices, states[0], len(times) - 1)
        samples = torch.arange(len(indices), device=indices.device)
        pairs = [(states[indices, samples], states[indices + 1, samples], times[indices], times[indices + 1])]
    else:
        num_samples = states.shape[1]
        pairs = [
            (states[k], states[k + 1], times[k].expand(num_samples), times[k + 1].expand(num_samples))
            for k in range(len(times) - 1)
        ]
    total = torch.zeros_like(at_least_float32(states[0]))
    for state, next_state, t, next_t in pairs:
        transition = _transition(state, predict(state, t), t, next_t, noise_level)
        total = total + transition_logprobs(next_state, transition)
    return total


def _transition(
    state: Tensor, prediction: FlowPrediction, t: Tensor, next_t: Tensor, noise_level: float | None
) -> FlowTransition:
    if prediction.stds is not None:
        return flow_noise_transition(state, prediction.velocities, prediction.stds, t, next_t)
    if noise_level is None:
        raise AlgosError("noise_level=None and a prediction without stds: a chain of the ODE has no log-probabilities")
    check_noise_level(noise_level)
    return flow_sde_transition(state, prediction.velocities, t, next_t, noise_level=noise_level)


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    """[B] as [B, 1, ...]"""
    return rows.view(-1, *[1] * (tensor.ndim - 1))


def _check_times(times: Tensor) -> None:
    if times.ndim != 1 or len(times) < 2:
        raise ShapeError(f"times has shape {list(times.shape)}; expected [K + 1], from 1 to 0")


def _check_indices(indices: Tensor, noise: Tensor, num_steps: int) -> None:
    check_shape("indices", indices, noise.shape[:1], "the samples of the chain")
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise AlgosError(f"indices has dtype {indices.dtype}; expected integers")
    outside = ((indices < 0) | (indices >= num_steps)).nonzero()
    if len(outside):
        index = int(outside[0])
        raise AlgosError(f"indices[{index}]={int(indices[index])} is no step of the chain: 0 ... {num_steps - 1}")
