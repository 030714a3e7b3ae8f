"""The entropy bonus."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, adapted_entropy_coef, entropy_bonus

quick = settings(max_examples=60)
shapes = st.tuples(st.integers(0, 4), st.integers(0, 6))


@quick
@given(shapes, st.sampled_from([0.0, 0.01, 2.0]), st.integers(0, 2**32 - 1))
def test_bonus(shape, coef, seed):
    rng = np.random.default_rng(seed)
    entropies, mask = rng.normal(size=shape), rng.random(shape) < 0.7
    tensor = torch.tensor(np.where(mask, entropies, np.nan), requires_grad=True)
    terms = entropy_bonus(tensor, torch.tensor(mask), coef=coef)
    np.testing.assert_allclose(terms.detach().numpy(), np.where(mask, -coef * entropies, 0.0), rtol=1e-6)
    terms.sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), np.where(mask, -coef, 0.0), rtol=1e-6)


def test_the_weight_of_the_bonus_rises_while_the_entropy_is_low_and_falls_while_it_is_high():
    coefs, coef = [], 0.0
    for entropy in (0.1, 0.2, 0.3, 0.3, 0.3, 0.0):
        coef = adapted_entropy_coef(coef, entropy, target=0.2, step=0.4, most=0.6)
        coefs.append(round(coef, 9))
    assert coefs == [0.4, 0.6, 0.2, 0.0, 0.0, 0.4]
    with pytest.raises(AlgosError, match="measured_entropy=nan must be"):
        adapted_entropy_coef(0.0, math.nan, target=0.2)


def test_refusals():
    ones = torch.ones(2, 3)
    with pytest.raises(AlgosError, match=r"coef=-0.1 must be at least 0"):
        entropy_bonus(ones, coef=-0.1)
    with pytest.raises(ShapeError, match="mask has shape"):
        entropy_bonus(ones, ones[:1], coef=0.1)
    with pytest.raises(NonFiniteError, match=r"entropies\[0, 0\]=nan"):
        entropy_bonus(ones * float("nan"), ones, coef=0.1)
