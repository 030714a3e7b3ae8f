"""The diagonal normal against its density written out, and against finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import NonFiniteError, ShapeError, gaussian_entropy, gaussian_log_prob


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), max_size=2), st.integers(1, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_log_prob_and_entropy(leading, A, shared_std, seed):
    rng = np.random.default_rng(seed)
    actions, mean, log_std = rng.normal(size=(3, *leading, A))
    if shared_std:
        log_std = rng.normal(size=A)
    std = np.broadcast_to(np.exp(log_std), mean.shape)
    actions = mean + std * actions  # a few deviations away: the reference takes the logarithm of the density itself
    density = np.exp(-(((actions - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
    entropy = 0.5 * np.log(2 * math.pi * math.e * std**2)
    actual = gaussian_log_prob(*map(torch.tensor, (actions, mean, log_std)))
    np.testing.assert_allclose(actual.numpy(), np.log(density).sum(-1), rtol=1e-6, atol=1e-9)
    actual = gaussian_entropy(torch.tensor(mean), torch.tensor(log_std))
    np.testing.assert_allclose(actual.numpy(), entropy.sum(-1), rtol=1e-6, atol=1e-9)


def test_gradients_by_finite_differences():
    actions, mean = torch.randn(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    log_std = torch.tensor([0.3, -0.5], dtype=torch.float64)
    inputs = tuple(t.clone().requires_grad_() for t in (actions, mean, log_std))
    assert torch.autograd.gradcheck(gaussian_log_prob, inputs)
    assert torch.autograd.gradcheck(lambda m, s: gaussian_entropy(m, s) + 0 * m.sum(-1), inputs[1:])


def test_half_precision_is_computed_in_float32():
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert gaussian_log_prob(x, x, x).dtype == torch.float32


def test_refusals():
    ones = torch.ones(4, 2)
    with pytest.raises(ShapeError, match=r"actions has shape \[4, 1\], mean has \[4, 2\]"):
        gaussian_log_prob(ones[:, :1], ones, ones)
    with pytest.raises(ShapeError, match=r"log_std has shape \[4, 1\]"):
        gaussian_log_prob(ones, ones, ones[:, :1])
    with pytest.raises(ShapeError, match="mean has no dimensions"):
        gaussian_entropy(torch.tensor(0.0), torch.tensor(0.0))
    for k, name in enumerate(["actions", "mean", "log_std"]):
        tensors = [ones.clone() for _ in range(3)]
        tensors[k][0, 1] = float("nan")
        with pytest.raises(NonFiniteError, match=rf"{name}\[0, 1\]=nan"):
            gaussian_log_prob(*tensors)
