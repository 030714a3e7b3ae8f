"""Importance corrections against float64 numpy references, sequence by sequence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    effective_sample_size,
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
    """(ratio at every token, one ratio for each sample of the level)"""
    ratios, samples = np.zeros(mask.shape), []
    for b in range(len(mask)):
        tokens = np.flatnonzero(mask[b])
        of_tokens = [np.exp(proximal[b, t]) / np.exp(rollout[b, t]) for t in tokens]
        if level == "token":
            ratios[b, tokens] = of_tokens
            samples += of_tokens
        elif len(tokens):
            ratio = np.prod(of_tokens) ** (1.0 if level == "sequence" else 1.0 / len(tokens))
            ratios[b, tokens] = ratio
            samples.append(ratio)
    return ratios, np.array(samples)


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


def check(correction, weights, mask, stays, is_cut, proximal, rollout, samples):
    num = mask.sum()
    np.testing.assert_allclose(correction.weights.numpy(), np.where(mask & stays, weights, 0.0), rtol=1e-6, atol=1e-12)
    assert correction.loss_mask.numpy().tolist() == (mask & stays).tolist()
    assert correction.num_terms == num

    def mean(values):
        return values[mask].sum() / max(1, num)

    used = np.where(stays, weights, 0.0)
    gaps = (proximal - rollout)[mask]
    expected = {
        "weight_mean": mean(used),
        "weight_max": used[mask].max() if num else 0.0,
        "truncated_fraction": mean(is_cut & mask),
        "rejected_fraction": mean(~stays & mask),
        "engine_kl": mean(rollout - proximal),
        "engine_kl_k3": mean(np.exp(proximal - rollout) - 1 - (proximal - rollout)),
        "largest_log_ratio": abs(gaps).max() if num else 0.0,
        "effective_sample_fraction": samples.sum() ** 2 / (samples**2).sum() / len(samples) if num else 1.0,
    }
    for name, value in expected.items():
        assert getattr(correction, name).item() == pytest.approx(value, rel=1e-6, abs=1e-9), name


@quick
@given(**batches, cap=st.sampled_from([1.0, 1.5, 5.0]))
def test_truncated(B, T, mask_rate, spread, level, seed, cap):
    proximal, rollout, mask = draw(B, T, mask_rate, spread, seed)
    ratios, samples = ratios_of(level, proximal, rollout, mask)
    correction = truncated_importance_sampling(*garbage_outside(proximal, rollout, mask), level=level, cap=cap)
    is_cut = ratios > cap * (1 + 1e-12)
    check(correction, np.minimum(ratios, cap), mask, np.ones_like(mask), is_cut, proximal, rollout, samples)


@quick
@given(**batches, bounds=st.sampled_from([(0.0, 2.0), (0.5, 5.0), (1.0, 1.0), (0.9, 1.1)]), weigh=st.booleans())
def test_masked(B, T, mask_rate, spread, level, seed, bounds, weigh):
    proximal, rollout, mask = draw(B, T, mask_rate, spread, seed)
    ratios, samples = ratios_of(level, proximal, rollout, mask)
    low, high = bounds
    stays = (ratios >= low * (1 - 1e-12)) & (ratios <= high * (1 + 1e-12)) | ~mask
    correction = masked_importance_sampling(
        *garbage_outside(proximal, rollout, mask), level=level, low=low, high=high, weigh=weigh
    )
    weights = ratios if weigh else np.ones_like(ratios)
    check(correction, weights, mask, stays, np.zeros_like(mask), proximal, rollout, samples)


def test_icepop_rejects_on_both_sides():
    ratios = torch.tensor([[0.49, 0.51, 1.0, 4.9, 5.1]], dtype=torch.float64)
    correction = icepop(ratios.log(), torch.zeros(1, 5, dtype=torch.float64), None)
    assert correction.loss_mask.tolist() == [[False, True, True, True, False]]
    torch.testing.assert_close(correction.weights, ratios * correction.loss_mask)
    assert correction.rejected_fraction.item() == pytest.approx(0.4)


@pytest.mark.parametrize("level", LEVELS)
def test_packed_rows_are_corrected_as_padded_ones(level):
    proximal, rollout, _ = draw(3, 4, 1.0, 0.5, 0)
    mask = np.arange(4) < np.array([[4], [2], [1]])
    proximal_row, rollout_row = (torch.tensor(values[mask][None]) for values in (proximal, rollout))
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 2]])
    for function in (truncated_importance_sampling, masked_importance_sampling):
        padded = function(*map(torch.tensor, (proximal, rollout, mask)), level=level)
        packed = function(proximal_row, rollout_row, None, level=level, sequence_ids=ids)
        torch.testing.assert_close(packed.weights[0], padded.weights[torch.tensor(mask)])
        assert packed.loss_mask[0].tolist() == padded.loss_mask.numpy()[mask].tolist()
        torch.testing.assert_close(packed.effective_sample_fraction, padded.effective_sample_fraction)


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
    assert correction.largest_log_ratio == 200.0 and correction.engine_kl_k3 == math.inf
    assert correction.effective_sample_fraction == 0.5
    correction = masked_importance_sampling(proximal, rollout, None)
    assert correction.loss_mask.tolist() == [[False, True]]
    assert correction.weights.isfinite().all()
    with pytest.raises(NonFiniteError, match=r"exp\(proximal_logprobs - rollout_logprobs\)\[0, 0\]=inf"):
        truncated_importance_sampling(proximal, rollout, None, cap=math.inf)


ESTIMATES = {"k1": abs, "k2": lambda log: log * log / 2, "k3": lambda log: math.exp(log) - 1 - log}


@quick
@given(
    st.sampled_from(REJECTIONS), st.integers(0, 4), st.integers(0, 6), st.booleans(), st.sampled_from([0.1, 1.0]), seeds
)
def test_rejection_by_a_divergence(statistic, B, T, is_packed, limit, seed):
    proximal, rollout, mask = draw(B, T, 0.7, 0.6, seed)
    ids = np.random.default_rng(seed).integers(0, 3, (B, T)) if is_packed else np.arange(B)[:, None].repeat(T, 1)
    reduced, _, estimate = statistic.rpartition("_")
    reduce = {"sequence_sum": sum, "sequence_mean": lambda terms: sum(terms) / len(terms), "sequence_max": max}
    expected = np.zeros((B, T), dtype=bool)
    for index in zip(*np.nonzero(mask), strict=True):
        places = [index] if reduced == "token" else list(zip(*np.nonzero(mask & (ids == ids[index])), strict=True))
        logs = [proximal[place] - rollout[place] for place in places]
        if estimate == "k1":
            divergence = abs(logs[0] if reduced == "token" else reduce[reduced](logs))
        else:
            estimates = [ESTIMATES[estimate](log) for log in logs]
            divergence = estimates[0] if reduced == "token" else reduce[reduced](estimates)
        expected[index] = divergence <= limit
    options = {"sequence_ids": torch.tensor(np.where(mask, ids, -1))} if is_packed else {}
    correction = reject_by_divergence(
        *garbage_outside(proximal, rollout, mask), statistic=statistic, limit=limit, **options
    )
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


def test_off_policy_sequences_of_a_packed_row():
    policy = torch.tensor([[-2.0, -2.0, 0.0, 0.0]])
    ids, advantages = torch.tensor([[0, 0, 1, 1]]), -torch.ones(1, 4)
    mask = off_policy_sequence_mask(policy, 0 * policy, advantages, None, threshold=1.5, sequence_ids=ids)
    assert mask.tolist() == [[False, False, True, True]], "over the whole row the drift is 1"
    with pytest.raises(AlgosError, match="threshold=-1 must be at least 0"):
        off_policy_sequence_mask(policy, policy, advantages, None, threshold=-1)
    with pytest.raises(ShapeError, match="advantages has shape"):
        off_policy_sequence_mask(policy, policy, advantages[:, :2], None, threshold=1)


@quick
@given(st.integers(0, 8), st.sampled_from([0.0, 1.0, 300.0]), seeds)
def test_effective_sample_size(num, spread, seed):
    logs = np.random.default_rng(seed).normal(0.0, spread, num)
    size = effective_sample_size(torch.tensor(logs)).item()
    weights = np.exp(logs - logs.max()) if num else logs
    assert size == pytest.approx(weights.sum() ** 2 / (weights**2).sum() if num else 0.0, rel=1e-6)
    masked = effective_sample_size(torch.tensor([*logs, math.nan]), torch.tensor([1] * num + [0])).item()
    assert masked == size


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
