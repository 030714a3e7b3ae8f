"""The optimal token baseline against a float64 reference written place by place, and against what makes it optimal."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, ShapeError, optimal_token_advantages


def reference(rewards, mask, norms):
    rows = [[(rewards[g, t], norms[g, t]) for t in range(mask.shape[1]) if mask[g, t]] for g in range(len(mask))]
    to_go = [[sum(reward for reward, _ in row[k:]) for k in range(len(row))] for row in rows]
    weights = [[sum(norm for _, norm in row[: k + 1]) for k in range(len(row))] for row in rows]
    totals = [row[0] for row in to_go if row]
    expected = np.zeros(mask.shape)
    for g, t in zip(*np.nonzero(mask), strict=True):
        k = int(mask[g, :t].sum())
        others = [i for i, row in enumerate(rows) if len(row) > k]
        baseline = 0.0
        if len(others) > 1:
            total = sum(weights[i][k] for i in others)
            baseline = sum(weights[i][k] * to_go[i][k] for i in others) / total if total else 0.0
        expected[g, t] = to_go[g][k] - baseline if len(set(totals)) > 1 else 0.0
    return expected


@settings(max_examples=80)
@given(st.integers(0, 5), st.integers(0, 6), st.sampled_from([0.5, 1.0]), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_place_has_its_baseline(G, T, mask_rate, has_gaps, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((G, T)) < mask_rate if has_gaps else np.arange(T) < rng.integers(0, T + 1, (G, 1))
    rewards, norms = rng.integers(0, 3, (G, T)) / 2, rng.uniform(0.1, 2.0, (G, T))
    garbage = [torch.tensor(np.where(mask, array, np.nan)) for array in (rewards, norms)]
    advantages = optimal_token_advantages(garbage[0], torch.tensor(mask), garbage[1])
    np.testing.assert_allclose(advantages.numpy(), reference(rewards, mask, norms), rtol=1e-6, atol=1e-9)


def test_the_first_token_of_a_softmax_has_the_baseline_of_least_variance():
    """A policy of one token: over all pairs of samples, the variance of `|score|^2 (r - b)^2` is least at the mean of
    the rewards weighted by the squared norms of the scores."""
    probabilities = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    norms = 1 - 2 * probabilities + probabilities.square().sum()
    scores = torch.eye(3, dtype=torch.float64) - probabilities
    torch.testing.assert_close(scores.square().sum(1), norms)
    many = (probabilities * 1000).long().tolist()
    rows = [token for token, count in enumerate(many) for _ in range(count)]
    advantages = optimal_token_advantages(rewards[rows, None], torch.ones(len(rows), 1), norms[rows, None])
    baseline = float((rewards[rows] - advantages[:, 0])[0])

    def variance(b):
        return float((probabilities * norms * (rewards - b).square()).sum())

    assert variance(baseline) < min(variance(baseline + 0.01), variance(baseline - 0.01))


def test_refusals():
    ones = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"expected \[G, T\]"):
        optimal_token_advantages(ones[0], ones[0], ones[0])
    with pytest.raises(ShapeError, match="logit_norms has shape"):
        optimal_token_advantages(ones, ones, ones[:, :2])
    with pytest.raises(AlgosError, match="logit_norms holds -1; a squared norm is at least 0"):
        optimal_token_advantages(ones, ones, -ones)
