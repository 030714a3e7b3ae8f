"""REINFORCE++ and its baseline form against float64 numpy references, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rewards_to_go,
)

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)
rates = st.sampled_from([0.0, 0.5, 1.0])
gammas = st.sampled_from([0.0, 0.5, 0.99, 1.0])


def close(actual, expected):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


def to_go_reference(rewards, mask, gamma):
    out = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        tokens = np.flatnonzero(mask[b])
        for i, t in enumerate(tokens):
            out[b, t] = sum(gamma**k * rewards[b, s] for k, s in enumerate(tokens[i:]))
    return out


def whitened_reference(values, mask, epsilon):
    chosen, out = values[mask], np.zeros(values.shape)
    if len(set(chosen.tolist())) > 1:
        mean = sum(chosen) / len(chosen)
        std = np.sqrt(sum((x - mean) ** 2 for x in chosen) / (len(chosen) - 1))
        out[mask] = (chosen - mean) / (std + epsilon)
    return out


@quick
@given(st.integers(0, 4), st.integers(0, 9), gammas, rates, st.sampled_from([1e-8, 0.5]), seeds)
def test_reinforce_plus_plus(B, T, gamma, mask_rate, epsilon, seed):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=(B, T)), rng.random((B, T)) < mask_rate
    to_go = to_go_reference(rewards, mask, gamma)
    rewards[~mask] = np.nan
    given_tensors = torch.tensor(rewards), torch.tensor(mask)
    close(rewards_to_go(*given_tensors, gamma), to_go)
    close(rewards_to_go(given_tensors[0].t(), given_tensors[1].t(), gamma, dim=0), to_go.T)
    advantages = reinforce_plus_plus_advantages(*given_tensors, gamma=gamma, epsilon=epsilon)
    close(advantages, whitened_reference(to_go, mask, epsilon))


@quick
@given(st.integers(0, 9), st.integers(0, 5), st.integers(1, 4), rates, st.booleans(), seeds)
def test_baseline_form(B, T, num_groups, mask_rate, equal, seed):
    rng = np.random.default_rng(seed)
    scores, mask = rng.integers(0, 2, B) * (not equal) + 0.3, rng.random((B, T)) < mask_rate
    ids, has_tokens = rng.integers(0, num_groups, B), mask.any(axis=1)
    centred = np.zeros((B, T))
    for b in np.flatnonzero(has_tokens):
        group = [scores[c] for c in range(B) if ids[c] == ids[b] and has_tokens[c]]
        centred[b] = scores[b] - sum(group) / len(group) if len(set(group)) > 1 else 0.0
    scores[~has_tokens] = np.nan
    advantages = reinforce_plus_plus_baseline_advantages(*map(torch.tensor, (scores, ids, mask)))
    close(advantages, whitened_reference(centred, mask, 1e-8))


def test_statistics_go_through_sum_over_ranks():
    """A second rank with the same numbers changes the count and nothing else."""
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]], dtype=torch.float64), torch.ones(2, 2)
    twice = torch.cat([rewards, rewards]), torch.cat([mask, mask])
    advantages = reinforce_plus_plus_advantages(rewards, mask, sum_over_ranks=lambda tensor: 2 * tensor)
    close(advantages, reinforce_plus_plus_advantages(*twice)[:2].numpy())
    scores, ids = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    advantages = reinforce_plus_plus_baseline_advantages(scores, ids, mask, sum_over_ranks=lambda tensor: 2 * tensor)
    twice = torch.cat([scores, scores]), torch.cat([ids, ids + 1]), torch.cat([mask, mask])
    close(advantages, reinforce_plus_plus_baseline_advantages(*twice)[:2].numpy())


def test_equal_scores_and_empty_masks_give_exactly_zero():
    for mask in (torch.ones(3, 4), torch.zeros(3, 4)):
        zeros = reinforce_plus_plus_baseline_advantages(torch.full((3,), 0.1), torch.zeros(3).long(), mask, epsilon=0.0)
        assert torch.equal(zeros, torch.zeros(3, 4))
        at_end = torch.zeros(3, 4).index_fill(1, torch.tensor([3]), 0.1)
        zeros = reinforce_plus_plus_advantages(at_end, mask, epsilon=0.0)
        assert torch.equal(zeros, torch.zeros(3, 4))


def test_refusals():
    ones, ids = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"rewards has shape \[2\]; expected \[B, T\]"):
        reinforce_plus_plus_advantages(ones[:, 0], ones[:, 0])
    with pytest.raises(ShapeError, match="mask has shape"):
        reinforce_plus_plus_advantages(ones, ones[:1])
    with pytest.raises(AlgosError, match="gamma=2"):
        reinforce_plus_plus_advantages(ones, ones, gamma=2)
    with pytest.raises(NonFiniteError, match=r"rewards\[0, 0\]=nan"):
        reinforce_plus_plus_advantages(ones * float("nan"), ones)
    with pytest.raises(AlgosError, match="epsilon=-1"):
        reinforce_plus_plus_advantages(ones, ones, epsilon=-1)
    with pytest.raises(ShapeError, match="scores has shape"):
        reinforce_plus_plus_baseline_advantages(ones, ids, ones)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        reinforce_plus_plus_baseline_advantages(ones[:, 0], ids, ones[:, 0])
    with pytest.raises(NonFiniteError, match=r"scores\[0\]=nan"):
        reinforce_plus_plus_baseline_advantages(ones[:, 0] * float("nan"), ids, ones)
    with pytest.raises(ShapeError, match="has no dimension 2"):
        rewards_to_go(ones, None, 1.0, dim=2)
    assert not reinforce_plus_plus_advantages(ones.clone().requires_grad_(), ones).requires_grad
