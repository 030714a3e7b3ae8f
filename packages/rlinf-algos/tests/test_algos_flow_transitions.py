"""One denoising step: formulas in float64, gradients, and that the stochastic process has the ODE's marginals.

With normal data the exact velocity is linear in the state, so mean and variance of every state follow from numbers.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError
from rlinf_algos.flow_matching import (
    FlowTransition,
    bounded_std,
    denoising_times,
    flow_noise_transition,
    flow_ode_transition,
    flow_sde_transition,
    transition_entropy,
    transition_logprobs,
)

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)
DATA_MEAN, DATA_STD = 1.5, 0.4


def draw(B, C, seed, num_steps=5):
    """States, velocities, deviations, next states [B, C, 2]; times [B] of steps of a chain, also of its first."""
    rng = np.random.default_rng(seed)
    states, velocities, next_states = rng.normal(size=(3, B, C, 2))
    step = rng.integers(0, num_steps, B)
    times, next_times = 1.0 - step / num_steps, 1.0 - (step + 1) / num_steps
    return states, velocities, rng.uniform(0.05, 0.5, (B, C, 2)), next_states, times, np.abs(next_times)


def density(x, mean, std):
    return math.log(1.0 / (std * math.sqrt(2 * math.pi)) * math.exp(-((x - mean) ** 2) / (2 * std**2)))


@quick
@given(st.integers(0, 4), st.integers(0, 3), st.sampled_from([0.3, 0.7, 1.0]), seeds)
def test_formulas(B, C, noise_level, seed):
    states, velocities, stds, next_states, times, next_times = draw(B, C, seed)
    x, v, t, s = (torch.tensor(array) for array in (states, velocities, times, next_times))
    sde = flow_sde_transition(x, v, t, s, noise_level=noise_level)
    learned = flow_noise_transition(x, v, torch.tensor(stds), t, s)
    ode = flow_ode_transition(x, v, t, s)
    logprobs = [transition_logprobs(torch.tensor(next_states), t).numpy() for t in (sde, learned)]
    for index in np.ndindex(states.shape):
        x, v, t, s = states[index], velocities[index], times[index[0]], next_times[index[0]]
        sigma = noise_level * math.sqrt(t / (1 - (s if t == 1.0 else t)))
        score = -(x + (1 - t) * v) / t
        mean, std = x + (v - sigma**2 / 2 * score) * (s - t), sigma * math.sqrt(t - s)
        np.testing.assert_allclose([sde.mean[index], sde.std[index]], [mean, std], rtol=1e-6)
        np.testing.assert_allclose(ode.mean[index], x + v * (s - t), rtol=1e-6)
        assert ode.std[index] == 0.0
        np.testing.assert_allclose([learned.mean[index], learned.std[index]], [x + v * (s - t), stds[index]], rtol=1e-6)
        if abs(next_states[index] - mean) < 20 * std:  # the reference's exp underflows beyond
            np.testing.assert_allclose(logprobs[0][index], density(next_states[index], mean, std), rtol=1e-6, atol=1e-9)
        expected = -0.5 * ((next_states[index] - learned.mean[index]) / stds[index]) ** 2
        expected -= math.log(stds[index] * math.sqrt(2 * math.pi))
        np.testing.assert_allclose(logprobs[1][index], expected, rtol=1e-6)
        entropy = 0.5 * math.log(2 * math.pi * math.e * stds[index] ** 2)
        np.testing.assert_allclose(transition_entropy(learned)[index], entropy, rtol=1e-6, atol=1e-9)


def test_half_precision_states_are_computed_in_float32():
    states = torch.ones(2, 3, dtype=torch.bfloat16)
    times = torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.0])
    transition = flow_sde_transition(states, states, *times, noise_level=0.5)
    assert transition.mean.dtype == transition.std.dtype == torch.float32


def test_gradients_by_finite_differences():
    states, velocities, stds, next_states, times, next_times = map(torch.tensor, draw(3, 2, 0))
    for tensor in (velocities, stds):
        tensor.requires_grad_()

    def of_sde(v):
        return transition_logprobs(next_states, flow_sde_transition(states, v, times, next_times, noise_level=0.6))

    def of_noise(v, raw):
        transition = flow_noise_transition(states, v, bounded_std(raw, low=0.1, high=0.4), times, next_times)
        return transition_logprobs(next_states, transition) + transition_entropy(transition)

    assert torch.autograd.gradcheck(of_sde, velocities)
    assert torch.autograd.gradcheck(of_noise, (velocities, stds))


@quick
@given(st.floats(-20.0, 20.0))
def test_deviations_stay_in_their_bounds(raw):
    std = bounded_std(torch.tensor(raw, dtype=torch.float64), low=0.08, high=0.16).item()
    share = (math.tanh(raw) + 1) / 2
    assert std == pytest.approx(math.sqrt((0.08**2) ** (1 - share) * (0.16**2) ** share), rel=1e-6)
    assert 0.08 * (1 - 1e-12) <= std <= 0.16 * (1 + 1e-12)


# -- marginals -----------------------------------------------------------------------------------------------------


def velocity(states, times):
    """E[noise - data | state] for data ~ N(DATA_MEAN, DATA_STD^2): the exact field."""
    t = times.view(-1, *[1] * (states.ndim - 1))
    variance = ((1 - t) * DATA_STD) ** 2 + t**2
    return (t - (1 - t) * DATA_STD**2) / variance * (states - (1 - t) * DATA_MEAN) - DATA_MEAN


def moments(step, num_steps):
    """[K + 1, 2]: mean and variance of each state; a step is linear, so two states and its deviation tell them."""
    times = denoising_times(num_steps, dtype=torch.float64)
    mean, variance, rows = 0.0, 1.0, [(0.0, 1.0)]
    probes = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for t, s in pairwise(times):
        at, to = t.expand(2), s.expand(2)
        transition = step(probes, velocity(probes, at), at, to)
        offset, slope = transition.mean[0].item(), (transition.mean[1] - transition.mean[0]).item()
        mean, variance = offset + slope * mean, slope**2 * variance + transition.std[0].item() ** 2
        rows.append((mean, variance))
    return np.array(rows)


@pytest.mark.parametrize("noise_level", [0.8, 1.0, 1.2])
def test_the_sde_has_the_marginals_of_the_ode_as_steps_get_shorter(noise_level):
    def step(x, v, t, s):
        return flow_sde_transition(x, v, t, s, noise_level=noise_level)

    errors = []
    for num_steps in (100, 800):
        t = np.linspace(1.0, 0.0, num_steps + 1)
        exact = np.stack([(1 - t) * DATA_MEAN, ((1 - t) * DATA_STD) ** 2 + t**2], axis=1)
        later = t < 0.9
        np.testing.assert_allclose(moments(flow_ode_transition, num_steps)[later], exact[later], atol=3.0 / num_steps)
        errors.append(np.abs(moments(step, num_steps) - exact)[later].max())
    assert errors[1] < errors[0] / 3  # eight times the steps
    assert errors[1] < 0.02


def test_samples_of_both_have_the_distribution_of_the_data():
    """Kolmogorov and Smirnov's distance of 20,000 samples to the data's distribution: 0.0115 has a p-value of 1 %."""
    generator = torch.Generator().manual_seed(0)
    times = denoising_times(300, dtype=torch.float64)
    noise = torch.randn(20000, 1, generator=generator, dtype=torch.float64)
    deterministic = stochastic = noise
    for t, s in pairwise(times):
        at, to = t.expand(len(noise)), s.expand(len(noise))
        deterministic = flow_ode_transition(deterministic, velocity(deterministic, at), at, to).mean
        step = flow_sde_transition(stochastic, velocity(stochastic, at), at, to, noise_level=1.0)
        stochastic = step.mean + step.std * torch.randn(noise.shape, generator=generator, dtype=torch.float64)
    for samples in (deterministic, stochastic):
        ranked = ((samples.flatten().sort().values - DATA_MEAN) / DATA_STD / math.sqrt(2)).erf().mul(0.5).add(0.5)
        distance = (ranked - (torch.arange(len(noise)) + 0.5) / len(noise)).abs().max().item()
        assert distance < 0.0115 + 0.01  # and the error of 300 steps
    assert abs(torch.corrcoef(torch.cat([noise, stochastic], dim=1).T)[0, 1].item()) < 0.2  # the noise was forgotten
    assert torch.corrcoef(torch.cat([noise, deterministic], dim=1).T)[0, 1].item() > 0.999


@pytest.mark.parametrize("noise_level", [0.5, 0.7])
def test_marginals_of_samples_agree_within_three_standard_errors(noise_level):
    """Means and variances of both processes' states at nine times, each from noise of its own."""
    num_samples, num_steps = 4000, 500
    generator = torch.Generator().manual_seed(1)
    times = denoising_times(num_steps, dtype=torch.float64)
    ode, sde = torch.randn(2, num_samples, 1, generator=generator, dtype=torch.float64)
    compared = 0
    for k, (t, s) in enumerate(pairwise(times), start=1):
        at, to = t.expand(num_samples), s.expand(num_samples)
        ode = flow_ode_transition(ode, velocity(ode, at), at, to).mean
        step = flow_sde_transition(sde, velocity(sde, at), at, to, noise_level=noise_level)
        sde = step.mean + step.std * torch.randn(sde.shape, generator=generator, dtype=torch.float64)
        if k >= num_steps // 5 and k % (num_steps // 10) == 0:
            compared += 1
            means, variances = (torch.stack([f(x) for x in (ode, sde)]) for f in (torch.mean, torch.var))
            error_of_mean = (variances.sum() / num_samples).sqrt()
            error_of_variance = (2 * variances.square().sum() / (num_samples - 1)).sqrt()  # of normal samples
            assert (means[0] - means[1]).abs() <= 3 * error_of_mean, f"step {k}: means {means.tolist()}"
            assert (variances[0] - variances[1]).abs() <= 3 * error_of_variance, f"step {k}: {variances.tolist()}"
    assert compared == 9


