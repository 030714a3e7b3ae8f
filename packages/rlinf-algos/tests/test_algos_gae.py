"""GAE for steps and tokens against float64 numpy references written from the definition, episode by episode."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, gae, token_gae

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def close(actual, expected):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


def gae_reference(rewards, values, next_values, terminated, truncated, gamma, lam, at_termination, at_truncation):
    """The definition: A[t] is the sum over l of (gamma lam)^l delta[t + l], up to the end of t's episode."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                bootstrap = True
                if terminated[k, n]:
                    bootstrap = at_termination
                elif truncated[k, n]:
                    bootstrap = at_truncation
                delta = rewards[k, n] + (gamma * next_values[k, n] if bootstrap else 0.0) - values[k, n]
                advantages[t, n] += (gamma * lam) ** (k - t) * delta
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantages, advantages + values


unit = st.sampled_from([0.0, 0.5, 0.8, 0.99, 1.0])


@quick
@given(
    st.integers(0, 9),
    st.integers(0, 3),
    unit,
    unit,
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
    seeds,
)
def test_gae(T, N, gamma, lam, at_termination, at_truncation, end_rate, seed):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, T, N))
    terminated, truncated = rng.random((2, T, N)) < end_rate
    advantages, returns = gae(
        *map(torch.tensor, (rewards, values, next_values, terminated, truncated)),
        gamma=gamma,
        lam=lam,
        bootstrap_at_termination=at_termination,
        bootstrap_at_truncation=at_truncation,
    )
    steps = (rewards, values, next_values, terminated, truncated)
    expected = gae_reference(*steps, gamma, lam, at_termination, at_truncation)
    close(advantages, expected[0])
    close(returns, expected[1])


def test_gae_all_truncated_is_one_step_each():
    rewards, values, next_values = torch.randn(3, 4, 2, dtype=torch.float64)
    no, yes = torch.zeros(4, 2), torch.ones(4, 2)
    advantages, _ = gae(rewards, values, next_values, no, yes, 0.9, 0.95)
    close(advantages, (rewards + 0.9 * next_values - values).numpy())
    advantages, _ = gae(rewards, values, next_values, yes, yes, 0.9, 0.95)
    close(advantages, (rewards - values).numpy())


def test_gae_with_lambda_1_is_the_discounted_return_minus_the_value():
    rewards = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    values, no = torch.full((3, 1), 0.5, dtype=torch.float64), torch.zeros(3, 1)
    terminated = torch.tensor([[0.0], [0.0], [1.0]])
    _, returns = gae(rewards, values, torch.tensor([[0.5], [0.5], [9.0]]), terminated, no, 0.5, 1.0)
    close(returns, [[1 + 1 + 1], [2 + 2], [4]])


def test_gae_does_not_look_at_next_values_it_does_not_use():
    ones = torch.ones(2, 1)
    terminated = torch.tensor([[0.0], [1.0]])
    next_values = torch.tensor([[1.0], [float("nan")]])
    advantages, _ = gae(ones, ones, next_values, terminated, 0 * ones, 1.0, 1.0)
    assert advantages.tolist() == [[1.0], [0.0]]
    with pytest.raises(NonFiniteError, match=r"next_values\[1, 0\]=nan"):
        gae(ones, ones, next_values, terminated, 0 * ones, 1.0, 1.0, bootstrap_at_termination=True)


def test_gae_refuses():
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"values has shape \[2, 1\], rewards has \[2, 3\]"):
        gae(ones, torch.ones(2, 1), ones, ones, ones, 1.0, 1.0)
    with pytest.raises(ShapeError, match=r"expected \[T, N\]"):
        gae(ones[0], ones[0], ones[0], ones[0], ones[0], 1.0, 1.0)
    with pytest.raises(AlgosError, match=r"gamma=1.1 must be between 0.0 and 1.0"):
        gae(ones, ones, ones, ones, ones, 1.1, 1.0)
    with pytest.raises(AlgosError, match=r"lam=-0.1"):
        gae(ones, ones, ones, ones, ones, 1.0, -0.1)
    for k, name in enumerate(["rewards", "values", "next_values"]):
        tensors = [ones.clone() for _ in range(3)]
        tensors[k][1, 2] = float("inf")
        with pytest.raises(NonFiniteError, match=rf"{name}\[1, 2\]=inf"):
            gae(*tensors, terminated=0 * ones, truncated=0 * ones, gamma=1.0, lam=1.0)
    assert not gae(ones, ones.requires_grad_(), ones, ones, ones, 1.0, 1.0)[1].requires_grad


def token_gae_reference(rewards, values, mask, gamma, lam):
    advantages = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        tokens = np.flatnonzero(mask[b])
        r, v = rewards[b, tokens], values[b, tokens]
        for i in range(len(tokens)):
            for k in range(i, len(tokens)):
                after = v[k + 1] if k + 1 < len(tokens) else 0.0
                advantages[b, tokens[i]] += (gamma * lam) ** (k - i) * (r[k] + gamma * after - v[k])
    return advantages, np.where(mask, advantages + values, 0.0)


@quick
@given(
    st.integers(0, 4),
    st.integers(0, 9),
    unit,
    unit,
    st.sampled_from([0.0, 0.5, 1.0]),
    seeds,
)
def test_token_gae(B, T, gamma, lam, mask_rate, seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, B, T))
    mask = rng.random((B, T)) < mask_rate
    expected = token_gae_reference(rewards, values, mask, gamma, lam)
    rewards[~mask], values[~mask] = np.nan, np.inf
    actual = token_gae(*map(torch.tensor, (rewards, values, mask)), gamma=gamma, lam=lam)
    close(actual[0], expected[0])
    close(actual[1], expected[1])


def test_token_gae_of_a_long_completion_in_float32():
    """The doubling passes keep the digits that a float64 loop has."""
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(1, 4096)).astype(np.float32), rng.random((1, 4096)) < 0.9
    rewards = np.zeros_like(values)
    rewards[0, np.flatnonzero(mask[0])[-1]] = 1.0
    carry = next_value = 0.0
    expected = np.zeros((1, 4096))
    for t in np.flatnonzero(mask[0])[::-1]:
        carry = float(rewards[0, t]) + next_value - float(values[0, t]) + 0.95 * carry
        next_value, expected[0, t] = float(values[0, t]), carry
    advantages, _ = token_gae(*map(torch.tensor, (rewards, values, mask)), gamma=1.0, lam=0.95)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=3e-6)


def test_token_gae_refuses():
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match="values has shape"):
        token_gae(ones, ones[:1], ones, 1.0, 1.0)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        token_gae(ones[0], ones[0], ones[0], 1.0, 1.0)
    with pytest.raises(NonFiniteError, match=r"values\[0, 0\]=nan"):
        token_gae(ones, ones * float("nan"), ones, 1.0, 1.0)
    for gamma, lam in [(2.0, 1.0), (1.0, 2.0)]:
        with pytest.raises(AlgosError, match=r"=2\.0 must be between"):
            token_gae(ones, ones, ones, gamma, lam)
