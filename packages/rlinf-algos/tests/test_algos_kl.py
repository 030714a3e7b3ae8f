"""KL estimates: formulas, gradients, and that they estimate the KL divergence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import NonFiniteError, ShapeError, kl_k1, kl_k2, kl_k3

REFERENCES = [
    (kl_k1, lambda p, q: p - q),
    (kl_k2, lambda p, q: (p - q) ** 2 / 2),
    (kl_k3, lambda p, q: np.exp(q) / np.exp(p) - 1 - np.log(np.exp(q) / np.exp(p))),
]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(REFERENCES), st.tuples(st.integers(0, 4), st.integers(0, 5)), st.integers(0, 2**32 - 1))
def test_formulas(pair, shape, seed):
    function, formula = pair
    rng = np.random.default_rng(seed)
    policy, ref = rng.normal(-1.0, 1.0, (2, *shape))
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    expected = np.where(mask, formula(policy, ref), 0.0)
    policy[~mask], ref[~mask] = np.nan, -np.inf
    found = function(*map(torch.tensor, (policy, ref, mask)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("function", [kl_k1, kl_k2, kl_k3])
def test_gradients_by_finite_differences(function):
    policy, ref = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.tensor([[1, 1, 0, 1]] * 3)
    assert torch.autograd.gradcheck(
        lambda p, q: function(p, q, mask), (policy.clone().requires_grad_(), ref.clone().requires_grad_())
    )


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl():
    """Expectation over all outcomes of a small distribution, not over samples."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.2, -0.5, 0.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    probs = policy.exp().detach()
    kl = (policy.exp() * (policy - ref)).sum()
    for function in (kl_k1, kl_k3):
        assert (probs * function(policy, ref)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((probs * kl_k2(policy, ref)).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((probs * kl_k1(policy, ref)).sum(), logits)
    torch.testing.assert_close(of_k2, expected)
    torch.testing.assert_close(of_k1, torch.zeros_like(expected))


def test_k3_keeps_its_digits_near_zero():
    d = 1e-6
    found = kl_k3(torch.tensor([d], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)).item()
    assert found == pytest.approx(d**2 / 2, rel=1e-4)


def test_refusals():
    ones = torch.ones(2, 2)
    for function in (kl_k1, kl_k2, kl_k3):
        with pytest.raises(ShapeError, match="ref_logprobs has shape"):
            function(ones, ones[0])
        with pytest.raises(NonFiniteError, match=r"ref_logprobs\[0, 1\]=-inf"):
            function(ones, torch.tensor([[0.0, -float("inf")], [0.0, 0.0]]))
    with pytest.raises(NonFiniteError, match=r"exp\(ref_logprobs - policy_logprobs\)\[0, 0\]=inf"):
        kl_k3(-100 * ones, 0 * ones)