# -- refusals ------------------------------------------------------------------------------------------------------


def test_refusals():
    x, t, s = torch.zeros(2, 3), torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.0])
    nan = torch.tensor([[0.0, float("nan"), 0.0], [0.0] * 3])
    with pytest.raises(ShapeError, match=r"velocities has shape \[2\], states has \[2, 3\]"):
        flow_ode_transition(x, x[:, 0], t, s)
    with pytest.raises(ShapeError, match=r"times has shape \[2, 1\], the samples of states has \[2\]"):
        flow_ode_transition(x, x, t[:, None], s)
    with pytest.raises(NonFiniteError, match=r"velocities\[0, 1\]=nan"):
        flow_sde_transition(x, nan, t, s, noise_level=0.5)
    with pytest.raises(NonFiniteError, match=r"states\[0, 1\]=nan"):
        flow_sde_transition(nan, x, t, s, noise_level=0.5)
    with pytest.raises(AlgosError, match=r"next_times\[1\]=0.5 is not below times\[1\]=0.5"):
        flow_ode_transition(x, x, t, torch.tensor([0.2, 0.5]))
    with pytest.raises(AlgosError, match=r"the largest of times=1.5 must be between"):
        flow_ode_transition(x, x, t + 0.5, s)
    with pytest.raises(AlgosError, match=r"the least of next_times=-0.5"):
        flow_ode_transition(x, x, t, s - 0.5)
    for level in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(AlgosError, match="noise_level="):
            flow_sde_transition(x, x, t, s, noise_level=level)
    with pytest.raises(AlgosError, match=r"stds\[0, 0\]=0.0 must be above 0"):
        flow_noise_transition(x, x, x, t, s)
    with pytest.raises(NonFiniteError, match=r"stds\[0, 1\]=nan"):
        flow_noise_transition(x, x, nan, t, s)
    with pytest.raises(AlgosError, match="a step without noise has no log-probability"):
        transition_logprobs(x, flow_ode_transition(x, x, t, s))
    with pytest.raises(NonFiniteError, match=r"next_states\[0, 1\]=nan"):
        transition_logprobs(nan, FlowTransition(mean=x, std=x + 1))
    with pytest.raises(AlgosError, match="deviations must be 0 < low < high"):
        bounded_std(x, low=0.2, high=0.1)
