"""The clipped policy loss against a scalar reference, its gradient against finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, ppo_clip_loss

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def reference_term(policy, proximal, advantage, low, high, dual):
    """One token: (loss, was the clipped branch smaller)."""
    ratio = math.exp(policy - proximal)
    plain = ratio * advantage
    clipped = min(max(ratio, 1 - low), 1 + high) * advantage
    objective = min(plain, clipped)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective, clipped < plain


def draw(shape, seed):
    rng = np.random.default_rng(seed)
    policy = rng.normal(-2.0, 1.0, shape)
    proximal = policy + rng.normal(0.0, 0.6, shape)
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    return policy, proximal, rng.normal(size=shape), mask


@quick
@given(
    st.tuples(st.integers(0, 4), st.integers(0, 6)),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 5.0)]),
    st.sampled_from([None, 1.5, 3.0]),
    seeds,
)
def test_terms_and_fractions(shape, clip, dual, seed):
    policy, proximal, advantages, mask = draw(shape, seed)
    terms, num_clipped, kl = np.zeros(shape), 0, 0.0
    for index in zip(*np.nonzero(mask), strict=True):
        terms[index], clipped = reference_term(
            policy[index], proximal[index], advantages[index], low=clip[0], high=clip[1], dual=dual
        )
        ratio = math.exp(policy[index] - proximal[index])
        num_clipped += clipped
        kl += ratio - 1 - math.log(ratio)
    policy[~mask], proximal[~mask], advantages[~mask] = np.nan, np.inf, -np.inf
    loss = ppo_clip_loss(
        *map(torch.tensor, (policy, proximal, advantages)),
        loss_mask=torch.tensor(mask),
        clip_low=clip[0],
        clip_high=clip[1],
        dual_clip=dual,
    )
    n = max(1, mask.sum())
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    assert loss.num_terms.item() == mask.sum()
    np.testing.assert_allclose(loss.clip_fraction.item(), num_clipped / n, rtol=1e-6)
    np.testing.assert_allclose(loss.approx_kl.item(), kl / n, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dual", [None, 1.5])
def test_gradient_by_finite_differences(dual):
    policy, proximal, advantages, mask = map(torch.tensor, draw((4, 5), 3))
    mask[0, 0] = True
    policy[~mask] = float("nan")
    policy.requires_grad_()

    def loss(p):
        return ppo_clip_loss(p, proximal, advantages, mask, dual_clip=dual).loss_terms

    free = policy.detach().nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(loss, free)
    loss(policy).sum().backward()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()
    assert (policy.grad[~mask] == 0).all()


def test_on_policy_gradient_is_that_of_reinforce():
    """Ratio exactly 1 lies inside the range: the full gradient passes, -A for each log-probability."""
    policy = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([[1.5, -2.0], [0.0, 4.0]])
    loss = ppo_clip_loss(policy, policy, advantages, None)
    loss.loss_terms.sum().backward()
    assert policy.grad is not None
    assert torch.equal(policy.grad, -advantages)
    assert loss.clip_fraction.item() == 0.0
    assert loss.approx_kl.item() == 0.0


def test_proximal_and_advantages_are_constants():
    policy, proximal, advantages = (torch.rand(2, 3, requires_grad=True) for _ in range(3))
    ppo_clip_loss(policy, proximal, advantages, None).loss_terms.sum().backward()
    assert policy.grad is not None
    assert proximal.grad is None
    assert advantages.grad is None


def test_one_advantage_for_a_sequence():
    policy, proximal, _, mask = map(torch.tensor, draw((3, 3), 5))
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    whole = ppo_clip_loss(policy, proximal, advantages, mask).loss_terms
    each = ppo_clip_loss(policy, proximal, advantages[:, None].expand(3, 3), mask).loss_terms
    assert torch.equal(whole, each)


def test_half_precision_is_computed_in_float32():
    policy = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert ppo_clip_loss(policy, policy, torch.ones(1, dtype=torch.bfloat16), None).loss_terms.dtype == torch.float32


def test_refusals():
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"proximal_logprobs has shape \[2\], policy_logprobs has \[2, 3\]"):
        ppo_clip_loss(ones, ones[:, 0], ones, ones)
    with pytest.raises(ShapeError, match=r"advantages has shape \[2, 1\]"):
        ppo_clip_loss(ones, ones, ones[:, :1], ones)
    with pytest.raises(ShapeError, match="loss_mask has shape"):
        ppo_clip_loss(ones, ones, ones, ones[:1])
    for k, name in enumerate(["policy_logprobs", "proximal_logprobs", "advantages"]):
        tensors = [ones.clone() for _ in range(3)]
        tensors[k][0, 2] = -math.inf
        with pytest.raises(NonFiniteError, match=rf"{name}\[0, 2\]=-inf"):
            ppo_clip_loss(*tensors, loss_mask=ones)
    with pytest.raises(NonFiniteError, match=r"exp\(policy_logprobs - proximal_logprobs\)\[0, 0\]=inf"):
        ppo_clip_loss(0 * ones, -100 * ones, ones, ones)
    for options, text in [
        ({"clip_low": 1.1}, "clip_low=1.1 must be between"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"clip_high": -0.1}, "clip_high=-0.1 must be at least"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
    ]:
        with pytest.raises(AlgosError, match=text):
            ppo_clip_loss(ones, ones, ones, ones, **options)
