"""The clipped value loss against a scalar reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, clipped_value_loss

quick = settings(deadline=None, max_examples=60)


@quick
@given(
    st.tuples(st.integers(0, 4), st.integers(0, 5)),
    st.sampled_from([None, 0.0, 0.2, 10.0]),
    st.integers(0, 2**32 - 1),
)
def test_terms_and_fraction(shape, clip, seed):
    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, *shape))
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    terms, num_clipped = np.zeros(shape), 0
    for i in zip(*np.nonzero(mask), strict=True):
        error = (values[i] - returns[i]) ** 2
        if clip is not None:
            moved = min(max(values[i], old[i] - clip), old[i] + clip)
            num_clipped += (moved - returns[i]) ** 2 > error
            error = max(error, (moved - returns[i]) ** 2)
        terms[i] = error / 2
    values[~mask], old[~mask], returns[~mask] = np.nan, np.inf, np.nan
    loss = clipped_value_loss(*map(torch.tensor, (values, old, returns, mask)), clip=clip)
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(loss.clip_fraction.item(), num_clipped / max(1, mask.sum()), rtol=1e-6)
    assert loss.num_terms.item() == mask.sum()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_by_finite_differences(clip):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    assert torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, old, returns, mask, clip=clip).loss_terms, values.requires_grad_()
    )


def test_old_values_and_returns_are_constants():
    values, old, returns = (torch.rand(3, requires_grad=True) for _ in range(3))
    clipped_value_loss(values, old, returns, None).loss_terms.sum().backward()
    assert values.grad is not None
    assert old.grad is None
    assert returns.grad is None


def test_refusals():
    ones = torch.ones(2)
    with pytest.raises(ShapeError, match="old_values has shape"):
        clipped_value_loss(ones, torch.ones(2, 1), ones, None)
    with pytest.raises(ShapeError, match="returns has shape"):
        clipped_value_loss(ones, ones, torch.ones(1), None)
    with pytest.raises(AlgosError, match="clip=-1"):
        clipped_value_loss(ones, ones, ones, None, clip=-1)
    for k, name in enumerate(["values", "old_values", "returns"]):
        tensors = [ones.clone() for _ in range(3)]
        tensors[k][1] = float("nan")
        with pytest.raises(NonFiniteError, match=rf"^{name}\[1\]=nan"):
            clipped_value_loss(*tensors, mask=None)
