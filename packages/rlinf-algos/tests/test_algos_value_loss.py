"""The squared and Huber's value loss, clipped and not, against a scalar reference."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, clipped_value_loss, huber_value_loss

quick = settings(max_examples=100)
FUNCTIONS = [clipped_value_loss, partial(huber_value_loss, delta=0.7, clip=0.2)]


@quick
@given(
    st.tuples(st.integers(0, 4), st.integers(0, 5)),
    st.sampled_from([None, 0.0, 0.2, 10.0]),
    st.sampled_from([None, 0.1, 1.0, 10.0]),
    st.integers(0, 2**32 - 1),
)
def test_terms_and_fraction(shape, clip, delta, seed):
    def loss_of(error):
        size = abs(error)
        return size**2 / 2 if delta is None or size <= delta else delta * (size - delta / 2)

    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, *shape))
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    terms, num_clipped = np.zeros(shape), 0
    for i in zip(*np.nonzero(mask), strict=True):
        terms[i] = loss_of(values[i] - returns[i])
        if clip is not None:
            moved = min(max(values[i], old[i] - clip), old[i] + clip)
            num_clipped += loss_of(moved - returns[i]) > terms[i]
            terms[i] = max(terms[i], loss_of(moved - returns[i]))
    values[~mask], old[~mask], returns[~mask] = np.nan, np.inf, np.nan
    function = clipped_value_loss if delta is None else partial(huber_value_loss, delta=delta)
    loss = function(*map(torch.tensor, (values, old, returns, mask)), clip=clip)
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(loss.clip_fraction.item(), num_clipped / max(1, mask.sum()), rtol=1e-6)
    assert loss.num_terms.item() == mask.sum()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_by_finite_differences(function, clip):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    assert torch.autograd.gradcheck(
        lambda v: function(v, old, returns, mask, clip=clip).loss_terms, values.requires_grad_()
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_old_values_and_returns_are_constants(function):
    values, old, returns = (torch.rand(3, requires_grad=True) for _ in range(3))
    function(values, old, returns, None).loss_terms.sum().backward()
    assert values.grad is not None
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_refusals(function):
    ones = torch.ones(2)
    with pytest.raises(ShapeError, match="old_values has shape"):
        function(ones, torch.ones(2, 1), ones, None)
    with pytest.raises(ShapeError, match="returns has shape"):
        function(ones, ones, torch.ones(1), None)
    with pytest.raises(AlgosError, match="clip=-1"):
        function(ones, ones, ones, None, clip=-1)
    for k, name in enumerate(["values", "old_values", "returns"]):
        tensors = [ones.clone() for _ in range(3)]
        tensors[k][1] = float("nan")
        with pytest.raises(NonFiniteError, match=rf"^{name}\[1\]=nan"):
            function(*tensors, mask=None)


def test_huber_is_the_square_below_delta_and_a_line_beyond():
    values, zeros = torch.tensor([0.5, 2.0, -4.0], requires_grad=True), torch.zeros(3)
    loss = huber_value_loss(values, zeros, zeros, None, delta=1.0)
    assert loss.loss_terms.tolist() == [0.125, 1.5, 3.5]
    loss.loss_terms.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 1.0, -1.0]
    for delta in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(AlgosError, match=f"delta={delta} must be above 0"):
            huber_value_loss(values, zeros, zeros, None, delta=delta)
