"""Chains of a tiny network: sampling and recomputation to the bit, float64 references, gradients, policy updates."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, at_level, ppo_clip_loss, token_mean
from rlinf_algos.flow_matching import (
    FlowPrediction,
    bounded_std,
    denoising_times,
    flow_chain_logprobs,
    flow_interpolation,
    flow_matching_loss,
    sample_flow_chain,
    training_times,
)

quick = settings(max_examples=30)
C, A = 3, 2


class Network(nn.Module):
    """Velocities and, for flow-noise, deviations, from a chunk of C actions and the time."""

    def __init__(self, learns_noise):
        super().__init__()
        self.body = nn.Linear(C * A + 1, 16)
        self.head = nn.Linear(16, C * A)
        self.noise_head = nn.Linear(16, C * A) if learns_noise else None

    def forward(self, states, times):
        hidden = self.body(torch.cat([states.flatten(1), times[:, None]], dim=1)).tanh()
        velocities = self.head(hidden).view(states.shape)
        if self.noise_head is None:
            return FlowPrediction(velocities)
        return FlowPrediction(velocities, bounded_std(self.noise_head(hidden).view(states.shape), low=0.1, high=0.3))


def make(learns_noise, B=7, num_steps=4, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    network = Network(learns_noise).to(dtype)
    times = denoising_times(num_steps, dtype=dtype)
    return network, torch.randn(B, C, A, dtype=dtype), times, torch.randint(num_steps, (B,))


METHODS = pytest.mark.parametrize(
    ("learns_noise", "all_steps"), [(False, False), (False, True), (True, False), (True, True)]
)


@METHODS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recomputed_log_probabilities_are_those_of_sampling_to_the_bit(learns_noise, all_steps, dtype):
    for seed in range(5):
        network, noise, times, indices = make(learns_noise, dtype=dtype, seed=seed)
        options = {"noise_level": None if learns_noise else 0.6, "indices": None if all_steps else indices}
        chain = sample_flow_chain(network, noise, times, **options)
        again = flow_chain_logprobs(network, chain.states, times, **options)
        assert torch.equal(again, chain.logprobs)
        assert again.requires_grad and not chain.logprobs.requires_grad
        assert chain.states.shape == (5, 7, C, A)
        assert torch.equal(chain.actions, chain.states[-1])


@METHODS
def test_log_probabilities_against_a_reference(learns_noise, all_steps):
    network, noise, times, indices = make(learns_noise, dtype=torch.float64)
    options = {"noise_level": None if learns_noise else 0.6, "indices": None if all_steps else indices}
    chain = sample_flow_chain(network, noise, times, generator=torch.Generator().manual_seed(3), **options)
    expected = np.zeros(noise.shape)
    for b in range(len(noise)):
        for k in range(4) if all_steps else [int(indices[b])]:
            t, s = times[k].item(), times[k + 1].item()
            prediction = network(chain.states[k, b][None], times[k][None])
            x, v = chain.states[k, b].numpy(), prediction.velocities[0].detach().numpy()
            if learns_noise:
                mean, std = x + v * (s - t), prediction.stds[0].detach().numpy()
            else:
                sigma = 0.6 * math.sqrt(t / (1 - (s if t == 1 else t)))
                mean = x + (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) * (s - t)
                std = np.full_like(mean, sigma * math.sqrt(t - s))
            z = (chain.states[k + 1, b].numpy() - mean) / std
            expected[b] += -0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(chain.logprobs.numpy(), expected, rtol=1e-6)


@METHODS
def test_gradients_by_finite_differences(learns_noise, all_steps):
    network, noise, times, indices = make(learns_noise, B=3, dtype=torch.float64)
    options = {"noise_level": None if learns_noise else 0.6, "indices": None if all_steps else indices}
    chain = sample_flow_chain(network, noise, times, **options)
    names = [name for name, _ in network.named_parameters()]

    def logprobs(*values):
        predict = partial(torch.func.functional_call, network, dict(zip(names, values, strict=True)))
        return flow_chain_logprobs(lambda x, t: predict((x, t)), chain.states, times, **options)

    assert torch.autograd.gradcheck(logprobs, tuple(network.parameters()))


def test_only_the_chosen_step_is_noisy():
    network, noise, times, indices = make(False)
    ode = sample_flow_chain(network, noise, times, noise_level=None)
    chain = sample_flow_chain(network, noise, times, noise_level=0.6, indices=indices)
    assert (ode.logprobs == 0).all()
    for b, k in enumerate(indices.tolist()):
        torch.testing.assert_close(chain.states[: k + 1, b], ode.states[: k + 1, b])
        assert (chain.states[k + 1, b] != ode.states[k + 1, b]).all()
        for later in range(k + 1, 4):  # the ODE again, from where the noise led
            t = times[later].expand(1)
            state = chain.states[later, b]
            step = state + (times[later + 1] - times[later]) * network(state[None], t).velocities[0]
            torch.testing.assert_close(chain.states[later + 1, b], step)


def test_a_generator_makes_a_chain_repeatable():
    network, noise, times, indices = make(False)
    runs = [
        sample_flow_chain(
            network, noise, times, noise_level=0.6, indices=indices, generator=torch.Generator().manual_seed(s)
        )
        for s in (1, 1, 2)
    ]
    assert torch.equal(runs[0].states, runs[1].states)
    assert not torch.equal(runs[0].states, runs[2].states)


@METHODS
def test_the_noise_of_the_steps_may_be_given(learns_noise, all_steps):
    network, noise, times, indices = make(learns_noise)
    options = {"noise_level": None if learns_noise else 0.6, "indices": None if all_steps else indices}
    generator = torch.Generator().manual_seed(1)
    step_noise = torch.stack([torch.randn(noise.shape, generator=generator) for _ in range(4)])
    drawn = sample_flow_chain(network, noise, times, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(sample_flow_chain(network, noise, times, step_noise=step_noise, **options).states, drawn.states)
    with pytest.raises(ShapeError, match=r"step_noise has shape \[3, 7, 3, 2\]"):
        sample_flow_chain(network, noise, times, step_noise=step_noise[:3], **options)


@pytest.mark.parametrize("learns_noise", [False, True])
def test_a_policy_gradient_moves_actions_towards_reward(learns_noise):
    """Reward for actions near 1: a few steps of PPO on chunk-level ratios raise it."""
    network, _, times, _ = make(learns_noise)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    rewards = []
    for _ in range(40):
        noise = torch.randn(128, C, A)
        options = {"noise_level": None if learns_noise else 0.5, "indices": torch.randint(4, (128,))}
        chain = sample_flow_chain(network, noise, times, **options)
        reward = -(chain.actions - 1.0).square().mean(dim=(1, 2))
        rewards.append(reward.mean().item())
        advantages = (reward - reward.mean()) / reward.std()
        for _ in range(2):
            logprobs = flow_chain_logprobs(network, chain.states, times, **options)
            loss = ppo_clip_loss(*at_level("chunk", logprobs, chain.logprobs, advantages))
            optimizer.zero_grad()
            token_mean(loss.loss_terms, None, 128).backward()
            optimizer.step()
    assert np.mean(rewards[-5:]) > 0.7 * np.mean(rewards[:5])  # rewards are negative


# -- supervised ----------------------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_interpolation_and_loss(B, seed):
    rng = np.random.default_rng(seed)
    actions, noise, velocities = rng.normal(size=(3, B, C, A))
    times, mask = rng.random(B), rng.random((B, C, A)) < 0.7
    t = times[:, None, None]
    states, targets = flow_interpolation(*map(torch.tensor, (actions, noise, times)))
    np.testing.assert_allclose(states.numpy(), t * noise + (1 - t) * actions, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(targets.numpy(), noise - actions, rtol=1e-6)
    predicted = torch.tensor(np.where(mask, velocities, np.nan), requires_grad=True)
    loss = flow_matching_loss(predicted, targets, torch.tensor(mask))
    expected = np.where(mask, (velocities - (noise - actions)) ** 2, 0.0)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-6)
    loss.sum().backward()
    assert predicted.grad is not None
    slope = np.where(mask, 2 * (velocities - (noise - actions)), 0.0)
    np.testing.assert_allclose(predicted.grad.numpy(), slope, rtol=1e-6, atol=1e-12)


def test_times_of_training_are_beta_distributed():
    drawn = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    times = training_times(drawn).double()
    ranked = ((times.sort().values - 0.001) / 0.999).clamp(min=0) ** 1.5  # the distribution of Beta(1.5, 1)
    assert (ranked - (torch.arange(20000) + 0.5) / 20000).abs().max() < 0.0115
    assert times.min() >= 0.001 and times.max() <= 1.0
    assert torch.equal(training_times(drawn, concentration=1.0, least=0.0), drawn)


def test_supervised_training_and_the_ode_reproduce_the_data():
    torch.manual_seed(0)
    network = Network(learns_noise=False)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    target = torch.linspace(-1.0, 1.0, C * A).view(C, A)
    for _ in range(300):
        actions = target + 0.05 * torch.randn(64, C, A)
        times = training_times(torch.rand(64))
        states, velocities = flow_interpolation(actions, torch.randn(64, C, A), times)
        optimizer.zero_grad()
        flow_matching_loss(network(states, times).velocities, velocities).mean().backward()
        optimizer.step()
    chain = sample_flow_chain(network, torch.randn(256, C, A), denoising_times(10), noise_level=None)
    assert (chain.actions.mean(dim=0) - target).abs().max() < 0.15


def test_times():
    assert denoising_times(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_refusals():
    network, noise, times, indices = make(False)
    chain = sample_flow_chain(network, noise, times, noise_level=0.5, indices=indices)
    with pytest.raises(AlgosError, match="num_steps=0 must be at least 1"):
        denoising_times(0)
    with pytest.raises(AlgosError, match=r"indices\[0\]=4 is no step of the chain: 0 ... 3"):
        sample_flow_chain(network, noise, times, noise_level=0.5, indices=indices * 0 + 4)
    with pytest.raises(AlgosError, match="indices has dtype"):
        sample_flow_chain(network, noise, times, noise_level=0.5, indices=indices.float())
    with pytest.raises(ShapeError, match=r"indices has shape \[6\], the samples of the chain has \[7\]"):
        flow_chain_logprobs(network, chain.states, times, noise_level=0.5, indices=indices[:6])
    with pytest.raises(ShapeError, match=r"states has shape \[4, 7, 3, 2\]; expected \[5, B, ...\]"):
        flow_chain_logprobs(network, chain.states[:4], times, noise_level=0.5)
    with pytest.raises(ShapeError, match=r"times has shape \[1\]"):
        sample_flow_chain(network, noise, times[:1], noise_level=0.5)
    with pytest.raises(AlgosError, match="noise_level=None and a prediction without stds"):
        flow_chain_logprobs(network, chain.states, times, noise_level=None)
    with pytest.raises(NonFiniteError, match=r"noise\[0, 0, 0\]=nan"):
        sample_flow_chain(network, noise * float("nan"), times, noise_level=0.5)
    with pytest.raises(NonFiniteError, match=r"velocities\[0, 0, 0\]=nan"):
        sample_flow_chain(lambda x, t: FlowPrediction(x * float("nan")), noise, times, noise_level=0.5)
    with pytest.raises(AlgosError, match=r"concentration=0.0 must be above 0"):
        training_times(torch.rand(3), concentration=0.0)
    with pytest.raises(AlgosError, match=r"times=1.5 must be between"):
        flow_interpolation(noise, noise, torch.full((7,), 1.5))
    with pytest.raises(ShapeError, match="target_velocities has shape"):
        flow_matching_loss(noise, noise[:3])
    with pytest.raises(NonFiniteError, match=r"velocities\[0, 0, 0\]=nan"):
        flow_matching_loss(noise * float("nan"), noise)
