"""Rewards to go against a float64 numpy reference, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    rewards_to_go,
)

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)
rates = st.sampled_from([0.0, 0.5, 1.0])
gammas = st.sampled_from([0.0, 0.5, 0.99, 1.0])


def close(actual, expected):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


def to_go_reference(rewards, mask, gamma):
    out = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        tokens = np.flatnonzero(mask[b])
        for i, t in enumerate(tokens):
            out[b, t] = sum(gamma**k * rewards[b, s] for k, s in enumerate(tokens[i:]))
    return out


@quick
@given(st.integers(0, 4), st.integers(0, 9), gammas, rates, seeds)
def test_rewards_to_go(B, T, gamma, mask_rate, seed):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=(B, T)), rng.random((B, T)) < mask_rate
    to_go = to_go_reference(rewards, mask, gamma)
    rewards[~mask] = np.nan
    tensors = torch.tensor(rewards), torch.tensor(mask)
    close(rewards_to_go(*tensors, gamma), to_go)
    close(rewards_to_go(tensors[0].t(), tensors[1].t(), gamma, dim=0), to_go.T)


def test_refusals():
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match="mask has shape"):
        rewards_to_go(ones, ones[:1], 1.0)
    with pytest.raises(AlgosError, match="gamma=2"):
        rewards_to_go(ones, ones, 2)
    with pytest.raises(NonFiniteError, match=r"rewards\[0, 0\]=nan"):
        rewards_to_go(ones * float("nan"), ones, 1.0)
    with pytest.raises(ShapeError, match="has no dimension 2"):
        rewards_to_go(ones, None, 1.0, dim=2)
    assert not rewards_to_go(ones.clone().requires_grad_(), ones, 1.0).requires_grad
