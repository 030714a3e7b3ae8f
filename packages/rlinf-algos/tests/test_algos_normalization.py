"""Means, whitening and explained variance against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import (
    NonFiniteError,
    ShapeError,
    explained_variance,
    masked_mean,
    masked_whiten,
    normalize_advantages,
)

quick = settings(deadline=None, max_examples=60)
shapes = st.tuples(st.integers(0, 4), st.integers(1, 6))
seeds = st.integers(0, 2**32 - 1)


def draw(shape, seed):
    """Values with garbage outside a ragged mask."""
    rng = np.random.default_rng(seed)
    values = rng.normal(2.0, 3.0, shape)
    mask = rng.random(shape) < rng.choice([0.0, 0.3, 1.0])
    return np.where(mask, values, np.nan), mask


@quick
@given(shapes, seeds)
def test_masked_mean(shape, seed):
    values, mask = draw(shape, seed)
    expected = values[mask].mean() if mask.any() else 0.0
    np.testing.assert_allclose(masked_mean(torch.tensor(values), torch.tensor(mask)).item(), expected, rtol=1e-6)


@quick
@given(shapes, st.sampled_from([0.0, 1e-8, 0.5]), seeds)
def test_masked_whiten(shape, epsilon, seed):
    values, mask = draw(shape, seed)
    expected = np.zeros(shape)
    if mask.sum() > 1:
        chosen = values[mask]
        expected[mask] = (chosen - chosen.mean()) / (chosen.std(ddof=1) + epsilon)
    for function in (masked_whiten, normalize_advantages):
        found = function(torch.tensor(values), torch.tensor(mask), epsilon=epsilon)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_whitening_equal_values_gives_exactly_zero():
    for values in (torch.full((5,), 0.1), torch.tensor([3.0]), torch.empty(0)):
        assert torch.equal(masked_whiten(values, epsilon=0.0), torch.zeros_like(values))


def test_gradients():
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda v: masked_whiten(v, mask, epsilon=0.1), values)
    assert torch.autograd.gradcheck(lambda v: masked_mean(v, mask), values)
    assert not normalize_advantages(values, mask).requires_grad


@quick
@given(shapes, seeds)
def test_explained_variance(shape, seed):
    values, mask = draw(shape, seed)
    returns = np.where(mask, values + np.random.default_rng(seed + 1).normal(size=shape), np.nan)
    found = explained_variance(torch.tensor(values), torch.tensor(returns), torch.tensor(mask)).item()
    if mask.sum() < 2:
        assert math.isnan(found)
    else:
        errors = returns[mask] - values[mask]
        np.testing.assert_allclose(found, 1 - errors.var() / returns[mask].var(), rtol=1e-6)


def test_explained_variance_of_perfect_and_constant_critics():
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns).item() == 1.0
    assert explained_variance(torch.zeros(3), returns).item() == pytest.approx(0.0)
    assert math.isnan(explained_variance(returns, torch.ones(3)).item())


def test_refusals():
    ones = torch.ones(2)
    with pytest.raises(ShapeError):
        masked_mean(ones, torch.ones(2, 1))
    with pytest.raises(ShapeError):
        normalize_advantages(ones, torch.ones(2, 1))
    with pytest.raises(ShapeError, match="returns has shape"):
        explained_variance(ones, torch.ones(3))
    with pytest.raises(NonFiniteError, match=r"values\[0\]=nan"):
        masked_whiten(ones * float("nan"))
    with pytest.raises(NonFiniteError, match=r"returns\[0\]=nan"):
        explained_variance(ones, ones * float("nan"))
    with pytest.raises(ValueError, match="epsilon=-1"):
        masked_whiten(ones, epsilon=-1)
