"""Importance corrections against float64 numpy references, sequence by sequence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    icepop,
    masked_importance_sampling,
    off_policy_sequence_mask,
    reject_by_divergence,
    token_mean,
    truncated_importance_sampling,
)
from rlinf_algos.presets import REJECTIONS

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)
LEVELS = ["token", "sequence", "geometric"]


def ratios_of(level, proximal, rollout, mask):
    """The ratio of the level at every token."""
    ratios = np.zeros(mask.shape)
    for b in range(len(mask)):
        tokens = np.flatnonzero(mask[b])
        of_tokens = [np.exp(proximal[b, t]) / np.exp(rollout[b, t]) for t in tokens]
        if level == "token":
            ratios[b, tokens] = of_tokens
        elif len(tokens):
            ratio = np.prod(of_tokens) ** (1.0 if level == "sequence" else 1.0 / len(tokens))
            ratios[b, tokens] = ratio
    return ratios


def draw(B, T, mask_rate, spread, seed):
    rng = np.random.default_rng(seed)
    rollout = rng.normal(-1.0, 0.5, (B, T))
    return rollout + rng.normal(0.0, spread, (B, T)), rollout, rng.random((B, T)) < mask_rate


def garbage_outside(proximal, rollout, mask):
    return map(torch.tensor, (np.where(mask, proximal, np.nan), np.where(mask, rollout, -np.inf), mask))


batches = {
    "B": st.integers(0, 4),
    "T": st.integers(0, 6),
    "mask_rate": st.sampled_from([0.0, 0.5, 1.0]),
    "spread": st.sampled_from([0.0, 0.3, 1.5]),
    "level": st.sampled_from(LEVELS),
    "seed": seeds,
}


def check(correction, weights, mask, stays, is_cut):
    num = mask.sum()
    np.testing.assert_allclose(correction.weights.numpy(), np.where(mask & stays, weights, 0.0), rtol=1e-6, atol=1e-12)
    assert correction.loss_mask.numpy().tolist() == (mask & stays).tolist()
    assert correction.num_terms == num

    def mean(values):
        return values[mask].sum() / max(1, num)

    expected = {"truncated_fraction": mean(is_cut & mask), "rejected_fraction": mean(~stays & mask)}
    for name, value in expected.items():
        assert getattr(correction, name).item() == pytest.approx(value, rel=1e-6, abs=1e-9), name


@quick
@given(**batches, cap=st.sampled_from([1.0, 1.5, 5.0]))
def test_truncated(B, T, mask_rate, spread, level, seed, cap):
    proximal, rollout, mask = draw(B, T, mask_rate, spread, seed)
    ratios = ratios_of(level, proximal, rollout, mask)
    correction = truncated_importance_sampling(*garbage_outside(proximal, rollout, mask), level=level, cap=cap)
    is_cut = ratios > cap * (1 + 1e-12)
    check(correction, np.minimum(ratios, cap), mask, np.ones_like(mask), is_cut)


@quick
@given(**batches, bounds=st.sampled_from([(0.0, 2.0), (0.5, 5.0), (1.0, 1.0), (0.9, 1.1)]), weigh=st.booleans())
def test_masked(B, T, mask_rate, spread, level, seed, bounds, weigh):
    proximal, rollout, mask = draw(B, T, mask_rate, spread, seed)
    ratios = ratios_of(level, proximal, rollout, mask)
    low, high = bounds
    stays = (ratios >= low * (1 - 1e-12)) & (ratios <= high * (1 + 1e-12)) | ~mask
    correction = masked_importance_sampling(
        *garbage_outside(proximal, rollout, mask), level=level, low=low, high=high, weigh=weigh
    )
    weights = ratios if weigh else np.ones_like(ratios)
    check(correction, weights, mask, stays, np.zeros_like(mask))


def test_icepop_rejects_on_both_sides():
    ratios = torch.tensor([[0.49, 0.51, 1.0, 4.9, 5.1]], dtype=torch.float64)
    correction = icepop(ratios.log(), torch.zeros(1, 5, dtype=torch.float64), None)
    assert correction.loss_mask.tolist() == [[False, True, True, True, False]]
    torch.testing.assert_close(correction.weights, ratios * correction.loss_mask)
    assert correction.rejected_fraction.item() == pytest.approx(0.4)


def test_a_truncated_weight_makes_the_gradient_that_of_the_actors_policy():
    """Over all outcomes: E_engine[min(r, cap) f] = E_actor[f] as long as the cap cuts nothing."""
    actor, engine = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.3, 0.3]).double()
    f = torch.tensor([1.0, -2.0, 3.0]).double()
    weights = truncated_importance_sampling(actor.log()[None], engine.log()[None], None).weights[0]
    torch.testing.assert_close((engine * weights * f).sum(), (actor * f).sum())


def test_far_ratios_neither_overflow_nor_hide():
    proximal, rollout = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]])
    correction = truncated_importance_sampling(proximal, rollout, None, cap=3.0)
    assert correction.weights.tolist() == [[3.0, 0.0]]
    correction = masked_importance_sampling(proximal, rollout, None)
    assert correction.loss_mask.tolist() == [[False, True]]
    assert correction.weights.isfinite().all()
    with pytest.raises(NonFiniteError, match=r"exp\(proximal_logprobs - rollout_logprobs\)\[0, 0\]=inf"):
        truncated_importance_sampling(proximal, rollout, None, cap=math.inf)


ESTIMATES = {"k1": abs, "k2": lambda log: log * log / 2, "k3": lambda log: math.exp(log) - 1 - log}


@quick
@given(st.sampled_from(REJECTIONS), st.integers(0, 4), st.integers(0, 6), st.sampled_from([0.1, 1.0]), seeds)
def test_rejection_by_a_divergence(statistic, B, T, limit, seed):
    proximal, rollout, mask = draw(B, T, 0.7, 0.6, seed)
    reduced, _, estimate = statistic.rpartition("_")
    reduce = {"sequence_sum": sum, "sequence_mean": lambda terms: sum(terms) / len(terms), "sequence_max": max}
    expected = np.zeros((B, T), dtype=bool)
    for index in zip(*np.nonzero(mask), strict=True):
        places = [index] if reduced == "token" else [(index[0], t) for t in np.flatnonzero(mask[index[0]])]
        logs = [proximal[place] - rollout[place] for place in places]
        if estimate == "k1":
            divergence = abs(logs[0] if reduced == "token" else reduce[reduced](logs))
        else:
            estimates = [ESTIMATES[estimate](log) for log in logs]
            divergence = estimates[0] if reduced == "token" else reduce[reduced](estimates)
        expected[index] = divergence <= limit
    correction = reject_by_divergence(*garbage_outside(proximal, rollout, mask), statistic=statistic, limit=limit)
    assert correction.loss_mask.numpy().tolist() == expected.tolist()
    assert torch.equal(correction.weights, correction.loss_mask.double())


def test_refusals_of_a_rejection():
    ones = torch.ones(2, 3)
    with pytest.raises(AlgosError, match="statistic='token_k9' is not known; did you mean 'token_k"):
        reject_by_divergence(ones, ones, None, statistic="token_k9", limit=1.0)
    for limit in (0.0, math.inf):
        with pytest.raises(AlgosError, match=f"limit={limit} must be above 0 and finite"):
            reject_by_divergence(ones, ones, None, statistic="token_k1", limit=limit)


def test_what_was_rejected_adds_nothing_whichever_mask_aggregates():
    correction = icepop(torch.tensor([[0.0, 3.0]]), torch.tensor([[0.0, 0.0]]), None)
    terms = torch.tensor([[1.0, 7.0]]) * correction.weights
    assert token_mean(terms, None, 2).item() == 0.5
    assert token_mean(terms, correction.loss_mask, correction.loss_mask.sum()).item() == 1.0


@quick
@given(st.integers(0, 4), st.integers(0, 6), st.sampled_from([0.0, 0.1, 0.5]), st.booleans(), seeds)
def test_off_policy_sequences(B, T, threshold, by_token, seed):
    policy, rollout, mask = draw(B, T, 0.7, 0.5, seed)
    advantages = np.random.default_rng(seed).normal(size=(B, T) if by_token else B)
    expected = mask.copy()
    for b in range(B):
        drift = sum(rollout[b, t] - policy[b, t] for t in range(T) if mask[b, t]) / max(1, mask[b].sum())
        for t in range(T):
            expected[b, t] &= not (drift > threshold and (advantages[b, t] if by_token else advantages[b]) < 0)
    policies, rollouts, masks = garbage_outside(policy, rollout, mask)
    actual = off_policy_sequence_mask(policies, rollouts, torch.tensor(advantages), masks, threshold=threshold)
    assert actual.numpy().tolist() == expected.tolist()


def test_refusals_of_the_off_policy_mask():
    policy, advantages = torch.zeros(1, 4), -torch.ones(1, 4)
    with pytest.raises(AlgosError, match="threshold=-1 must be at least 0"):
        off_policy_sequence_mask(policy, policy, advantages, None, threshold=-1)
    with pytest.raises(ShapeError, match="advantages has shape"):
        off_policy_sequence_mask(policy, policy, advantages[:, :2], None, threshold=1)


def test_weights_are_constants():
    proximal = torch.zeros(1, 2, requires_grad=True)
    for function in (truncated_importance_sampling, masked_importance_sampling, icepop):
        assert not function(proximal, torch.zeros(1, 2), None).weights.requires_grad


@pytest.mark.parametrize("function", [truncated_importance_sampling, masked_importance_sampling, icepop])
def test_refusals(function):
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match="rollout_logprobs has shape"):
        function(ones, ones[:1], None)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        function(ones[0], ones[0], None)
    with pytest.raises(ShapeError, match="loss_mask has shape"):
        function(ones, ones, ones[:1])
    with pytest.raises(NonFiniteError, match=r"^rollout_logprobs\[0, 0\]=nan"):
        function(ones, ones * math.nan, None)
    with pytest.raises(NonFiniteError, match=r"^proximal_logprobs\[0, 0\]=-inf"):
        function(ones * -math.inf, ones, None)


def test_options_out_of_range():
    ones = torch.ones(2, 3)
    with pytest.raises(AlgosError, match=r"cap=0\.5 must be at least 1"):
        truncated_importance_sampling(ones, ones, None, cap=0.5)
    with pytest.raises(AlgosError, match="low=2"):
        masked_importance_sampling(ones, ones, None, low=2)
    with pytest.raises(AlgosError, match=r"high=0\.5"):
        masked_importance_sampling(ones, ones, None, high=0.5)
    with pytest.raises(AlgosError, match='level="row" is none of'):
        truncated_importance_sampling(ones, ones, None, level="row")  # pyright: ignore[reportArgumentType]
