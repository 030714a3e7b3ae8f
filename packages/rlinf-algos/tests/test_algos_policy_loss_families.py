"""Every policy loss but PPO's own against scalar references, its gradient against finite differences."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    PolicyLoss,
    ShapeError,
    cispo_loss,
    clip_cov_loss,
    decoupled_ppo_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    policy_gradient_loss,
    policy_loss,
    ppo_clip_loss,
    sapo_loss,
    sequence_clip_loss,
    sequence_mean_token_mean,
)

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(0, 4), st.integers(0, 6))
clips = st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 5.0)])


def draw(shape, seed, num_logprobs=2):
    """Log-probabilities (the first of the policy), advantages, mask."""
    rng = np.random.default_rng(seed)
    policy = rng.normal(-2.0, 1.0, shape)
    others = [policy + rng.normal(0.0, 0.6, shape) for _ in range(num_logprobs - 1)]
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    return [policy, *others], rng.normal(size=shape), mask


def tensors(*arrays, mask):
    """Garbage outside the mask, which nothing may read."""
    garbage = [np.nan, np.inf, -np.inf, np.nan][: len(arrays)]
    return [torch.tensor(np.where(mask, array, bad)) for array, bad in zip(arrays, garbage, strict=True)]


def surrogate(ratio, advantage, clip):
    return -min(ratio * advantage, min(max(ratio, 1 - clip[0]), 1 + clip[1]) * advantage)


@quick
@given(shapes, clips, seeds)
def test_gspo(shape, clip, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    ids = np.repeat(np.arange(shape[0])[:, None], shape[1], 1)
    terms, is_clipped = np.zeros(shape), 0
    for index in zip(*np.nonzero(mask), strict=True):
        mine = mask & (ids == ids[index])
        ratio = math.exp(sum((policy - proximal)[mine]) / mine.sum())
        terms[index] = surrogate(ratio, advantages[index], clip)
        is_clipped += terms[index] > -ratio * advantages[index]
    loss = gspo_loss(
        *tensors(policy, proximal, advantages, mask=mask),
        loss_mask=torch.tensor(mask),
        clip_low=clip[0],
        clip_high=clip[1],
    )
    n = max(1, mask.sum())
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(loss.clip_fraction.item(), is_clipped / n, rtol=1e-6)
    assert loss.num_terms.item() == mask.sum()


def test_gspo_has_the_gradient_of_the_sequence_level_objective():
    """Eq. 5 written out, sequence by sequence; the clip far enough for all but one sequence."""
    (policy, proximal), _, mask = draw((5, 6), 4)
    mask[:] = np.arange(6) < np.array([[6], [1], [3], [0], [5]])
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    policy = torch.tensor(policy, requires_grad=True)
    objective = torch.zeros((), dtype=torch.float64)
    for b in range(5):
        if mask[b].any():
            s = (policy[b] - torch.tensor(proximal[b]))[torch.tensor(mask[b])].mean().exp()
            objective = objective + torch.minimum(s * advantages[b], s.clamp(0.7, 1.3) * advantages[b]) / 5
    (expected,) = torch.autograd.grad(-objective, policy)
    loss = gspo_loss(policy, torch.tensor(proximal), advantages, torch.tensor(mask), clip_low=0.3, clip_high=0.3)
    value = sequence_mean_token_mean(loss.loss_terms, torch.tensor(mask), 5)
    (gradient,) = torch.autograd.grad(value, policy)
    assert 0.0 < loss.clip_fraction.item() < 1.0
    torch.testing.assert_close(value, -objective, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@quick
@given(shapes, clips, seeds)
def test_cispo(shape, clip, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    terms, gradient, num_clipped = np.zeros(shape), np.zeros(shape), 0
    for index in zip(*np.nonzero(mask), strict=True):
        ratio = math.exp(policy[index] - proximal[index])
        weight = min(max(ratio, 1 - clip[0]), 1 + clip[1])
        terms[index], gradient[index] = -weight * advantages[index] * policy[index], -weight * advantages[index]
        num_clipped += weight != ratio
    inputs = tensors(policy, proximal, advantages, mask=mask)
    inputs[0].requires_grad_()
    loss = cispo_loss(*inputs, loss_mask=torch.tensor(mask), clip_low=clip[0], clip_high=clip[1])
    loss.loss_terms.sum().backward()
    assert inputs[0].grad is not None
    np.testing.assert_allclose(loss.loss_terms.detach().numpy(), terms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(inputs[0].grad.numpy(), gradient, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(loss.clip_fraction.item(), num_clipped / max(1, mask.sum()), rtol=1e-6)


@quick
@given(shapes, clips, st.sampled_from([None, 1.0, 1.5]), seeds)
def test_decoupled(shape, clip, cap, seed):
    (policy, proximal, rollout), advantages, mask = draw(shape, seed, num_logprobs=3)
    terms = np.zeros(shape)
    for index in zip(*np.nonzero(mask), strict=True):
        weight = math.exp(proximal[index] - rollout[index])
        weight = 0.0 if cap is not None and weight > cap else weight
        terms[index] = weight * surrogate(math.exp(policy[index] - proximal[index]), advantages[index], clip)
    *inputs, rollout = tensors(policy, proximal, advantages, rollout, mask=mask)
    loss = decoupled_ppo_loss(
        *inputs,
        loss_mask=torch.tensor(mask),
        rollout_logprobs=rollout,
        clip_low=clip[0],
        clip_high=clip[1],
        weight_cap=cap,
    )
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    assert loss.num_terms.item() == mask.sum()


def test_decoupled_is_ppo_where_the_proximal_policy_sampled():
    (policy, proximal), advantages, mask = draw((3, 5), 2)
    inputs = [torch.tensor(x) for x in (policy, proximal, advantages, mask)]
    actual = decoupled_ppo_loss(*inputs, rollout_logprobs=inputs[1], dual_clip=2.0)
    expected = ppo_clip_loss(*inputs, dual_clip=2.0)
    assert torch.equal(actual.loss_terms, expected.loss_terms)
    assert actual.clip_fraction == expected.clip_fraction


@quick
@given(shapes, seeds)
def test_policy_gradient(shape, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    inputs = tensors(policy, proximal, advantages, mask=mask)
    inputs[0].requires_grad_()
    loss = policy_gradient_loss(*inputs, loss_mask=torch.tensor(mask))
    loss.loss_terms.sum().backward()
    assert inputs[0].grad is not None
    expected = np.where(mask, -advantages * policy, 0.0)
    np.testing.assert_allclose(loss.loss_terms.detach().numpy(), expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(inputs[0].grad.numpy(), np.where(mask, -advantages, 0.0), rtol=1e-6)
    assert loss.clip_fraction.item() == 0.0


@quick
@given(shapes, st.sampled_from([(1.0, 1.05), (0.5, 3.0)]), seeds)
def test_sapo(shape, taus, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    terms, slopes = np.zeros(shape), np.zeros(shape)
    for index in zip(*np.nonzero(mask), strict=True):
        ratio, advantage = math.exp(policy[index] - proximal[index]), advantages[index]
        tau = taus[0] if advantage > 0 else taus[1]
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        terms[index], slopes[index] = -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio
    inputs = tensors(policy, proximal, advantages, mask=mask)
    inputs[0].requires_grad_()
    loss = sapo_loss(*inputs, loss_mask=torch.tensor(mask), tau_positive=taus[0], tau_negative=taus[1])
    loss.loss_terms.sum().backward()
    assert inputs[0].grad is not None
    np.testing.assert_allclose(loss.loss_terms.detach().numpy(), terms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(inputs[0].grad.numpy(), slopes, rtol=1e-6, atol=1e-12)


@quick
@given(shapes, st.sampled_from([(0.4, 0.4), (0.2, 0.28), (1.0, 5.0)]), seeds)
def test_gmpo(shape, clip, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    ids = np.repeat(np.arange(shape[0])[:, None], shape[1], 1)
    terms, num_clipped = np.zeros(shape), 0
    for index in zip(*np.nonzero(mask), strict=True):
        mine = mask & (ids == ids[index])
        product = 1.0
        for d, a in zip((policy - proximal)[mine], advantages[mine], strict=True):
            product *= math.exp(min(d, clip[1]) if a > 0 else max(d, -clip[0]))
        terms[index] = -advantages[mine].mean() * product ** (1 / mine.sum())
        d, a = (policy - proximal)[index], advantages[index]
        num_clipped += d > clip[1] if a > 0 else d < -clip[0]
    loss = gmpo_loss(
        *tensors(policy, proximal, advantages, mask=mask),
        loss_mask=torch.tensor(mask),
        clip_low=clip[0],
        clip_high=clip[1],
    )
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(loss.clip_fraction.item(), num_clipped / max(1, mask.sum()), rtol=1e-6)


def test_gmpo_refuses():
    ones = torch.ones(2, 3)
    with pytest.raises(AlgosError, match=r"clip_low=1.1 must be between"):
        gmpo_loss(ones, ones, ones, ones, clip_low=1.1)
    with pytest.raises(NonFiniteError, match=r"exp\(policy_logprobs - proximal_logprobs\)\[0\]=inf"):
        gmpo_loss(0 * ones, -100 * ones, -ones, ones)


def test_one_far_token_moves_gmpo_less_than_gspo():
    """One of 4 tokens is 20 times likelier: the geometric mean is cut for that token alone."""
    policy = torch.tensor([[3.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = gmpo_loss(policy, torch.zeros(1, 4), torch.ones(1), None)
    loss.loss_terms.mean().backward()
    assert policy.grad is not None
    assert policy.grad[0, 0] == 0 and (policy.grad[0, 1:] < 0).all()
    assert loss.loss_terms[0, 0].item() == pytest.approx(-math.exp(0.4 / 4))


def covariances(policy, advantages, mask):
    n = max(1, mask.sum())
    return (advantages - advantages[mask].sum() / n) * (policy - policy[mask].sum() / n)


@quick
@given(shapes, st.sampled_from([(0.02, 0.02), (0.0, 0.1)]), st.sampled_from([1.0, 1.5, 20.0]), seeds, st.booleans())
def test_dppo(shape, clip, cap, seed, by_kl):
    """A token teaches unless its probability has left the region in the direction of its advantage."""
    (policy, proximal), advantages, mask = draw(shape, seed)
    slopes, num_outside = np.zeros(shape), 0
    for index in zip(*np.nonzero(mask), strict=True):
        q, p, advantage = math.exp(policy[index]), math.exp(proximal[index]), advantages[index]
        moved = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if by_kl and max(p, q) < 1 else abs(q - p)
        limit = clip[1] if advantage > 0 else clip[0]
        is_outside = moved > limit and (q > p) == (advantage > 0)
        slopes[index] = 0.0 if is_outside else -min(q / p, cap) * advantage
        num_outside += is_outside
    keeps = not by_kl or (policy[mask].max(initial=-1.0) < -1e-3 and proximal[mask].max(initial=-1.0) < -1e-3)
    assume(keeps)  # where a probability is above 1, as drawn ones may be, there is no KL
    free, other, by_token = tensors(policy, proximal, advantages, mask=mask)
    free.requires_grad_()
    function = dppo_kl_loss if by_kl else dppo_tv_loss
    loss = function(free, other, by_token, torch.tensor(mask), clip_low=clip[0], clip_high=clip[1], ratio_cap=cap)
    loss.loss_terms.sum().backward()
    assert free.grad is not None
    np.testing.assert_allclose(free.grad.numpy(), slopes, rtol=1e-6, atol=1e-12)
    assert loss.clip_fraction.item() * max(1, mask.sum()) == pytest.approx(num_outside, abs=1e-4)


def test_dppo_lets_rare_tokens_move_and_holds_likely_ones():
    """From 1e-5 to 1e-3 is a ratio of 100 and next to no mass; from 0.99 to 0.7 is a ratio that PPO does not clip."""
    policy, proximal = torch.tensor([[1e-3, 0.7]]).log(), torch.tensor([[1e-5, 0.99]]).log()
    for function in (dppo_tv_loss, dppo_kl_loss):
        loss = function(policy, proximal, torch.tensor([[1.0, -1.0]]), None)
        assert loss.loss_terms[0, 0] != 0 and loss.loss_terms[0, 1] == 0
    assert ppo_clip_loss(policy, proximal, torch.tensor([[1.0, -1.0]]), None, clip_low=0.3).clip_fraction == 0.5
    with pytest.raises(AlgosError, match=r"ratio_cap=0.5 must be at least 1"):
        dppo_tv_loss(policy, proximal, policy, None, ratio_cap=0.5)


@quick
@given(shapes, clips, seeds)
def test_sequence_clip(shape, clip, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    ids = np.repeat(np.arange(shape[0])[:, None], shape[1], 1)
    terms, is_clipped = np.zeros(shape), 0
    for index in zip(*np.nonzero(mask), strict=True):
        ratio = np.prod(np.exp((policy - proximal)[mask & (ids == ids[index])]))
        terms[index] = surrogate(ratio, advantages[index], clip)
        is_clipped += terms[index] > -ratio * advantages[index]
    loss = sequence_clip_loss(
        *tensors(policy, proximal, advantages, mask=mask),
        loss_mask=torch.tensor(mask),
        clip_low=clip[0],
        clip_high=clip[1],
    )
    np.testing.assert_allclose(loss.loss_terms.numpy(), terms, rtol=1e-6, atol=1e-12)
    assert loss.clip_fraction.item() * max(1, mask.sum()) == pytest.approx(is_clipped, abs=1e-4)


def test_on_policy_a_clipped_sequence_has_the_gradient_of_reinforce():
    """Of the mean over completions: `-A` for each token, whatever the length (arXiv:2402.14740)."""
    policy = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask, advantages = torch.tensor([[1, 1], [1, 0]]), torch.tensor([2.0, -1.0])
    loss = sequence_clip_loss(policy, policy.detach(), advantages, mask)
    sequence_mean_token_mean(loss.loss_terms, mask, 2).backward()
    assert policy.grad is not None and policy.grad.tolist() == [[-1.0, -1.0], [0.5, 0.0]]


@quick
@given(shapes, st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([(-0.5, 5.0), (0.1, 0.6)]), seeds)
def test_clip_cov(shape, fraction, bounds, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    plain, is_clipped, candidates = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    cov = covariances(policy, advantages, mask)
    for index in zip(*np.nonzero(mask), strict=True):
        ratio = math.exp(policy[index] - proximal[index])
        plain[index] = surrogate(ratio, advantages[index], (0.2, 0.2))
        is_clipped[index] = plain[index] > -ratio * advantages[index]
        candidates[index] = not is_clipped[index] and bounds[0] < cov[index] < bounds[1]
    inputs = tensors(policy, proximal, advantages, mask=mask)
    options = {"cov_fraction": fraction, "cov_low": bounds[0], "cov_high": bounds[1]}
    loss = clip_cov_loss(*inputs, loss_mask=torch.tensor(mask), **options)
    dropped = (loss.loss_terms.numpy() == 0) & (plain != 0)
    assert not (dropped & ~candidates).any()
    assert dropped.sum() == min(max(1, int(fraction * mask.sum())), candidates.sum())
    np.testing.assert_allclose(loss.loss_terms.numpy(), np.where(dropped, 0.0, plain), rtol=1e-6, atol=1e-12)
    num_clipped = loss.clip_fraction.item() * max(1, mask.sum())
    assert num_clipped == pytest.approx((is_clipped | dropped).sum(), abs=1e-4)
    again = clip_cov_loss(*inputs, loss_mask=torch.tensor(mask), **options)
    assert torch.equal(again.loss_terms, loss.loss_terms), "the draw is a function of its inputs"


@quick
@given(shapes, st.sampled_from([0.01, 0.3, 1.0]), st.sampled_from([0.0, 1.0, 2.5]), seeds)
def test_kl_cov(shape, fraction, coef, seed):
    (policy, proximal), advantages, mask = draw(shape, seed)
    num_chosen = max(1, int(fraction * mask.sum())) if mask.any() else 0
    cov = np.where(mask, covariances(policy, advantages, mask), -np.inf)
    ranked = np.sort(cov[mask])[::-1]  # float32 decides which of two is larger
    assume(num_chosen in (0, len(ranked)) or ranked[num_chosen - 1] - ranked[num_chosen] > 1e-5)
    chosen = np.zeros(shape, bool)
    for place in np.argsort(-cov, axis=None)[:num_chosen]:
        chosen[np.unravel_index(place, shape)] = True
    d = policy - proximal
    expected = np.where(mask, -advantages * np.exp(d) + coef * np.where(chosen & (abs(d) >= 1e-5), abs(d), 0.0), 0.0)
    inputs = tensors(policy, proximal, advantages, mask=mask)
    loss = kl_cov_loss(*inputs, loss_mask=torch.tensor(mask), cov_fraction=fraction, cov_kl_coef=coef)
    np.testing.assert_allclose(loss.loss_terms.numpy(), expected, rtol=1e-6, atol=1e-12)
    assert loss.clip_fraction.item() * max(1, mask.sum()) == pytest.approx(num_chosen, abs=1e-4)


def test_rounding_makes_no_penalty_of_kl_cov():
    """The proximal log-probabilities of the same weights, computed in another micro-batch: its sign is no gradient."""
    policy = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    proximal = policy.detach() + torch.tensor([[1e-6, -1e-6, 0.1]])
    loss = kl_cov_loss(policy, proximal, torch.zeros(1, 3), None, cov_fraction=1.0, chosen=torch.ones(1, 3).bool())
    loss.loss_terms.sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == [[0.0, 0.0, -1.0]]


def test_refusals_of_covariances():
    ones = torch.ones(2, 3)
    for loss in (clip_cov_loss, kl_cov_loss):
        for fraction in (0.0, 1.5):
            with pytest.raises(AlgosError, match=f"cov_fraction={fraction} must be above 0 and at most 1"):
                loss(ones, ones, ones, ones, cov_fraction=fraction)
    with pytest.raises(AlgosError, match=r"cov_low=5.0 must be below cov_high=1.0"):
        clip_cov_loss(ones, ones, ones, ones, cov_low=5.0, cov_high=1.0)
    with pytest.raises(AlgosError, match=r"cov_kl_coef=-1.0 must be at least 0"):
        kl_cov_loss(ones, ones, ones, ones, cov_kl_coef=-1.0)


LOSSES = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "decoupled": lambda *inputs, **options: decoupled_ppo_loss(*inputs, rollout_logprobs=inputs[1], **options),
    "policy_gradient": policy_gradient_loss,
    "sapo": sapo_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
    "clip_cov": lambda *inputs: clip_cov_loss(*inputs, cov_low=1e6, cov_high=1e9),
    "kl_cov": kl_cov_loss,
}
"""Losses with one term for each token: GSPO's, which is a loss of whole sequences, has that form too. Clip-Cov is given
bounds that no token meets."""


@pytest.mark.parametrize("name", ["ppo_clip", "decoupled", "policy_gradient", "sapo", "clip_cov", "kl_cov"])
def test_gradients_by_finite_differences(name):
    """Losses whose terms depend on the policy alone: GSPO's and CISPO's hold constants made of it (tests above)."""
    (policy, proximal), advantages, mask = draw((3, 5), 8)
    mask[0, 0] = True
    free = torch.tensor(policy, requires_grad=True)
    rest = [torch.tensor(x) for x in (proximal, advantages, mask)]
    assert torch.autograd.gradcheck(lambda p: LOSSES[name](p, *rest).loss_terms, free)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_all_have_the_policy_gradient(name):
    """At ratio 1 every loss gives the gradient -A for each log-probability; so does the sequence-level one."""
    policy = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([[1.5, -2.0], [0.0, 4.0]])
    loss = LOSSES[name](policy, policy.detach(), advantages, None)
    loss.loss_terms.sum().backward()
    assert isinstance(loss, PolicyLoss)
    assert policy.grad is not None
    assert torch.equal(policy.grad, -advantages)
    assert loss.approx_kl.item() == 0.0
    assert loss.clip_fraction.item() == (0.25 if name == "kl_cov" else 0.0), "KL-Cov always chooses"


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_and_no_elements_at_all_give_zeros(name):
    for shape in [(2, 3), (0, 3), (2, 0)]:
        policy = torch.full(shape, float("nan"), requires_grad=True)
        loss = LOSSES[name](policy, policy.detach(), policy.detach(), torch.zeros(shape))
        loss.loss_terms.sum().backward()
        assert policy.grad is not None
        assert (policy.grad == 0).all()
        for value in (loss.loss_terms.sum(), loss.num_terms, loss.clip_fraction, loss.approx_kl):
            assert value.item() == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_constants_get_no_gradient_and_an_advantage_of_a_sequence_is_that_of_its_tokens(name):
    policy, proximal = (torch.rand(2, 3, requires_grad=True) for _ in range(2))
    advantages = torch.tensor([1.0, -2.0], requires_grad=True)
    loss = LOSSES[name](policy, proximal, advantages, None)
    loss.loss_terms.sum().backward()
    assert policy.grad is not None
    assert proximal.grad is None and advantages.grad is None
    each = LOSSES[name](policy, proximal, advantages[:, None].expand(2, 3), None)
    assert torch.equal(each.loss_terms, loss.loss_terms)


@pytest.mark.parametrize("name", LOSSES)
def test_non_finite_input_stops_with_tensor_and_index(name):
    ones = torch.ones(2, 3)
    for k, tensor in enumerate(["policy_logprobs", "proximal_logprobs", "advantages"]):
        inputs = [ones.clone() for _ in range(3)]
        inputs[k][0, 2] = -math.inf
        with pytest.raises(NonFiniteError, match=rf"{tensor}\[0, 2\]=-inf"):
            LOSSES[name](*inputs, ones)
    with pytest.raises(NonFiniteError, match=r"exp\(policy_logprobs - proximal_logprobs\)\[0, 0\]=inf"):
        LOSSES[name](0 * ones, -100 * ones, ones, ones)
    with pytest.raises(ShapeError, match=r"proximal_logprobs has shape \[2\], policy_logprobs has \[2, 3\]"):
        LOSSES[name](ones, ones[:, 0], ones, ones)
    with pytest.raises(ShapeError, match=r"advantages has shape \[2, 1\]"):
        LOSSES[name](ones, ones, ones[:, :1], ones)


def test_refusals_of_options():
    ones = torch.ones(2, 3)
    for name in ("gspo", "cispo", "decoupled"):
        with pytest.raises(AlgosError, match=r"clip_low=1.1 must be between"):
            LOSSES[name](ones, ones, ones, ones, clip_low=1.1)
    with pytest.raises(AlgosError, match=r"tau_negative=0.0 must be above 0"):
        LOSSES["sapo"](ones, ones, ones, ones, tau_negative=0.0)
    with pytest.raises(AlgosError, match=r"weight_cap=0.5 must be at least 1"):
        LOSSES["decoupled"](ones, ones, ones, ones, weight_cap=0.5)
    with pytest.raises(ShapeError, match=r"rollout_logprobs has shape \[2\]"):
        decoupled_ppo_loss(ones, ones, ones, ones, rollout_logprobs=ones[:, 0])
    with pytest.raises(NonFiniteError, match=r"rollout_logprobs\[0, 0\]=nan"):
        decoupled_ppo_loss(ones, ones, ones, ones, rollout_logprobs=ones * float("nan"))
    with pytest.raises(NonFiniteError, match=r"exp\(proximal_logprobs - rollout_logprobs\)\[0, 0\]=inf"):
        decoupled_ppo_loss(ones, ones, ones, ones, rollout_logprobs=-100 * ones)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        gspo_loss(ones[0], ones[0], ones[0], None)
    for function in (gmpo_loss, sequence_clip_loss):
        with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
            function(ones[0], ones[0], ones[0], None)


def test_every_policy_loss_has_the_same_four_inputs():
    for name in policy_loss.__all__:
        if name.endswith("_loss") and name != "measured_loss":
            parameters = inspect.signature(getattr(policy_loss, name)).parameters
            assert list(parameters)[:4] == ["policy_logprobs", "proximal_logprobs", "advantages", "loss_mask"]
            assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[4:])
