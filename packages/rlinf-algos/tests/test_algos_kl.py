"""KL estimates: formulas, gradients, and that they estimate the KL divergence."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    adapted_kl_coef,
    kl_abs,
    kl_k1,
    kl_k1_plus,
    kl_k2,
    kl_k3,
    kl_k3_plus,
    mixed_reference,
    ratio_weighted_kl,
    rewards_at_last_token,
)


def k3(p, q):
    return np.exp(q) / np.exp(p) - 1 - np.log(np.exp(q) / np.exp(p))


REFERENCES = [
    (kl_k1, lambda p, q: p - q),
    (kl_k2, lambda p, q: (p - q) ** 2 / 2),
    (kl_k3, k3),
    (kl_abs, lambda p, q: abs(p - q)),
    (kl_k1_plus, lambda p, q: p - q),
    (kl_k3_plus, k3),
]


@settings(max_examples=60)
@given(st.sampled_from(REFERENCES), st.tuples(st.integers(0, 4), st.integers(0, 5)), st.integers(0, 2**32 - 1))
def test_formulas(pair, shape, seed):
    function, formula = pair
    rng = np.random.default_rng(seed)
    policy, ref = rng.normal(-1.0, 1.0, (2, *shape))
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    expected = np.where(mask, formula(policy, ref), 0.0)
    policy[~mask], ref[~mask] = np.nan, -np.inf
    actual = function(*map(torch.tensor, (policy, ref, mask)))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-12)


@settings(max_examples=60)
@given(st.sampled_from([kl_k3, kl_k3_plus]), st.sampled_from([0.1, 3.0, 10.0, 1000.0]), st.integers(0, 2**32 - 1))
def test_a_clamped_k3_is_the_smaller_of_k3_and_the_clamp(function, clamp, seed):
    policy, ref = np.random.default_rng(seed).normal(0.0, 5.0, (2, 3, 4))
    estimates = function(torch.tensor(policy), torch.tensor(ref), clamp=clamp)
    np.testing.assert_allclose(estimates.numpy(), np.minimum(k3(policy, ref), clamp), rtol=1e-6, atol=1e-12)


def test_a_clamp_takes_the_gradient_from_tokens_beyond_it_alone():
    """A ratio of e^50 has the value of the clamp; in float32 e^100 would overflow. verl bounds k3 by 10 as well."""
    policy = torch.tensor([-50.0, -100.0, -1.0, 30.0], requires_grad=True)
    terms = kl_k3(policy, torch.tensor([0.0, 0.0, -0.5, 0.0]), clamp=10.0)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([10.0, 10.0, np.exp(0.5) - 1.5, 10.0])
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, 0.0, 1.0 - np.exp(0.5), 0.0])
    for clamp in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(AlgosError, match="must be above 0 and finite"):
            kl_k3(policy, policy, clamp=clamp)


@pytest.mark.parametrize("function", [kl_k1, kl_k2, kl_k3, kl_abs])
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
    (of_k1,) = torch.autograd.grad((probs * kl_k1(policy, ref)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(of_k2, expected)
    for function in (kl_k1_plus, kl_k3_plus):
        estimate = (probs * function(policy, ref)).sum()
        assert estimate.item() == pytest.approx(kl.item(), rel=1e-12)
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(of_k1, torch.zeros_like(expected))


def test_k3_keeps_its_digits_near_zero():
    d = 1e-6
    estimate = kl_k3(torch.tensor([d], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)).item()
    assert estimate == pytest.approx(d**2 / 2, rel=1e-4)


def test_refusals():
    ones = torch.ones(2, 2)
    for function, _ in REFERENCES:
        with pytest.raises(ShapeError, match="ref_logprobs has shape"):
            function(ones, ones[0])
        with pytest.raises(NonFiniteError, match=r"ref_logprobs\[0, 1\]=-inf"):
            function(ones, torch.tensor([[0.0, -float("inf")], [0.0, 0.0]]))
    for function in (kl_k3, kl_k3_plus):
        with pytest.raises(NonFiniteError, match=r"exp\(ref_logprobs - policy_logprobs\)\[0, 0\]=inf"):
            function(-100 * ones, 0 * ones)


@settings(max_examples=60)
@given(
    st.integers(0, 4),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**32 - 1),
)
def test_rewards_at_the_last_token(B, T, mask_rate, seed):
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(size=B), rng.random((B, T)) < mask_rate
    at_end = np.zeros((B, T))
    for b in range(B):
        tokens = np.flatnonzero(mask[b])
        for t in tokens:
            at_end[b, t] = scores[b] if t == tokens[-1] else 0.0
        if not len(tokens):
            scores[b] = np.nan
    rewards = rewards_at_last_token(torch.tensor(scores), torch.tensor(mask))
    np.testing.assert_allclose(rewards.numpy(), at_end, rtol=1e-6, atol=1e-12)


def test_rewards_at_the_last_token_refuse():
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        rewards_at_last_token(ones[0], ones[0])
    with pytest.raises(ShapeError, match="scores has shape"):
        rewards_at_last_token(ones[:1, 0], ones)
    with pytest.raises(NonFiniteError, match=r"scores\[0\]=nan"):
        rewards_at_last_token(ones[:, 0] * float("nan"), ones)


def test_the_adapted_coefficient():
    adapt = partial(adapted_kl_coef, 0.2, target_kl=6.0, num_samples=100, horizon=1000)
    assert adapt(6.0) == 0.2
    assert adapt(6.6) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert adapt(60.0) == pytest.approx(0.2 * 1.02)  # no faster than a fifth in a horizon
    assert adapt(-1.0) == pytest.approx(0.2 * 0.98)
    for name, change in [
        ("kl_coef=0", {"kl_coef": 0.0}),
        ("target_kl=0", {"target_kl": 0.0}),
        ("measured_kl=nan", {"measured_kl": float("nan")}),
        ("horizon=5", {"horizon": 5}),
        ("num_samples=-1", {"num_samples": -1}),
    ]:
        arguments = {"kl_coef": 0.2, "measured_kl": 1.0, "target_kl": 6.0, "num_samples": 10, "horizon": 100}
        with pytest.raises(AlgosError, match=name):
            adapted_kl_coef(**{**arguments, **change})


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_a_weighted_k3_of_another_policys_samples_is_the_kl_in_value_and_gradient(seed):
    """Exactly, over all outcomes of the proximal policy; without the weight neither is."""
    rng = np.random.default_rng(seed)
    free = torch.tensor(rng.normal(size=5), requires_grad=True)
    ref, proximal = (torch.tensor(rng.normal(size=5)).log_softmax(0) for _ in range(2))
    policy = free.log_softmax(0)
    exact = (policy.exp() * (policy - ref)).sum()
    weighted = (proximal.exp() * ratio_weighted_kl(kl_k3(policy, ref), policy, proximal)).sum()
    torch.testing.assert_close(weighted, exact)
    slopes = [torch.autograd.grad(value, free, retain_graph=True)[0] for value in (weighted, exact)]
    torch.testing.assert_close(*slopes)
    on_policy = (policy.detach().exp() * ratio_weighted_kl(kl_k3(policy, ref), policy, policy.detach())).sum()
    torch.testing.assert_close(torch.autograd.grad(on_policy, free, retain_graph=True)[0], slopes[1])
    with pytest.raises(ShapeError, match="kl has shape"):
        ratio_weighted_kl(ref[:2], policy, proximal)


def test_a_reference_that_follows_the_policy():
    old, new = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 2.0])
    assert mixed_reference(old, new, 0.25).tolist() == [1.5, -1.0]
    assert torch.equal(mixed_reference(old, new, 1.0), new) and torch.equal(mixed_reference(old, new, 0.0), old)
    half = mixed_reference(old.bfloat16(), new, 1e-4)
    assert half.dtype == torch.bfloat16 and half.tolist() == [1.0, -2.0]
    with pytest.raises(AlgosError, match=r"weight=1\.5 must be between 0\.0 and 1\.0"):
        mixed_reference(old, new, 1.5)
    with pytest.raises(ShapeError, match="policy has shape"):
        mixed_reference(old, new[:1], 0.5)
