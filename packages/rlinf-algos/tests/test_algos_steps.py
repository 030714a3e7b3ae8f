"""Groups of episodes against float64 numpy references written over dictionaries."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    ShapeError,
    first_episode_mask,
    gigpo_advantages,
    grpo_advantages,
    step_group_advantages,
    turn_return_advantages,
)

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def close(actual, expected):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


def grouped(values, normalize_std, epsilon):
    """{place: (group, value)} -> {place: advantage}; equal to 12 digits is equal."""
    out = {}
    for place, (group, value) in values.items():
        others = [v for g, v in values.values() if g == group]
        mean, spread = sum(others) / len(others), max(others) - min(others)
        std = np.sqrt(sum((v - mean) ** 2 for v in others) / max(1, len(others) - 1))
        out[place] = 0.0 if spread < 1e-12 else (value - mean) / (std + epsilon if normalize_std else 1.0)
    return out


@quick
@given(st.integers(0, 5), st.integers(0, 6), st.booleans(), st.sampled_from([0.0, 0.2, 1.0]), seeds)
def test_steps_are_compared_with_those_of_the_same_time(T, N, normalize_std, end_rate, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, (T, N)) / 2
    terminated, truncated = rng.random((2, T, N)) < end_rate
    mask, to_go = np.zeros((T, N), dtype=bool), {}
    for n in range(N if T else 0):
        length = next((t + 1 for t in range(T) if terminated[t, n] or truncated[t, n]), T)
        mask[:length, n] = True
        to_go |= {(t, n): (t, sum(0.5 ** (k - t) * rewards[k, n] for k in range(t, length))) for t in range(length)}
    advantages = grouped(to_go, normalize_std, 1e-4)
    expected = np.array([[advantages.get((t, n), 0.0) for n in range(N)] for t in range(T)]).reshape(T, N)
    ends = torch.tensor(terminated), torch.tensor(truncated)
    assert first_episode_mask(*ends).numpy().tolist() == mask.tolist()
    rewards[~mask] = np.nan
    close(step_group_advantages(torch.tensor(rewards), *ends, 0.5, normalize_std=normalize_std), expected)


@quick
@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 0.5, 2.0]), seeds)
def test_gigpo(T, N, normalize_std, step_weight, seed):
    """Episodes against their group and, where a state was met more than once, steps against those in the same state."""
    rng = np.random.default_rng(seed)
    rewards, states = rng.integers(0, 3, (T, N)) / 2, rng.integers(0, 3, (T, N))
    terminated, truncated = rng.random((2, T, N)) < 0.2
    returns, to_go = {}, {}
    for n in range(N):
        length = next((t + 1 for t in range(T) if terminated[t, n] or truncated[t, n]), T)
        returns[n] = (0, sum(rewards[:length, n]))
        for t in range(length):
            to_go[t, n] = (states[t, n], sum(0.5 ** (k - t) * rewards[k, n] for k in range(t, length)))
    of_episodes, of_steps = grouped(returns, normalize_std, 1e-4), grouped(to_go, normalize_std, 1e-4)
    expected = np.zeros((T, N))
    for t, n in to_go:
        expected[t, n] = of_episodes[n] + step_weight * of_steps[t, n]
    rewards, *ends, states = (torch.tensor(array) for array in (rewards, terminated, truncated, states))
    close(
        gigpo_advantages(rewards, ends[0], ends[1], states, 0.5, step_weight=step_weight, normalize_std=normalize_std),
        expected,
    )


def test_gigpo_without_a_state_that_was_met_twice_is_grpo():
    rewards, ends = torch.rand(3, 4), torch.zeros(3, 4)
    advantages = gigpo_advantages(rewards, ends, ends, torch.arange(12).view(3, 4), 0.9)
    assert torch.equal(advantages, grpo_advantages(rewards.double().sum(0, keepdim=True).float()).expand(3, 4))
    with pytest.raises(AlgosError, match="step_weight=-1 must be at least 0"):
        gigpo_advantages(rewards, ends, ends, torch.arange(12).view(3, 4), 0.9, step_weight=-1)


@quick
@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), seeds)
def test_returns_of_turns_are_compared_with_those_of_all_turns(T, N, normalize_std, seed):
    rng = np.random.default_rng(seed)
    rewards, ends = rng.integers(0, 3, (T, N)) / 2, rng.random((T, N)) < 0.3
    to_go = {}
    for n in range(N):
        length = next((t + 1 for t in range(T) if ends[t, n]), T)
        for t in range(length):
            to_go[t, n] = (0, sum(0.5 ** (k - t) * rewards[k, n] for k in range(t, length)))
    advantages = grouped(to_go, normalize_std, 1e-4)
    expected = [[advantages.get((t, n), 0.0) for n in range(N)] for t in range(T)]
    terminated = torch.tensor(ends)
    computed = turn_return_advantages(
        torch.tensor(rewards), terminated, ~terminated & False, 0.5, normalize_std=normalize_std
    )
    close(computed, expected)


def test_returns_of_single_turns_are_grpo():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 1.0]])
    ends = torch.ones(1, 4)
    assert torch.equal(turn_return_advantages(rewards, ends, ends, 0.9), grpo_advantages(rewards))


def test_refusals():
    ones, ids = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"expected \[T, N\]"):
        first_episode_mask(ids, ids)
    with pytest.raises(ShapeError, match="truncated has shape"):
        first_episode_mask(ones, ones[:1])
    with pytest.raises(ShapeError, match="has shape"):
        step_group_advantages(ones[:1], ones, ones, 1.0)
